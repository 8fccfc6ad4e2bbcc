"""The regions of a model that names none: its repeated blocks are ``layer``, their experts ``EP``.

A stack is an ``nn.ModuleList`` or ``nn.Sequential`` with two or more children of one class. The
outermost stacks count. Stacks of single operations (``nn.Linear``) count only where they hold more
parameters than stacks of blocks. Experts are modules inside a block that hold 3-D parameters and
are called experts. Everything else joins its neighbours, as operations outside regions always do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from piper.capture.regions import ChosenTags, paths_like

LAYER, EXPERTS = "layer", "EP"


@dataclass(frozen=True, slots=True)
class _Stack:
    """Repeated blocks, by path in the model."""

    path: str
    blocks: dict[str, nn.Module]

    @property
    def composite(self) -> bool:
        """Whether its blocks have submodules."""
        return any(next(block.children(), None) is not None for block in self.blocks.values())

    @property
    def size(self) -> int:
        """The number of elements of its parameters."""
        return sum(map(_size, self.blocks.values()))


def chosen_tags(model: nn.Module) -> Mapping[str, str]:
    """Tags for the repeated blocks of ``model``; none if nothing in it repeats."""
    blocks = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    stacks = list(_stacks(model, "", blocks))
    composite = [stack for stack in stacks if stack.composite]
    single = [stack for stack in stacks if not stack.composite]
    if sum(stack.size for stack in composite) >= sum(stack.size for stack in single):
        stacks = composite
    everything = dict(model.named_modules(remove_duplicate=False))
    tags: dict[str, str] = {}
    for stack in stacks:
        tags |= dict.fromkeys(_patterns(stack, list(stack.blocks), everything), LAYER)
    for stack in stacks:
        experts = [
            f"{path}.{name}"
            for path, block in stack.blocks.items()
            for name, module in block.named_modules()
            if name and _of_experts(name, module)
        ]
        tags |= dict.fromkeys(_patterns(stack, experts, everything), EXPERTS)
    return ChosenTags(tags) if tags else tags


def _stacks(module: nn.Module, path: str, blocks: set[str]) -> Iterator[_Stack]:
    """The outermost stacks in ``module``. ``blocks`` names classes that are blocks wherever they
    are: models of transformers declare them."""
    named = [(name, child) for name, child in module._modules.items() if child is not None]
    children = {f"{path}.{name}" if path else name: child for name, child in named}
    chosen: dict[str, nn.Module] = {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        kinds: defaultdict[type, dict[str, nn.Module]] = defaultdict(dict)
        for place, child in children.items():
            if _size(child):
                kinds[type(child)][place] = child
        repeated = [_Stack(path, kind) for kind in kinds.values() if len(kind) > 1]
        chosen |= max(repeated, key=lambda stack: stack.size, default=_Stack(path, {})).blocks
        chosen |= {place: x for place, x in children.items() if type(x).__name__ in blocks}
    if chosen:
        yield _Stack(path, {place: x for place, x in children.items() if place in chosen})
    for place, child in children.items():
        if place not in chosen:
            yield from _stacks(child, place, blocks)


def _of_experts(name: str, module: nn.Module) -> bool:
    called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
    return "expert" in called and any(p.dim() == 3 for p in own)


def _patterns(stack: _Stack, paths: list[str], everything: dict[str, nn.Module]) -> list[str]:
    """Patterns that match ``paths``, modules of the blocks of ``stack``, and nothing else."""
    start = f"{stack.path}." if stack.path else ""
    general: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        _, dot, inside = path.removeprefix(start).partition(".")
        general[f"{start}*{dot}{inside}"].append(path)
    return [
        pattern
        for wide, exact in general.items()
        for pattern in ([wide] if paths_like(wide, everything) == exact else exact)
    ]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))
