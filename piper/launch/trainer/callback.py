"""What a loop calls after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from piper.base.errors import PiperError
from piper.launch.trainer.step_result import StepResult


@runtime_checkable
class Callback(Protocol):
    """An object that is told of a run."""

    def on_step(self, step: int, result: StepResult) -> None:
        """Step number ``step``, counted from 1 over the whole run, has this result."""
        ...

    def on_end(self) -> None:
        """The run is over, by its last step, by an error, or because nobody asks for more."""
        ...


def checked_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks, if they are such."""
    found = list(callbacks)
    for number, one in enumerate(found):
        if not isinstance(one, Callback) or isinstance(one, type):
            raise PiperError(
                f"callbacks[{number}] is {one!r}: give an object with on_step(step, result) and "
                "on_end(), such as piper.callbacks.TensorBoard(folder)"
            )
    return found


@contextmanager
def told(callbacks: Sequence[Callback]) -> Iterator[None]:
    """At its end, all callbacks are told that the run is over, whatever one of them raises."""
    if not callbacks:
        yield
        return
    try:
        with told(callbacks[1:]):
            yield
    finally:
        callbacks[0].on_end()
