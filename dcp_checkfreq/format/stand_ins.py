"""The closed unpickler: it makes lists, tuples, numbers and texts, and nothing else.

Each class that DCP's pickles name has a stand-in, a list that keeps the state it is given.
`format/build` makes the real objects from them, once all of it was looked at. So no code of a
checkpoint's writer runs, none of torch's runs on values that were not checked, and nothing that a
pickle does can reach a class of this process.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from dcp_checkfreq.format.forms import Forms
from dcp_checkfreq.format.opcodes import DICT_MARK, OddPickle, without_dicts


class Made(list[Any]):
    """An object: its state, if it was given one. What is appended to it follows."""

    __slots__ = ()
    __setstate__ = list.append

    def __init__(self) -> None:
        super().__init__()  # takes no values: to list those of a long text would take memory


class MadeMetadata(Made):
    """`Metadata`."""

    __slots__ = ()


class MadeTensor(Made):
    """`TensorStorageMetadata`."""

    __slots__ = ()


class MadeBytes(Made):
    """`BytesStorageMetadata`."""

    __slots__ = ()


class MadeChunk(Made):
    """`ChunkStorageMetadata`."""

    __slots__ = ()


class MadeProperties(Made):
    """`TensorProperties`, of any module that ever had it."""

    __slots__ = ()


class MadeIndex(Made):
    """`MetadataIndex`."""

    __slots__ = ()


class MadeInfo(Made):
    """`_StorageInfo`."""

    __slots__ = ()


class MadeStorageMeta(Made):
    """`StorageMeta`."""

    __slots__ = ()


class MadePrefix(Made):
    """`_StoragePrefix`, which no reader looks at."""

    __slots__ = ()


class _Called(Made):
    """The result of a call: the arguments come first, in one tuple."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.append(arguments)


class MadePath(_Called):
    """A path of `pathlib`, by its parts."""

    __slots__ = ()


class MadeOrderedDict(_Called):
    """`OrderedDict`: keys and values follow."""

    __slots__ = ()


class MadeChainMap(_Called):
    """`ChainMap`, by its maps."""

    __slots__ = ()


class MadeBuiltin(_Called):
    """A call of `list`, `dict` or `tuple`, which no pickle needs that holds only values."""

    __slots__ = ()


def _dims(dims: Any) -> Any:
    """Stand in for `torch.Size`: its users need a tuple of numbers only."""
    return dims


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_FILES_MODULE = "torch.distributed.checkpoint.filesystem"
_STAND_INS: dict[tuple[str, str], Any] = {
    DICT_MARK: DICT_MARK,
    ("torch", "Size"): _dims,
    (_METADATA_MODULE, "Metadata"): MadeMetadata,
    (_METADATA_MODULE, "MetadataIndex"): MadeIndex,
    (_METADATA_MODULE, "StorageMeta"): MadeStorageMeta,
    (_METADATA_MODULE, "TensorStorageMetadata"): MadeTensor,
    (_METADATA_MODULE, "BytesStorageMetadata"): MadeBytes,
    (_METADATA_MODULE, "ChunkStorageMetadata"): MadeChunk,
    (_METADATA_MODULE, "TensorProperties"): MadeProperties,
    (_OLD_MODULE, "TensorProperties"): MadeProperties,
    (_FILES_MODULE, "_StorageInfo"): MadeInfo,
    (_FILES_MODULE, "_StoragePrefix"): MadePrefix,
    ("collections", "OrderedDict"): MadeOrderedDict,
    ("collections", "ChainMap"): MadeChainMap,
}
_LAYOUT = ("torch.serialization", "_get_layout")
_ENCODINGS = {(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (_OLD_MODULE, "MEM_FORMAT_ENCODING")}
for _name in ("list", "dict", "tuple"):
    _STAND_INS["builtins", _name] = type(f"MadeBuiltin_{_name}", (MadeBuiltin,), {"__slots__": ()})
for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"):
        _STAND_INS[_module, _name] = MadePath

# What damaged opcodes can raise; to the caller all of them mean the same.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _ClosedUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, forms: Forms) -> None:
        super().__init__(stream)
        self._forms = forms

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None and module == "torch":
            stand_in = self._forms.dtypes.get(name)
        if (module, name) == _LAYOUT:
            stand_in = self._layout
        elif (module, name) in _ENCODINGS:
            stand_in = self._encoding
        if stand_in is None:
            wanted = f"{module}.{name}" if len(module) + len(name) < 200 else "something"
            raise OddPickle(f"it names {wanted}, which no DCP metadata needs")
        return stand_in

    def _layout(self, name: Any) -> Any:
        if type(name) is str and name in self._forms.layouts:
            return self._forms.layouts[name]
        raise OddPickle("it names a layout that torch does not have")

    def _encoding(self, number: Any) -> Any:
        if type(number) is int and number in self._forms.encodings:
            return self._forms.encodings[number]
        raise OddPickle("it names a memory format that torch does not have")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise OddPickle("it refers to objects outside of itself")


def unpickled(body: bytes, forms: Forms, *, tell_dicts: bool = False) -> Any:
    """Return what a pickle holds, with stand-ins for objects and lists for dicts.

    Dtypes, layouts and memory formats are those of ``forms``. See `opcodes.without_dicts` for
    ``tell_dicts``. Time and memory are a small multiple of the
    size of ``body``, whatever is in it.

    Raises:
        OddPickle: it is no pickle of DCP metadata.
    """
    stream = io.BytesIO(without_dicts(body, tell_dicts=tell_dicts))
    try:
        return _ClosedUnpickler(stream, forms).load()
    except OddPickle:
        raise
    except _UNPICKLING_ERRORS as error:
        raise OddPickle(f"it is damaged ({type(error).__name__}: {str(error)[:200]})") from error
