"""Checkpoints for torch.distributed.checkpoint that lose less work and can be trusted.

Names are resolved when they are first used, so that importing the package costs nothing. They are
listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
