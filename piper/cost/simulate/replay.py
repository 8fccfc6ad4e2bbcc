"""Run plans in simulated time: stream order, waits, communication and contention.

On a GPU the host runs ahead: an instruction starts once it is issued, its stream is free and its
waits are done. On a CPU the host itself computes: it issues nothing while it computes or waits. A
communication starts when all participants have reached it. Communications that share a link, and
computation beside communication, slow each other down.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from piper.base.errors import PiperError
from piper.cost.hardware import Sharing


@dataclass(slots=True)
class Track:
    """The instructions of one simulated rank, in plan order. Each list has one entry per
    instruction."""

    streams: list[int]
    """The number of its stream."""
    waits: list[tuple[int, ...]]
    """The instructions, by index in this track, that must finish first."""
    seconds: list[float]
    """Its duration if it computes."""
    comms: list[int]
    """The number of its communication; -1 if it computes."""
    issue: list[float]
    """Seconds that the host takes to issue it."""
    synchronous: bool
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Communication:
    """A communication between ranks, or a copy by one rank."""

    seconds: float
    participants: int
    links: int
    """The links it uses, as a bit mask."""
    slows: float | None = None
    """The slowdown of a concurrent computation, if the communication's stream has an SM share."""


def replay(tracks: Sequence[Track], comms: Sequence[Communication], sharing: Sharing) -> None:
    """Fill in the start and end of every instruction."""
    _Replay(tracks, comms, sharing).run()


_END, _RETRY, _HOST = range(3)


