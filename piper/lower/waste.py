"""Finds duplicate computation, and gathers caused by operations without a sharding rule.

If a region is not sharded along an axis, all devices along that axis compute the same: each repeats
the FLOPs of the region's matrix products. An operation without a sharding rule for its input layout
reads gathered inputs, which costs bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import Model
from piper.ir.ops import Compute
from piper.ir.passes import Pass

LARGE = Fraction(1, 20)
"""Waste above this share of a step causes a warning."""


@dataclass(frozen=True, slots=True)
class Waste:
    """The waste of one kind of operation in a step, over all its regions."""

    operations: tuple[str, ...]
    regions: tuple[str, ...]
    copies: int | None
    """Number of devices that compute the same; None if inputs are gathered."""
    amount: int
    """Redundant FLOPs over all devices, or bytes that a device sends."""
    share: Fraction
    """``amount`` as a share of the step's FLOPs or of the bytes sent."""

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
    """The waste of a step in which a device sends at most ``sent`` bytes, largest share first."""
    repeated: defaultdict[tuple[tuple[str, ...], int], _Sum] = defaultdict(_Sum)
    gathered: defaultdict[str, _Sum] = defaultdict(_Sum)
    total = 0
    alike: dict[tuple[int, int], int] = {}
    """By chunk and replicas, the number of devices that compute the same."""
    times = np.bincount(dag.kinds.of).tolist()
    for node, count in zip(dag.examples, times, strict=True):
        if not isinstance(node.op, Compute):
            continue
        chunk = models.get(node.parts, dag.model).chunks[node.op.chunk]
        flops = chunk.variants[dag.policy(chunk.index)].passes[node.op.which].flops
        flops *= len(node.devices)
        total += flops * count
        region = " ".join(f"{name}[{index}]" for name, index in chunk.tags.items()) or "the model"
        key = chunk.index, node.replicas
        copies = alike.get(key) or alike.setdefault(key, _copies(dag, node))
        if copies > 1 and flops:
            repeated[chunk.products, copies].add(region, (flops - flops // copies) * count)
        if node.op.which is Pass.F:
            for gather in chunk.gathered:
                gathered[gather.operation].add(region, gather.nbytes * count)
    wastes = [
        Waste(products, tuple(x.regions), copies, x.amount, Fraction(x.amount, max(1, total)))
        for (products, copies), x in repeated.items()
    ] + [
        Waste((name,), tuple(x.regions), None, x.amount, Fraction(x.amount, max(1, sent, x.amount)))
        for name, x in gathered.items()
    ]
    return tuple(sorted(wastes, key=lambda row: -row.share))


def waste_text(wastes: Sequence[Waste]) -> str:
    """A text with one entry per line."""
    return "\n".join(["waste:", *(f"  {waste}" for waste in wastes)])


class _Sum:
    def __init__(self) -> None:
        self.amount = 0
        self.regions: dict[str, None] = {}

    def add(self, region: str, amount: int) -> None:
        self.regions[region] = None
        self.amount += amount


def _copies(dag: Dag, node: Node) -> int:
    """The number of devices that compute the same."""
    return len({dag.copy_of(node, rank) for rank in range(node.replicas)})
