"""Derives the collectives between two layouts of a value on one mesh.

along an axis       to S(j)            to R
from S(i)           all_to_all         all_gather
from P              reduce_scatter     all_reduce

Between two meshes, rows are sent instead (``Transfer``).
"""

from __future__ import annotations

import itertools

from piper.ir.collectives import Move, move_between
from piper.ir.layouts import Layout
from piper.ir.ops import Collective

_ORDER = [*Move]
"""Reductions that scatter come first: later collectives then move less."""


def redistribute(made: Layout, wanted: Layout) -> tuple[Collective, ...]:
    """The collectives that change a value's layout on one mesh, each over all axes that need it."""
    assert made.mesh == wanted.mesh
    axes = [name for name, _ in made.mesh.axes]
    steps = [
        ((before, after), name)
        for name, before, after in zip(axes, made.placements, wanted.placements, strict=True)
        if before != after and made.mesh.size(name) > 1
    ]
    steps.sort(key=lambda step: _ORDER.index(move_between(*step[0])))
    return tuple(
        Collective(before, after, made.mesh.groups(*(name for _, name in row)))
        for (before, after), row in itertools.groupby(steps, key=lambda step: step[0])
    )
