"""Writing a schedule: one row for each pipeline rank, filled with verbs; microbatches count up by
themselves.

    schedule = Schedule("mine", stages=2, microbatches=4)
    for rank, row in enumerate(schedule.rows):
        row.forward(rank)                       # the next microbatch of stage ``rank``
        row.pair(forward=rank, backward=rank)   # two that overlap
        ...

A schedule is turned into ``place`` and ``order`` directives, and knows nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.directives import Directive, order, place
from piper.errors import DirectiveError

Item = dict[str, int | str]
"""A filter: one pass of one stage for one microbatch."""


class Row:
    """What one pipeline rank does, in order.

    ``stages`` gives, for each stage that the rank holds, the microbatches that it runs there.
    """

    def __init__(
        self, stages: Mapping[int, Sequence[int]], tag: str = "PP", batch: str = "MB"
    ) -> None:
        self.stages = {stage: tuple(batches) for stage, batches in stages.items()}
        self.groups: list[list[Item]] = []
        self.tag, self.batch = tag, batch
        self._forwards = {stage: deque(batches) for stage, batches in self.stages.items()}
        self._backwards = {stage: deque(batches) for stage, batches in self.stages.items()}
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, stage: int, times: int = 1) -> Row:
        """The forward of the next microbatch of ``stage``."""
        for _ in range(times):
            self.groups.append([self._forward(stage)])
        return self

    def backward(self, stage: int, times: int = 1) -> Row:
        """The whole backward of the next microbatch."""
        for _ in range(times):
            self.groups.append([self._backward(stage, "B")])
        return self

    def backward_input(self, stage: int, times: int = 1) -> Row:
        """The backward for the inputs; that for the weights waits for ``backward_weight``."""
        for _ in range(times):
            item = self._backward(stage, "BI")
            self._weights.append((stage, int(item[self.batch])))
            self.groups.append([item])
        return self

    def backward_weight(self, times: int = 1) -> Row:
        """The backward for the weights that has waited longest."""
        for _ in range(times):
            stage, microbatch = self._weights.popleft()
            self.groups.append([self._item(stage, microbatch, "BW")])
        return self

    def pair(self, *, forward: int, backward: int) -> Row:
        """A forward and a backward that overlap: communication of one hides behind the other."""
        self.groups.append([self._forward(forward), self._backward(backward, "B")])
        return self

    def forwards_left(self, stage: int) -> int:
        return len(self._forwards[stage])

    def backwards_left(self, stage: int) -> int:
        return len(self._backwards[stage])

    @property
    def weights_left(self) -> int:
        """Backwards for weights that still wait."""
        return len(self._weights)

    def _forward(self, stage: int) -> Item:
        return self._item(stage, self._next(self._forwards, stage, "forward"), "F")

    def _backward(self, stage: int, which: str) -> Item:
        return self._item(stage, self._next(self._backwards, stage, "backward"), which)

    def _next(self, left: Mapping[int, deque[int]], stage: int, what: str) -> int:
        if stage not in left:
            raise DirectiveError(f"stage {stage} is not on this rank, which has {list(left)}")
        if not left[stage]:
            raise DirectiveError(f"stage {stage} has no {what} left on this rank")
        return left[stage].popleft()

    def _item(self, stage: int, microbatch: int, which: str) -> Item:
        return {self.tag: stage, self.batch: microbatch, "PASS": which}


@dataclass(slots=True)
class Schedule:
    """The rows of all pipeline ranks."""

    name: str
    microbatches: int
    rows: list[Row] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages that the model is cut into."""
        return 1 + max(stage for row in self.rows for stage in row.stages)

    def directives(
        self, groups: Sequence[Sequence[int]] | None = None, *, stream: str = "p2p"
    ) -> list[Directive]:
        """Where the stages run and in which order; ``groups`` are the devices of each rank."""
        groups = groups or [[rank] for rank in range(self.ranks)]
        self._check()
        return [*self._places(groups, stream), *(order(*row.groups) for row in self.rows)]

    def _places(self, groups: Sequence[Sequence[int]], stream: str) -> list[Directive]:
        found: list[Directive] = []
        for stage in range(self.stages):
            homes = [(r, row) for r, row in enumerate(self.rows) if stage in row.stages]
            for rank, row in homes:
                where: dict[str, object] = {row.tag: stage}
                if len(homes) > 1:  # the stage lives on several ranks, each for some microbatches
                    where[row.batch] = list(row.stages[stage])
                found.append(place(where, devices=groups[rank], stream=stream))
        return found

    def _check(self) -> None:
        for rank, row in enumerate(self.rows):
            for stage in row.stages:
                left = row.forwards_left(stage), row.backwards_left(stage)
                if any(left) or row.weights_left:
                    raise DirectiveError(
                        f"{self.name}: rank {rank} leaves {left[0]} forwards and {left[1]} "
                        f"backwards of stage {stage} undone, and {row.weights_left} of weights"
                    )


def straight(name: str, stages: int, microbatches: int) -> Schedule:
    """An empty schedule with one stage on each rank."""
    return Schedule(
        name, microbatches, [Row({rank: range(microbatches)}) for rank in range(stages)]
    )


def looped(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """An empty schedule with ``virtual`` stages on each rank: rank r has r, r + ranks, ..."""
    rows = [
        Row({rank + ranks * v: range(microbatches) for v in range(virtual)})
        for rank in range(ranks)
    ]
    return Schedule(name, microbatches, rows)


def folded(name: str, ranks: int, microbatches: int) -> Schedule:
    """An empty schedule in a V: rank r has stage r on the way down and 2 * ranks - 1 - r up."""
    rows = [
        Row({rank: range(microbatches), 2 * ranks - 1 - rank: range(microbatches)})
        for rank in range(ranks)
    ]
    return Schedule(name, microbatches, rows)


def refuse(name: str, microbatches: int, works: str, good: bool) -> None:
    """Refuse a number of microbatches that a schedule cannot run."""
    if not good:
        raise DirectiveError(f"{name} cannot run {microbatches} microbatches: {works}")
