"""A checkpoint to look into, without a process group and without a state to fill.

`open_checkpoint` opens one, `lazy` are its tensors and values, `source` reads them, `mapped_boxes`
maps what lies on a local disk in one piece. `picked` is what an index asks for.
"""
