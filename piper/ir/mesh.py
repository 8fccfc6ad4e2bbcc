"""``Mesh``: devices with named axes.

Mesh([0, 1, 2, 3, 4, 5], dp=2, ep=3)      dp 0   0 1 2
                                          dp 1   3 4 5     the last axis varies fastest
                                            ep   0 1 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from piper.base.errors import DirectiveError
from piper.base.units import numbers_code

T = TypeVar("T")
MOST_DEVICES = 2**20
"""More than any strategy or cluster has; a list of this length takes a second to make."""


def listed(items: Iterable[T]) -> tuple[T, ...]:
    """All of ``items``; refuses an endless iterable."""
    group = tuple(islice(items, MOST_DEVICES + 1))
    if len(group) > MOST_DEVICES:
        raise DirectiveError(f"a list of devices or tags has more than {MOST_DEVICES} items")
    return group


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Devices in order, and the named axes with their sizes."""

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
        """The number of devices along ``axis``."""
        return dict(self.axes)[axis]

    def stride(self, axis: str) -> int:
        """The distance in ``devices`` between neighbours along ``axis``."""
        index = [name for name, _ in self.axes].index(axis)
        return math.prod(size for _, size in self.axes[index + 1 :])

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that differ only along ``axes``, in mesh order."""
        along, others = [0], [0]
        for name, size in self.axes:
            stride = self.stride(name)
            offsets = along if name in axes else others
            offsets[:] = [at + i * stride for at in offsets for i in range(size)]
        return tuple(tuple(self.devices[at + i] for i in along) for at in others)

    def first(self, axes: Iterable[str]) -> Mesh:
        """The same devices with ``axes`` as the outer axes."""
        names = [name for name, _ in self.axes]
        outer = [name for name in names if name in set(axes)]
        inner = [name for name in names if name not in outer]
        devices = [d for group in self.groups(*inner) for d in group]
        return Mesh(devices, **{name: self.size(name) for name in (*outer, *inner)})

    def __str__(self) -> str:
        axes = "".join(f", {name}={size}" for name, size in self.axes)
        return f"Mesh({numbers_code(self.devices)}{axes})"

    __repr__ = __str__
