"""Data loaders that resume exactly where training stopped.

`order` says which sample comes when and where a job is in it, `loaders` hand out batches in that
order, `sources` are what they read, `wrap` makes loaders of other kinds resume, `dali` holds the
loaders for pipelines of DALI, `random` the random numbers of samples, and `cache` keeps slow files
near.

Names are resolved when they are first used, so that NumPy, DALI and pyarrow are only imported by
those who use them. They are listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
