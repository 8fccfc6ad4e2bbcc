"""The traffic of a plan: the number of communications and the bytes that a device sends.

A collective counts the bytes of the algorithm that sends least.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from piper.ir.collectives import COLLECTIVES
from piper.ir.dag.dag import Dag, devices_text
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Collective, Transfer
from piper.ir.plan.columns import Columns
from piper.ir.plan.instructions import Verb
from piper.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Flow:
    """Communications of one kind on one stream, in one step."""

    kind: str
    """"send", or the name of a collective."""
    stream: str
    count: int
    nbytes: int
    """Total bytes sent by each device."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that each device of one class sends in one step."""

    devices: tuple[int, ...]
    flows: tuple[Flow, ...]

    @property
    def nbytes(self) -> int:
        return sum(flow.nbytes for flow in self.flows)

    def of(self, kind: str) -> int:
        """Bytes sent by communications of one kind."""
        return sum(flow.nbytes for flow in self.flows if flow.kind == kind)

    def count(self, kind: str) -> int:
        """The number of communications of one kind."""
        return sum(flow.count for flow in self.flows if flow.kind == kind)

    def __str__(self) -> str:
        parts = [f"{f.count} {f.kind} on {f.stream} {f.nbytes:,} bytes" for f in self.flows]
        each = "each of " if len(self.devices) > 1 else ""
        sender = f"{each}{devices_text(self.devices)} sends"
        return f"{sender} {self.nbytes:,} bytes: {', '.join(parts)}"


_SENDING = frozenset((Verb.SEND, Verb.COLLECTIVE))


def traffic_of(dag: Dag, plan: Plan, sizes: Sizes) -> Traffic:
    """The traffic of each device of ``plan``."""
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    sent: defaultdict[tuple[str, str], Fraction] = defaultdict(Fraction)
    mine = plan.devices[0]
    x = Columns.of(plan.instructions)
    times = np.bincount(dag.kinds.of[x.nodes[x.among(_SENDING)]])
    for kind in np.flatnonzero(times).tolist():
        node, count = dag.nodes[dag.kinds.examples[kind]], int(times[kind])
        match node.op:
            case Transfer(source=source, target=target):
                key = "send", node.stream
                each = Fraction(0 if source == target else sizes.sent(node.reads[0]))
            case Collective(kind=move, groups=groups):
                key = move.value, node.stream
                n = next(len(group) for group in groups if mine in group)
                nbytes = sizes.moved(node)
                share = Fraction(n - 1, n) * nbytes
                each = min(x.sent(nbytes, share) for x in COLLECTIVES[move].algorithms)
            case _:
                continue
        sent[key] += each * count
        counts[key] += count
    flows = [Flow(*key, counts[key], int(sent[key])) for key in sorted(counts)]
    return Traffic(plan.devices, tuple(flows))
