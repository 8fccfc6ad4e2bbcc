"""Where a device is in its plan while the host is ahead of it: for whoever asks why nothing moves.

Every communication sets an event when it is over. The events of the last two runs are kept, so the
host may be one step ahead and no more: before it begins the next, it waits for the step before.
"""

from __future__ import annotations

import torch

from piper.lower.plan import COMMUNICATING, Plan


class _Run:
    def __init__(self, places: list[int]) -> None:
        self.ends = {place: torch.cuda.Event() for place in places}
        self.over = torch.cuda.Event()


class Progress:
    """The communications of one plan that have ended."""

    def __init__(self, plan: Plan) -> None:
        places = [i for i, x in enumerate(plan.instructions) if x.verb in COMMUNICATING]
        self._last, self._now = _Run(places), _Run(places)

    def begin(self) -> None:
        """A run begins; the one before the last is over."""
        self._last, self._now = self._now, self._last
        self._now.over.synchronize()

    def note(self, place: int, stream: torch.cuda.Stream) -> None:
        """The communication at ``place`` is over when ``stream`` comes here."""
        self._now.ends[place].record(stream)

    def end(self, stream: torch.cuda.Stream) -> None:
        """The run is over when ``stream`` comes here."""
        self._now.over.record(stream)

    def unfinished(self) -> int | None:
        """The first communication that has begun and is not over."""
        for run in (self._last, self._now):
            for place, end in run.ends.items():
                if not end.query():
                    return place
        return None
