"""Loaders for pipelines of DALI.

`loader` feeds a pipeline in our order, `source` is what it is fed with, `native_reader` continues
DALI's own readers, `checkpoint` keeps DALI's own checkpoint, `graph` accounts for every source of
a pipeline, `plugin` is DALI where it is installed.
"""
