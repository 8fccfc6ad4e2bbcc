"""The callbacks that a training loop calls after each step and at its end.

Only the process of rank 0 calls them. A callback with ``on_begin`` is called in every process: its
calls of the trainer need all of them under torchrun. A callback may ask for more of some steps.
Such a step takes longer and gives the same numbers; loggers in the same list log what it then has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from piper.base.arguments import whole_number
from piper.base.errors import PiperError
from piper.launch.device.report import ProfileKind
from piper.launch.trainer.step_result import StepResult


@runtime_checkable
class Callback(Protocol):
    """An object that is notified of a run's steps and end. It may also have ``on_begin(trainer)``,
    ``on_evaluate(step, result)`` and ``observes(step)``."""

    def on_step(self, step: int, result: StepResult) -> None:
        """Called after each step; ``step`` counts from 1 over the whole run."""
        ...

    def on_end(self) -> None:
        """Called when the run ends: after its last step, by an error, or when the caller stops
        iterating."""
        ...


def checked_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks as a list; an object that is not a callback is refused."""
    if isinstance(callbacks, Callback):
        raise PiperError(f"callbacks= is one {type(callbacks).__name__}: give a list, [callback]")
    checked = list(callbacks)
    for number, one in enumerate(checked):
        if not isinstance(one, Callback) or isinstance(one, type):
            raise PiperError(
                f"callbacks[{number}] is {one!r}: give an object with on_step(step, result) and "
                "on_end(), such as piper.callbacks.TensorBoard(folder)"
            )
    return checked


@runtime_checkable
class EvaluationCallback(Protocol):
    """A callback that is also notified of evaluations of held-out batches."""

    def on_evaluate(self, step: int, result: StepResult) -> None:
        """Called after each evaluation, with the number of the last step."""
        ...


@runtime_checkable
class TrainerCallback(Protocol):
    """A callback that gets the trainer, and is called in every process."""

    def on_begin(self, trainer: Any) -> None:
        """Called before the first step."""
        ...


@runtime_checkable
class ObservingCallback(Protocol):
    """A callback that asks for more of some steps."""

    def observes(self, step: int) -> ProfileKind | None:
        """What to measure in a step, the same in every process. If two callbacks ask for different
        things, the second gets the next step."""
        ...


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


class Observations:
    """What to measure in each step, as callbacks ask for it."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [x for x in callbacks if isinstance(x, ObservingCallback)]
        self._due: list[ProfileKind] = []

    def of(self, step: int) -> ProfileKind | None:
        """What to measure in this step; steps are asked for in order."""
        asked = [callback.observes(step) for callback in self._callbacks]
        self._due += [x for x in dict.fromkeys(asked) if x is not None and x not in self._due]
        return self._due.pop(0) if self._due else None


@contextmanager
def told(callbacks: Sequence[Callback], trainer: Any) -> Iterator[None]:
    """Call ``on_begin`` of callbacks that have it, and ``on_end`` of every callback at the end of
    the block, even if one of them raises."""
    if not callbacks:
        yield
        return
    try:
        if isinstance(callbacks[0], TrainerCallback):
            callbacks[0].on_begin(trainer)
        with told(callbacks[1:], trainer):
            yield
    finally:
        callbacks[0].on_end()
