"""While a model is traced, calls of equal modules become single operations.

The first and the last of equal modules are traced as they are (a ``Trial``), and then stand in the
graph as one operation too, like all others (a ``LeafCall``). ``expansion.py`` puts the operations
of the trial in place of each call. What a trial must show: its forward neither writes to its
inputs, parameters or buffers, nor changes an attribute of the model, a random generator or a mode,
nor looks at a number in which the modules differ; its inputs and results are tensors and plain
values, and its results share no memory with anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from piper.base.modes import autocast_kinds
from piper.capture.intercept.outside_effects import attributes_of, generators_now
from piper.capture.regions import Region, RegionRecorder
from piper.capture.repeats.equal_modules import NotEqual, Siblings, State, equal_modules
from piper.ir.tensors import TensorSpec

MARK = "piper.trial"
"""The metadata key of the operations of a trial; its value is the trial's number."""
_NAMESPACE = "piper_repeats"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


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


class Repeats:
    """The equal modules of a model, and their calls."""

    def __init__(self, step: nn.Module, recorder: RegionRecorder, groups: list[Siblings]) -> None:
        self._step = step
        self._recorder = recorder
        self._inside = False
        self._stopped: set[int] = set()
        self._reads: list[list[str]] = []
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

    @property
    def tried(self) -> bool:
        """Whether a trial began."""
        return bool(self._reads)

    def check(self) -> None:
        """Refuse numbers that were read after their trial."""
        if any(self._reads):
            raise NotEqual("a number is read later")

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
            return self._call(group, path, module, plain, args, kwargs)

        return forward

    def _call(
        self,
        group: Siblings,
        path: str,
        module: nn.Module,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = None if self._inside or id(group) in self._stopped else _signature(args, kwargs)
        if given is None:
            return plain(*args, **kwargs)
        state = group.state(module)
        number = next((i for i, x in enumerate(self.variants) if _is(x, group, given, state)), None)
        if number is None or module is group.members[-1]:
            before = len(self._recorder.entered)
            marked = torch.ops.piper_repeats.given(_tensors((args, kwargs)), len(self.calls))
            result = self._tried(group, module, plain, args, kwargs)
            if id(group) in self._stopped:
                if number is not None:
                    raise NotEqual(f"{path} does more than {self.variants[number].first}")
                return result
            leaves, form = pytree.tree_flatten(result)
            entered = tuple(self._recorder.entered)[before:]
            specs = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
            made = _tensors(result)
            if number is None:
                number = len(self.variants)
                self.variants.append(CallVariant(group, given, state, specs, form, entered, path))
            known = self.variants[number]
            names = [region.name for region in known.regions]
            if (known.results, known.form) != (specs, form) or names != [x.name for x in entered]:
                raise NotEqual(f"{path} returns something else than {known.first}")
            regions = dict(zip(known.regions, entered, strict=True))
            self.trials.append(Trial(len(self.calls), marked, made))
        else:
            known = self.variants[number]
            regions = self._recorder.enter_again(
                known.regions, lambda where: where.replace(_tag(known.first), _tag(path))
            )
        self.calls.append(LeafCall(path, known, regions))
        tensors = _tensors((args, kwargs))
        made = torch.ops.piper_repeats.call(tensors, number, len(self.calls) - 1)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if any(x.requires_grad != grad for x in made):
            raise NotEqual(f"{path} returns other tensors than an operation")
        results = iter(made)
        leaves = [next(results) if isinstance(x, TensorSpec) else x for x in known.results]
        return known.form.unflatten(leaves)

    def _tried(
        self,
        group: Siblings,
        module: nn.Module,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of a module that is traced as it is. Stops the group if it does more than
        compute its result."""
        state = [*self._step.parameters(), *self._step.buffers()]
        given = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        before = self._outside([*tensors, *state])
        watch = _Watch()
        self._inside = True
        try:
            with (
                traceback.annotate({MARK: len(self.trials)}),
                group.unread(module) as reads,
                watch,
            ):
                self._reads.append(reads)
                result = plain(*args, **kwargs)
        finally:
            self._inside = False
        made = pytree.tree_leaves(result)
        after = self._outside([*tensors, *state])
        same = pytree.tree_leaves((args, kwargs))
        proven = (
            not watch.seen
            and not reads
            and len(same) == len(given)
            and all(x is y for x, y in zip(given, same, strict=True))
            and _unchanged(before, after)
            and _plain_results(made, tensors, state)
        )
        if not proven:
            self._stopped.add(id(group))
        return result

    def _outside(self, tensors: list[Tensor]) -> tuple[Any, dict[Any, Any]]:
        """All that a forward can change, beside its results."""
        modes = torch.is_grad_enabled(), autocast_kinds(), self._recorder.depth
        versions = [x._version for x in tensors]
        return (generators_now(), modes, versions), attributes_of(self._step)


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


def _tag(path: str) -> str:
    """How the place of a region inside a module begins, if ``tags`` made it."""
    return f"module '{path.removeprefix('model.')}."


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _is(variant: CallVariant, group: Siblings, signature: Any, state: State) -> bool:
    known = variant.group is group and variant.signature == signature
    return known and variant.state == state


def _unchanged(before: tuple[Any, dict[Any, Any]], after: tuple[Any, dict[Any, Any]]) -> bool:
    if before[0] != after[0] or before[1].keys() != after[1].keys():
        return False
    pairs = [(x, after[1][name]) for name, x in before[1].items()]
    return all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in pairs)


def _plain_results(made: list[Any], given: list[Tensor], state: list[Tensor]) -> bool:
    """Whether the results are tensors with memory of their own, as an operation makes them, and
    plain values."""
    tensors = [x for x in made if isinstance(x, Tensor)]
    kinds = all(type(x) in (FakeTensor, *_PLAIN) for x in made)
    known = {_memory(x) for x in (*given, *state)}
    own = len({_memory(x) for x in tensors} - known) == len(tensors)
    grad = any(x.requires_grad for x in given) and torch.is_grad_enabled()
    return kinds and own and bool(tensors) and all(x.requires_grad == grad for x in tensors)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that a forward can read of its arguments while it is traced, and the modes; None if there
    may be more."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors or autocast_kinds():
        return None
    memory = [_memory(x) for x in tensors]
    objects = [id(x) for x in tensors]
    described: list[Any] = []
    for x in leaves:
        if type(x) is FakeTensor and x.constant is None and (x.dim() or x.dtype is not torch.bool):
            about = TensorSpec.of(x), x.storage_offset(), x.device, x.requires_grad
            described.append((*about, memory.index(_memory(x)), objects.index(id(x))))
        elif type(x) in _PLAIN:
            described.append((type(x), repr(x)))
        else:
            return None
    return described, form, torch.is_grad_enabled(), torch.get_default_dtype()


class _Watch(TorchFunctionMode):
    """Notes what a trial cannot contain: changes of modes, which make blocks of the graph, and
    tensors made from Python values, which are constants of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or func in _NOT_PLAIN
        return func(*args, **(kwargs or {}))


_NOT_PLAIN = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.tensor,
        torch.as_tensor,
        torch.from_numpy,
        torch.Tensor.new_tensor,
    }
)
