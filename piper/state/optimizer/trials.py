"""Whether an optimizer treats each parameter independently, found by training small parameters.

Four facts decide where and when Piper may call its ``step``:

- ``steps_by_bucket``: one ``step`` for some parameters and a second for the others equal one
  ``step`` for all. False for an optimizer that counts its calls, or that has hooks on ``step``.
- ``looks_across``: a parameter's update depends on other parameters, as with a global norm.
- ``works_on_slices``: it treats each element independently, so a parameter may be cut anywhere.
- ``works_on_shards``: a parameter may be cut along a dimension.

The trials train ``Samples``: names and small shapes. A factory that takes no names is tried with
made-up ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.state.optimizer.factory import (
    NamedParameters,
    members_of,
    settings,
    settings_by_parameter,
)

Make = Callable[[NamedParameters], torch.optim.Optimizer]
Samples = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of small parameters."""

_ROWS, _COLUMNS = 16, 16
_SHAPES = {1: (_ROWS * _COLUMNS,), 2: (_ROWS, _COLUMNS), 3: (4, 8, 8)}
_STEPS = 12
"""Enough to see an action that runs every ten steps."""
_LARGE = 1e4
"""Some gradients are multiplied by this, to reveal clipping of their norm."""
_MIXED = ((_ROWS, _COLUMNS), (_COLUMNS,), (_ROWS, _COLUMNS), (_COLUMNS,))
_MATRICES = ((_ROWS, _COLUMNS),) * 4
UNNAMED: tuple[Samples, ...] = tuple(
    tuple((str(i), shape) for i, shape in enumerate(shapes)) for shapes in (_MIXED, _MATRICES)
)
"""For a factory without names. The second set is for optimizers that take matrices only."""
_DTYPES = (torch.float64, torch.float32)
"""fp64 shows the smallest influence, but some optimizers do not take it."""


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A small shape with the same number of dimensions."""
    return _SHAPES.get(len(shape), (4,) * len(shape))


def sample(seed: int, shape: tuple[int, ...] = (_ROWS, _COLUMNS)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def step_with(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
) -> None:
    """One step on these parameters of the optimizer."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    with only(optimizer, parameters):
        optimizer.step()


def steps_by_bucket(make: Make, samples: Sequence[Samples], device: torch.device) -> bool:
    """Whether ``step`` may be called for some of the parameters first, then for the others."""

    def trained(row: Samples, dtype: torch.dtype) -> bool:
        together = _Trial(make, row, range(len(row)), dtype, device)
        in_turn = _Trial(make, row, range(len(row)), dtype, device)
        if together.has_hooks:
            return False
        for step in range(_STEPS):
            together.step(step)
            in_turn.step_in_turn(step)
        return together.facts() == in_turn.facts() and together.counts() == in_turn.counts()

    return _tried(trained, samples)


def looks_across(make: Make, samples: Sequence[Samples], device: torch.device) -> bool:
    """Whether its updates change if it is made for fewer parameters."""

    def trained(row: Samples, dtype: torch.dtype) -> bool:
        everything = _Trial(make, row, range(len(row)), dtype, device)
        parts = [_Trial(make, row, which, dtype, device) for which in _halves(len(row))]
        for step in range(_STEPS):
            for trial in (everything, *parts):
                trial.step(step)
        return everything.facts() != [fact for part in parts for fact in part.facts()]

    return _tried(trained, samples)


def looks_at_others(make: Make, samples: Sequence[Samples], device: torch.device) -> bool:
    """``looks_across`` for an optimizer that must be made for all parameters: whether its updates
    change if it steps with fewer of them."""

    def trained(row: Samples, dtype: torch.dtype) -> bool:
        whole = range(len(row))
        everything = _Trial(make, row, whole, dtype, device)
        parts = [(_Trial(make, row, whole, dtype, device), which) for which in _halves(len(row))]
        for step in range(_STEPS):
            everything.step(step)
            for trial, which in parts:
                trial.step(step, which)
        facts_of_parts = [trial.facts()[i] for trial, which in parts for i in which]
        return everything.facts() != facts_of_parts

    return _tried(trained, samples)


def works_on_slices(make: Make, name: str, shape: tuple[int, ...], beside: NamedParameters) -> bool:
    """Whether two steps on a parameter equal two steps on its flat halves, each half with its own
    optimizer, as on its own device. Each optimizer also has the parameters ``beside`` it."""
    return _works_on(make, name, shape, beside, lambda x: x.flatten().chunk(2))


def works_on_shards(
    make: Make, name: str, shape: tuple[int, ...], beside: NamedParameters, dim: int
) -> bool:
    """``works_on_slices`` with two shards along ``dim`` instead of flat halves."""
    return _works_on(make, name, shape, beside, partial(torch.chunk, chunks=2, dim=dim))


