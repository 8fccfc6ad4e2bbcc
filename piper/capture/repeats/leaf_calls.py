"""While a model is traced, calls of equal modules become single operations.

The first and the last of equal modules are traced as they are (a ``Trial``), and then stand in the
graph as one operation too, like all others (a ``LeafCall``). ``expansion.py`` puts the operations
of the trial in place of each call. What a trial must show: its forward neither writes to its
inputs, parameters or buffers, nor changes an attribute of the model, a random generator or a mode,
nor looks at a number in which the modules differ; its inputs and results are tensors, plain values
and an empty key-value cache, and its results share no memory with anything.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils import _pytree as pytree

from piper.capture.intercept.hf_cache import is_cache
from piper.capture.regions import Region, RegionRecorder
from piper.capture.repeats.caches import StandIn, close, written_in
from piper.capture.repeats.equal_modules import (
    NotEqual,
    Siblings,
    State,
    equal_modules,
    number_of,
)
from piper.capture.repeats.signatures import (
    Arguments,
    flat,
    plain_results,
    signature,
    tensors_of,
)
from piper.capture.repeats.trial_checks import Outside, Watch
from piper.ir.tensors import TensorSpec

MARK = "piper.trial"
"""The metadata key of the operations of a trial; its value is the trial's number."""
_NAMESPACE = "piper_repeats"


@dataclass(frozen=True, slots=True)
class CallVariant:
    """One way in which the modules of a group are called."""

    group: Siblings
    signature: Any
    state: State
    results: tuple[Any, ...]
    """The results, flat; the spec of each tensor."""
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
class _Call:
    """A call of a member of a group, before anything is known of it."""

    group: Siblings
    path: str
    module: nn.Module
    plain: Callable[..., Any]
    arguments: Arguments

    @property
    def cache(self) -> Any:
        """The key-value cache among the arguments, or None."""
        return next(filter(is_cache, flat(self.arguments)[0]), None)


