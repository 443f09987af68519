"""Trainers of others, with our saves and restores in the place of theirs. All of them are extras.

`transformers` is for Hugging Face's `Trainer`; `trainer_part` is what is saved of one besides its
model and optimizer, `trainer_resuming` its way back. `lightning` is a callback and strategies for
Lightning, `torchtitan` a checkpoint manager for its `Trainer`. `needed` says in one line what to
install.

Import the module of your framework: nothing is imported before it is asked for.
"""
