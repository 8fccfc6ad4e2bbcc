"""The search: candidates are tried in the order of a rough time. Those that cannot be faster than
the best found, or need more memory than there is, are never built. It can end at any time: then it
says how much faster a candidate could be that it has not tried."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from itertools import count

from piper.base.errors import PiperError
from piper.base.units import bytes_text, seconds_text
from piper.cost.simulate.estimate import Estimate
from piper.program.tune.candidate import Candidate
from piper.program.tune.space import Space
from piper.program.tune.tuned import Tried
from piper.program.tune.workload import Workload

_FRESH = 1.03
"""How much slower a candidate seems whose regions are not traced yet: the trace takes seconds."""
_PATIENCE = 4
_COMPARED = 6
"""So many ways are compared, also if fewer show that no other candidate can be the best."""
_REFUSALS = 3
"""After so many refusals, and no success, a way to shard regions is given up."""


class Search:
    """Tries candidates until time is up or none can be better."""

    def __init__(
        self,
        space: Space,
        work: Workload,
        estimate: Callable[[Candidate], Estimate],
        among: Iterable[Candidate] | None = None,
    ) -> None:
        self._space, self._work, self._estimate = space, work, estimate
        self.tried: dict[Candidate, Tried] = {}
        self.left: list[Tried] = []
        """Not tried, because they cannot be the best, or time was up."""
        self.best: Tried | None = None
        self._compared: set[tuple[int | str, ...]] = set()
        self._queue: list[tuple[float, int, Candidate]] = []
        self._number = count()
        self._local = among is None
        self._traced: set[tuple[int, ...]] = set()
        self._refusals: dict[tuple[int, ...], list[str]] = {}
        self._memory = max(d.memory for box in work.cluster.machines for d in box.devices)
        for candidate in space.candidates() if among is None else among:
            self._add(candidate)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def within(self) -> float | None:
        """How much slower the best may be than any candidate of the space, as a share; None if
        nothing was found."""
        if self.best is None:
            return None
        bounds = [self._work.seconds(candidate) for _, _, candidate in self._queue]
        return max(0.0, self.best.seconds / min([*bounds, self.best.seconds]) - 1)

    def run(self, seconds: float, shown: Callable[[Search], None] | None = None) -> None:
        """Search for ``seconds``, four times as long if nothing fits, or until all is seen."""
        begun = time.monotonic()
        while self._queue and time.monotonic() < begun + seconds * (1 if self.best else _PATIENCE):
            _, _, candidate = heapq.heappop(self._queue)
            if candidate in self.tried:
                continue
            if len(self._compared) >= _COMPARED and self._is_slower(candidate):
                self._skip(candidate)
            elif candidate.traced not in self._traced and not self._is_next(candidate):
                self._push(candidate, self._work.guess(candidate) * _FRESH)
            else:
                self._try(candidate)
            if shown is not None:
                shown(self)
        for _, _, candidate in self._queue:
            self.left.append(Tried(candidate, reason="not tried: time was up"))

    def _is_slower(self, candidate: Candidate) -> bool:
        """Whether a candidate cannot be faster than the best."""
        return self.best is not None and self._work.seconds(candidate) >= self.best.seconds

    def _is_next(self, candidate: Candidate) -> bool:
        """Whether no other candidate is to be tried before one that must be traced."""
        return not self._queue or self._queue[0][0] >= self._work.guess(candidate) * _FRESH

    def _push(self, candidate: Candidate, priority: float) -> None:
        heapq.heappush(self._queue, (priority, next(self._number), candidate))

    def _add(self, candidate: Candidate) -> None:
        need = self._work.peak(candidate)
        if need > self._memory:
            reason = f"needs at least {bytes_text(need)}: a device has {bytes_text(self._memory)}"
            self.tried[candidate] = Tried(candidate, refused=reason)
        else:
            self._push(candidate, self._work.guess(candidate))

    def _skip(self, candidate: Candidate) -> None:
        bound = seconds_text(self._work.seconds(candidate))
        reason = f"takes at least {bound}: slower than the best"
        self.left.append(Tried(candidate, reason=reason))

    def _try(self, candidate: Candidate) -> None:
        sharded = candidate.traced[1:]
        known = self._refusals.get(sharded, [])
        if len(known) >= _REFUSALS:
            self.tried[candidate] = Tried(candidate, refused=known[-1])
            return
        try:
            estimate = self._estimate(candidate)
        except PiperError as error:
            self.tried[candidate] = Tried(candidate, refused=str(error))
            if sharded not in {c.traced[1:] for c, x in self.tried.items() if x.estimate}:
                self._refusals.setdefault(sharded, []).append(str(error))
            return
        self._traced.add(candidate.traced)
        self.tried[candidate] = made = Tried(candidate, estimate)
        if not estimate.fits:
            about = f"needs {bytes_text(estimate.peak)}: {estimate.fullest}"
            self.tried[candidate] = Tried(candidate, estimate, refused=about)
            if self.best is None or estimate.seconds < self.best.seconds:
                self._near(self._space.smaller(candidate), candidate, estimate.seconds)
            return
        self._compared.add(candidate.way)
        if self.best is None or made.seconds < self.best.seconds:
            self.best = made
            self._near(self._space.beside(candidate), candidate, made.seconds)

    def _near(self, others: Iterable[Candidate], candidate: Candidate, seconds: float) -> None:
        """Try others that are near a good candidate soon: at their rough time, scaled by its."""
        scale = seconds / self._work.guess(candidate)
        for other in others if self._local else ():
            if other not in self.tried and self._work.peak(other) <= self._memory:
                self._push(other, self._work.guess(other) * scale)