class _Replay:
    def __init__(
        self, tracks: Sequence[Track], comms: Sequence[Communication], sharing: Sharing
    ) -> None:
        self.tracks, self.comms, self.sharing = tracks, comms, sharing
        self.now = 0.0
        self.events: list[tuple[float, int, int, int, int]] = []
        self.numbers = count()
        sizes = [len(track.streams) for track in tracks]
        for track, size in zip(tracks, sizes, strict=True):
            track.start, track.end = [0.0] * size, [0.0] * size
        self.left = [[len(waits) for waits in track.waits] for track in tracks]
        self.followers: list[list[list[int]]] = [[[] for _ in range(size)] for size in sizes]
        self.queues: list[dict[int, list[int]]] = []
        for rank, track in enumerate(tracks):
            queues: dict[int, list[int]] = {}
            for i, (stream, waits) in enumerate(zip(track.streams, track.waits, strict=True)):
                if not track.synchronous or track.comms[i] >= 0:  # the host runs the others
                    queues.setdefault(stream, []).append(i)
                for other in waits:
                    self.followers[rank][other].append(i)
            self.queues.append({s: items[::-1] for s, items in queues.items()})
        self.issued = [[0.0, *accumulate(track.issue)] for track in tracks]
        """When a host that runs ahead issues each instruction."""
        self.host = [0] * len(tracks)
        self.held = [False] * len(tracks)
        """Whether a synchronous host waits for an instruction to finish."""
        self.waiting = [[False] * size for size in sizes]
        """Whether an instruction has started, or has reached its communication."""
        self.arrived: list[list[tuple[int, int]]] = [[] for _ in comms]
        # Running tasks: communications by their number, computations by higher numbers.
        self.rest: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.version: dict[int, int] = {}
        self.who: dict[int, list[tuple[int, int]]] = {}
        self.talking: list[set[int]] = [set() for _ in tracks]
        self.computing: list[set[int]] = [set() for _ in tracks]
        self.shares = max(sharing.links, sharing.compute, sharing.communication) > 0
        self.done = 0

    def run(self) -> None:
        for rank, track in enumerate(self.tracks):
            if track.synchronous:
                self.advance(rank)
            else:
                for stream in self.queues[rank]:
                    self.try_head(rank, stream)
        while self.events:
            self.now, _, kind, a, b = heapq.heappop(self.events)
            if kind == _END:
                if self.version.get(a) == b:
                    self.finish(a)
            elif kind == _RETRY:
                self.try_head(a, b)
            else:
                self.advance(a)
        total = sum(len(track.streams) for track in self.tracks)
        if self.done != total:
            raise PiperError(f"the plans stop after {self.done} of {total} instructions")

    def push(self, at: float, kind: int, a: int, b: int) -> None:
        heapq.heappush(self.events, (at, next(self.numbers), kind, a, b))

    def advance(self, rank: int) -> None:
        """Let a synchronous host issue its next instructions."""
        track = self.tracks[rank]
        while self.host[rank] < len(track.streams):
            i = self.host[rank]
            if self.left[rank][i]:
                self.held[rank] = True
                return
            self.host[rank] += 1
            if track.comms[i] < 0:
                self.compute(rank, i)
                return
            self.try_head(rank, track.streams[i])
            if track.issue[i]:
                self.push(self.now + track.issue[i], _HOST, rank, 0)
                return

    def try_head(self, rank: int, stream: int) -> None:
        """Start the first instruction of a stream, if it can."""
        queue = self.queues[rank][stream]
        if not queue:
            return
        i = queue[-1]
        track = self.tracks[rank]
        if self.left[rank][i] or self.waiting[rank][i]:
            return
        if track.synchronous:
            if i >= self.host[rank]:
                return
        elif self.now < self.issued[rank][i]:
            self.push(self.issued[rank][i], _RETRY, rank, stream)
            return
        comm = track.comms[i]
        self.waiting[rank][i] = True
        if comm < 0:
            self.compute(rank, i)
            return
        arrived = self.arrived[comm]
        arrived.append((rank, i))
        if len(arrived) == self.comms[comm].participants:
            self.begin(comm, self.comms[comm].seconds, arrived)

    def compute(self, rank: int, i: int) -> None:
        task = len(self.comms) + next(self.numbers)
        self.begin(task, self.tracks[rank].seconds[i], [(rank, i)])

    def begin(self, task: int, seconds: float, who: list[tuple[int, int]]) -> None:
        self.who[task] = who
        for rank, i in who:
            self.tracks[rank].start[i] = self.now
            (self.talking if task < len(self.comms) else self.computing)[rank].add(task)
        self.rest[task], self.since[task], self.version[task] = seconds, self.now, 0
        self.rate[task] = 0.0
        if self.shares:
            self.settle(who)
        else:
            self.rate[task] = 1.0
            self.push(self.now + seconds, _END, task, 0)

    def settle(self, who: list[tuple[int, int]]) -> None:
        """Update the pace of all tasks that run on these ranks."""
        affected: set[int] = set()
        for rank, _ in who:
            affected |= self.talking[rank]
            affected |= self.computing[rank]
        for task in sorted(affected):
            pace = 1 / self.slowness(task)
            if pace == self.rate[task]:
                continue
            self.rest[task] -= (self.now - self.since[task]) * self.rate[task]
            self.since[task], self.rate[task] = self.now, pace
            self.version[task] += 1
            self.push(self.now + max(0.0, self.rest[task]) / pace, _END, task, self.version[task])

    def slowness(self, task: int) -> float:
        """The factor by which concurrent tasks slow ``task`` down now."""
        sharing = self.sharing
        if task >= len(self.comms):
            ((rank, _),) = self.who[task]
            beside = [self.comms[m].slows for m in self.talking[rank]]
            each = [sharing.compute if slows is None else slows for slows in beside]
            return 1 + max(each, default=0.0)
        mine = self.comms[task]
        worst = 0.0
        for rank, _ in self.who[task]:
            others = sum(
                1 for m in self.talking[rank] if m != task and self.comms[m].links & mine.links
            )
            slower = sharing.links * others
            if self.computing[rank] and mine.slows is None:
                slower += sharing.communication
            worst = max(worst, slower)
        return 1 + worst

    def finish(self, task: int) -> None:
        who = self.who.pop(task)
        communicates = task < len(self.comms)
        for table in (self.rest, self.rate, self.since, self.version):
            del table[task]
        for rank, _ in who:
            (self.talking if communicates else self.computing)[rank].discard(task)
        if self.shares:
            self.settle(who)
        for rank, i in who:
            track = self.tracks[rank]
            track.end[i] = self.now
            self.done += 1
            if communicates or not track.synchronous:
                self.queues[rank][track.streams[i]].pop()
        for rank, i in who:
            self.release(rank, i, communicates)

    def release(self, rank: int, i: int, communicates: bool) -> None:
        """Start the instructions that waited for a finished one."""
        track = self.tracks[rank]
        left = self.left[rank]
        for following in self.followers[rank][i]:
            left[following] -= 1
            if not track.synchronous and left[following] == 0:
                self.try_head(rank, track.streams[following])
        if communicates or not track.synchronous:
            self.try_head(rank, track.streams[i])
        if not track.synchronous:
            return
        if not communicates:
            self.advance(rank)
        elif self.held[rank] and left[self.host[rank]] == 0:
            self.held[rank] = False
            self.advance(rank)
