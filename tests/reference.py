"""Plain eager PyTorch, microbatch by microbatch: the reference numbers for every captured step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from piper.capture.model import Captured, capture
from tests.one_device import SingleDevice

Inputs = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """Results of one batch: loss, gradients by name, output per microbatch, buffers afterwards."""

    loss: Tensor
    gradients: dict[str, Tensor]
    outputs: tuple[Any, ...]
    buffers: dict[str, Tensor]


class Net(nn.Module):
    """A model from one function ``forward(self, ...)`` and its members by name."""

    def __init__(self, forward: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def slices(tree: Any, parts: int) -> list[Any]:
    """``tree`` cut into ``parts``: every tensor with dimensions is cut along dimension 0."""
    leaves, spec = pytree.tree_flatten(tree)

    def part(leaf: Any, i: int) -> Any:
        return leaf.chunk(parts)[i] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return [pytree.tree_unflatten([part(leaf, i) for leaf in leaves], spec) for i in range(parts)]


def eager(
    model: nn.Module,
    inputs: Inputs,
    targets: Sequence[Tensor],
    loss: Callable[..., Any],
    microbatches: int,
    before: Callable[[nn.Module, int], None] | None = None,
) -> Result:
    """One step of plain PyTorch on a copy of ``model`` (and of ``loss``, if it is a module).

    ``before(model, microbatch)`` is called before each microbatch, for example to seed it.
    """
    memo: dict[int, Any] = {}
    model = copy.deepcopy(model, memo)
    loss = copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss
    model.zero_grad(set_to_none=True)
    losses, counts, outputs = [], [], []
    args = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    parts = zip(slices(args, microbatches), slices(tuple(targets), microbatches), strict=True)
    for index, (x, y) in enumerate(parts):
        if before is not None:
            before(model, index)
        output = model(**x) if isinstance(x, dict) else model(*x)
        value = loss(output, *y)
        if isinstance(value, tuple):
            value[0].backward()
            counts.append(value[1].detach())
        else:
            (value / microbatches).backward()
        losses.append((value[0] if isinstance(value, tuple) else value).detach())
        outputs.append(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), output))
    total = torch.stack(losses).sum()
    gradients = {n: p.grad for n, p in named_parameters(model, loss) if p.grad is not None}
    if counts:
        count = torch.stack(counts).sum()
        gradients = {name: grad / count for name, grad in gradients.items()}
    mean = total / (count if counts else microbatches)
    return Result(mean, gradients, tuple(outputs), dict(model.named_buffers()))


def named_parameters(model: nn.Module, loss: Any) -> list[tuple[str, nn.Parameter]]:
    """Parameters by their names in Piper."""
    own = list(model.named_parameters())
    if isinstance(loss, nn.Module):
        own += [(f"loss:{name}", p) for name, p in loss.named_parameters()]
    return own


def piper_step(
    captured: Captured,
    model: nn.Module,
    inputs: Inputs,
    targets: Sequence[Tensor],
    *,
    split_backward: bool,
    loss: Any = None,
) -> Result:
    """The same step by the captured programs, on a copy of ``model``."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(model, memo)
    module = copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else None
    single = SingleDevice(captured, model, loss=module, split_backward=split_backward)
    batch = (inputs,) if isinstance(inputs, Mapping) else tuple(inputs)
    mean, gradients, outputs = single.differentiate(*batch, *targets)
    buffers = {name: single.buffers[name] for name, _ in model.named_buffers()}
    return Result(mean, gradients, outputs, buffers)


def assert_equal(
    found: Result, expected: Result, what: str = "", *, gradient_tolerance: float = 0.0
) -> None:
    """Loss, gradients, outputs and buffers are equal bit for bit. Where a test says why, gradients
    may differ by ``gradient_tolerance`` times their largest element."""
    assert found.gradients.keys() == expected.gradients.keys(), what
    wrong = [
        name
        for name, gradient in found.gradients.items()
        if not same(gradient, expected.gradients[name], gradient_tolerance)
    ]
    wrong += [n for n, b in found.buffers.items() if not same(b, expected.buffers[n])]
    wrong += [] if same(found.loss, expected.loss) else ["the loss"]
    assert len(found.outputs) == len(expected.outputs), what
    for i, (mine, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        a, a_spec = pytree.tree_flatten(mine)
        b, b_spec = pytree.tree_flatten(theirs)
        assert a_spec == b_spec, what
        if not all(same(x, y) for x, y in zip(a, b, strict=True)):
            wrong.append(f"output of microbatch {i}")
    assert not wrong, f"{what}: not bitwise equal: {', '.join(wrong)}"


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Equal values of one dtype and shape; tensors bit for bit, or within ``tolerance`` times the
    largest element."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not tolerance:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def assert_equal_to_eager(
    model: nn.Module,
    inputs: Inputs,
    targets: Sequence[Tensor],
    loss: Callable[..., Any],
    *,
    microbatches: int = 2,
    tags: Mapping[str, str] | None = None,
    remat: Sequence[str] = ("none",),
    gradient_tolerance: float = 0.0,
) -> Captured:
    """Capture ``model`` and compare one step with eager, for fused and for split backward.

    Returns the last capture, one for each policy of ``remat``.
    """
    expected = eager(model, inputs, targets, loss, microbatches)
    for policy in remat:
        captured = capture(
            model,
            inputs=inputs,
            targets=targets,
            loss=loss,
            tags=tags,
            microbatches=microbatches,
            remat=policy,
            outputs=lambda output, *_: output,
        )
        for split in (False, True):
            found = piper_step(captured, model, inputs, targets, split_backward=split, loss=loss)
            what = f"remat={policy}, {'split' if split else 'fused'}"
            assert_equal(found, expected, what, gradient_tolerance=gradient_tolerance)
    return captured
