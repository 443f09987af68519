"""Files of a slow volume, kept on a local disk for all processes of a node.

`file_cache` is the cache, `dataset` a data set over it, `source` the volume, `folder` the files on
the disk, `byte_count` how many bytes they are, `eviction` which go first, `stats` what it did.
"""
