"""Callbacks that ask for more of some steps. Loggers in the same list log what the steps then have.

Such a step takes longer and gives the same numbers.
"""

from __future__ import annotations

from piper.base.arguments import whole_number
from piper.launch.device.report import ProfileKind
from piper.launch.trainer.step_result import StepResult


class _Observing:
    """Asks for ``kind`` of every ``every``-th step."""

    kind: ProfileKind

    def __init__(self, *, every: int) -> None:
        self._every = whole_number("every", every)

    def observes(self, step: int) -> ProfileKind | None:
        return self.kind if step % self._every == 0 else None

    def on_step(self, step: int, result: StepResult) -> None: ...

    def on_end(self) -> None: ...


class RegionStatistics(_Observing):
    """Every ``every``-th step has statistics of each region: ``result.gradients`` and
    ``result.activations``."""

    kind = ProfileKind.REGIONS


class StepProfile(_Observing):
    """Every ``every``-th step has the time of every instruction: ``result.profile``."""

    kind = ProfileKind.TIME
