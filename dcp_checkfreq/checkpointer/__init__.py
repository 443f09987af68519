"""What a training loop holds: `Checkpointer`, and what it is made of.

`checkpointer` is the object itself, `save_loop` what saving does from step to step, `saver` one
save at a time: `save_start` agrees with the other ranks on what is copied, `background_save` writes
and publishes it, `replicas` names what differs between ranks, at `save_meeting` all ranks hear how
it ended. `memory_forecast` says what memory that takes. `run` is the folder, the ranks and the name
of a run, `run_history` are its steps on storage. `restorer` is a restore: `state_loader` brings a
checkpoint into the live state. `registered` are the parts that were handed in, `stopping` the last
save after a signal, `last_words` the one after an error: `last_step` knows whether the state is
still there, `dropped` what is given back at the end. `load_part` reads one part of a checkpoint
without any of it.
"""
