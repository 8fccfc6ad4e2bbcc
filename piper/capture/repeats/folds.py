"""A fold: equal parts of a model that follow each other, of which a graph has only the first two.

    graph    first layer ─▶ part 0 ─▶ part 1 ─▶ last layer ─▶ loss
    model    first layer ─▶ part 0 ─▶ part 1 ─▶ part 2 ─▶ ... ─▶ part n ─▶ last layer ─▶ loss

Each part reads what the part before it made, and otherwise the same values as all parts. Whatever
is learned of part 1 from part 0 then holds of each part from the one before, so that the work on a
graph does not grow with depth. Where the two parts come out differently, ``NotFolded`` is raised,
and the graph of all parts is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import fx

from piper.capture.regions import Region, tags_of
from piper.capture.repeats.call_ops import CallRun


class NotFolded(Exception):  # noqa: N818 - not an error: the graph of all parts is used
    """The two parts in a graph do not show what the other parts are."""


@dataclass(frozen=True, slots=True)
class FoldPart:
    """One of the equal parts."""

    paths: tuple[str, ...]
    """The modules that it calls. Those of all parts are in the same order, as are regions."""
    regions: tuple[Region, ...]
    """The regions around its operations."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Equal parts, in their order."""

    parts: tuple[FoldPart, ...]

    @staticmethod
    def of(run: CallRun) -> Fold | None:
        """The fold of a run of calls; None if it has too few parts, parts that share all their
        regions, so that regions do not tell them apart, or parts whose modules and regions do not
        correspond."""
        starts = range(0, len(run.calls), run.period)
        calls = [run.calls[start : start + run.period] for start in starts]
        parts = tuple(
            FoldPart(
                tuple(call.path for call in part),
                tuple(x for call in part for x in (*call.around, *call.regions.values())),
            )
            for part in calls
        )
        fold = Fold(parts)
        told = all(
            not mine.isdisjoint(call.around)
            for mine, part in zip(fold.own(), calls, strict=True)
            for call in part
        )
        alike = {(_pattern(x.paths), _pattern(x.regions), _names(x)) for x in parts}
        return fold if told and len(alike) == 1 and len(parts) > 2 else None

    def own(self) -> list[set[Region]]:
        """For each part, the regions that no other part has."""
        regions = [set(part.regions) for part in self.parts]
        counts = Counter(chain.from_iterable(regions))
        return [{region for region in part if counts[region] == 1} for part in regions]

    def named(self, name: Callable[[str], str]) -> Fold:
        """The fold with the names of its modules by ``name``."""
        parts = [replace(x, paths=tuple(map(name, x.paths))) for x in self.parts]
        return replace(self, parts=tuple(parts))

    def mirrored(self, graph: fx.Graph, state: Callable[[fx.Node], Any]) -> None:
        """Refuse a ``state`` of the operations of part 1 that is not that of part 0."""
        one, two = (
            [state(node) for node in graph.nodes if not own.isdisjoint(tags_of(node.meta))]
            for own in self.own()[:2]
        )
        if one != two:
            raise NotFolded


def _pattern(items: Sequence[object]) -> tuple[int, ...]:
    """Which of the items are the same."""
    return tuple(map(items.index, items))


def _names(part: FoldPart) -> tuple[str, ...]:
    return tuple(region.name for region in part.regions)


def renamed(path: str, one: FoldPart, two: FoldPart) -> str:
    """The path in part ``two`` of what has this path in part ``one``."""
    for mine, other in zip(one.paths, two.paths, strict=True):
        if path == mine or path.startswith(f"{mine}."):
            return other + path.removeprefix(mine)
    return path
