"""``place``: runs nodes on a group of devices.

    F PP[0] ─▶ F PP[1]     place({"PP": 0}, devices=[0, 2])     F PP[0] @0,2 ─▶ F PP[1] @1,3
                           place({"PP": 1}, devices=[1, 3])

The group divides the microbatch; what flows between groups is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from piper.directives.base import Directive, check_group, check_stream, device_group, plain_filter
from piper.errors import DirectiveError
from piper.ir.dag import Dag, SendRule
from piper.ir.filters import Filter, FilterLike, select
from piper.ir.mesh import Mesh
from piper.ir.text import name_of


@dataclass(frozen=True)
class Place(Directive):
    name: ClassVar[str] = "place"

    where: FilterLike
    devices: tuple[int, ...]
    stream: str = "p2p"
    axes: Mapping[str, int] | None = None
    batch: tuple[str, ...] | None = None

    def rewrite(self, dag: Dag, me: int) -> Dag:
        group = self.devices
        check_group(group)
        check_stream("stream", self.stream)
        mesh = None if self.axes is None else Mesh(group, **self.axes)
        self._check_batch()
        sends = SendRule(self.stream, me)
        changed = {}
        for number in select(dag, Filter.of(self.where)):
            node = dag.nodes[number]
            if node.devices:
                raise DirectiveError(
                    f"{name_of(dag, number)} is placed already, on {list(node.devices)} by "
                    f"{dag.history[node.sends.made_by]}: make the two filters disjoint"
                )
            changed[number] = replace(node, devices=group, mesh=mesh, sends=sends, made_by=me)
        return dag.with_nodes(changed)

    def _check_batch(self) -> None:
        if self.batch is None:
            return
        if self.axes is None:
            raise DirectiveError(
                f"batch={list(self.batch)} names axes, but the devices have none: give "
                f"devices=Mesh({list(self.devices)}, ...)"
            )
        unknown = [axis for axis in self.batch if axis not in self.axes]
        if unknown:
            raise DirectiveError(
                f"batch names the axis {unknown[0]!r}, but the mesh has {', '.join(self.axes)}"
            )
        left = [a for a, size in self.axes.items() if size > 1 and a not in self.batch]
        if left:
            raise DirectiveError(
                f"the axis {left[0]!r} would not divide the batch, and nothing else divides along "
                f"it: its {self.axes[left[0]]} devices would all compute the same. Name it in "
                "batch=, or leave batch= out"
            )

    def _written(self, field: str) -> str:
        if field == "devices" and self.axes is not None:
            return f"devices={Mesh(self.devices, **self.axes)}"
        return super()._written(field)

    def _shown(self, field: str) -> bool:
        return field != "axes"


def place(
    where: FilterLike,
    *,
    devices: Sequence[int] | Mesh,
    stream: str = "p2p",
    batch: str | Sequence[str] | None = None,
) -> Place:
    """Run the matched nodes on ``devices``, which divide each microbatch among them.

    ``devices`` is a list, or a ``Mesh`` whose axes other directives can name; ``batch`` are those
    of its axes that divide the batch, by default all. What the nodes send to other groups goes over
    ``stream``. A filter on the microbatch may place the same stage on different groups.
    """
    names = (batch,) if isinstance(batch, str) else None if batch is None else tuple(batch)
    axes = dict(devices.axes) if isinstance(devices, Mesh) else None
    group = devices.devices if isinstance(devices, Mesh) else device_group(devices)
    return Place(plain_filter(where), group, stream, axes, names)
