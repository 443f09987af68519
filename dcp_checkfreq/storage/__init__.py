"""Bytes in and out of storage. Knows nothing of torch, plans or checkpoints.

`tier` is what a storage must promise, call by call; `local` and `object_store` keep it, and `open`
picks one for a path or URL. `eventual` looks again for names that show up late, `forwarding` hands
every call of a tier on.
"""
