"""A local disk in front of a slow storage: saves end there first, and are uploaded behind it.

`staged_tier` is the two as one tier, `local_disk` what lies on the disk and what may go,
`mount_tier` a remote side that is a mounted volume. `staged_save` is one save on one rank, `upload`
all ranks copying and rank 0 publishing. `unfinished` finds saves that a dead run has left on the
disks, `resume_upload` finishes them.
"""
