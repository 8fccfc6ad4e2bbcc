"""A GPU's position in its plan, behind the host: to find out where a step hangs.

Every stream counts its finished communications.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper.ir.grouped import grouped
from piper.ir.plan.instructions import COMMUNICATING
from piper.ir.plan.plan import Plan
from piper.runtime.streams.signals import Signal


class Progress:
    """The finished communications of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._streams = [x.stream for x in plan.instructions]
        rows = enumerate(plan.instructions)
        self._pcs = grouped((x.stream, pc) for pc, x in rows if x.verb in COMMUNICATING)
        """By stream, the program counters of its communications."""
        self._signals = {name: Signal() for name in self._pcs}
        self._first = dict.fromkeys(self._signals, 0)
        """By stream, the signals sent before this run. The previous run may have ended in an error,
        so this is not always a number of whole runs."""

    def begin(self) -> None:
        """Note the beginning of a run."""
        self._first = {name: signal.sent for name, signal in self._signals.items()}

    def note(self, pc: int, stream: torch.cuda.Stream) -> None:
        """Count the communication at ``pc`` as finished when ``stream`` reaches this point."""
        self._signals[self._streams[pc]].send(stream)

    def ended(self) -> Callable[[], bool]:
        """A function that tells whether all communications noted until now have finished. Later
        ones do not matter."""
        sent = [(signal, signal.sent) for signal in self._signals.values()]
        return lambda: all(signal.reached >= number for signal, number in sent)

    def unfinished(self) -> int | None:
        """The program counter of the first communication that has begun and not finished."""
        running = []
        for name, signal in self._signals.items():
            reached, pcs = signal.reached, self._pcs[name]
            if reached < signal.sent:
                run, index = divmod(reached - self._first[name], len(pcs))
                running.append((run, pcs[index]))
        return min(running)[1] if running else None
