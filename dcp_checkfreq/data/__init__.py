"""Data loaders that go on exactly where training stopped.

`order` says which sample comes when and where a job is in it, `loaders` hand out batches, `sources`
are what they read, `cache` keeps slow files near, `random` is the random numbers of samples, and
`dali` the loaders for pipelines of DALI.

Names are resolved when they are first used, so that NumPy, DALI and pyarrow are only imported by
those who use them. They are listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
