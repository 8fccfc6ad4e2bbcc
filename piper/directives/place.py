"""``place``: runs nodes on a group of devices.

    F PP[0] ─▶ F PP[1]     place({"PP": 0}, devices=[0, 2])     F PP[0] @0,2 ─▶ F PP[1] @1,3
                           place({"PP": 1}, devices=[1, 3])

The group divides the microbatch; what flows between groups is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from piper.directives.base import Directive
from piper.errors import DirectiveError
from piper.ir.dag import Dag
from piper.ir.filters import Filter, FilterLike, select
from piper.ir.text import name_of


@dataclass(frozen=True)
class Place(Directive):
    name: ClassVar[str] = "place"

    where: FilterLike
    devices: tuple[int, ...]
    stream: str = "p2p"

    def rewrite(self, dag: Dag, me: int) -> Dag:
        group = self.devices
        if not group or any(not isinstance(d, int) or d < 0 for d in group):
            raise DirectiveError(f"devices={list(group)} must be device numbers, at least one")
        if len(set(group)) < len(group):
            raise DirectiveError(f"devices={list(group)} names a device twice")
        changed = {}
        for number in select(dag, Filter.of(self.where)):
            node = dag.nodes[number]
            if node.devices:
                raise DirectiveError(
                    f"{name_of(dag, number)} is placed already, on {list(node.devices)} by "
                    f"{dag.why(number)}: make the two filters disjoint"
                )
            changed[number] = replace(node, devices=group, made_by=me)
        streams = {**dag.transfer_streams, group: self.stream}
        return replace(dag.with_nodes(changed), transfer_streams=streams)


def place(where: FilterLike, *, devices: Sequence[int], stream: str = "p2p") -> Place:
    """Run the matched nodes on ``devices``, which divide each microbatch among them.

    What they send to other groups goes over ``stream``. A filter on the microbatch may place the
    same stage on different groups.
    """
    return Place(dict(where), tuple(devices), stream)
