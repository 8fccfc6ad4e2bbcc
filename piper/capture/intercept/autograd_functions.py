"""``torch.autograd.Function`` in a model: training uses the function's own backward.

During export, each call is one opaque op. In the exported graph it is the call again, and tracing
follows its forward and backward when its chunk is differentiated.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError, warn
from piper.base.units import class_text
from piper.capture.blame import calling_line
from piper.capture.intercept.outside_effects import attributes_of_class, numbers_of

_NAMESPACE = "piper_functions"
_REGISTERED = "GeneratedBackwardFor_"
"""The prefix of torch's classes for backwards that ``register_autograd`` added to an op."""
_CONTROL_FLOW = "torch._higher_order_ops"  # refusals.py refuses control flow
_PLAIN = (int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """``function.apply`` as a function from its tensor arguments to the tensors it returns. All
    other arguments are ``constants``."""

    function: Any
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    """The arguments, flat; None for each tensor."""
    tensors: tuple[bool, ...]
    """Which of the flat arguments are tensors."""
    autocast: tuple[tuple[str, torch.dtype], ...]
    """The device types with autocast enabled at the call, and their autocast dtypes."""
    __name__: str
    """The name in a graph: equal for equal calls."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(self.whole(tensors)) if isinstance(x, Tensor)]

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The function's whole result, tensors and other values."""
        source = iter(tensors)
        leaves = [
            next(source) if is_tensor else constant
            for is_tensor, constant in zip(self.tensors, self.constants, strict=True)
        ]
        with ExitStack() as contexts:
            for device, dtype in self.autocast:
                contexts.enter_context(torch.autocast(device, dtype))
            return self.function.apply(*self.spec.unflatten(leaves))

    def __str__(self) -> str:
        return self.__name__


class Functions:
    """The autograd functions that a model calls during export, as ops."""

    def __init__(self, library: torch.library.Library) -> None:
        self.inside = False
        """Whether an autograd function is running, so that calls inside it are plain calls."""
        self._library = library
        self._calls: dict[str, FunctionCall] = {}
        self._results: dict[str, tuple[list[Any], pytree.TreeSpec]] = {}
        """The leaves and structure that each call last returned, by name."""

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Call ``function`` as one op."""
        leaves, spec = pytree.tree_flatten(args)
        call = self._named_apart(_described(function, leaves, spec))
        name = call.__name__
        if name not in self._calls:
            self._register(call)
        given = [x for x in leaves if isinstance(x, Tensor)]
        made = iter(getattr(getattr(torch.ops, _NAMESPACE), name)(given))
        results, form = self._results[name]
        return form.unflatten([next(made) if isinstance(x, Tensor) else x for x in results])

    def _named_apart(self, call: FunctionCall) -> FunctionCall:
        """``call``, renamed if another function already has its name."""
        name = call.__name__
        while name in self._calls and self._calls[name].function is not call.function:
            name += "_"
        return replace(call, __name__=name)

    def restore(self, graph: fx.Graph) -> None:
        """Replace the ops in ``graph`` by the calls that they stand for."""
        for node in graph.nodes:
            if getattr(node.target, "namespace", None) == _NAMESPACE:
                node.target = self._calls[node.target._schema.name.partition("::")[2]]

    def _register(self, call: FunctionCall) -> None:
        name = call.__name__
        self._calls[name] = call

        def results(tensors: list[Tensor]) -> list[Tensor]:
            before = [x._version for x in tensors]
            self.inside = True
            try:
                with torch.no_grad():
                    leaves, form = pytree.tree_flatten(call.whole(tensors))
            finally:
                self.inside = False
            if before != [x._version for x in tensors]:
                raise CaptureError(
                    f"the autograd function {call.function.__name__}, used at {calling_line()}, "
                    "writes in place to a tensor that it is given: write to a copy (x = x.clone())"
                )
            self._results[name] = leaves, form
            return [torch.empty_like(x) for x in leaves if isinstance(x, Tensor)]

        self._library.define(f"{name}(Tensor[] tensors) -> Tensor[]")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", results, lib=self._library)


def _described(function: Any, leaves: list[Any], spec: pytree.TreeSpec) -> FunctionCall:
    """A call of ``function``. Its name is a digest of everything but the tensors."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise CaptureError(
                f"the autograd function {function.__name__} is given {class_text(leaf)} at "
                f"{calling_line()}, and only tensors and plain values can be kept: give these, or "
                "write it with plain ops, or as a torch.library.custom_op with register_autograd"
            )
    tensors = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    kinds = sorted({leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)})
    casts = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )
    said = f"{function.__module__}.{function.__qualname__} {spec} {tensors} {constants} {casts}"
    name = f"{function.__name__}_{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    return FunctionCall(function, spec, constants, tensors, casts, name)


def functions_of(graph: fx.Graph) -> list[Any]:
    """The autograd functions that ``graph`` calls."""
    calls = (node.target for node in graph.nodes)
    return list(dict.fromkeys(x.function for x in calls if isinstance(x, FunctionCall)))


def state_of(functions: Sequence[Any]) -> dict[str, Any]:
    """The numbers (also in lists and dicts) that autograd functions read beside their arguments:
    class attributes and globals."""
    read: dict[str, Any] = {}
    for function in functions:
        own = numbers_of(attributes_of_class(function))
        read |= {f"{function.__name__}.{name}": value for name, value in own.items()}
        for code in (function.forward, function.backward, function.setup_context):
            names = getattr(getattr(code, "__code__", None), "co_names", ())
            around = getattr(code, "__globals__", {})
            read |= numbers_of({name: around[name] for name in names if name in around})
    return read


def warn_of_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Warn of state that changed while autograd functions were traced. Returns whether any did."""
    changed = [name for name, value in before.items() if after.get(name) != value]
    for name in changed:
        warn(
            f"{name!r} changes from one call of an autograd function to the next; the captured "
            "step keeps the value it has now. If it is part of the computation, make it a buffer "
            "and give it to the function"
        )
    return bool(changed)


@contextmanager
def function_ops() -> Iterator[Functions]:
    """Inside, ops that stand for autograd functions can be registered."""
    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        yield Functions(library)


@contextmanager
def kept_whole(functions: Functions) -> Iterator[None]:
    """Inside, autograd functions are called as ops: tracing would follow their forward and lose
    their backward."""

    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        known = cls.__name__.startswith(_REGISTERED) or cls.__module__.startswith(_CONTROL_FLOW)
        alone = not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs)))
        if known or alone or functions.inside:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            args = inspect.signature(cls.forward).bind(*args, **kwargs).args
        elif kwargs:
            raise TypeError(f"{cls.__name__}.apply takes no keyword arguments")
        return functions.call(cls, args)

    base: Any = torch.autograd.Function
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original
