"""Random operations of a program draw from a generator that the caller names (``drawing_from``).

The default generator belongs to the process: other threads draw from it while a step runs. Most
operations take a generator. The others (attention with dropout on GPUs, custom operations, and
Inductor's code, unless it draws only seeds) use the default generator: its state is swapped while
the operation runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from piper.capture.graphs import is_random

_current: ContextVar[torch.Generator | None] = ContextVar("piper.generator", default=None)
_exchanging = threading.RLock()


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Inside, random operations of programs in this thread draw from ``generator``."""
    token = _current.set(generator)
    try:
        yield
    finally:
        _current.reset(token)


def draw_privately(graph: fx.Graph) -> None:
    """Make the random operations of ``graph`` draw from the generator named at run time."""
    for node in graph.nodes:
        if node.op == "call_function" and is_random(node):
            node.target = _Drawing(node.target)


def take_seeds(graph: fx.Graph) -> list[Callable[[], Tensor]]:
    """Turn the seeds that a graph for Inductor draws into its last arguments. Returns the functions
    that draw them; an empty list, with the graph unchanged, if it draws anything else."""
    drawn = [x for x in graph.nodes if x.op == "call_function" and is_random(x)]
    if any(str(node.target) != _SEEDS for node in drawn):
        return []
    draws: list[Callable[[], Tensor]] = []
    for node in drawn:
        taken = graph.find_nodes(op="placeholder")
        first = next(iter(graph.nodes))
        with graph.inserting_after(taken[-1]) if taken else graph.inserting_before(first):
            last = graph.placeholder(node.name)
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        draws.append(partial(_seeds, *node.args))
    return draws


_SEEDS = "prims.inductor_seeds.default"


def _seeds(count: int, device: torch.device) -> Tensor:
    whole = torch.iinfo(torch.int64)
    return torch.randint(
        whole.min, whole.max, (count,), generator=_current.get(), dtype=torch.int64, device=device
    )


class _Drawing:
    """A random operation that draws from the generator named by ``drawing_from``."""

    def __init__(self, operation: OpOverload) -> None:
        self.__name__ = str(operation).replace(".", "_").replace("::", "_")
        self._call = _with_generator(operation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _with_generator(operation: OpOverload) -> Callable[..., Any]:
    if operation in _OWN:
        return _OWN[operation]
    taking = _taking_generator(operation)
    if taking is not None:
        return lambda *args, **kwargs: taking(*args, **kwargs, generator=_current.get())

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        with default_exchanged():
            return operation(*args, **kwargs)

    return exchanged


def _taking_generator(operation: OpOverload) -> OpOverload | None:
    """The overload of ``operation`` that also takes a generator, if any."""
    packet = operation.overloadpacket
    mine = [(x.name, str(x.type)) for x in operation._schema.arguments]
    for overload in (operation, *(getattr(packet, name) for name in packet.overloads())):
        theirs = [(x.name, str(x.type)) for x in overload._schema.arguments]
        others = [x for x in theirs if x[0] != "generator"]
        if len(others) < len(theirs) and others == [x for x in mine if x[0] != "generator"]:
            return overload
    return None


@contextmanager
def default_exchanged() -> Iterator[None]:
    """Inside, the default generator has the state of the one named by ``drawing_from``. Draws of
    other threads meanwhile come from that state too."""
    generator = _current.get()
    if generator is None:
        yield
        return
    default = _default(generator.device)
    with _exchanging:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout``, bit for bit, built from operations that take a generator."""
    generator = _current.get()
    if generator is None or train is False or p == 1 or not x.numel():  # nothing is drawn
        return torch.native_dropout(x, p, train)
    if x.device.type == "cuda":
        dropped, kept = torch._fused_dropout(x, 1 - p, generator)
        return dropped, kept.view(torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x.mul(mask).mul_(1 / (1 - p)), mask


def dropout(x: Tensor, p: float) -> Tensor:
    """``torch.dropout`` in training, with the same draws, from the named generator."""
    generator = _current.get()
    if x.device.type == "cuda" and 0 < p < 1:
        return _native_dropout(x, p, True)[0]
    return torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p).mul_(x)


def _like(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operation such as ``rand_like``: ``fill`` fills a new tensor from the generator."""

    def made(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return fill(torch.empty_like(x, **kwargs), *args, generator=_current.get())

    return made


_ATEN = torch.ops.aten
_OWN: Mapping[OpOverload, Callable[..., Any]] = {
    _ATEN.bernoulli.p: lambda x, p: torch.bernoulli(x, p, generator=_current.get()),
    _ATEN.native_dropout.default: _native_dropout,
    _ATEN.rand_like.default: _like(Tensor.uniform_),
    _ATEN.randn_like.default: _like(Tensor.normal_),
    _ATEN.randint_like.default: _like(lambda x, high, **g: x.random_(0, high, **g)),
    _ATEN.randint_like.low_dtype: _like(lambda x, low, high, **g: x.random_(low, high, **g)),
}
"""Replacements, with a generator, of operations without one; dropout by its fastest call."""
