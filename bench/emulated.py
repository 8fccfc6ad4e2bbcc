"""Models whose computations are sleeps of known length, so that many workers fit on few cores.

Everything else is real: capture, plans, processes, communication. Forwards, input gradients and
weight gradients each have their own length.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import register_flop_formula

from piper import annotate

FLOPS = 1e9
SPEEDS = "PIPER_BENCH_SPEEDS"
"""The environment variable with the name of a file: the speeds of processes that are not as fast as
the others, a line for each with its number and speed."""


def _sleep(seconds: float) -> None:
    path = os.environ.get(SPEEDS)
    if path is None:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    for line in Path(path).read_text().splitlines():
        pid, speed = line.split()
        if int(pid) == os.getpid():
            until += seconds / float(speed) - seconds
    time.sleep(max(0.0, until - time.perf_counter()))


@torch.library.custom_op("piper_bench::pause", mutates_args=(), tags=(torch.Tag.pointwise,))
def pause(x: Tensor, seconds: float) -> Tensor:
    """A copy of ``x``, after ``seconds``."""
    _sleep(seconds)
    return x.clone()


@torch.library.custom_op("piper_bench::sleep", mutates_args=(), tags=(torch.Tag.pointwise,))
def sleep(x: Tensor, forward: float, backward: float) -> Tensor:
    """A copy of ``x``, after ``forward`` seconds; its gradient takes ``backward`` seconds."""
    _sleep(forward)
    return x.clone()


@torch.library.custom_op("piper_bench::slowly", mutates_args=(), tags=(torch.Tag.pointwise,))
def slowly(weight: Tensor, seconds: float) -> Tensor:
    """A copy of ``weight``, at once; its gradient takes ``seconds``."""
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
    """Tells plans how long a pause takes, on a device of ``FLOPS`` operations per second."""
    return round(seconds * FLOPS)


@register_flop_formula(torch.ops.piper_bench.sleep)
def _sleep_flops(shape: object, forward: float, backward: float, **_: object) -> int:
    return round(forward * FLOPS)


class Sleepers(nn.Module):
    """Layers that sleep and scale, each followed by experts that do the same; a backward takes as
    long as a forward."""

    def __init__(self, layers: int, experts: int, dim: int, seconds: float) -> None:
        super().__init__()
        self.seconds, self.experts = seconds, experts
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(layers))
        self.expert_scales = nn.ParameterList(torch.ones(experts, 1, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Dimension 1 has ``experts`` blocks of positions: block p goes to expert p."""
        for scale, expert_scale in zip(self.scales, self.expert_scales, strict=True):
            with annotate("layer"):
                x = sleep(x * scale, self.seconds, self.seconds)
                rows = x.unflatten(1, (self.experts, -1)).transpose(0, 1).flatten(1, 2)
                with annotate("EP"):
                    rows = sleep(rows * expert_scale, self.seconds, self.seconds)
                x = rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)
        return x


class Block(nn.Module):
    """Sleeps, and scales its input."""

    def __init__(self, dim: int, forward: float, inputs: float, weights: float) -> None:
        """Seconds of the forward, of the input gradient, and of the weight gradient."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.seconds = forward, inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        forward, inputs, weights = self.seconds
        return sleep(x, forward, inputs) * slowly(self.scale, weights)


class Blocks(nn.Module):
    """Blocks in sequence, each a region "layer"."""

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
