"""How long nodes take: enough to order what a strategy leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper.errors import PiperError
from piper.ir.dag import Compute, Dag, Node, Update
from piper.lower.recorded import Recorded
from piper.lower.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Costs:
    """How fast devices compute and communicate, in seconds."""

    flops_per_second: float = 200e12
    bytes_per_second: float = 50e9
    overhead: float = 5e-6
    recorded: Recorded | None = None
    """What was measured, which counts wherever it knows: ``profile.recorded``."""

    def __post_init__(self) -> None:
        speeds = self.flops_per_second, self.bytes_per_second
        if not all(speed > 0 for speed in speeds) or not 0 <= self.overhead < math.inf:
            raise PiperError(f"{self}: speeds must be positive, and overhead not negative")
        if not isinstance(self.recorded, Recorded | None):
            raise PiperError(f"recorded={self.recorded!r} must be piper.Recorded, or None")

    def duration(self, dag: Dag, sizes: Sizes, node: Node) -> float:
        known = None if self.recorded is None else self.recorded.seconds(dag, sizes, node)
        if known is not None:
            return known
        if isinstance(node.op, Compute):
            flops = sizes.facts(node.op, node.parts).flops
            return self.overhead + flops / self.flops_per_second
        if isinstance(node.op, Update):
            return self.overhead
        return self.overhead + sizes.moved(node) / self.bytes_per_second
