"""Where a device is in its plan while the host is ahead of it: for whoever asks why nothing moves.

Every stream counts its communications that are over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from piper.ir.plan.instructions import COMMUNICATING
from piper.ir.plan.plan import Plan
from piper.runtime.streams.signals import Signal


class Progress:
    """The communications of one plan that have ended."""

    def __init__(self, plan: Plan) -> None:
        self._streams = [x.stream for x in plan.instructions]
        self._pcs: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, where its communications are."""
        for pc, x in enumerate(plan.instructions):
            if x.verb in COMMUNICATING:
                self._pcs[x.stream].append(pc)
        self._signals = {name: Signal() for name in self._pcs}
        self._first = dict.fromkeys(self._signals, 0)
        """What had been sent before this run: the one before may have ended in an error."""

    def begin(self) -> None:
        """A run begins."""
        self._first = {name: signal.sent for name, signal in self._signals.items()}

    def note(self, pc: int, stream: torch.cuda.Stream) -> None:
        """The communication at ``pc`` is over when ``stream`` comes here."""
        self._signals[self._streams[pc]].send(stream)

    def ended(self) -> Callable[[], bool]:
        """What tells whether the communications up to now are over: others may have begun since."""
        sent = [(signal, signal.sent) for signal in self._signals.values()]
        return lambda: all(signal.reached >= number for signal, number in sent)

    def unfinished(self) -> int | None:
        """The first communication that has begun and is not over."""
        found = []
        for name, signal in self._signals.items():
            reached, pcs = signal.reached, self._pcs[name]
            if reached < signal.sent:
                run, index = divmod(reached - self._first[name], len(pcs))
                found.append((run, pcs[index]))
        return min(found)[1] if found else None