class Repeats:
    """The equal modules of a model, and their calls."""

    def __init__(self, step: nn.Module, recorder: RegionRecorder, groups: list[Siblings]) -> None:
        self._step = step
        self._recorder = recorder
        self._inside = False
        self._stopped: set[int] = set()
        self._reasons: dict[int, str] = {}
        """By group, why calls of its modules are traced one by one."""
        self._reads: list[str] = []
        self.tried = False
        """Whether a trial began."""
        self.variants: list[CallVariant] = []
        self.calls: list[LeafCall] = []
        self.trials: list[Trial] = []
        self.groups = groups

    @property
    def results(self) -> list[Tensor]:
        """The results of the trials: the step returns them too, after its own."""
        return [x for trial in self.trials for x in (trial.given, *trial.results)]

    @property
    def copies(self) -> int:
        """How many calls were not traced."""
        return len(self.calls) - len(self.trials)

    def __str__(self) -> str:
        """For each group, how many of its modules were traced, and why."""
        traced = Counter(id(self.calls[trial.call].variant.group) for trial in self.trials)
        lines = []
        for group in self.groups:
            first, *_, last = (path.removeprefix("model.") for path in group.paths)
            here = f"{traced[id(group)]} traced for all"
            if id(group) in self._reasons:
                here += f", others one by one: {self._reasons[id(group)]}"
            lines.append(f"{first} to {last}: {len(group.paths)} equal modules, {here}")
        return "\n".join(lines)

    def check(self) -> None:
        """Refuse reads that ended no trial, or came after it."""
        if self._reads:
            raise NotEqual(f"{self._reads[0].removeprefix('.')} is read")

    def intercept(self, contexts: ExitStack) -> None:
        """Until ``contexts`` end, calls of equal modules become single operations."""
        for group in self.groups:
            for path, module in zip(group.paths, group.members, strict=True):
                now: list[nn.Module] = []  # the proxy of the module that is called
                hook = module.register_forward_pre_hook(lambda m, _, now=now: now.append(m))
                contexts.callback(hook.remove)
                module.forward = self._around(group, path, module, now)
                contexts.callback(delattr, module, "forward")

    def fakes(self, inputs: list[Tensor], variant: int, call: int) -> list[Tensor]:
        specs = [x for x in self.variants[variant].results if isinstance(x, TensorSpec)]
        return [spec.empty(inputs[0].device) for spec in specs]

    def _around(
        self, group: Siblings, path: str, module: nn.Module, now: list[nn.Module]
    ) -> Callable[..., Any]:
        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            called = now.pop() if now else module
            plain = functools.partial(type(called).forward, called)
            return self._called(_Call(group, path, module, plain, (args, kwargs)))

        return forward

    def _called(self, call: _Call) -> Any:
        stopped = self._inside or id(call.group) in self._stopped
        with torch._C.DisableTorchFunction():  # else each look at a tensor passes all modes
            given = None if stopped else signature(call.arguments)
            state = {} if given is None else call.group.state(call.module)
        if given is None:
            if not self._inside:
                self._reasons.setdefault(id(call.group), "they read more than plain arguments")
            args, kwargs = call.arguments
            return call.plain(*args, **kwargs)
        known = next((x for x in self.variants if _is(x, call.group, given, state)), None)
        if known is None or call.module is call.group.members[-1]:
            marked = torch.ops.piper_repeats.given(tensors_of(call.arguments), len(self.calls))
            before = len(self._recorder.entered)
            result, entry = self._tried(call)
            if id(call.group) in self._stopped:
                if known is not None:
                    raise NotEqual(f"{call.path} does more than {known.first}")
                return result
            entered = tuple(self._recorder.entered)[before:]
            made = _made(call, given, state, result, entered, entry)
            known = self._known(call, known, made)
            regions = dict(zip(known.regions, entered, strict=True))
            self.trials.append(Trial(len(self.calls), marked, tensors_of(result)))
        else:
            first, path = _tag(known.first), _tag(call.path)
            regions = self._recorder.enter_again(
                known.regions, lambda where: where.replace(first, path)
            )
        if known.entry is not None:
            close(call.cache, number_of(call.module, known.entry), self._reads)
        return self._as_operation(call, known, regions)

    def _known(self, call: _Call, known: CallVariant | None, made: CallVariant) -> CallVariant:
        """The variant of a call that was ``made``: if one was ``known``, both must be equal."""
        if known is None:
            self.variants.append(made)
            return made
        names = [[region.name for region in x.regions] for x in (known, made)]
        ends = [(x.results, x.form, x.entry) for x in (known, made)]
        if ends[0] != ends[1] or names[0] != names[1]:
            raise NotEqual(f"{call.path} returns something else than {known.first}")
        return known

    def _as_operation(
        self, call: _Call, known: CallVariant, regions: Mapping[Region, Region]
    ) -> Any:
        """The results of the operation that a call becomes."""
        self.calls.append(LeafCall(call.path, known, regions))
        tensors = tensors_of(call.arguments)
        number = next(i for i, x in enumerate(self.variants) if x is known)
        made = torch.ops.piper_repeats.call(tensors, number, len(self.calls) - 1)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if any(x.requires_grad != grad for x in made):
            raise NotEqual(f"{call.path} returns other tensors than an operation")
        results = iter(made)
        leaves = [next(results) if isinstance(x, TensorSpec) else x for x in known.results]
        return known.form.unflatten(leaves)

    def _tried(self, call: _Call) -> tuple[Any, str | None]:
        """The result of a module that is traced as it is, and the number of the entry that it
        writes of a cache. Stops the group if it does more than compute its result."""
        given, form = flat(call.arguments)
        tensors = [x for x in given if isinstance(x, Tensor)]
        state = [*self._step.parameters(), *self._step.buffers()]
        caches = {id(x): StandIn(x, self._reads) for x in given if is_cache(x)}
        args, kwargs = form.unflatten([caches.get(id(x), x) for x in given])
        before = Outside(self._step, [*tensors, *state], self._recorder.depth)
        watch = Watch()
        self._inside = self.tried = True
        try:
            with (
                traceback.annotate({MARK: len(self.trials)}),
                call.group.unread(call.module, self._reads),
                watch,
            ):
                result = call.plain(*args, **kwargs)
        finally:
            self._inside = False
        after = Outside(self._step, [*tensors, *state], self._recorder.depth)
        same, _ = flat(call.arguments)
        kept = len(same) == len(given) and all(x is y for x, y in zip(given, same, strict=True))
        reasons = {
            "they change a mode, or hold tensors made from Python values": watch.seen,
            "they read the number in which they differ": bool(self._reads),
            "they change more than their results": not kept or not before.same(after),
            "their results are more than new tensors": not plain_results(
                pytree.tree_leaves(result), tensors, state
            ),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        written = [w for x in caches.values() if (w := written_in(x)) is not None]
        if reason is not None:
            self._stopped.add(id(call.group))
            self._reasons[id(call.group)] = reason
            for keys, values, name in written:
                call.cache.update(keys, values, number_of(call.module, name))
        return result, next((name for _, _, name in written), None)


def _made(
    call: _Call,
    given: Any,
    state: State,
    result: Any,
    entered: tuple[Region, ...],
    entry: str | None,
) -> CallVariant:
    """The variant of a call that was traced."""
    leaves, form = pytree.tree_flatten(result)
    specs = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
    return CallVariant(call.group, given, state, specs, form, entered, call.path, entry)


CallOps = torch.library.Library


@contextmanager
def call_ops() -> Iterator[CallOps]:
    """Inside, a call can be an operation."""
    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        library.define("call(Tensor[] inputs, int variant, int call) -> Tensor[]")
        library.define("given(Tensor[] inputs, int call) -> Tensor")
        yield library


@contextmanager
def calls_as_operations(
    step: nn.Module, recorder: RegionRecorder, ops: CallOps | None
) -> Iterator[Repeats | None]:
    """Inside, calls of equal modules of ``step`` become single operations of ``ops``."""
    groups = equal_modules(step) if ops is not None else []
    if ops is None or not groups:
        yield None
        return
    repeats = Repeats(step, recorder, groups)
    torch.library.register_fake(f"{_NAMESPACE}::call", repeats.fakes, lib=ops)
    torch.library.register_fake(f"{_NAMESPACE}::given", lambda x, call: x[0].new_empty(()), lib=ops)
    with ExitStack() as contexts:
        repeats.intercept(contexts)
        yield repeats
    repeats.check()


def tracing_of(repeats: Repeats | None, unequal: str) -> str:
    """Which modules were traced once for all their equals. ``unequal`` is the reason if the attempt
    was given up."""
    if unequal:
        return f"every module is traced: {unequal}"
    return "every module is traced: no four are equal" if repeats is None else str(repeats)


def _tag(path: str) -> str:
    """How the place of a region inside a module begins, if ``tags`` made it."""
    return f"module '{path.removeprefix('model.')}."


def _is(variant: CallVariant, group: Siblings, given: Any, state: State) -> bool:
    known = variant.group is group and variant.signature == given
    return known and variant.state == state
