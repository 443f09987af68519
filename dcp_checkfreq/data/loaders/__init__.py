"""Loaders in our order, which resume at any batch.

`map_style`, `parquet`, `shards` and `batch_sampler` are the loaders. `base` is what they share,
`read_ahead` what those share that read data in pieces.
"""
