"""How much of a tensor no box covers. Pure.

A sum of volumes does not tell: two boxes that overlap make up for one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[Sequence[int], Sequence[int]]  # offsets and lengths

# Boxes that do not overlap take as many steps as there are boxes and dimensions; real ones never
# overlap. This bounds what made-up ones can take.
_STEPS_PER_BOX = 200


class TooTangled(ValueError):
    """The boxes overlap so much that it would take too long to tell."""


def uncovered(size: Sequence[int], boxes: Sequence[Box]) -> int:
    """Return how many elements of a tensor of ``size`` lie in none of the boxes.

    Args:
        size: of the tensor.
        boxes: inside of it.

    Raises:
        TooTangled: made-up boxes; see there.
    """
    if len(boxes) == 1 and tuple(boxes[0][1]) == tuple(size):
        return 0
    solid = [box for box in boxes if all(box[1])]
    steps = [1000 + _STEPS_PER_BOX * len(solid) * max(len(size), 1)]
    return math.prod(size) - _covered(solid, 0, len(size), steps)


def _covered(boxes: Sequence[Box], dim: int, dims: int, steps: list[int]) -> int:
    """Return the volume of the union of boxes, in dimensions from ``dim`` on."""
    if not boxes:
        return 0
    if dim == dims:
        return 1
    if len(boxes) == 1:
        return math.prod(boxes[0][1][dim:])
    steps[0] -= len(boxes)
    edges = [(box[0][dim], 1, n) for n, box in enumerate(boxes)]
    edges += [(box[0][dim] + box[1][dim], 0, n) for n, box in enumerate(boxes)]
    edges.sort()
    total = 0
    here: dict[int, Box] = {}  # boxes that the slab between two edges lies in
    slab: tuple[frozenset[int], int] | None = None  # the last one, and its volume per thickness
    before = 0
    for at, begins, n in edges:
        if at > before and here:
            steps[0] -= len(here)
            if steps[0] < 0:
                raise TooTangled("chunks overlap too often to be added up")
            members = frozenset(here)
            if slab is None or slab[0] != members:
                slab = members, _covered(list(here.values()), dim + 1, dims, steps)
            total += (at - before) * slab[1]
        before = at
        if begins:
            here[n] = boxes[n]
        else:
            del here[n]
    return total
