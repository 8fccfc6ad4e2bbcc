"""The layout of a value on its mesh: one placement per mesh axis.

Mesh([0, 1, 2, 3], dp=2, tp=2)      rows of the batch       dp S(0), tp R
                                    gradient of a weight    dp P(sum), tp R
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.collectives import PartialSum, Placement, Replicated, Sharded
from piper.ir.mesh import Mesh
from piper.ir.rules import Bucket


@dataclass(frozen=True, slots=True)
class Layout:
    """A value on a mesh."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    """One per axis."""

    def along(self, **placements: Placement) -> Layout:
        """This layout with other placements along some axes."""
        names = [name for name, _ in self.mesh.axes]
        pairs = zip(names, self.placements, strict=True)
        return Layout(self.mesh, tuple(placements.get(name, own) for name, own in pairs))

    def __str__(self) -> str:
        axes = zip(self.mesh.axes, self.placements, strict=True)
        shown = [f"{name} {placement}" for (name, size), placement in axes if size > 1]
        return ", ".join(shown) or "whole"


class BucketLayouts:
    """A bucket of parameters on the devices that hold it. Parameters are sharded along ``ep``
    (experts) or a tensor parallel axis. Copies are replicated along ``replicate``, and along
    ``alike`` where they make equal gradients. ZeRO shards each copy along ``shard``."""

    def __init__(self, bucket: Bucket) -> None:
        devices = [device for group in bucket.groups for device in group]
        axis = bucket.axis if bucket.axis not in ("replicate", "alike", "shard") else "ep"
        sizes = {"replicate": bucket.copies // bucket.alike, "alike": bucket.alike}
        self.mesh = Mesh(devices, **{axis: len(bucket.groups)}, **sizes, shard=bucket.within)
        whole = Layout(self.mesh, (Replicated(),) * len(self.mesh.axes))
        self.in_use = whole.along(**{axis: Sharded(bucket.dim)})
        sharded = self.in_use.along(shard=Sharded(0))
        self.gradients = self.in_use.along(replicate=PartialSum(), shard=PartialSum())
        self.optimizer = sharded if bucket.level >= 1 else self.in_use
        """The layout of the optimizer's state, and of the elements it updates."""
        self.at_rest = sharded if bucket.level == 3 else self.in_use
