"""A folder of a POSIX file system as a tier.

`tier` is the tier, `direct_io` moves the bytes of one file, `huge_pages` are its buffers,
`regular` opens regular files only, `mapped` maps them, `abilities` finds out what a mount can do.
"""
