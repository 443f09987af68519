"""Runs a script or a module as Python itself would, with the drop-in on.

The script is the process's ``__main__`` to the very end, past its last line: what it saves in the
background there is pickled by that name. `runpy` takes its module away before.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

_DCP = "torch.distributed.checkpoint"

_log = logging.getLogger(__name__)


def run(script: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
    """Run it. Whatever it raises goes on to the caller, `SystemExit` too.

    The drop-in is installed when DCP is imported, and so after what the script does before it
    imports torch, as with its environment.

    Args:
        script: its path, or the name of a module.
        arguments: that it finds in ``sys.argv``.
        is_module: ``script`` is a module, as with ``python -m``.

    Raises:
        FileNotFoundError: there is no such script.
        ModuleNotFoundError: there is no such module, or it is a package without ``__main__``.
    """
    install_when_imported()
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    if is_module:
        code, file, main.__spec__ = _found(script)
        main.__package__ = main.__spec__.parent
        main.__loader__ = main.__spec__.loader
        script = file
    else:
        file = os.path.abspath(script)
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec")
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(script))
    main.__file__ = file
    sys.argv[:] = [script, *arguments]
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _found(name: str) -> tuple[types.CodeType, str, ModuleSpec]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(None if spec is None else spec.loader, "get_code", None)
    code = None if get_code is None else get_code(name)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"there is no module {name} to run", name=name)
    return code, spec.origin or name, spec


def install_when_imported() -> None:
    """Install the drop-in right after DCP is imported; at once if it is."""
    if _DCP in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _Finder())


def _install() -> None:
    from dcp_checkfreq.dropin import switch

    switch.install()
    is_heard = logging.getLogger(switch.__name__).isEnabledFor(logging.INFO)
    if not is_heard and os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"dcp_checkfreq: {switch.notice()}\n")


class _Finder(MetaPathFinder):
    """Finds DCP once, by the finders behind it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _DCP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _imported, loader, loader.exec_module
            )
        return spec


def _imported(loader: Loader, run_it: object, module: types.ModuleType) -> None:
    assert callable(run_it)
    run_it(module)
    vars(loader).pop("exec_module", None)
    _install()
