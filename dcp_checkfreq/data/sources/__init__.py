"""What loaders read: files, and what is in them.

`paths` finds the files. `shard_source` is shard files as one data set, `shard_index` what a scan
found in them, `shard_readers` and `tar_reader` how samples lie in one. `parquet_schema` judges
whether Parquet files can be read as one.
"""
