"""Whether an optimizer treats each parameter by itself, found by training small ones with it.

Three facts, of which each matters for where and when its ``step`` may be called:

- ``steps_by_bucket``: calling ``step`` for some parameters and then for the others is the same as
  calling it once for all of them. Not so for whatever counts its calls, or for hooks on ``step``.
- ``looks_across``: what becomes of a parameter depends on the others, as with a norm over all.
- ``works_on_parts``: it treats each element by itself, so that a parameter may be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Shapes = Sequence[tuple[int, ...]]

_ROWS, _COLUMNS = 16, 16
_STEPS = 12
"""Enough for what is done every ten steps."""
_LARGE = 1e4
"""Some gradients are multiplied with it: by that a limit on their norm is found."""
_MIXED = ((_ROWS, _COLUMNS), (_COLUMNS,), (_ROWS, _COLUMNS), (_COLUMNS,))
_MATRICES = ((_ROWS, _COLUMNS),) * 4
_KINDS = tuple((s, d) for d in (torch.float64, torch.float32) for s in (_MIXED, _MATRICES))
"""What is trained, the first that an optimizer takes: some take matrices only, some no fp64, in
which the smallest influence is seen."""


def sample(seed: int, shape: tuple[int, ...] = (_ROWS, _COLUMNS)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def step_with(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def steps_by_bucket(factory: OptimizerFactory, device: torch.device) -> bool:
    """Whether ``step`` may be called for some of the parameters, and then for the others."""

    def trained(shapes: Shapes, dtype: torch.dtype) -> bool:
        together = _Trial(factory, shapes, range(len(shapes)), dtype, device)
        in_turn = _Trial(factory, shapes, range(len(shapes)), dtype, device)
        if together.has_hooks:
            return False
        for step in range(_STEPS):
            together.step(step)
            in_turn.step_in_turn(step)
        return together.facts() == in_turn.facts() and together.counts() == in_turn.counts()

    return _tried(trained)


def looks_across(factory: OptimizerFactory, device: torch.device) -> bool:
    """Whether it does something else with parameters if it is given fewer of them."""

    def trained(shapes: Shapes, dtype: torch.dtype) -> bool:
        half = len(shapes) // 2
        halves = (range(half), range(half, 2 * half))
        everything = _Trial(factory, shapes, range(len(shapes)), dtype, device)
        parts = [_Trial(factory, shapes, which, dtype, device) for which in halves]
        for step in range(_STEPS):
            for trial in (everything, *parts):
                trial.step(step)
        return everything.facts() != [*parts[0].facts(), *parts[1].facts()]

    return _tried(trained)


def works_on_parts(factory: OptimizerFactory) -> bool:
    """Whether two steps on a matrix equal two steps on its halves, each a flat row."""
    whole = nn.Parameter(sample(0))
    halves = [nn.Parameter(part.clone()) for part in sample(0).flatten().chunk(2)]
    try:
        first, second = factory([whole]), factory(halves)
        for seed in (1, 2):
            gradient = sample(seed)
            step_with(first, [whole], [gradient])
            step_with(second, halves, list(gradient.flatten().chunk(2)))
    except (RuntimeError, ValueError, TypeError):
        return False
    return torch.allclose(whole.detach().flatten(), torch.cat([h.detach() for h in halves]))


def _tried(trained: Callable[[Shapes, torch.dtype], bool]) -> bool:
    """What comes out with the first kind of parameters that is taken."""
    for shapes, dtype in _KINDS[:-1]:
        with suppress(Exception):  # whatever it is, the last kind tells it to the caller
            return trained(shapes, dtype)
    return trained(*_KINDS[-1])


class _Trial:
    """Small parameters, each drawn to a goal of its own, and an optimizer of some of them."""

    def __init__(
        self,
        factory: OptimizerFactory,
        shapes: Shapes,
        which: range,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._goals = [sample(100 + i, shapes[i]).to(device, dtype) for i in which]
        self._parameters = [nn.Parameter(sample(i, shapes[i]).to(device, dtype)) for i in which]
        self._optimizer = factory(self._parameters)

    @property
    def has_hooks(self) -> bool:
        """Whether something of the user's happens with every call of ``step``."""
        made: Any = self._optimizer
        kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        return any(getattr(made, kind, None) for kind in kinds)

    def step(self, number: int) -> None:
        """One step with all parameters at once."""
        step_with(self._optimizer, self._parameters, self._gradients(number))
        self._clear()

    def step_in_turn(self, number: int) -> None:
        """The same as one call for each half of the parameters, which does not see the other."""
        gradients = self._gradients(number)
        half = len(gradients) // 2
        for part in (slice(half), slice(half, None)):
            with only(self._optimizer, self._parameters[part]):
                step_with(self._optimizer, self._parameters[part], gradients[part])
            self._clear()

    def facts(self) -> list[Any]:
        """What was made of each parameter: its value, its state, the settings of its group."""
        groups = {
            id(p): {k: v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        state = self._optimizer.state
        return [_plain((p.detach(), state.get(p, {}), groups[id(p)])) for p in self._parameters]

    def counts(self) -> Any:
        """Numbers that the optimizer keeps for itself."""
        kinds = (bool, int, float, Tensor)
        return _plain({k: v for k, v in vars(self._optimizer).items() if isinstance(v, kinds)})

    def _gradients(self, number: int) -> list[Tensor]:
        large = _LARGE if number % 5 == 3 else 1.0
        noise = [sample(1000 + number, tuple(goal.shape)).to(goal) / 10 for goal in self._goals]
        pairs = zip(self._parameters, self._goals, noise, strict=True)
        return [(p.detach() - goal + some) * large for p, goal, some in pairs]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The optimizer knows of some parameters only: it looks at every one that it knows."""
    few = set(map(id, parameters))
    usual = [group["params"] for group in optimizer.param_groups]
    try:
        for group, row in zip(optimizer.param_groups, usual, strict=True):
            group["params"] = [p for p in row if id(p) in few]
        yield
    finally:
        for group, row in zip(optimizer.param_groups, usual, strict=True):
            group["params"] = row


def _plain(item: Any) -> Any:
    """``item`` as something that is equal to another if all its bits are."""
    if isinstance(item, Tensor):
        content = item.detach().cpu()
        bits = content.contiguous().reshape(-1).view(torch.uint8).tolist()
        return (str(content.dtype), tuple(content.shape), bits)
    if isinstance(item, Mapping):
        return [(str(key), _plain(value)) for key, value in item.items()]
    if isinstance(item, list | tuple):
        return [_plain(x) for x in item]
    return repr(item) if isinstance(item, str | int | float | bool | None) else type(item).__name__
