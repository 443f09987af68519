"""What `torch.distributed.checkpoint` calls, and what a restarted job asks first.

`writer` and `reader` are its `StorageWriter` and `StorageReader`, `rank_save` is one save of one
rank, which `Checkpointer` goes on with where DCP ends, `item_reads` what a load plan comes to.
`save_planner` and `load_planner` are its planners, `wanted_planner` is that of a restore.
`boundary` brings what they raise to all ranks, `covered` sees that a load fills every target,
`unsettled` takes back what saves have left that DCP never called to an end, `name_lengths` refuses
folders in which names would get too long. `read_metadata` reads what a load begins with.
`find_latest` tells a restarted job which checkpoint is whole.
"""
