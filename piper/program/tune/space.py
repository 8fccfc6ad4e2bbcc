"""The space of candidates: all splits of the devices, schedules, microbatches, ZeRO levels and
recomputation. Candidates that differ only in what has no effect, or that no schedule can run, are
not in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from piper.program.tune.candidate import Candidate
from piper.strategies.directives.partition import balanced

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev")
_MOST_MICROBATCHES = 64


@dataclass(frozen=True, slots=True)
class Space:
    """The limits of the search."""

    devices: int
    batch: int
    """Rows of the global batch."""
    layers: int
    regions: str
    machine: int
    """Devices of a machine: tensor parallelism stays inside."""
    tensor: bool
    """Whether the model declares how its parameters are sharded."""
    experts: bool
    schedules: Sequence[str] = SCHEDULES
    context: bool = True

    def candidates(self) -> Iterator[Candidate]:
        """All of them, without those that only local search tries."""
        of = _divisors(self.devices)
        for pp, tp, cp in itertools.product(of, repeat=3):
            dp, left = divmod(self.devices, pp * tp * cp)
            if left or pp > max(1, self.layers) or self.batch % dp:
                continue
            if (tp > 1 and (not self.tensor or tp > self.machine)) or (cp > 1 and not self.context):
                continue
            shards = [n for n in _divisors(dp * cp * tp) if n == 1 or self.experts]
            counts = [m for m in _divisors(self.batch // dp) if m <= _MOST_MICROBATCHES]
            for ep, m, (schedule, virtual) in itertools.product(shards, counts, self._orders(pp)):
                made = Candidate(
                    pp, dp, tp, cp, ep, schedule, virtual, m, sequence_parallel=tp > 1,
                    regions=self.regions,
                )  # fmt: skip
                if made.stages <= max(1, self.layers) and _runs(made):
                    levels = (0, 1, 3) if m == 1 else (0, 1, 2, 3)  # else 2 is 1
                    for zero in levels if dp * cp > 1 else (0,):
                        for recomputed in sorted({0, self.layers}):
                            yield replace(made, zero=zero, recomputed=recomputed)

    def _orders(self, pp: int) -> Iterator[tuple[str, int | None]]:
        for schedule in self.schedules if pp > 1 else ("1f1b",):
            if schedule in ("interleaved", "breadth-first"):
                yield from ((schedule, n) for n in (2, 4))
            else:
                yield schedule, None

    def smaller(self, c: Candidate) -> Iterator[Candidate]:
        """``c``, which does not fit, with an eighth more of its regions recomputed."""
        more = c.recomputed + max(1, self.layers // 8)
        if more < self.layers:
            yield replace(c, recomputed=more)

    def beside(self, c: Candidate) -> Iterator[Candidate]:
        """Candidates near ``c``: other recomputation, stage bounds, order, buckets, placement."""
        steps = (1, max(1, self.layers // 16), max(1, self.layers // 4))
        for n in sorted({c.recomputed + sign * step for step in steps for sign in (-1, 1)}):
            if 0 <= n <= self.layers:
                yield replace(c, recomputed=n)
        for schedule, virtual in self._orders(c.pp):
            other = replace(c, schedule=schedule, virtual=virtual, by=None)
            if other.stages <= self.layers and _runs(other):
                yield other
        for factor in (0.25, 4.0):
            if c.dp * c.cp > 1 and 1 <= c.bucket_mb * factor <= 400:
                yield replace(c, bucket_mb=c.bucket_mb * factor)
        if c.pp > 1 and self.devices > self.machine:
            inner = "pipeline-inner" if c.layout == "pipeline-outer" else "pipeline-outer"
            yield replace(c, layout=inner)
        if c.stages > 1:
            counts = list(c.by or balanced([1.0] * self.layers, c.stages))
            for a, b in itertools.permutations({0, c.stages // 2, c.stages - 1}, 2):
                moved = [n - (i == a) + (i == b) for i, n in enumerate(counts)]
                if min(moved) > 0:
                    yield replace(c, by=tuple(moved))


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _runs(c: Candidate) -> bool:
    """Whether the schedule can run so many microbatches, and is filled by them."""
    m, pp = c.microbatches, c.pp
    if pp == 1:
        return True
    least = {"zb-v": 2 * pp - 1, "dualpipev": 2 * pp, "v-half": 2 * pp - 1}.get(c.schedule, pp)
    return m >= least and (c.schedule != "interleaved" or m % pp == 0)
