"""The operation that a call of an equal module becomes, and attempts to trace a model with it.

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


@dataclass(frozen=True, slots=True)
class LeafCall:
    """A call of a module that is one operation."""

    path: str
    variant: CallVariant
    regions: Mapping[Region, Region]
    """The regions that it enters, by those that the first member entered."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A call whose operations are in the graph."""

    call: int
    given: Tensor
    """The result of an operation that names its inputs: an ``x.to(x.dtype)`` in the forward takes
    the name of ``x`` for all that follows."""
    results: list[Tensor]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trace with calls of equal modules as operations."""

    found: Found
    variants: list[CallVariant] = field(default_factory=list)


_attempt: ContextVar[Attempt] = ContextVar("piper_attempt")
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
# torch caches operations, also removed ones: so these are defined once for all traces
_LIBRARY.define("call(Tensor[] inputs, int variant, int call) -> Tensor[]")
_LIBRARY.define("given(Tensor[] inputs, int call) -> Tensor")


def _fakes(inputs: list[Tensor], variant: int, call: int) -> list[Tensor]:
    results = _attempt.get().variants[variant].results
    return [x.empty(inputs[0].device) for x in results if isinstance(x, TensorSpec)]


torch.library.register_fake(f"{_NAMESPACE}::call", _fakes, lib=_LIBRARY)
torch.library.register_fake(
    f"{_NAMESPACE}::given", lambda inputs, call: inputs[0].new_empty(()), lib=_LIBRARY
)


def once_if_equal(trace: Callable[[Attempt | None], _T], repeats: bool) -> tuple[_T, str]:
    """The result of ``trace`` with calls of equal modules as operations, or, if the modules cannot
    be proven equal, without, and the reason. An attempt that has found how to trace them is
    repeated."""
    unequal, found = "", Found()
    while repeats and not unequal:
        attempt = Attempt(found)
        token = _attempt.set(attempt)
        try:
            return trace(attempt), unequal
        except Again:
            continue
        except NotEqual as error:
            unequal = str(error)
        finally:
            _attempt.reset(token)
    return trace(None), unequal
