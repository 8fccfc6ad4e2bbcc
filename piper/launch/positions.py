"""Batches whose position can be kept in a checkpoint and found again.

An iterable is begun again, and as many batches are dropped as were taken; a loader that has a
``state_dict`` (such as torchdata's ``StatefulDataLoader``) goes on from it; a function of the step
needs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from piper.errors import PiperError

Batch = Sequence[Any] | Mapping[str, Any]
Batches = Iterable[Batch] | Callable[[int], Batch]


@runtime_checkable
class Stateful(Protocol):
    """A loader that knows where it is."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Position:
    """Gives batches one by one, and says where in them it is."""

    def __init__(self, batches: Batches, step: int) -> None:
        """``step`` is the number of the first one, for a function."""
        self._batches = batches
        self._taken = 0
        self._rows = self._begin(step, 0)

    def _begin(self, step: int, dropped: int) -> Iterator[Batch]:
        if isinstance(self._batches, Iterable):
            return itertools.islice(self._batches, dropped, None)
        if not callable(self._batches):
            raise PiperError(
                f"batches is a {type(self._batches).__name__}: give an iterable of batches, or a "
                "function from the number of a step to its batch"
            )
        return map(self._batches, itertools.count(step))

    def take(self) -> Batch | None:
        """The next batch, or None if there are no more."""
        for batch in self._rows:
            self._taken += 1
            return batch
        return None

    def state(self) -> dict[str, Any]:
        """Where it is, as plain values."""
        loader = self._batches.state_dict() if isinstance(self._batches, Stateful) else None
        return {"taken": self._taken, "loader": loader}

    def go_to(self, state: Any, step: int) -> None:
        """Go on from where another was after ``step`` steps."""
        known = state if isinstance(state, dict) else {}
        taken, loader = known.get("taken", step), known.get("loader")
        if not isinstance(taken, int):
            taken = step
        if isinstance(self._batches, Stateful) and loader is not None:
            self._batches.load_state_dict(loader)
            self._rows = self._begin(step, 0)
        else:
            self._rows = self._begin(step, taken)
        self._taken = taken
