"""Bytes in and out of storage. Knows nothing of torch, plans or checkpoints."""
