"""The operation that calls of equal modules become, and attempts to trace a model with it.

A trace enters, as a function of the attempt; its result leaves. What an attempt finds of the model
is known to the next one; if the modules cannot be proven equal, the model is traced without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.capture.regions import Region
from piper.capture.repeats.equal_modules import Again, Found, NotEqual, Siblings, State
from piper.ir.tensors import TensorSpec

_T = TypeVar("_T")
MARK = "piper.trial"
"""The metadata key of the operations of a trial; its value is the trial's number."""
_NAMESPACE = "piper_repeats"


@dataclass(frozen=True, slots=True)
class PassedThrough:
    """A result that is one of the tensors given."""

    position: int


@dataclass(frozen=True, slots=True)
class CallVariant:
    """One way in which the modules of a group are called."""

    group: Siblings
    signature: Any
    state: State
    results: tuple[Any, ...]
    """The results, flat; the spec of each new tensor."""
    form: pytree.TreeSpec
    regions: tuple[Region, ...]
    """The regions that its first member entered."""
    first: str
    entry: str | None
    """The attribute that numbers the module's entry in the key-value cache, if it writes one."""

    @property
    def tensors(self) -> list[TensorSpec]:
        """The specs of the new tensors among the results."""
        return [x for x in self.results if isinstance(x, TensorSpec)]

    def result(self, given: list[Tensor], made: list[Tensor]) -> Any:
        """What a call returns that is ``given`` these tensors and has ``made`` these."""
        new = iter(made)
        leaves = [
            next(new) if isinstance(x, TensorSpec)
            else given[x.position] if isinstance(x, PassedThrough)
            else x
            for x in self.results
        ]  # fmt: skip
        return self.form.unflatten(leaves)


@dataclass(frozen=True, slots=True)
class LeafCall:
    """A call of a module that is not traced."""

    path: str
    variant: CallVariant
    around: tuple[Region, ...]
    """The regions that it is called in."""
    regions: Mapping[Region, Region]
    """The regions that it enters, by those that the first member entered."""


@dataclass(frozen=True, slots=True)
class EarlierResult:
    """A result of an earlier call of a run."""

    call: int
    result: int


@dataclass(frozen=True, slots=True)
class CallRun:
    """Calls that are one operation. Its results are those of the last ``period`` calls."""

    calls: tuple[LeafCall, ...]
    given: tuple[tuple[int | EarlierResult, ...], ...]
    """For each call, its tensors: which of the operation's, or results of earlier calls."""
    period: int
    """The number of calls that repeat: each is equal to the call this many before it, and reads the
    same tensors, or those that this many calls later made."""

    @property
    def results(self) -> list[EarlierResult]:
        last = [*enumerate(self.calls)][-self.period :]
        return [EarlierResult(n, i) for n, call in last for i in range(len(call.variant.tensors))]


@dataclass(frozen=True, slots=True)
class Trial:
    """A call whose operations are in the graph."""

    run: int
    """The number of the run that has only this call."""
    given: Tensor
    """The result of an operation that names its inputs: an ``x.to(x.dtype)`` in the forward takes
    the name of ``x`` for all that follows."""
    results: list[Tensor]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trace with calls of equal modules as operations."""

    found: Found
    runs: list[CallRun] = field(default_factory=list)


_attempt: ContextVar[Attempt] = ContextVar("piper_attempt")
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
# torch caches operations, also removed ones: so these are defined once for all traces
_LIBRARY.define("call(Tensor[] inputs, int run) -> Tensor[]")
_LIBRARY.define("given(Tensor[] inputs, int run) -> Tensor")


def _fakes(inputs: list[Tensor], run: int) -> list[Tensor]:
    of = _attempt.get().runs[run]
    specs = [x for call in of.calls[-of.period :] for x in call.variant.tensors]
    return [x.empty(inputs[0].device) for x in specs]


torch.library.register_fake(f"{_NAMESPACE}::call", _fakes, lib=_LIBRARY)
torch.library.register_fake(
    f"{_NAMESPACE}::given", lambda inputs, run: inputs[0].new_empty(()), lib=_LIBRARY
)


def once_if_equal(trace: Callable[[Attempt | None], _T], found: Found) -> _T:
    """The result of ``trace`` with calls of equal modules as operations, or, if the modules cannot
    be proven equal, without. An attempt that has found how to trace them is repeated."""
    while not found.unequal:
        attempt = Attempt(found)
        token = _attempt.set(attempt)
        try:
            return trace(attempt)
        except Again:
            continue
        except NotEqual as error:
            found.unequal = str(error)
        finally:
            _attempt.reset(token)
    return trace(None)
