"""What a step computes more than once, and what it gathers because nothing says how to shard it.

Devices along an axis that a region is not sharded along compute the same: products there cost their
floating-point operations as many times. An operation without a rule for its layout reads its inputs
gathered: that costs bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import Model
from piper.ir.ops import Compute
from piper.ir.passes import Pass

LARGE = Fraction(1, 20)
"""The share of a step from which on waste is worth a warning."""


@dataclass(frozen=True, slots=True)
class Waste:
    """What one kind of operation wastes in a step, over all regions that have it."""

    operations: tuple[str, ...]
    regions: tuple[str, ...]
    copies: int | None
    """How many devices compute the same; None if inputs are gathered."""
    amount: int
    """Floating-point operations that all devices could do without, or bytes that a device sends."""
    share: Fraction
    """Of the floating-point operations, or of the bytes sent, of the step."""

    def __str__(self) -> str:
        where = self.regions[0] + (f" and {len(self.regions) - 1} more" * (len(self.regions) > 1))
        what = f"{', '.join(self.operations)} in {where}"
        share = f"{float(self.share):.1%}"
        if self.copies is None:
            return f"{what} has no sharding rule for its inputs, which are gathered: " + (
                f"{self.amount:,} bytes, {share} of what a device sends in a step"
            )
        return f"{what} computed by each of {self.copies} devices alike: " + (
            f"{self.amount:,} FLOP too many, {share} of the step"
        )


def waste_of(dag: Dag, models: Mapping[int, Model], sent: int) -> tuple[Waste, ...]:
    """The waste of a step in which a device sends at most ``sent`` bytes, most costly first."""
    repeated: defaultdict[tuple[tuple[str, ...], int], _Sum] = defaultdict(_Sum)
    gathered: defaultdict[str, _Sum] = defaultdict(_Sum)
    total = 0
    for node in dag.nodes:
        if not isinstance(node.op, Compute):
            continue
        chunk = models.get(node.parts, dag.model).chunks[node.op.chunk]
        flops = chunk.variants[dag.policy(chunk.index)].passes[node.op.which].flops
        flops *= len(node.devices)
        total += flops
        region = " ".join(f"{name}[{index}]" for name, index in chunk.tags.items()) or "the model"
        copies = _copies(dag, node)
        if copies > 1 and flops:
            repeated[chunk.products, copies].add(region, flops - flops // copies)
        if node.op.which is Pass.F:
            for one in chunk.gathered:
                gathered[one.operation].add(region, one.nbytes)
    rows = [
        Waste(products, tuple(x.regions), copies, x.amount, Fraction(x.amount, max(1, total)))
        for (products, copies), x in repeated.items()
    ] + [
        Waste((name,), tuple(x.regions), None, x.amount, Fraction(x.amount, max(1, sent, x.amount)))
        for name, x in gathered.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.share))


def waste_text(wastes: Sequence[Waste]) -> str:
    """One a line."""
    return "\n".join(["waste:", *(f"  {waste}" for waste in wastes)])


class _Sum:
    def __init__(self) -> None:
        self.amount = 0
        self.regions: dict[str, None] = {}

    def add(self, region: str, amount: int) -> None:
        self.regions[region] = None
        self.amount += amount


def _copies(dag: Dag, node: Node) -> int:
    """How many devices compute the same."""
    return len({dag.copy_of(node, rank) for rank in range(node.replicas)})
