"""Yields batches and saves the position in them, so that a resumed run continues at the same batch.

For an iterable, resume restarts the pass with torch's generators as they were at its start (workers
of a loader are seeded from them), and drops the batches already taken. A sampler with ``set_epoch``
is told the number of the pass. A loader with a ``state_dict`` (such as torchdata's
``StatefulDataLoader``) continues from that. A function of the step needs no state.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from piper.base.errors import PiperError, warn
from piper.base.units import class_text, counted

AnyBatch = Sequence[Any] | Mapping[str, Any]
BatchSource = Iterable[AnyBatch] | Callable[[], Iterable[AnyBatch]] | Callable[[int], AnyBatch]


@runtime_checkable
class Stateful(Protocol):
    """A loader that can save and restore its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def __iter__(self) -> Iterator[AnyBatch]: ...


READ_ONCE = (
    "a generator or another iterator is read once: give a list, a loader, or a function that "
    "yields batches, which are begun again"
)


class Position:
    """Yields batches one by one, and knows its position in them."""

    def __init__(
        self, batches: BatchSource, step: int, *, epochs: int | None, repeat: bool, random: bool
    ) -> None:
        """``step`` is the first number passed to a function of the step. There are ``epochs``
        passes; without them any number if ``repeat``, else one. ``random`` says that torch's
        generators have the same state in all processes, so their state is part of the position."""
        self._source = batches
        self._of_step = _is_of_step(batches)
        self._loader = batches if isinstance(batches, Stateful) else None
        self._generators: dict[str, torch.Generator] = {}
        if random and self._loader is None and not self._of_step:
            self._generators = _generators(batches)
        if epochs is not None and self._of_step:
            raise PiperError(
                "epochs= counts passes over the batches, and a function of the number of a step "
                "has no end: give steps=, or a function without arguments that yields the batches"
            )
        if epochs is not None and epochs > 1 and not repeat and isinstance(batches, Iterator):
            raise PiperError(f"epochs={epochs} is not possible: {READ_ONCE}")
        self._told = epochs is not None
        self._most = epochs or (None if repeat else 1)
        self._once = isinstance(batches, Iterator)
        self._step = step
        self._rows: Iterator[AnyBatch] | None = None
        self._passes = 0
        self._taken = 0
        """Batches taken in this pass."""
        self.over = False
        """Whether there are no more batches."""
        self.has_batch = False
        """Whether a batch was taken but not yet trained on."""
        self._begun: dict[str, bytes] = {}
        """The states of the generators when this pass began."""

    def take(self) -> AnyBatch | None:
        """The next batch; None after the last one of a pass, and if there are no more."""
        if self.over:
            return None
        if self._rows is None:
            self._begun = self._random()
            self._rows = self._begin()
        for batch in self._rows:
            self._taken += 1
            self.has_batch = True
            return batch
        self.over = not (self._taken and self._next_pass())
        return None

    @property
    def epochs(self) -> int:
        """The number of passes that have ended."""
        return self._passes + int(self.over and self._taken > 0)

    @property
    def total(self) -> int | None:
        """The number of batches of all passes, if it is known."""
        length = self._length
        return None if self._most is None or length is None else length * self._most

    @property
    def _length(self) -> int | None:
        """The number of batches of a pass, if it is known."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def why_empty(self) -> str:
        """Why there is no batch, and what to do."""
        source = self._source
        if self._once:
            return f"the iterator has none left; {READ_ONCE}"
        if (
            isinstance(source, DataLoader)
            and source.drop_last
            and isinstance(source.dataset, Sized)
        ):
            return (
                f"the dataset has {counted(len(source.dataset), 'row')}, and the DataLoader drops "
                f"a batch of fewer than {source.batch_size} (drop_last=True)"
            )
        return f"{class_text(source)} gives none"

    @property
    def parts(self) -> int:
        """The number of parts of the dataset, of which the loader's sampler gives one."""
        samplers = _owners(self._source).values()
        return max(
            (x.num_replicas for x in samplers if isinstance(x, DistributedSampler)), default=1
        )

    def last_rows(self, size: int, steps: int | None) -> int | None:
        """The rows of the last batch of this pass, if a loader of batches of ``size`` is known to
        end it with fewer, and ``steps`` more steps reach it."""
        loader = self._source
        if self.over or not isinstance(loader, DataLoader) or loader.batch_size != size:
            return None
        if loader.drop_last:
            return None
        try:
            rows, batches = len(loader.sampler), len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        reached = steps is None or self._taken + steps >= batches
        return rows % size or None if reached else None

    @property
    def collates(self) -> bool:
        """Whether batches are made by a function of the user, which may add rows."""
        return isinstance(self._source, DataLoader) and (
            self._source.collate_fn is not default_collate
        )

    def _next_pass(self) -> bool:
        """Go to the next pass, if there is one."""
        if self._once or (self._most is not None and self._passes + 1 >= self._most):
            return False
        self._passes, self._taken, self._rows = self._passes + 1, 0, None
        return True

    def trained(self) -> None:
        """Mark the last batch as trained on."""
        self.has_batch = False

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was trained on, as plain values."""
        if self.has_batch and self._loader is not None:
            raise PiperError(
                f"the {type(self._loader).__name__} has given a batch that was not trained on, and "
                "cannot go back to it: resume from the checkpoint before"
            )
        return {
            "taken": self._taken - self.has_batch,
            "length": self._length,
            "loader": None if self._loader is None else self._loader.state_dict(),
            "passes": self._passes,
            "over": self.over,
            "begun": self._begun,
            "random": self._random(),
        }

    def go_to(self, state: Any, step: int) -> None:
        """Continue from a position that was saved after ``step`` steps."""
        known = state if isinstance(state, dict) else {}
        taken, passes, loader = known.get("taken"), known.get("passes"), known.get("loader")
        self._step = step
        self._taken = taken if isinstance(taken, int) and taken >= 0 else step
        self._passes = passes if isinstance(passes, int) else 0
        self.over = known.get("over") is True
        before, now = known.get("length"), self._length
        if isinstance(before, int) and now is not None and now != before and not self.over:
            warn(
                f"a pass has {counted(now, 'batch')}, and had {before} when the checkpoint "
                f"of step {step} was saved: the run continues after {self._taken} of these, which "
                "need not be those that it has trained on; give the loader from before, or begin "
                "other data with init=piper.weights(...) of an export, in a new folder"
            )
        self._begun = _states(known.get("begun"))
        random = _states(known.get("random"))
        self._set(random)
        if self._loader is not None and loader is not None:
            self._loader.load_state_dict(loader)
        elif not self._of_step:
            self._rows = self._after(self._taken, random)
        if self.over and self._next_pass():  # this call takes more steps or epochs
            self.over = False

    def _begin(self) -> Iterator[AnyBatch]:
        source = self._source
        if self._told or self._passes:  # otherwise the caller may have told it
            for tell in {getattr(x, "set_epoch", None) for x in _owners(source).values()}:
                if callable(tell):
                    tell(self._passes)
        if isinstance(source, Iterable):
            return iter(source)
        if self._of_step:
            return map(cast(Callable[[int], AnyBatch], source), itertools.count(self._step))
        rows = cast(Callable[[], Iterable[AnyBatch]], source)()
        if not isinstance(rows, Iterable):
            raise PiperError(
                f"batches is a function without arguments that returned {class_text(rows)}: "
                "it must return or yield the batches; one that gives the batch of a step takes the "
                "number of the step"
            )
        return iter(rows)

    def _after(self, dropped: int, random: Mapping[str, bytes]) -> Iterator[AnyBatch]:
        """The rest of a pass, without its first ``dropped`` batches; ``random`` are the states of
        the generators at that point."""
        self._set(self._begun)
        rows, rest = self._begin(), self._rows
        while 0 < (done := sum(1 for _ in itertools.islice(rows, dropped))) < dropped:
            if not self._next_pass():
                break
            dropped -= done  # a checkpoint without a position counts the steps of all passes
            self._taken, self._rows = dropped, rest
            rows = self._begin()
        self._set(random)
        yield from rows

    def _random(self) -> dict[str, bytes]:
        return {n: g.get_state().numpy().tobytes() for n, g in self._generators.items()}

    def _set(self, states: Mapping[str, bytes]) -> None:
        for name, content in states.items():
            if name in self._generators:
                state = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)
                try:
                    self._generators[name].set_state(state)
                except RuntimeError as error:
                    raise PiperError(
                        f"the checkpoint has no valid state of torch's random numbers: {error}"
                    ) from error


def _is_of_step(batches: object) -> bool:
    """Whether ``batches`` is a function from a step number to its batch; False for an iterable, or
    a function that yields all batches."""
    if isinstance(batches, Iterable):
        return False
    if not callable(batches):
        raise PiperError(
            f"batches is {class_text(batches)}: give an iterable of batches, such as a "
            "torch.utils.data.DataLoader of a dataset, or a function from the number of a step to "
            "its batch"
        )
    try:
        signature = inspect.signature(batches)
    except (TypeError, ValueError):  # a C function without a signature
        return True
    one, none = _takes(signature, 0), _takes(signature)
    if inspect.isgeneratorfunction(batches) and not none:
        raise PiperError(
            f"batches is a function that yields, {_named(batches)}, and takes arguments: call it "
            "(and give what it returns), or give a function without arguments that yields the "
            "batches, or one that returns the batch of a step"
        )
    if not one and not none:
        raise PiperError(
            f"batches is {_named(batches)}, a function of several arguments: give one that takes "
            "the number of a step and returns its batch, or one that takes none and yields them all"
        )
    return one and not inspect.isgeneratorfunction(batches)


def _takes(signature: inspect.Signature, *arguments: int) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _named(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _owners(batches: object) -> dict[str, object]:
    """A loader and its samplers."""
    several = getattr(batches, "batch_sampler", None)
    return {
        "loader": batches,
        "sampler": getattr(batches, "sampler", None),
        "batch_sampler": several,
        "batch_sampler.sampler": getattr(several, "sampler", None),
    }


def _generators(batches: object) -> dict[str, torch.Generator]:
    """The torch generators that a pass over the batches may draw from, by owner."""
    own = {name: getattr(x, "generator", None) for name, x in _owners(batches).items()}
    generators: dict[str, torch.Generator] = {}
    for name, generator in {"torch": torch.default_generator, **own}.items():
        if isinstance(generator, torch.Generator) and generator not in generators.values():
            generators[name] = generator
    return generators


def _states(data: object) -> dict[str, bytes]:
    known = data if isinstance(data, dict) else {}
    return {n: x for n, x in known.items() if isinstance(n, str) and isinstance(x, bytes)}
