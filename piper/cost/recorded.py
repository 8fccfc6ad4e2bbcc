"""Measured times of passes and communications, to predict other strategies.

A pass is identified by its chunk, its rows and its remat policy; its time does not depend on the
order, and on its devices only by their speeds, if these were measured. For another number of rows
the time is scaled by operations: in proportion, or, if several sizes were measured, on the line
through them, which includes the fixed part that does not shrink with the rows.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from piper.base.codec import Format, decode, encode
from piper.base.errors import PiperError
from piper.base.paths import write_file
from piper.base.reading import MalformedError, file_bytes, parsed
from piper.cost.tasks import Task, Work
from piper.ir.grouped import grouped
from piper.ir.ops import Group
from piper.ir.passes import Pass

_FORMAT = Format("costs", 2)


@dataclass(frozen=True, slots=True)
class Timed:
    """The measured time of a pass."""

    work: Work
    flops: int
    seconds: float

    def __post_init__(self) -> None:
        if self.work.rows < 1 or self.flops < 0 or not 0 <= self.seconds < math.inf:
            raise PiperError(f"{self} was not measured: it has rows, and takes time")


@dataclass(frozen=True, slots=True)
class Moved:
    """The measured time of communications of one kind and size."""

    kind: str
    """"send", "update", "add", or the name of a collective."""
    members: int
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.members < 1 or self.nbytes < 0 or not 0 <= self.seconds < math.inf:
            raise PiperError(f"{self} was not measured: it has members, and takes time")


@dataclass(frozen=True)
class Recorded:
    """All measured times: a cost model that knows the measured tasks."""

    passes: tuple[Timed, ...]
    moved: tuple[Moved, ...]
    speeds: Mapping[int, float] = field(default_factory=dict)
    """By device, if the passes were measured on devices of unequal speed: their seconds are those
    of a device of speed 1."""

    @staticmethod
    def of(
        passes: Iterable[tuple[Work, int, float]],
        moved: Iterable[tuple[str, int, int, float]],
        speeds: Mapping[int, float] | None = None,
    ) -> Recorded:
        """From single measurements: for a pass its operations and seconds, for a communication its
        kind, members, bytes and seconds. Takes the median, which is robust to outliers."""
        works = grouped(((work, flops), seconds) for work, flops, seconds in passes)
        moves = grouped(((kind, n, nbytes), seconds) for kind, n, nbytes, seconds in moved)
        return Recorded(
            tuple(Timed(*key, statistics.median(times)) for key, times in works.items()),
            tuple(Moved(*key, statistics.median(times)) for key, times in sorted(moves.items())),
            speeds or {},
        )

    @cached_property
    def _by_work(self) -> Mapping[Work, Timed]:
        return {timed.work: timed for timed in self.passes}

    @cached_property
    def _by_chunk(self) -> Mapping[tuple[int, str, Pass], Sequence[Timed]]:
        works = ((timed.work, timed) for timed in self.passes)
        return grouped(((work.chunk, work.region, work.which), x) for work, x in works)

    @cached_property
    def _by_kind(self) -> Mapping[tuple[str, int], Sequence[Moved]]:
        moves = sorted(self.moved, key=lambda moved: moved.nbytes)
        return grouped(((moved.kind, moved.members), moved) for moved in moves)

    def pass_seconds(self, work: Work, flops: int) -> float | None:
        """Seconds of a pass; None if no similar pass was measured."""
        exact = self._by_work.get(work)
        if exact is not None:
            return exact.seconds
        others = self._by_chunk.get((work.chunk, work.region, work.which))
        if not others:
            return self._halves(work, flops)
        near = sorted(others, key=lambda one: (one.work.remat is not work.remat, _apart(one, work)))
        sizes = [(_size(one.work.rows, one.flops, flops), one.seconds) for one in near]
        return _scaled(sizes, _size(work.rows, flops, near[0].flops))

    def _halves(self, work: Work, flops: int) -> float | None:
        """A backward from its two halves, or a half from the whole, if only that was measured."""
        if work.which is Pass.B:
            halves = [self._other(work, which) for which in (Pass.BI, Pass.BW)]
            known = [one for one in halves if one is not None]
            return sum(one.seconds * work.rows / one.work.rows for one in known) or None
        whole = self._other(work, Pass.B) if work.which in (Pass.BI, Pass.BW) else None
        if whole is None or (whole.flops and not flops):
            return None
        if whole.flops:
            return whole.seconds * flops / whole.flops
        return whole.seconds / 2 * work.rows / whole.work.rows

    def _other(self, work: Work, which: Pass) -> Timed | None:
        measured = self._by_chunk.get((work.chunk, work.region, which))
        return min(measured, key=lambda timed: _apart(timed, work)) if measured else None

    def moved_seconds(self, kind: str, members: int, nbytes: int) -> float | None:
        """Seconds of a communication, interpolated between the next smaller and larger ones of its
        kind; None if it is smaller or larger than all that were measured."""
        points = self._by_kind.get((kind, members))
        if not points:
            return None
        after = bisect_left(points, nbytes, key=lambda one: one.nbytes)
        if after == len(points):
            return None
        high = points[after]
        if high.nbytes == nbytes:
            return high.seconds
        if after == 0:
            return None
        low = points[after - 1]
        place = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
        return low.seconds + place * (high.seconds - low.seconds)

    def nearest(self, task: Task) -> Moved | None:
        """The measured task of this kind that is nearest in size; None for passes, and if none was
        measured."""
        points = self._by_kind.get((task.kind.value, task.members))
        if task.work is not None or not points:
            return None
        return min(points[0], points[-1], key=lambda one: abs(one.nbytes - task.nbytes))

    def duration(self, task: Task, devices: Group) -> float | None:
        """Seconds of a task; None if no similar task was measured."""
        if task.work is not None:
            seconds = self.pass_seconds(task.work, task.flops)
            if seconds is None or not self.speeds:
                return seconds
            return seconds / min(self.speeds.get(d, 1.0) for d in devices)
        return self.moved_seconds(task.kind.value, task.members, task.nbytes)

    def regions(self, tag: str) -> dict[int, float]:
        """The measured seconds of each region ``tag``, forward and backward of one row: costs for
        ``partition(by=)``. As there, other regions join the one before them."""
        chunks = grouped((timed.work.chunk, timed) for timed in self.passes)
        found: dict[int, float] = {}
        before: list[float] = []
        region = None
        for _, passes in sorted(chunks.items()):
            name = re.search(rf"(?:^| ){re.escape(tag)}\[(\d+)\]", passes[0].work.region)
            region = region if name is None else int(name[1])
            if region is None:
                before.append(_of_row(passes))
            else:
                found[region] = found.get(region, 0.0) + _of_row(passes)
        if not found:
            names = sorted({timed.work.region for timed in self.passes})
            raise PiperError(
                f"the profile has measured no region {tag!r}; it has: {', '.join(names)}"
            )
        found[min(found)] += sum(before)
        return found

    def __add__(self, other: Recorded) -> Recorded:
        """The measurements of both; the mean where both have one."""
        if bool(self.speeds) != bool(other.speeds):
            raise PiperError(
                "one of these profiles has the speeds of devices and the other has not: take "
                "profile.by_device of both, or profile.recorded of both"
            )
        known = grouped((*self.speeds.items(), *other.speeds.items()))
        return Recorded.of(
            ((one.work, one.flops, one.seconds) for one in (*self.passes, *other.passes)),
            ((m.kind, m.members, m.nbytes, m.seconds) for m in (*self.moved, *other.moved)),
            {device: statistics.mean(speeds) for device, speeds in known.items()},
        )

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file."""
        write_file(path, json.dumps(_FORMAT.headed(encode(self))))

    @staticmethod
    def load(path: str | Path) -> Recorded:
        """The costs that ``save`` wrote."""
        try:
            recorded: Recorded = decode(Recorded, _FORMAT.content(parsed(file_bytes(path))))
            return recorded
        except (OSError, MalformedError) as error:
            raise PiperError(f"{path} cannot be read: {error}") from error


