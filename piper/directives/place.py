"""``place``: runs nodes on a group of devices.

    F PP[0] ─▶ F PP[1]     place({"PP": 0}, devices=[0, 2])     F PP[0] @0,2 ─▶ F PP[1] @1,3
                           place({"PP": 1}, devices=[1, 3])

The group divides the microbatch; what flows between groups is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from piper.directives.base import Directive, check_group, check_stream, device_group, plain_filter
from piper.errors import DirectiveError
from piper.ir.dag import Dag, SendRule
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
        check_group(group)
        check_stream("stream", self.stream)
        sends = SendRule(self.stream, me)
        changed = {}
        for number in select(dag, Filter.of(self.where)):
            node = dag.nodes[number]
            if node.devices:
                raise DirectiveError(
                    f"{name_of(dag, number)} is placed already, on {list(node.devices)} by "
                    f"{dag.history[node.sends.made_by]}: make the two filters disjoint"
                )
            changed[number] = replace(node, devices=group, sends=sends, made_by=me)
        return dag.with_nodes(changed)


def place(where: FilterLike, *, devices: Sequence[int], stream: str = "p2p") -> Place:
    """Run the matched nodes on ``devices``, which divide each microbatch among them.

    What they send to other groups goes over ``stream``. A filter on the microbatch may place the
    same stage on different groups.
    """
    return Place(plain_filter(where), device_group(devices), stream)
