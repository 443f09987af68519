"""Tensors and byte items to pieces of shard files, and back."""
