"""Models whose computations are sleeps of known length: many workers fit on few cores.

Everything else is real: capture, plans, processes, communication. Forwards, gradients of inputs and
gradients of weights each have a length of their own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import register_flop_formula

from piper import annotate

FLOPS = 1e9


@torch.library.custom_op("piper_bench::pause", mutates_args=(), tags=(torch.Tag.pointwise,))
def pause(x: Tensor, seconds: float) -> Tensor:
    """``x``, later."""
    time.sleep(seconds)
    return x.clone()


@torch.library.custom_op("piper_bench::sleep", mutates_args=(), tags=(torch.Tag.pointwise,))
def sleep(x: Tensor, forward: float, backward: float) -> Tensor:
    """``x``, later; its gradient takes a time of its own."""
    time.sleep(forward)
    return x.clone()


@torch.library.custom_op("piper_bench::slowly", mutates_args=(), tags=(torch.Tag.pointwise,))
def slowly(weight: Tensor, seconds: float) -> Tensor:
    """``weight``, at once; its gradient takes time."""
    return weight.clone()


@pause.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@sleep.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


@slowly.register_fake
def _(weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[-1]


def _sleep_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return pause(gradient, ctx.seconds), None, None


def _slowly_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return pause(gradient, ctx.seconds), None


sleep.register_autograd(_sleep_backward, setup_context=_keep)
slowly.register_autograd(_slowly_backward, setup_context=_keep)


@register_flop_formula(torch.ops.piper_bench.pause)
def _pause_flops(shape: object, seconds: float, **_: object) -> int:
    """So that plans know how long it takes, on a device of ``FLOPS`` a second."""
    return round(seconds * FLOPS)


@register_flop_formula(torch.ops.piper_bench.sleep)
def _sleep_flops(shape: object, forward: float, backward: float, **_: object) -> int:
    return round(forward * FLOPS)


class Sleepers(nn.Module):
    """Layers that sleep and scale, each followed by experts that do; a backward takes as long as a
    forward."""

    def __init__(self, layers: int, experts: int, dim: int, seconds: float) -> None:
        super().__init__()
        self.seconds, self.experts = seconds, experts
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(layers))
        self.expert_scales = nn.ParameterList(torch.ones(experts, 1, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Of rows of ``experts`` times some positions: those at position p go to expert p."""
        for scale, expert_scale in zip(self.scales, self.expert_scales, strict=True):
            with annotate("layer"):
                x = sleep(x * scale, self.seconds, self.seconds)
                rows = x.unflatten(1, (self.experts, -1)).transpose(0, 1).flatten(1, 2)
                with annotate("EP"):
                    rows = sleep(rows * expert_scale, self.seconds, self.seconds)
                x = rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)
        return x


class Block(nn.Module):
    """Sleeps and scales."""

    def __init__(self, dim: int, forward: float, inputs: float, weights: float) -> None:
        """Seconds of a forward, of the gradient of its input, and of that of its weight."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.seconds = forward, inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        forward, inputs, weights = self.seconds
        return sleep(x, forward, inputs) * slowly(self.scale, weights)


class Blocks(nn.Module):
    """One after the other, each a region "layer"."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with annotate("layer"):
                x = block(x)
        return x


def loss(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target)
