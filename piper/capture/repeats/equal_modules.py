"""Which modules of a model are equal: they run the same code on equal settings, so that only the
contents of their parameters and buffers differ.

Modules enter; groups of equal siblings leave. Equal means: the same classes, the same attributes
(numbers by value, other objects by identity), tensors of the same shape, and no hook but those of
``tags``. Whole numbers may differ, such as the ``layer_idx`` of transformers: while a member is
traced, an ``Unread`` stands for such a number, and any use of it ends the attempt.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.regions import Tagged
from piper.capture.repeats.hidden import content_of, is_hidden, submodules
from piper.capture.repeats.signatures import own_attributes
from piper.capture.repeats.surroundings import names_beside_type
from piper.ir.tensors import TensorSpec

FEWEST = 4
"""Equal modules that are worth it: the first and the last are traced, the others are not."""
_PLAIN = (bool, int, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
State = dict[str, Any]


class NotEqual(Exception):  # noqa: N818 - not an error: the model is traced module by module
    """Modules could not be proven equal."""


class Again(NotEqual):
    """The model is to be traced again, with what this attempt has found (``Found``)."""


@dataclass(slots=True)
class Found:
    """What traces of a model have found of its equal modules. A later one, of other rows or in the
    other mode, begins with it."""

    apart: dict[str, str] = field(default_factory=dict)
    """By the first of equal modules, why they are traced one by one."""
    shown: set[str] = field(default_factory=set)
    """Modules that are called otherwise than their equals before: they are traced."""
    singly: set[str] = field(default_factory=set)
    """By the first of equal modules, those whose calls cannot wait: between them, the model reads
    what they returned, or writes into what they were given. Each is an operation of its own."""
    read: set[str] = field(default_factory=set)
    """Whole numbers that equal modules read, by path in the module: these may not differ."""
    compared: set[tuple[str, ...]] = field(default_factory=set)
    """Equal modules of which the last was traced too, and has the operations of the first."""
    unequal: str = ""
    """Why every module is traced, if the modules could not be proven equal."""

    def copied(self) -> Found:
        return copy.deepcopy(self)


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """Equal modules under one parent, in the order of the model."""

    paths: tuple[str, ...]
    members: tuple[nn.Module, ...]
    differing: frozenset[str]
    """The attributes, by path in the module, whose whole numbers differ between members."""

    def state(self, module: nn.Module) -> State:
        """What a member's forward can read of it, without the numbers that differ. If its tensors
        and submodules are hidden, nobody has changed them, and they are left out."""
        state = state_of(module, inside=not is_hidden(module))
        return {k: v for k, v in state.items() if k not in self.differing}

    def in_state(self, module: nn.Module, state: State) -> bool:
        """Whether a member's forward would read what is in ``state``, the whole state of one."""
        if is_hidden(module):
            state = {path: value for path, value in state.items() if path.startswith(".")}
        return self.state(module) == state

    @contextmanager
    def unread(self, module: nn.Module, reads: list[str]) -> Iterator[None]:
        """Inside, nobody can look at the numbers that differ: ``reads`` notes who tries."""
        before = {path: number_of(module, path) for path in sorted(self.differing)}
        for path, number in before.items():
            _set(module, path, Unread(path, reads) if type(number) is int else number)
        try:
            yield
        finally:
            for path, number in before.items():
                _set(module, path, number)


def equal_modules(model: nn.Module, found: Found) -> list[Siblings]:
    """The groups of at least ``FEWEST`` equal siblings that have parameters and submodules; none
    are inside others, unless these are traced one by one."""
    paths = dict(model.named_parameters(remove_duplicate=False))
    paths |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    uses = Counter(map(id, paths.values()))
    groups: list[Siblings] = []
    whole: set[str] = set()
    """Members of groups, and what is inside them."""
    for parent_path, parent in model.named_modules():
        if parent_path in whole or parent_path.rpartition(".")[0] in whole:
            whole.add(parent_path)
            continue
        kinds: dict[type, list[tuple[str, nn.Module]]] = {}
        for name, child in parent.named_children():
            if next(child.children(), None) is not None and "forward" not in vars(child):
                path = f"{parent_path}.{name}" if parent_path else name
                kinds.setdefault(type(child), []).append((path, child))
        for siblings in kinds.values():
            if len(siblings) >= FEWEST:
                alone = [(path, m) for path, m in siblings if _owns_its_tensors(m, uses)]
                equal = _groups(alone, found.read)
                groups += equal
                whole |= {x for g in equal if g.paths[0] not in found.apart for x in g.paths}
    return groups


