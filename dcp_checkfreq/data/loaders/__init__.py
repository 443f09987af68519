"""Loaders that hand out batches and go on where they stopped.

`map_style`, `parquet`, `shards` and `batch_sampler` are loaders in our order; `base` and
`read_ahead` are what they share. `wrap_iterable` makes any other loader go on: `wrap_state` is what
it saves, `order_sources` finds the generators and samplers that its order comes from, `made` what
makes its batches, `content` and `trail` notice a replay that goes another way.
"""
