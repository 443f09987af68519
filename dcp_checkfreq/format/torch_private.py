"""The only place that touches names which torch does not promise to keep.

| name | why there is no way round it |
|---|---|
| `filesystem._StorageInfo` | stock readers look an item up by it: it is what `.metadata` holds |
| `filesystem._StoragePrefix` | stock plans carry it, and old checkpoints may hold it |
| `metadata._MEM_FORMAT_ENCODING` | part of every pickled `TensorProperties` |
| `serialization._get_layout` | how torch pickles `torch.strided` |

`tests/format/test_torch_private.py` notices when one of them goes.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.serialization import _get_layout as get_layout

__all__ = ["MemoryFormat", "StorageInfo", "StoragePrefix", "get_layout"]
