"""Stock DCP's classes with our writer and reader behind them: one line in front of a script.

`switch` turns it on and off, `writers` and `readers` are what the methods of stock's classes then
do, `behind` is what one object of stock's has of ours, `fitting` says which objects that may be,
`background` looks after asynchronous saves, `run` runs a whole script, `command_line` says which.

Names are resolved when they are first used, so that a script may still say how torch is imported.
They are listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
