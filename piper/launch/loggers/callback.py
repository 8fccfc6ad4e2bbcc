"""The callbacks that a training loop calls after each step and at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from piper.base.errors import PiperError
from piper.launch.trainer.step_result import StepResult


@runtime_checkable
class Callback(Protocol):
    """An object that is notified of a run's steps and end, and, if it has ``on_evaluate(step,
    result)``, of evaluations."""

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


@contextmanager
def told(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Call ``on_end`` of every callback at the end of the block, even if one of them raises."""
    if not callbacks:
        yield
        return
    try:
        with told(callbacks[1:]):
            yield
    finally:
        callbacks[0].on_end()