def _of_row(passes: Sequence[Timed]) -> float:
    """Seconds of forward and backward of a chunk, for one row of the batch."""
    each = {timed.work.which: timed.seconds / timed.work.rows for timed in passes}
    halves = each.get(Pass.BI, 0.0) + each.get(Pass.BW, 0.0)
    return each.get(Pass.F, 0.0) + each.get(Pass.B, halves)


def _size(rows: int, flops: int, other: int) -> int:
    """The size of a pass: its operations, or its rows if it or the other has no operations."""
    return flops if flops and other else rows


def _scaled(measured: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds at ``size``, from measured (size, seconds), nearest first. Uses a line through the
    first and another point that rises and is not negative at size 0; otherwise scales the first in
    proportion."""
    first, seconds = measured[0]
    for other, theirs in measured[1:]:
        if other != first and (theirs - seconds) * (other - first) > 0:
            slope = (theirs - seconds) / (other - first)
            at_nothing = seconds - slope * first
            if at_nothing >= 0:
                return at_nothing + slope * size
    return seconds * size / first


def _apart(one: Timed, work: Work) -> float:
    """The difference in size between a measured pass and ``work``."""
    larger, smaller = sorted((one.work.rows, work.rows), reverse=True)
    return larger / max(1, smaller) + abs(one.work.ways - work.ways)