def _groups(siblings: list[tuple[str, nn.Module]], read: set[str]) -> list[Siblings]:
    found: list[tuple[State, list[tuple[str, nn.Module]], set[str]]] = []
    typed = names_beside_type(siblings[0][1]) if siblings else frozenset()
    for path, module in siblings:
        state = state_of(module)
        for first, members, differing in found:
            apart = _difference(first, state)
            if apart is not None:  # the type of an ``Unread`` is not that of the number
                read |= {x for x in apart if x.rpartition(".")[2] in typed}
            if apart is not None and apart.isdisjoint(read):
                members.append((path, module))
                differing |= apart
                break
        else:
            found.append((state, [(path, module)], set()))
    return [
        Siblings(tuple(p for p, _ in members), tuple(m for _, m in members), frozenset(differing))
        for _, members, differing in found
        if len(members) >= FEWEST
    ]


def _difference(one: State, two: State) -> set[str] | None:
    """The attributes that differ, if all of these are whole numbers; else None."""
    if one.keys() != two.keys():
        return None
    apart = {name for name in one if one[name] != two[name]}
    return apart if all(_is_number(x[name]) for x in (one, two) for name in apart) else None


def _is_number(value: Any) -> bool:
    """Whether a value of a state is a whole number."""
    return isinstance(value, tuple) and len(value) == 2 and value[0] is int


def _owns_its_tensors(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether no tensor of the module is also one of another module."""
    own = [*(x for _, x in module.named_parameters(remove_duplicate=False))]
    tensors = [*own, *(x for _, x in module.named_buffers(remove_duplicate=False))]
    return bool(own) and all(uses[i] == n for i, n in Counter(map(id, tensors)).items())


def state_of(module: nn.Module, *, inside: bool = True) -> State:
    """The attributes of a module and its submodules by path, in a form that ``==`` compares. If not
    ``inside``, only its own."""
    state: State = {}
    places: dict[int, str] = {}
    for path, owner in submodules(module) if inside else [("", module)]:
        if id(owner) in places:
            state[f"{path}."] = places[id(owner)]
            continue
        places[id(owner)] = path
        state[f"{path}."] = type(owner)
        parameters, buffers = content_of(owner._parameters), content_of(owner._buffers)
        for name, tensor in (*parameters.items(), *buffers.items()):
            kept = name in parameters
            state[f"{path}.{name}"] = tensor if tensor is None else _tensor(tensor, kept, places)
        for name, value in vars(owner).items():
            if name in _HOOKS:
                if owner is not module:  # the hooks of the module itself run around its forward
                    state[f"{path}.{name}"] = _hooks(value)
            elif name == "_non_persistent_buffers_set" or name in ("_parameters", "_buffers"):
                continue
            elif name == "_modules":
                state[f"{path}.{name}"] = tuple(content_of(value))
            elif not (owner is module and name == "forward"):
                state[f"{path}.{name}"] = _value(value, places)
    return state


def _tensor(x: Tensor, parameter: bool, places: dict[int, str]) -> Any:
    place = places.setdefault(id(x), f"tensor {len(places)}")
    own = _value(own_attributes(x), places)
    return parameter, type(x), TensorSpec.of(x), x.stride(), x.requires_grad, place, own


def _hooks(hooks: Any) -> Any:
    if not isinstance(hooks, dict):
        return _Same(hooks)
    kinds = []
    for hook in hooks.values():
        tagged = getattr(hook, "__self__", None)
        if isinstance(tagged, Tagged):
            kinds.append((tagged.name, tagged.pattern))
        elif hook is not True:  # marks of ``always_call``
            return _Same(object())
    return tuple(kinds)


def _value(value: Any, places: dict[int, str]) -> Any:
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)  # 0.0 and -0.0 differ
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(_value(x, places) for x in value)
    if kind in (dict, OrderedDict, Counter):
        return kind, tuple((_value(k, places), _value(v, places)) for k, v in value.items())
    if kind is functools.partial:
        return kind, *(_value(x, places) for x in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return kind, value.__func__, places.get(id(value.__self__), _Same(value.__self__))
    return _Same(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal to the same object only."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def number_of(module: nn.Module, path: str) -> Any:
    """A number that differs between equal modules."""
    owner, _, name = path.rpartition(".")
    return vars(dict(submodules(module))[owner])[name]


def _set(module: nn.Module, path: str, number: Any) -> None:
    owner, _, name = path.rpartition(".")
    vars(module.get_submodule(owner))[name] = number


class Unread:
    """Stands for a whole number that nobody may look at: every use is recorded and fails."""

    def __init__(self, name: str, reads: list[str]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_reads", reads)

    def __getattribute__(self, name: str) -> Any:
        return int if name == "__class__" else refuse_use(self)  # the class of all members


def refuse_use(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Any use of an ``Unread``."""
    name = object.__getattribute__(self, "_name")
    object.__getattribute__(self, "_reads").append(name)
    raise NotEqual(f"{name.removeprefix('.')} is read")


_KEPT = {"__class__", "__new__", "__init__", "__getattribute__", "__init_subclass__", "__doc__"}
for _name in {name for name in dir(int) if name.startswith("__")} - _KEPT - {"__subclasshook__"}:
    setattr(Unread, _name, refuse_use)  # operators look past ``__getattribute__``