def _works_on(
    make: Make,
    name: str,
    shape: tuple[int, ...],
    beside: NamedParameters,
    cut: Callable[[Tensor], Sequence[Tensor]],
) -> bool:
    whole = nn.Parameter(sample(0, shape))
    parts = [nn.Parameter(part.clone()) for part in cut(sample(0, shape))]
    try:
        first = make([(name, whole), *beside])
        others = [make([(name, part), *beside]) for part in parts]
        if any(getattr(member, "needs_whole_tensors", False) for member in _owners(first, whole)):
            return False
        known = settings_by_parameter(first)[id(whole)]
        pairs = zip(others, parts, strict=True)
        if any(settings_by_parameter(other)[id(part)] != known for other, part in pairs):
            return False
        for seed in (1, 2):
            gradient = sample(seed, shape)
            step_with(first, [whole], [gradient])
            for other, part, mine in zip(others, parts, cut(gradient), strict=True):
                step_with(other, [part], [mine])
    except (RuntimeError, ValueError, TypeError):
        return False
    wanted = cut(whole.detach())
    return all(torch.allclose(a, b.detach()) for a, b in zip(wanted, parts, strict=True))


def _owners(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> list[torch.optim.Optimizer]:
    """The user's optimizers that have this parameter."""
    return [
        member
        for member in members_of(optimizer)
        if any(parameter is p for group in member.param_groups for p in group["params"])
    ]


def _halves(count: int) -> list[range]:
    """Index ranges of the two halves, without an empty one."""
    half = (count + 1) // 2
    return [which for which in (range(half), range(half, count)) if which]


def _tried(trained: Callable[[Samples, torch.dtype], bool], samples: Sequence[Samples]) -> bool:
    """The result for the first samples and dtype that the optimizer accepts."""
    *first, last = [(row, dtype) for dtype in _DTYPES for row in samples]
    for row, dtype in first:
        with suppress(Exception):  # the last attempt raises it to the caller
            return trained(row, dtype)
    return trained(*last)


class _Trial:
    """The small parameters ``which`` of ``row`` and their optimizer. Gradients pull each parameter
    to its own goal."""

    def __init__(
        self,
        make: Make,
        row: Samples,
        which: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = {i: row[i][1] for i in which}
        self._goals = [sample(100 + i, shape).to(device, dtype) for i, shape in shapes.items()]
        self._parameters = [
            nn.Parameter(sample(i, shape).to(device, dtype)) for i, shape in shapes.items()
        ]
        names = [row[i][0] for i in which]
        self._optimizer = make(list(zip(names, self._parameters, strict=True)))

    @property
    def has_hooks(self) -> bool:
        """Whether the user registered hooks on ``step``."""
        kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        return any(getattr(x, kind, None) for x in members_of(self._optimizer) for kind in kinds)

    def step(self, number: int, which: range | None = None) -> None:
        """One step with all parameters, or only with ``which``, hiding the others."""
        gradients = self._gradients(number)
        chosen = range(len(gradients)) if which is None else which
        parameters = [self._parameters[i] for i in chosen]
        step_with(self._optimizer, parameters, [gradients[i] for i in chosen])
        for parameter in self._parameters:
            parameter.grad = None

    def step_in_turn(self, number: int) -> None:
        """The same step as two calls: each sees one half of the parameters."""
        for which in _halves(len(self._parameters)):
            self.step(number, which)

    def facts(self) -> list[Any]:
        """The result for each parameter: its value, its state, the settings of its group."""
        groups = {
            id(p): settings(group)
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        state = self._optimizer.state
        return [_plain((p.detach(), state.get(p, {}), groups[id(p)])) for p in self._parameters]

    def counts(self) -> Any:
        """Numbers that the optimizers keep as attributes, apart from parameter state."""
        kinds = (bool, int, float, Tensor)
        return [
            _plain({k: v for k, v in vars(member).items() if isinstance(v, kinds)})
            for member in members_of(self._optimizer)
        ]

    def _gradients(self, number: int) -> list[Tensor]:
        large = _LARGE if number % 5 == 3 else 1.0
        noise = [sample(1000 + number, tuple(goal.shape)).to(goal) / 10 for goal in self._goals]
        pairs = zip(self._parameters, self._goals, noise, strict=True)
        return [(p.detach() - goal + some) * large for p, goal, some in pairs]


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restricts the optimizer's groups to ``parameters``: ``step`` visits everything in them."""
    few = set(map(id, parameters))
    usual = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, usual, strict=True):
            group["params"] = [p for p in params if id(p) in few]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, usual, strict=True):
            group["params"] = params


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
