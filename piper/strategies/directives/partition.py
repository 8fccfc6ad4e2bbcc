"""``partition``: group consecutive regions into stages.

layer[0] layer[1] layer[2] layer[3]   partition("layer", into="PP", parts=2)
└──── PP[0] ────┘ └──── PP[1] ────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.base.units import counted
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import ChunkFacts
from piper.strategies.directives.directive import (
    Directive,
    check_speeds,
    check_tag,
    positive,
)

PROFILE = "profile"
"""``by=`` the profile that ``compile`` gets."""


@dataclass(frozen=True)
class Partition(Directive):
    name: ClassVar[str] = "partition"
    positional: ClassVar[tuple[str, ...]] = ("tag",)

    tag: str
    into: str
    parts: int
    by: str | Sequence[int] | Mapping[int, float] = "flops"
    speeds: Sequence[float] | None = None

    def check(self) -> None:
        positive("parts", self.parts)
        check_tag("tag", self.tag)
        check_tag("into", self.into)
        if self.speeds is not None:
            check_speeds(self.speeds, self.parts, "stage")
            if not isinstance(self.by, str | Mapping):
                raise DirectiveError(
                    f"by={self.by} says how many regions each stage has: leave out speeds="
                )

    def rewrite(self, dag: Dag, me: int) -> Dag:
        if self.into in dag.tag_values:
            raise DirectiveError(f"the tag {self.into!r} already exists; choose another name")
        regions = sorted({c.tags[self.tag] for c in dag.model.chunks if self.tag in c.tags})
        if not regions and self.parts == 1 and isinstance(self.by, str):
            return self._tagged(dag, [0] * len(dag.model.chunks), me)
        if not regions:
            known = sorted({t for c in dag.model.chunks for t in c.tags})
            if set(known) <= {"loss"}:
                raise DirectiveError(
                    f"the model has no region {self.tag!r}, nor any other, to make "
                    f"{counted(self.parts, 'stage')} of: nothing in it repeats (two or more "
                    "modules of one class in an nn.ModuleList or nn.Sequential); name its regions "
                    "with piper.annotate in the model, or by the paths of its modules with tags="
                )
            raise DirectiveError(f"no region is tagged {self.tag!r}; there are: {', '.join(known)}")
        if self.parts > len(regions):
            raise DirectiveError(
                f"{self.parts} parts of {counted(len(regions), 'region')} {self.tag!r}: at most "
                f"{len(regions)}"
            )
        owners = self._owners(dag.model.chunks, regions)
        counts = self._counts(dag, regions, owners)
        stages = dict(
            zip(regions, (s for s, n in enumerate(counts) for _ in range(n)), strict=True)
        )
        dag = replace(dag, stages={**dag.stages, self.into: tuple(counts)})
        return self._tagged(dag, [stages[owner] for owner in owners], me)

    def _tagged(self, dag: Dag, stages: Sequence[int], me: int) -> Dag:
        """``dag`` with each chunk tagged with its stage."""
        changed = {
            number: structs.replace(
                node, tags={**node.tags, self.into: stages[node.compute.chunk]}, made_by=me
            )
            for number, node in enumerate(dag.nodes)
        }
        return dag.with_nodes(changed)

    def _owners(self, chunks: Sequence[ChunkFacts], regions: Sequence[int]) -> list[int]:
        """The region of each chunk: its own, else the region of the previous chunk, else the
        first."""
        owners: list[int] = []
        for chunk in chunks:
            before = owners[-1] if owners else regions[0]
            owners.append(chunk.tags.get(self.tag, before))
        return owners

    def _counts(self, dag: Dag, regions: Sequence[int], owners: Sequence[int]) -> list[int]:
        """The number of regions in each stage."""
        # one stage takes all regions, also in evaluation mode, where their number may differ
        by = dag.model.stages.get(self.into, self.by) if self.parts > 1 else self.by
        if isinstance(by, Sequence) and not isinstance(by, str):
            counts = list(by)
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
            if not whole or len(counts) != self.parts or sum(counts) != len(regions):
                raise DirectiveError(
                    f"by={counts} must be {self.parts} positive counts that add up to "
                    f"{len(regions)}, the number of regions {self.tag!r}"
                )
            return counts
        weights = dict.fromkeys(regions, 0.0)
        if isinstance(by, Mapping):
            weights = self._measured(regions, by)
        else:
            for chunk, owner in zip(dag.model.chunks, owners, strict=True):
                weights[owner] += self._weight(dag, chunk)
        if not any(weights.values()):  # no costs known: equal weights
            weights = dict.fromkeys(regions, 1.0)
        return balanced([weights[region] for region in regions], self.parts, self.speeds)

    def _measured(self, regions: Sequence[int], by: Mapping[int, float]) -> dict[int, float]:
        if set(by) != set(regions):
            raise DirectiveError(
                f"by gives costs of the regions {sorted(by, key=str)}, but {self.tag!r} has "
                f"{list(regions)}: give one for each"
            )
        good = all(isinstance(cost, int | float) and cost >= 0 for cost in by.values())
        if not good:
            raise DirectiveError(f"by={dict(by)} must give a cost, not negative, for each region")
        return {region: float(cost) for region, cost in by.items()}

    def _weight(self, dag: Dag, chunk: ChunkFacts) -> float:
        if self.by == "flops":
            passes = chunk.variants[dag.policy(chunk.index)].passes
            return float(sum(f.flops for which, f in passes.items() if which.value in ("F", "B")))
        if self.by == "params":
            return float(sum(dag.model.parameters[name].nbytes for name in chunk.parameters))
        if self.by == PROFILE:
            raise DirectiveError(
                "by='profile' needs measured costs: compile with costs=profile.recorded, of a "
                "profile that trainer.profile returned"
            )
        raise DirectiveError(
            f"by={self.by!r} is unknown: 'flops', 'params', 'profile', a list of counts, or a "
            "mapping from region to measured cost"
        )


def balanced(
    weights: Sequence[float], parts: int, speeds: Sequence[float] | None = None
) -> list[int]:
    """How many consecutive items each part gets, such that the heaviest part, or the one that
    takes longest at its speed, is minimal."""
    n = len(weights)
    pace = speeds or [1.0] * parts
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = [[float("inf")] * (n + 1) for _ in range(parts + 1)]
    cut = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for end in range(k, n - (parts - k) + 1):
            for start in range(k - 1, end):
                cost = max(best[k - 1][start], (sums[end] - sums[start]) / pace[k - 1])
                if cost < best[k][end]:
                    best[k][end], cut[k][end] = cost, start
    counts, end = [], n
    for k in range(parts, 0, -1):
        counts.append(end - cut[k][end])
        end = cut[k][end]
    return counts[::-1]


@named_arguments(DirectiveError)
def partition(
    tag: str,
    *,
    into: str,
    parts: int,
    by: str | Sequence[int] | Mapping[int, float] = "flops",
    speeds: Sequence[float] | None = None,
) -> Partition:
    """Group the regions named ``tag`` into ``parts`` stages named ``into``.

    ``by`` is the cost that is balanced over the stages: "flops", "params", "profile" (the profile
    that ``compile`` gets as ``costs=``), or a mapping from region to measured cost; or a list with
    the number of regions in each stage. ``speeds`` are those of the devices of each stage; only
    their ratios matter. Chunks outside these regions join the previous stage. One stage needs no
    regions: it is the whole model.
    """
    if isinstance(by, Sequence) and not isinstance(by, str):
        by = list(by)
    by = dict(by) if isinstance(by, Mapping) else by
    pace = tuple(speeds) if isinstance(speeds, list) else speeds
    return Partition(tag, into, parts, by, pace)
