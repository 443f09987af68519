"""What a DALI pipeline is fed with: our order, as paths, labels and random numbers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from dcp_checkfreq.data.order.cursor import Cursor
from dcp_checkfreq.data.order.epoch_orders import Indices
from dcp_checkfreq.data.order.permutation import SAMPLE_STREAM, derive
from dcp_checkfreq.data.order.position import Position, Share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# NumPy's names of what both DALI and torch have, and DALI's.
LABEL_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "float16": "FLOAT16", "float32": "FLOAT", "float64": "FLOAT64",
}  # fmt: skip

_FLOAT_BITS = 24  # of a float32's fraction: each value is exact, and none is rounded up to 1


def uniforms(seed: int, epoch: int, indices: Sequence[int], count: int) -> NDArray[np.float32]:
    """Return ``count`` random numbers in ``[0, 1)`` for each item: a function of all arguments.

    They never change within a version, and no library's random stream decides them.

    Returns:
        [len(indices), count], float32.
    """
    import numpy as np

    items = np.asarray(indices, dtype=np.uint64)[:, None]
    numbers = np.arange(count, dtype=np.uint64)
    # `derive` is plain arithmetic modulo 2**64, which arrays of uint64 do as well.
    bits = derive(SAMPLE_STREAM, seed, epoch, cast(Any, items), cast(Any, numbers))
    high = cast("NDArray[np.uint64]", bits) >> np.uint64(64 - _FLOAT_BITS)
    found: NDArray[np.float32] = high.astype(np.float32) * np.float32(2.0**-_FLOAT_BITS)
    return found


def names_id(paths: Sequence[str]) -> str:
    """Return a digest of the paths in their order, below the folder that they have in common.

    So a list that comes in another order (as ``os.listdir`` may give it elsewhere) is noticed, and
    a folder that was moved is not.
    """
    # Character by character is meant: what the first and the last share, all share.
    shared = os.path.commonprefix([min(paths), max(paths)])  # noqa: RUF071
    start = shared.rfind(os.sep) + 1
    names = "\0".join(path[start:] for path in paths)
    return hashlib.sha256(os.fsencode(names)).hexdigest()


class DALISource:
    """The ``source`` that `ResumableDALILoader` hands to ``build``.

    A pipeline begins with `inputs`; or with an ``fn.external_source`` of one's own around this
    object, with ``batch=True, batch_info=True`` and three outputs.
    """

    def __init__(
        self, cursor: Cursor, paths: Sequence[str], labels: NDArray[Any], *, nrand: int
    ) -> None:
        self._cursor = cursor
        self._paths = paths
        self._labels = labels
        self._nrand = nrand
        self._indices = Indices(cursor.seed, len(paths), shuffle=True)
        self._shares: Iterator[Share] = iter(())

    def begin(self, at: Position) -> None:
        """Feed from this position on. Before the pipeline's first run."""
        self._shares = self._from(at)

    def _from(self, at: Position) -> Iterator[Share]:
        """Yield shares without end: a pipeline need not run dry between epochs."""
        while True:
            epoch = at.epoch
            for step, share in self._cursor.plan(at):
                yield share
                at = step.after
            if at.epoch == epoch:  # the rest is dropped
                at = Position(epoch + 1, 0)

    def __call__(self, _: Any) -> tuple[list[Any], NDArray[Any], NDArray[np.float32]]:
        """Return the next batch.

        DALI calls it in the order of its batches, ahead of the training. Its number of the batch
        says nothing: after DALI's own checkpoint is loaded it continues after the number before.
        """
        import numpy as np

        runs = self._indices.of(next(self._shares))
        indices = [index for _, part in runs for index in part]
        numbers = [uniforms(self._cursor.seed, epoch, part, self._nrand) for epoch, part in runs]
        names = [np.frombuffer(os.fsencode(self._paths[i]), dtype=np.uint8) for i in indices]
        return names, self._labels[indices], np.concatenate(numbers)

    def inputs(self) -> tuple[Any, Any, Any]:
        """Return the pipeline's inputs. Call it where the pipeline is defined.

        Returns:
            - path: uint8, what ``fn.io.file.read`` takes.
            - label: of the dtype of ``labels``.
            - uniforms: [nrand], float32 in ``[0, 1)``: a function of (seed, epoch, index).
        """
        from nvidia.dali import fn
        from nvidia.dali.types import DALIDataType

        of_labels = getattr(DALIDataType, LABEL_TYPES[self._labels.dtype.name])
        path, label, numbers = fn.external_source(
            source=self,
            num_outputs=3,
            batch=True,
            batch_info=True,
            dtype=[DALIDataType.UINT8, of_labels, DALIDataType.FLOAT],
            ndim=[1, self._labels.ndim - 1, 1],
        )
        return path, label, numbers
