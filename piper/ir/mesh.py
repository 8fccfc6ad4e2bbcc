"""``Mesh``: devices with named axes.

Mesh([0, 1, 2, 3, 4, 5], dp=2, ep=3)      dp 0   0 1 2
                                          dp 1   3 4 5     the last axis counts fastest
                                            ep   0 1 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from piper.base.errors import DirectiveError

T = TypeVar("T")
MOST_DEVICES = 2**20
"""More than any strategy or cluster has; such a list is made in a second."""


def listed(items: Iterable[T]) -> tuple[T, ...]:
    """All of ``items``, which are not without end."""
    group = tuple(islice(items, MOST_DEVICES + 1))
    if len(group) > MOST_DEVICES:
        raise DirectiveError(f"a list of devices or tags has more than {MOST_DEVICES} items")
    return group


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Devices in order, and the sizes of the axes that they fill."""

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]

    def __init__(self, devices: Iterable[int], **axes: int) -> None:
        group = listed(devices) if isinstance(devices, Iterable) else None
        if group is None or isinstance(devices, str):
            raise DirectiveError(f"Mesh({devices!r}): the devices must be a list of numbers")
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise DirectiveError(
                    f"Mesh: the axis {name}={size!r} must have a positive whole number of devices"
                )
        if not axes:
            raise DirectiveError(
                f"Mesh({list(group)}) names no axis: say Mesh({list(group)}, dp={len(group)}), or "
                "give the list of devices alone"
            )
        if math.prod(axes.values()) != len(group):
            written = " * ".join(f"{name}={size}" for name, size in axes.items())
            raise DirectiveError(
                f"Mesh: {written} is {math.prod(axes.values())} devices, but {len(group)} are "
                f"given: {list(group)}"
            )
        object.__setattr__(self, "devices", group)
        object.__setattr__(self, "axes", tuple(axes.items()))

    def size(self, axis: str) -> int:
        """How many devices lie along ``axis``."""
        return dict(self.axes)[axis]

    def stride(self, axis: str) -> int:
        """How far apart neighbours along ``axis`` are in the order of the devices."""
        place = [name for name, _ in self.axes].index(axis)
        return math.prod(size for _, size in self.axes[place + 1 :])

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The devices that differ along ``axes`` alone, in the order of the mesh."""
        along, others = [0], [0]
        for name, size in self.axes:
            stride = self.stride(name)
            row = along if name in axes else others
            row[:] = [at + i * stride for at in row for i in range(size)]
        return tuple(tuple(self.devices[at + i] for i in along) for at in others)

    def first(self, axes: Iterable[str]) -> Mesh:
        """The same devices with ``axes`` before the others."""
        names = [name for name, _ in self.axes]
        outer = [name for name in names if name in set(axes)]
        inner = [name for name in names if name not in outer]
        devices = [d for group in self.groups(*inner) for d in group]
        return Mesh(devices, **{name: self.size(name) for name in (*outer, *inner)})

    def __str__(self) -> str:
        axes = "".join(f", {name}={size}" for name, size in self.axes)
        return f"Mesh({list(self.devices)}{axes})"

    __repr__ = __str__
