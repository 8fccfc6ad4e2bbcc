"""Calls of equal modules wait until one of their results is needed, and then become operations.

Until then, tensors without an operation stand for their results. If each call reads what the one
before it made, as the layers of a transformer do, many calls become one operation (``CallRun``), so
that tracing costs the same for any number of them:

    x ─▶ layer 1 ─▶ layer 2 ─▶ layer 3 ─▶ y    becomes    x ─▶ run of three calls ─▶ y

The model may not read the results of calls inside a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from piper.capture.repeats.call_ops import Attempt, CallRun, EarlierResult, LeafCall
from piper.capture.repeats.signatures import differentiable
from piper.ir.tensors import TensorSpec

_READS = "reads what {} returned"
_LONGEST = 8
"""The most different calls that are looked for in the period of a run."""
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "itemsize")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A call that is not an operation yet."""

    number: int
    call: LeafCall
    given: list[Tensor]
    made: list[Tensor]
    """Stand for its results."""
    versions: list[int]
    """Of the tensors given, when they were given."""


class WaitingCalls:
    """The calls that are not operations yet, in order."""

    def __init__(self, attempt: Attempt, refuse: Callable[[LeafCall, str], NoReturn]) -> None:
        """``refuse`` ends the attempt: the call cannot wait, because the model does this."""
        self._attempt, self._refuse = attempt, refuse
        self._waiting: list[_Waiting] = []
        self._calls = 0
        self._makers: dict[int, tuple[int, int]] = {}
        """By identity, the results of calls, also tensors that stand for them: the numbers of the
        call and of the result."""
        self._standing: dict[int, LeafCall] = {}
        """By identity, the tensors that stand for results of this call."""
        self._now: dict[int, Tensor] = {}
        """For some of these, the result of an operation."""
        self._held: list[Tensor] = []
        """All these tensors, so that identities stay taken."""

    def add(self, call: LeafCall, given: list[Tensor], grad: bool) -> list[Tensor]:
        """Tensors that stand for the results of a call with the tensors ``given``. ``grad`` says
        whether they need gradients."""
        made = [_standing_for(spec, given[0], grad) for spec in call.variant.tensors]
        self._waiting.append(_Waiting(self._calls, call, given, made, _versions(given)))
        self._standing |= {id(x): call for x in made}
        self._note(made)
        return made

    def at_once(self, call: LeafCall, given: list[Tensor]) -> list[Tensor]:
        """The results of an operation for a call that does not wait. No call may wait."""
        made = self._emitted(CallRun((call,), (tuple(range(len(given))),), 1), given)
        self._note(made)
        return made

    def flush(self) -> None:
        """Make operations of all calls that wait."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if _versions(one.given) != one.versions:
                self._refuse(one.call, "writes into what {} was given")
        while waiting:
            period, count = self._repetition(waiting)
            self._run(waiting[: period * count], period)
            del waiting[: period * count]

    def now(self, x: Any) -> Any:
        """``x``, or the result that it stands for. No call may wait."""
        if id(x) not in self._standing:
            return x
        if id(x) not in self._now:
            self._refuse(self._standing[id(x)], _READS)
        return self._now[id(x)]

    def refuse_standing(self, tree: Any) -> None:
        """Refuse tensors in ``tree`` that stand for results."""
        if self._standing:
            for x in pytree.tree_leaves(tree):
                if id(x) in self._standing:
                    self._refuse(self._standing[id(x)], _READS)

    def _note(self, made: list[Tensor]) -> None:
        """Number the results of the next call."""
        self._makers |= {id(x): (self._calls, i) for i, x in enumerate(made)}
        self._held += made
        self._calls += 1

    def _run(self, calls: list[_Waiting], period: int) -> None:
        """Make one operation of calls that repeat after ``period`` calls."""
        made: dict[int, EarlierResult] = {}
        inputs: dict[int, tuple[int, Tensor]] = {}
        given: list[tuple[int | EarlierResult, ...]] = []
        for number, one in enumerate(calls):
            for x in one.given:
                if id(x) not in made:
                    inputs.setdefault(id(x), (len(inputs), self.now(x)))
            given.append(tuple(made.get(id(x)) or inputs[id(x)][0] for x in one.given))
            made |= {id(x): EarlierResult(number, i) for i, x in enumerate(one.made)}
        run = CallRun(tuple(one.call for one in calls), tuple(given), period)
        results = iter(self._emitted(run, [x for _, x in inputs.values()]))
        for one in calls[-period:]:
            for x in one.made:
                self._now[id(x)] = result = next(results)
                self._makers[id(result)] = self._makers[id(x)]
                self._held.append(result)

    def _repetition(self, calls: list[_Waiting]) -> tuple[int, int]:
        """After how many calls the first of ``calls`` repeat, and how often."""
        period, count = 1, 1
        for n in range(1, min(_LONGEST, len(calls) // 2) + 1):
            pairs = [self._step(*pair, n) for pair in zip(calls, calls[n:], strict=False)]
            steps = [pairs[i : i + n] for i in range(0, len(pairs) - n + 1, n)]
            first = steps[0]
            times = 1 if None in first else 1 + sum(1 for _ in takewhile(first.__eq__, steps))
            if times > 1 and n * times > period * count:
                period, count = n, times
        return period, count

    def _step(self, one: _Waiting, two: _Waiting, period: int) -> tuple[bool, ...] | None:
        """For each tensor given to two equal calls, whether it is the same tensor; else it is the
        same result of an earlier call, seen from each. None if neither."""
        if one.call.variant is not two.call.variant:
            return None
        same = []
        for x, y in zip(one.given, two.given, strict=True):
            makers = self._makers.get(id(x)), self._makers.get(id(y))
            if x is not y:
                (i, of), (j, also) = (maker or (-1, -1) for maker in makers)
                before = one.number - i
                if i < 0 or of != also or before != two.number - j or before > period:
                    return None
            same.append(x is y)
        return tuple(same)

    def _emitted(self, run: CallRun, inputs: list[Tensor]) -> list[Tensor]:
        self._attempt.runs.append(run)
        made: list[Tensor] = torch.ops.piper_repeats.call(inputs, len(self._attempt.runs) - 1)
        return made


class RefuseReads(TorchFunctionMode):
    """While active, refuses operations on tensors that stand for results of calls."""

    def __init__(self, waiting: WaitingCalls) -> None:
        super().__init__()
        self._waiting = waiting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _ABOUT:
            self._waiting.refuse_standing((args, kwargs))
        return func(*args, **(kwargs or {}))


_ABOUT = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point),
    }
)
"""What can be read of a tensor that stands for a result: it has the same spec."""


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each tensor was written into."""
    with torch._C.DisableTorchFunction():
        return [x._version for x in tensors]


def _standing_for(spec: TensorSpec, like: Tensor, grad: bool) -> Tensor:
    """A tensor of ``spec`` that no operation made."""
    assert isinstance(like, FakeTensor)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), like.fake_mode:
        return spec.empty(like.device).requires_grad_(grad and differentiable(spec.dtype))
