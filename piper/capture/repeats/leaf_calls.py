"""While a model is traced, calls of equal modules become single operations, or runs of them one.

The first and the last of equal modules are traced as they are (a ``Trial``), and then stand in the
graph as one operation too, like all others (``call_runs.py``). ``expansion.py`` puts the operations
of the trial in place of each call. What a trial must show: its forward neither writes to its
inputs, parameters or buffers, nor changes an attribute of the model, a random generator or a mode,
nor looks at a number in which the modules differ; its inputs and results are tensors, plain values
and an empty key-value cache, and its results share no memory with anything.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import traceback

from piper.capture.intercept.hf_cache import is_cache
from piper.capture.regions import Region, RegionRecorder
from piper.capture.repeats.caches import StandIn, close, written_in
from piper.capture.repeats.call_ops import (
    MARK,
    Attempt,
    CallVariant,
    LeafCall,
    PassedThrough,
    Trial,
)
from piper.capture.repeats.call_runs import RefuseReads, WaitingCalls
from piper.capture.repeats.equal_modules import (
    Again,
    Found,
    NotEqual,
    Siblings,
    State,
    equal_modules,
    number_of,
)
from piper.capture.repeats.hidden import hide, is_hidden
from piper.capture.repeats.signatures import (
    Arguments,
    differentiable,
    flat,
    flat_results,
    plain_results,
    signature,
    tensors_of,
)
from piper.capture.repeats.surroundings import Surroundings
from piper.capture.repeats.trial_checks import Outside, Watch
from piper.ir.tensors import TensorSpec

_CHANGED = "what they share, or a global that they read, changes"
_MOST_SHOWN = 2
"""If more modules of a group are called otherwise than their equals, all of them may be."""


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

    def made_by(self, now: Callable[[Any], Any]) -> _Call:
        """The call with the results that its tensors stand for."""
        leaves, form = flat(self.arguments)
        return replace(self, arguments=form.unflatten(map(now, leaves)))


class Repeats:
    """The equal modules of a model, and their calls."""

    def __init__(
        self, step: nn.Module, recorder: RegionRecorder, groups: list[Siblings], attempt: Attempt
    ) -> None:
        self._step = step
        self._recorder = recorder
        self._found = attempt.found
        self._inside = False
        self._reads: list[str] = []
        self._watched = False
        self.stopped: NotEqual | None = None
        """Why this attempt cannot go on, also if the model's code goes on."""
        self.tried = False
        """Whether a trial began, or was refused: errors before are the model's own."""
        self.variants: list[CallVariant] = []
        self.runs = attempt.runs
        self.trials: list[Trial] = []
        self._waiting = WaitingCalls(attempt, self._singly)
        self._around_them: dict[str, tuple[Surroundings, object]] = {}
        """By the first of equal modules, their surroundings, and what these were at its call."""
        self.groups = groups
        named = step.named_parameters, step.named_buffers
        self.tensors = [path for of in named for path, _ in of(remove_duplicate=False)]
        """The paths of all parameters and buffers, in torch's order."""
        self.twins: dict[str, str] = {}
        """For each hidden tensor, the same tensor of the first equal module."""
        self.compared: set[tuple[str, ...]] = set()
        """As in ``Found``: these that this attempt compares."""

    @property
    def results(self) -> list[Tensor]:
        """The results of the trials: the step returns them too, after its own."""
        return [x for trial in self.trials for x in (trial.given, *trial.results)]

    @property
    def copies(self) -> int:
        """How many calls were not traced."""
        return sum(len(run.calls) for run in self.runs) - len(self.trials)

    def __str__(self) -> str:
        """For each group, how many of its modules were traced, and why."""
        traced = Counter(id(self.runs[x.run].calls[0].variant.group) for x in self.trials)
        lines = []
        for group in self.groups:
            first, *_, last = (path.removeprefix("model.") for path in group.paths)
            here = f"{traced[id(group)]} traced for all"
            if group.paths[0] in self._found.apart:
                here = f"traced one by one: {self._found.apart[group.paths[0]]}"
            lines.append(f"{first} to {last}: {len(group.paths)} equal modules, {here}")
        return "\n".join(lines)

    def check(self) -> None:
        """Refuse reads that ended no trial, or came after it."""
        if self._reads or self.stopped is not None:
            raise self.failure(f"{self._reads[0].removeprefix('.')} is read" if self._reads else "")

    def failure(self, error: object) -> NotEqual:
        """Why an attempt that ended with ``error`` cannot go on. If a number was read in which
        modules differ, those with other numbers are not equal to them."""
        read = {x for group in self.groups for x in group.differing}.intersection(self._reads)
        if self.stopped is None and read:
            self._found.read |= read
            self.stopped = Again(f"{', '.join(sorted(read))} is read")
        return self.stopped or NotEqual(str(error))

    def intercept(self, contexts: ExitStack) -> None:
        """Until ``contexts`` end, calls of equal modules become single operations."""
        for group in self.groups:
            if group.paths[0] in self._found.apart:
                continue
            for path, module in zip(group.paths, group.members, strict=True):
                now: list[nn.Module] = []  # the proxy of the module that is called
                hook = module.register_forward_pre_hook(lambda m, _, now=now: now.append(m))
                contexts.callback(hook.remove)
                module.forward = self._around(group, path, module, now)
                contexts.callback(delattr, module, "forward")
            shown = self._found.shown.intersection(group.paths)
            if len(shown) <= _MOST_SHOWN:
                self._hide(group, shown, contexts)

    def _hide(self, group: Siblings, shown: set[str], contexts: ExitStack) -> None:
        """Hide all modules of ``group`` but the first, those in ``shown`` and the last, if it is
        to be compared."""
        first = group.members[0]
        named = first.named_parameters, first.named_buffers
        own = [name for of in named for name, _ in of(remove_duplicate=False)]
        for path, module in list(zip(group.paths, group.members, strict=True))[1:]:
            if path not in shown and not self._compares(group, module):
                self.twins |= {f"{path}.{name}": f"{group.paths[0]}.{name}" for name in own}
                hide(module, self._looked, contexts)

    def _looked(self) -> None:
        if self._watched:
            self._stop(NotEqual("the model looks at the tensors or submodules of equal modules"))

    def _stop(self, error: NotEqual) -> NoReturn:
        self.tried = True
        self.stopped = self.stopped or error
        raise error

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model is called, and its loss."""
        with self.watched(), RefuseReads(self._waiting):
            yield
            self._waiting.flush()

    def refuse_standing(self, results: Sequence[Tensor]) -> None:
        """Refuse results of the step that no operation made."""
        self._waiting.refuse_standing(results)

    @contextmanager
    def watched(self, now: bool = True) -> Iterator[None]:
        """Inside, the model's own code runs, which must not look at what is hidden."""
        before, self._watched = self._watched, now
        try:
            yield
        finally:
            self._watched = before

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
        if self._inside:
            args, kwargs = call.arguments
            return call.plain(*args, **kwargs)
        with self.watched(False):
            with torch._C.DisableTorchFunction():  # else each look at a tensor passes all modes
                given = signature(call.arguments)
                if given is None:
                    self._one_by_one(call, "they read more than plain arguments")
                if self._surroundings_changed(call.group):
                    self._one_by_one(call, _CHANGED)
                known = next((x for x in self.variants if _is(x, call, given)), None)
            if known is not None and not self._compares(call.group, call.module):
                return self._again(call, known)
            if is_hidden(call.module):
                self._found.shown.add(call.path)
                self._stop(Again(f"{call.path} is called otherwise than its equals before"))
            self._waiting.flush()
            return self._first(call.made_by(self._waiting.now), known, given)

    def _compares(self, group: Siblings, module: nn.Module) -> bool:
        """Whether a module is traced to compare it with its equals."""
        return module is group.members[-1] and group.paths not in self._found.compared

    def _again(self, call: _Call, known: CallVariant) -> Any:
        """The results of a module that is called as an equal one was before. The last of them is an
        operation of its own, so that the graph is that of the trace that compared it."""
        first, path = _tag(known.first), _tag(call.path)
        entered = self._recorder.enter_again(
            known.regions, lambda where: where.replace(first, path)
        )
        if call.group.paths[0] in self._found.singly or call.module is call.group.members[-1]:
            self._waiting.flush()
            return self._as_operation(call.made_by(self._waiting.now), known, entered)
        tensors = tensors_of(call.arguments)
        made = self._waiting.add(self._leaf(call, known, entered), tensors, _grad(tensors))
        return known.result(tensors, made)

    def _first(self, call: _Call, known: CallVariant | None, given: Any) -> Any:
        """The results of a module that is traced."""
        run, state = len(self.runs), call.group.state(call.module)
        marked = torch.ops.piper_repeats.given(tensors_of(call.arguments), run)
        before = len(self._recorder.entered)
        result, entry = self._tried(call)
        regions = tuple(self._recorder.entered)[before:]
        known = self._known(call, known, _made(call, given, state, result, regions, entry))
        self.trials.append(Trial(run, marked, _new(tensors_of(result), call)))
        return self._as_operation(call, known, dict(zip(known.regions, regions, strict=True)))

    def _surroundings_changed(self, group: Siblings) -> bool:
        """Whether what the modules read beside their attributes and arguments has changed since
        the first call."""
        known = self._around_them.get(group.paths[0])
        if known is not None:
            return known[0].now() != known[1]
        found = Surroundings(group.members[0])
        self._around_them[group.paths[0]] = found, found.now()
        return False

    def _one_by_one(self, call: _Call, reason: str) -> NoReturn:
        self._found.apart[call.group.paths[0]] = reason
        self._stop(Again(reason))

    def _known(self, call: _Call, known: CallVariant | None, made: CallVariant) -> CallVariant:
        """The variant of a call that was ``made``: if one was ``known``, both must be equal."""
        if known is None:
            self.variants.append(made)
            return made
        if known.first != call.path:
            self.compared.add(call.group.paths)
        names = [[region.name for region in x.regions] for x in (known, made)]
        ends = [(x.results, x.form, x.entry) for x in (known, made)]
        if ends[0] != ends[1] or names[0] != names[1]:
            raise NotEqual(f"{call.path} returns something else than {known.first}")
        return known

    def _leaf(self, call: _Call, known: CallVariant, regions: Mapping[Region, Region]) -> LeafCall:
        if known.entry is not None:
            close(call.cache, number_of(call.module, known.entry), self._reads)
        return LeafCall(call.path, known, self._recorder.open, regions)

    def _as_operation(
        self, call: _Call, known: CallVariant, regions: Mapping[Region, Region]
    ) -> Any:
        """The results of the operation that a call becomes."""
        tensors = tensors_of(call.arguments)
        made = self._waiting.at_once(self._leaf(call, known, regions), tensors)
        grad = _grad(tensors)
        if any(x.requires_grad != (grad and differentiable(x.dtype)) for x in made):
            raise NotEqual(f"{call.path} returns other tensors than an operation")
        return known.result(tensors, made)

    def _singly(self, call: LeafCall, why: str) -> NoReturn:
        self._found.singly.add(call.variant.group.paths[0])
        self._stop(Again(f"the model {why.format(call.path)}"))

    def _tried(self, call: _Call) -> tuple[Any, str | None]:
        """The result of a module that is traced as it is, and the number of the entry that it
        writes of a cache."""
        given, form = flat(call.arguments)
        tensors = [x for x in given if isinstance(x, Tensor)]
        state = [*self._step.parameters(), *self._step.buffers()]
        caches = {id(x): StandIn(x, self._reads) for x in given if is_cache(x)}
        args, kwargs = form.unflatten([caches.get(id(x), x) for x in given])
        before = Outside(self._step, [*tensors, *state], len(self._recorder.open))
        watch = Watch()
        self._inside = self.tried = True
        try:
            with (
                traceback.annotate({MARK: len(self.trials)}),
                call.group.unread(call.module, self._reads),
                self.watched(),
                watch,
            ):
                result = call.plain(*args, **kwargs)
        finally:
            self._inside = False
        after = Outside(self._step, [*tensors, *state], len(self._recorder.open))
        same, _ = flat(call.arguments)
        kept = len(same) == len(given) and all(x is y for x, y in zip(given, same, strict=True))
        reasons = {
            "they change a mode, or hold tensors made from Python values": watch.seen,
            "they read the number in which they differ": bool(self._reads),
            _CHANGED: self._surroundings_changed(call.group),
            "they change more than their results": not kept or not before.same(after),
            "their results are more than new tensors": not plain_results(
                _new(flat_results(result)[0], call), tensors, state
            ),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            self._one_by_one(call, reason)
        written = [w for x in caches.values() if (w := written_in(x)) is not None]
        return result, next((name for _, _, name in written), None)


def _grad(tensors: list[Tensor]) -> bool:
    """Whether the results of an operation on ``tensors`` need gradients."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _new(results: list[Any], call: _Call) -> list[Any]:
    """``results`` without those that are tensors of the arguments."""
    given = {id(x) for x in tensors_of(call.arguments)}
    return [x for x in results if id(x) not in given]


def _made(
    call: _Call,
    given: Any,
    state: State,
    result: Any,
    entered: tuple[Region, ...],
    entry: str | None,
) -> CallVariant:
    """The variant of a call that was traced."""
    leaves, form = flat_results(result)
    positions = {id(x): PassedThrough(i) for i, x in enumerate(tensors_of(call.arguments))}
    specs = tuple(
        positions.get(id(x), TensorSpec.of(x)) if isinstance(x, Tensor) else x for x in leaves
    )
    return CallVariant(call.group, given, state, specs, form, entered, call.path, entry)


@contextmanager
def calls_as_operations(
    step: nn.Module, recorder: RegionRecorder, attempt: Attempt | None
) -> Iterator[Repeats | None]:
    """Inside, calls of equal modules of ``step`` become single operations."""
    groups = [] if attempt is None else equal_modules(step, attempt.found)
    if attempt is None or not groups:
        yield None
        return
    repeats = Repeats(step, recorder, groups, attempt)
    with ExitStack() as contexts:
        repeats.intercept(contexts)
        yield repeats
    repeats.check()


def tracing_of(repeats: Repeats | None, found: Found) -> str:
    """Which modules were traced once for all their equals."""
    if found.unequal:
        return f"every module is traced: {found.unequal}"
    if repeats is not None:
        return str(repeats)
    read = [name.removeprefix(".") for name in sorted(found.read)]
    why = f", for {', '.join(read)} is read" if read else ""
    return f"every module is traced: no four are equal{why}"


def _tag(path: str) -> str:
    """How the place of a region inside a module begins, if ``tags`` made it."""
    return f"module '{path.removeprefix('model.')}."


def _is(variant: CallVariant, call: _Call, given: Any) -> bool:
    known = variant.group is call.group and variant.signature == given
    return known and call.group.in_state(call.module, variant.state)
