"""The trial of an optimizer that the table does not know: it trains small parameters whole and
all at once, and again in the way in question. Equal results, or the answer is no.

- ``steps_by_bucket``: one ``step`` for some parameters and a second for the others equal one
  ``step`` for all. Not so for an optimizer that counts its calls, or that has hooks on ``step``.
- ``looks_across``: a parameter's update depends on other parameters, as with a global norm.
- ``works_on_parts``: a parameter may be cut, each part on its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from piper.state.optimizer.factory import NamedParameters, members_of, regrouped, settings
from piper.state.optimizer.nature import has_hooks

Make = Callable[[NamedParameters], torch.optim.Optimizer]
Parting = Callable[[Tensor], Sequence[Tensor]]

_STEPS = 12
"""Enough to see an action that runs every ten steps."""
_LARGE = 1e4
"""Some gradients are multiplied by this, to reveal clipping of their norm."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A small parameter, or a part of it."""

    name: str
    seed: int
    shape: tuple[int, ...]
    cut: Parting = lambda whole: (whole,)
    part: int = 0

    def values(self, kind: int = 0) -> Tensor:
        """Its first values, or other numbers of the same shape."""
        generator = torch.Generator().manual_seed(1000 * kind + self.seed)
        whole = torch.randn(self.shape, generator=generator, dtype=torch.float32)
        return self.cut(whole)[self.part].clone()


def made(
    make: Make,
    pieces: Sequence[Piece],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[NamedParameters, torch.optim.Optimizer]:
    """Parameters, and an optimizer for them."""
    given = [(piece.name, nn.Parameter(piece.values().to(device, dtype))) for piece in pieces]
    return given, make(given)


def steps_by_bucket(make: Make, pieces: Sequence[Piece], device: torch.device) -> bool:
    """Whether ``step`` may be called for some of the parameters first, then for the others."""

    def tried(dtype: torch.dtype) -> bool:
        together = _Trial(make, pieces, [range(len(pieces))], dtype, device)
        in_turn = _Trial(make, pieces, _halves(len(pieces)), dtype, device)
        same = together.facts() == in_turn.facts() and together.counts() == in_turn.counts()
        return same and not any(map(has_hooks, members_of(together.optimizer)))

    return _accepted(tried)


def looks_across(
    make: Make, pieces: Sequence[Piece], device: torch.device, *, of_all: bool
) -> bool:
    """Whether updates change if it is made for half of the parameters; ``of_all``: if it is made
    for all of them and steps with half."""

    def tried(dtype: torch.dtype) -> bool:
        facts: list[Any] = []
        for half in _halves(len(pieces)):
            mine = slice(half.start, half.stop)
            if of_all:
                facts += _Trial(make, pieces, [half], dtype, device).facts()[mine]
            else:
                facts += _Trial(make, pieces[mine], [range(len(half))], dtype, device).facts()
        return _Trial(make, pieces, [range(len(pieces))], dtype, device).facts() != facts

    return _accepted(tried)


def works_on_parts(
    make: Make, piece: Piece, cut: Parting, beside: Sequence[Piece], device: torch.device
) -> bool:
    """Whether training a parameter equals training its parts, each with its own optimizer. Each
    optimizer also has the parameters ``beside`` it, which it does not update."""
    parts = [replace(piece, cut=cut, part=i) for i in range(len(cut(piece.values())))]
    with suppress(RuntimeError, ValueError, TypeError):  # it does not take such shapes
        whole, *others = (
            _Trial(make, [x, *beside], [range(1)], torch.float32, device).parameters[0].detach()
            for x in (piece, *parts)
        )
        return all(map(torch.allclose, cut(whole), others))
    return False


def _halves(count: int) -> list[range]:
    """Index ranges of the two halves, without an empty one."""
    half = (count + 1) // 2
    return [which for which in (range(half), range(half, count)) if which]


def _accepted(tried: Callable[[torch.dtype], bool]) -> bool:
    """The result in fp64, which shows the smallest influence; in fp32 if the optimizer does not
    take fp64."""
    with suppress(Exception):
        return tried(torch.float64)
    return tried(torch.float32)


class _Trial:
    """The optimizer of ``pieces`` after some steps, each of which takes the ``turns`` one after
    another. Gradients pull each parameter to its own goal."""

    def __init__(
        self,
        make: Make,
        pieces: Sequence[Piece],
        turns: Sequence[range],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        given, self.optimizer = made(make, pieces, device, dtype)
        self.parameters = [p for _, p in given]
        goals = [piece.values(1).to(device, dtype) for piece in pieces]
        for number in range(_STEPS):
            large = _LARGE if number % 5 == 3 else 1.0
            noise = [piece.values(2 + number).to(device, dtype) / 10 for piece in pieces]
            pulls = zip(self.parameters, goals, noise, strict=True)
            gradients = [(p.detach() - goal + some) * large for p, goal, some in pulls]
            for turn in turns:
                chosen = [self.parameters[i] for i in turn]
                step_with(self.optimizer, chosen, [gradients[i] for i in turn])

    def facts(self) -> list[Any]:
        """The result for each parameter: its value, its state, the settings of its group."""
        groups = {p: settings(g) for g in self.optimizer.param_groups for p in g["params"]}
        state = self.optimizer.state
        return [_plain((p.detach(), state.get(p, {}), groups[p])) for p in self.parameters]

    def counts(self) -> Any:
        """Numbers that the optimizers keep as attributes, apart from parameter state."""
        kinds = (bool, int, float, Tensor)
        return [
            _plain({k: v for k, v in vars(member).items() if isinstance(v, kinds)})
            for member in members_of(self.optimizer)
        ]


def step_with(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
) -> None:
    """One step on these parameters of the optimizer, which then have no gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    few, groups = set(parameters), optimizer.param_groups
    with regrouped(optimizer, [{"params": [p for p in g["params"] if p in few]} for g in groups]):
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _plain(item: Any) -> Any:
    """``item`` as plain values that compare equal only if every bit is equal."""
    if isinstance(item, Tensor):
        content = item.detach().cpu()
        bits = content.contiguous().reshape(-1).view(torch.uint8).tolist()
        return (str(content.dtype), tuple(content.shape), bits)
    if isinstance(item, Mapping):
        return [(str(key), _plain(value)) for key, value in item.items()]
    if isinstance(item, list | tuple):
        return [_plain(x) for x in item]
    return repr(item) if isinstance(item, str | int | float | bool | None) else type(item).__name__
