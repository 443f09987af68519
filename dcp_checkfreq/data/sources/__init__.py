"""What loaders read: files, and what is in them.

`paths` finds the files. `shard_source` is shard files as one data set, `shard_index` keeps what a
scan found in them, `shard_readers` and `tar_reader` know how samples lie in one. `parquet_source`
is Parquet files as one data set, and `parquet_schema` decides whether they can be read as one.
"""
