"""Write a schedule: one row per pipeline rank, filled by verbs. Each verb takes the next
microbatch.

    schedule = straight("mine", ranks=2, microbatches=4)
    for rank, row in enumerate(schedule.rows):
        row.forward(rank)                       # the next microbatch of stage ``rank``
        row.pair(forward=rank, backward=rank)   # two passes that overlap
        ...

A schedule becomes ``place`` and ``order`` directives, nothing else. Printed, it is drawn with
forward, input and weight passes of equal length.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.base.errors import DirectiveError
from piper.base.units import counted
from piper.ir.mesh import Mesh
from piper.ir.passes import Pass
from piper.strategies.action import Action
from piper.strategies.directives import Directive, order, place
from piper.strategies.directives.directive import positive
from piper.strategies.timing import timed

_MOST_CELLS = 2**18


class Row:
    """The actions of one pipeline rank, in order; actions in one group overlap.

    ``stages`` maps each stage of the rank to the microbatches that the rank runs there.
    """

    def __init__(self, stages: Mapping[int, Sequence[int]]) -> None:
        self.stages = {stage: tuple(microbatches) for stage, microbatches in stages.items()}
        self.groups: list[tuple[Action, ...]] = []
        self._forwards = {s: OrderedDict.fromkeys(batches) for s, batches in self.stages.items()}
        self._backwards = {s: OrderedDict.fromkeys(batches) for s, batches in self.stages.items()}
        self._weights: list[tuple[int, int]] = []

    def forward(self, stage: int, times: int = 1) -> Row:
        """The forward of the next microbatch of ``stage``."""
        for _ in range(times):
            self.run(self._next(stage, Pass.F))
        return self

    def backward(self, stage: int, times: int = 1) -> Row:
        """The whole backward of the next microbatch."""
        for _ in range(times):
            self.run(self._next(stage, Pass.B))
        return self

    def backward_input(self, stage: int, times: int = 1) -> Row:
        """The input backward of the next microbatch; ``backward_weight`` runs its other half."""
        for _ in range(times):
            self.run(self._next(stage, Pass.BI))
        return self

    def backward_weight(self, times: int = 1) -> Row:
        """The oldest pending weight backward."""
        for _ in range(times):
            if not self._weights:
                raise DirectiveError("no backward for weights waits on this rank")
            stage, microbatch = self._weights[0]
            self.run(Action(stage, Pass.BW, microbatch))
        return self

    def pair(self, *, forward: int, backward: int) -> Row:
        """A forward and a backward that overlap: compute of one hides communication of the
        other."""
        return self.run(self._next(forward, Pass.F), self._next(backward, Pass.B))

    def run(self, *actions: Action) -> Row:
        """Exactly these actions, overlapping; the verbs above choose the microbatch for you."""
        if not actions or not all(isinstance(a, Action) for a in actions):
            raise DirectiveError(
                f"run{actions}: give one or more of Action(stage, which, microbatch)"
            )
        for action in actions:
            self._take(action)
        self.groups.append(actions)
        return self

    def forwards_left(self, stage: int) -> int:
        return len(self._left(stage, Pass.F))

    def backwards_left(self, stage: int) -> int:
        return len(self._left(stage, Pass.B))

    @property
    def weights_left(self) -> int:
        """The number of pending weight backwards."""
        return len(self._weights)

    def _left(self, stage: int, which: Pass) -> OrderedDict[int, None]:
        left = self._forwards if which is Pass.F else self._backwards
        if stage not in left:
            has = ", ".join(map(str, left)) or "none"
            raise DirectiveError(f"stage {stage} is not on this rank; its stages are: {has}")
        return left[stage]

    def _next(self, stage: int, which: Pass) -> Action:
        left = self._left(stage, which)
        if not left:
            count = len(self.stages[stage])
            what = "forward" if which is Pass.F else "backward"
            raise DirectiveError(f"stage {stage} has no {what} left: all {count} are in the row")
        return Action(stage, which, next(iter(left)))

    def _take(self, action: Action) -> None:
        stage, which, microbatch = action
        if which is Pass.BW:
            if (stage, microbatch) not in self._weights:
                raise DirectiveError(f"{action}: no backward for its inputs before it")
            self._weights.remove((stage, microbatch))
            return
        left = self._left(stage, which)
        if microbatch not in left:
            if microbatch not in self.stages[stage]:
                raise DirectiveError(f"{action}: this rank does not run it")
            raise DirectiveError(f"{action}: the row already has it")
        if which is not Pass.F and microbatch in self._forwards[stage]:
            raise DirectiveError(f"{action}: no forward before it")
        del left[microbatch]
        if which is Pass.BI:
            self._weights.append((stage, microbatch))


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
        """The number of stages of the model."""
        return 1 + max(stage for row in self.rows for stage in row.stages)

    def directives(
        self,
        groups: Sequence[Sequence[int] | Mesh] | None = None,
        *,
        stage: str = "PP",
        microbatch: str = "MB",
        stream: str = "p2p",
        batch: str | Sequence[str] | None = None,
        sequence: str | None = None,
        attention: str = "all_to_all",
    ) -> list[Directive]:
        """The ``place`` and ``order`` directives of the schedule. ``groups`` are the devices of
        each rank; ``stage`` and ``microbatch`` are the tags from ``partition`` and ``split``;
        ``batch``, ``sequence`` and ``attention`` are as in ``place``."""
        timed(self)  # raises if the schedule deadlocks
        groups = [[rank] for rank in range(self.ranks)] if groups is None else groups
        if len(groups) != self.ranks:
            raise DirectiveError(
                f"{self.name} has {counted(self.ranks, 'rank')}, but devices are given for "
                f"{len(groups)}"
            )
        directives: list[Directive] = []
        for number in range(self.stages):
            homes = [(r, row) for r, row in enumerate(self.rows) if number in row.stages]
            for rank, row in homes:
                where: dict[str, int | list[int]] = {stage: number}
                if len(homes) > 1:  # several ranks hold the stage, each for some microbatches
                    where[microbatch] = list(row.stages[number])
                directives.append(
                    place(
                        where,
                        devices=groups[rank],
                        stream=stream,
                        batch=batch,
                        sequence=sequence,
                        attention=attention,
                    )
                )
        for row in self.rows:
            filters = [
                [{stage: a.stage, microbatch: a.microbatch, "PASS": a.which.value} for a in group]
                for group in row.groups
            ]
            directives.append(order(*filters))
        return directives

    def check(self) -> None:
        """Refuse a schedule in which a rank leaves passes undone, or a stage does not run every
        microbatch once."""
        if not self.rows:
            raise DirectiveError(f"{self.name} has no ranks")
        for rank, row in enumerate(self.rows):
            if not row.stages:
                raise DirectiveError(f"{self.name}: rank {rank} has nothing to do")
            for stage in row.stages:
                forwards, backwards = row.forwards_left(stage), row.backwards_left(stage)
                if forwards or backwards:
                    raise DirectiveError(
                        f"{self.name}: rank {rank} leaves {counted(forwards, 'forward')} and "
                        f"{counted(backwards, 'backward')} of stage {stage} undone"
                    )
            if row.weights_left:
                raise DirectiveError(
                    f"{self.name}: rank {rank} leaves {counted(row.weights_left, 'backward')} for "
                    "weights undone"
                )
        for stage in range(self.stages):
            run = sorted(m for row in self.rows for m in row.stages.get(stage, ()))
            if len(run) != self.microbatches or run != list(range(self.microbatches)):
                raise DirectiveError(
                    f"{self.name}: stage {stage} runs the microbatches {run}, but each of the "
                    f"{self.microbatches} must pass it once"
                )

    def without_pairs(self) -> Schedule:
        """The same order without overlap: the passes of a pair run one after the other."""
        rows = []
        for row in self.rows:
            rows.append(Row(row.stages))
            for action in (action for group in row.groups for action in group):
                rows[-1].run(action)
        return Schedule(f"{self.name} without pairs", self.microbatches, rows)

    def with_weights_apart(self) -> Schedule:
        """The same, with every whole backward split into halves that overlap. Nothing waits for
        the weight half, so it fills the time of exposed collectives."""
        rows = []
        for row in self.rows:
            rows.append(Row(row.stages))
            for group in row.groups:
                rows[-1].run(*(half for action in group for half in _halves(action)))
        return Schedule(f"{self.name} with weights apart", self.microbatches, rows)

    def __str__(self) -> str:
        return str(timed(self))


def _halves(action: Action) -> tuple[Action, ...]:
    """A whole backward as BI and BW; any other action unchanged."""
    if action.which is not Pass.B:
        return (action,)
    return action._replace(which=Pass.BI), action._replace(which=Pass.BW)


def straight(name: str, ranks: int, microbatches: int) -> Schedule:
    """An empty schedule with one stage on each rank."""
    return looped(name, ranks, 1, microbatches)


def looped(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    """An empty schedule with ``virtual`` stages on each rank: rank r has r, r + ranks, ..."""
    check_size(ranks=ranks, virtual=virtual, microbatches=microbatches)
    rows = [
        Row({rank + ranks * v: range(microbatches) for v in range(virtual)})
        for rank in range(ranks)
    ]
    return Schedule(name, microbatches, rows)


def folded(name: str, ranks: int, microbatches: int) -> Schedule:
    """An empty schedule in a V: rank r has stage r on the way down and 2 * ranks - 1 - r up."""
    check_size(ranks=ranks, microbatches=microbatches)
    rows = [
        Row({rank: range(microbatches), 2 * ranks - 1 - rank: range(microbatches)})
        for rank in range(ranks)
    ]
    return Schedule(name, microbatches, rows)


def check_size(**sizes: int) -> None:
    """Refuse sizes that are not positive whole numbers, and schedules that are too large."""
    for what, count in sizes.items():
        positive(what, count)
    if (cells := math.prod(sizes.values())) > _MOST_CELLS:
        written = " * ".join(f"{what}={count}" for what, count in sizes.items())
        raise DirectiveError(
            f"{written} is {cells} forwards, and a schedule has at most {_MOST_CELLS}: use fewer"
        )


def refuse(name: str, microbatches: int, needs: str, good: bool) -> None:
    """Refuse a number of microbatches that a schedule cannot run."""
    if not good:
        given = counted(microbatches, "microbatch")
        raise DirectiveError(f"{name} cannot run {given}: give {needs}")
