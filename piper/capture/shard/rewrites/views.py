"""Views of shards. In row-major order, a device's shard is a run of elements in every period of as
many runs as there are parts; a view keeps this order. So nothing is communicated where a dimension
of the result has the same runs:

    [rows, seq S, 64] ─▶ [rows * seq, 64], a section for each row ─▶ [rows, seq S, 8, 8]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

aten = torch.ops.aten
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)


def viewed(
    shape: Sequence[int], made: Sequence[int], dim: int, sections: int, parts: int
) -> tuple[int, int] | None:
    """The dimension of a view of shape ``made`` that has the parts of dimension ``dim``, and the
    number of its sections that have parts of their own; None if there is none. The dimension of
    ``shape`` has ``sections``."""
    run, rest = divmod(math.prod(shape[dim:]), sections * parts)
    if rest or not run:
        return None
    place, inside, before = None, math.prod(made), 0
    for at, size in enumerate(made):
        period, inside = inside, inside // size
        if run % inside == 0 and period % (run * parts) == 0 and period != before:
            place, before = (at, period // (run * parts)), period
    return place
