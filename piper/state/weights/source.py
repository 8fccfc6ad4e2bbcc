"""Where a model's initial weights come from: its own tensors, ``init`` for tensors on the meta
device, or files. Also the keys of its state dict."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.ir.dag.facts import LOSS_PREFIX
from piper.state.weights.other_model import differences
from piper.state.weights.weight_files import Init, WeightFiles


@dataclass(frozen=True, slots=True)
class Source:
    """A model, its loss if the loss is a module, and ``init``: a function for tensors on the meta
    device, or ``piper.weights(folder)``."""

    model: nn.Module
    loss: nn.Module | None = None
    init: Init | WeightFiles | None = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, by its first name."""
        seen: set[int] = set()
        for prefix, module in self.roots():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that currently do not require grad."""
        return frozenset(name for name, p in self.parameters() if not p.requires_grad)

    def refuse_refrozen(self, frozen: frozenset[str]) -> None:
        """Refuse a model whose frozen parameters changed. ``frozen`` is the set at compile time."""
        now = self.frozen
        changed = [(name, "False") for name in sorted(now - frozen)]
        changed += [(name, "True") for name in sorted(frozen - now)]
        if changed:
            name, flag = changed[0]
            more = f" (and of {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise PiperError(
                f"requires_grad of {name}{more} is {flag} now and was not when the model was "
                "compiled, but what is trained is part of the program: compile again, or set it "
                "back"
            )

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, by its first name."""
        for prefix, module in self.roots():
            for name, buffer in module.named_buffers():
                yield prefix + name, buffer

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Source:
        """A copy whose parameters and buffers are ``tensors``, by their first names; tensors that
        are tied stay so. The others are copied."""
        memo: dict[int, Any] = {}
        for name, parameter in self.parameters():
            if name in tensors:
                memo[id(parameter)] = nn.Parameter(tensors[name], parameter.requires_grad)
        for name, buffer in self.buffers():
            if name in tensors:
                memo.setdefault(id(buffer), tensors[name])
        model = copy.deepcopy(self.model, memo)
        return replace(self, model=model, loss=copy.deepcopy(self.loss, memo))

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The modules with state, each with the prefix of its names."""
        roots = [("", self.model)]
        return roots + ([(LOSS_PREFIX, self.loss)] if self.loss is not None else [])


def materialised(
    name: str, tensor: Tensor, device: torch.device, init: Init | None, seed: int
) -> Tensor:
    """``tensor`` on ``device``, filled by ``init`` if it is on the meta device. The name seeds the
    generator, so weights depend neither on the order of filling nor on the strategy."""
    if not tensor.is_meta:
        return tensor.detach().to(device)
    if init is None:
        raise PiperError(
            f"{name} is on the meta device and has no values: give init=, a function "
            "(name, tensor, generator) that fills it, or piper.weights(folder)"
        )
    data = torch.empty_like(tensor, device=device, requires_grad=False)
    init(name, data, torch.Generator(device).manual_seed(seed_for(name, seed)))
    return data


def seed_for(name: str, seed: int) -> int:
    """The random seed for the tensor of this name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class StateNames:
    """The keys of the model's state dict and the tensor behind each key."""

    keys: Mapping[str, str]
    """For each key, its tensor's first name. Tied parameters have several keys."""
    shapes: Mapping[str, tuple[int, ...]]
    added: tuple[str, ...] = ()
    """Keys that are neither parameters nor buffers: extra state, and values computed by hooks."""

    @staticmethod
    def of(source: Source) -> StateNames:
        firsts: dict[int, str] = {}
        for name, tensor in (*source.parameters(), *source.buffers()):
            firsts.setdefault(id(tensor), name)
        keys: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        added: list[str] = []
        for prefix, module in source.roots():
            for key, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and id(tensor) in firsts:
                    keys[prefix + key] = firsts[id(tensor)]
                    shapes[prefix + key] = tuple(tensor.shape)
                else:
                    added.append(prefix + key)
        return StateNames(keys, shapes, tuple(added))

    @property
    def elements(self) -> Mapping[str, int]:
        """The number of elements of each key's tensor."""
        return {key: math.prod(shape) for key, shape in self.shapes.items()}

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        strict: bool = True,
        what: str = "the state dict",
    ) -> None:
        """Refuse a state dict of another model, judged by its keys and ``shapes``. Unless
        ``strict``, keys may be missing."""
        missing = [key for key in self.keys if key not in shapes] if strict else []
        known = {*self.keys, *self.added}
        extra = {key: "" for key in shapes if key not in known}
        others = {
            key: (shapes[key], shape)
            for key, shape in self.shapes.items()
            if shapes.get(key, shape) != shape
        }
        if text := differences(self.shapes, missing, extra, others):
            raise PiperError(
                f"{what} is not this model's. {text}. Compile the model that was saved"
            )

    def checked(self, state: Mapping[str, Tensor], *, strict: bool) -> dict[str, Tensor]:
        """The tensors of a state dict by their first names. Refuses another model's state dict."""
        for key in self.keys.keys() & state.keys():
            if not isinstance(state[key], Tensor):
                raise PiperError(f"{key} is {class_text(state[key])}, not a tensor")
        shapes = {key: tuple(getattr(x, "shape", ())) for key, x in state.items()}
        self.check(shapes, strict=strict)
        return {self.keys[key]: state[key] for key in self.keys if key in state}

    def named(self, tensor_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """A state dict. ``tensor_of`` returns a tensor by its first name."""
        known: dict[str, Tensor] = {}
        state = {}
        for key, name in self.keys.items():
            if name not in known:
                known[name] = tensor_of(name)
            state[key] = known[name]
        return state

    def with_added(self, source: Source, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """``state`` plus the entries that the modules of ``source`` add, in the modules' order. A
        copy of the modules with the tensors of ``state`` computes them."""
        if not self.added:
            return dict(state)
        made = source.with_tensors({self.keys[key]: tensor for key, tensor in state.items()})
        full: dict[str, Any] = {}
        for prefix, module in made.roots():
            for key, item in module.state_dict().items():
                full[prefix + key] = state.get(prefix + key, item)
        return full
