"""Where a device is in its plan while the host is ahead of it: for whoever asks why nothing moves.

Every stream counts its communications that are over.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from piper.lower.plan import COMMUNICATING, Plan
from piper.runtime.signals import Signal


class Progress:
    """The communications of one plan that have ended."""

    def __init__(self, plan: Plan) -> None:
        self._streams = [x.stream for x in plan.instructions]
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, where its communications are."""
        for place, x in enumerate(plan.instructions):
            if x.verb in COMMUNICATING:
                self._places[x.stream].append(place)
        self._signals = {name: Signal() for name in self._places}
        self._first = dict.fromkeys(self._signals, 0)
        """What had been sent before this run: the one before may have ended in an error."""

    def begin(self) -> None:
        """A run begins."""
        self._first = {name: signal.sent for name, signal in self._signals.items()}

    def note(self, place: int, stream: torch.cuda.Stream) -> None:
        """The communication at ``place`` is over when ``stream`` comes here."""
        self._signals[self._streams[place]].send(stream)

    def unfinished(self) -> int | None:
        """The first communication that has begun and is not over."""
        found = []
        for name, signal in self._signals.items():
            reached, places = signal.reached, self._places[name]
            if reached < signal.sent:
                run, index = divmod(reached - self._first[name], len(places))
                found.append((run, places[index]))
        return min(found)[1] if found else None
