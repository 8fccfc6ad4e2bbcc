"""A model whose computations are sleeps of known length: many workers fit on few cores.

Everything else is real: capture, plans, processes, communication. A layer sleeps, then its experts,
which are exchanged; forwards and backwards take equally long.
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


@torch.library.custom_op("piper_bench::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    """``x``, later; its gradient takes as long."""
    time.sleep(seconds)
    return x.clone()


@sleep.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return sleep(gradient, ctx.seconds), None


sleep.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.piper_bench.sleep)
def _flops(shape: object, seconds: float, **_: object) -> int:
    """So that plans know how long it takes, on a device of ``FLOPS`` a second."""
    return round(seconds * FLOPS)


class Sleepers(nn.Module):
    """Layers that sleep and scale, each followed by experts that do."""

    def __init__(self, layers: int, experts: int, dim: int, seconds: float) -> None:
        super().__init__()
        self.seconds, self.experts = seconds, experts
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(layers))
        self.expert_scales = nn.ParameterList(torch.ones(experts, 1, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Of rows of ``experts`` times some positions: those at position p go to expert p."""
        for scale, expert_scale in zip(self.scales, self.expert_scales, strict=True):
            with annotate("layer"):
                x = sleep(x * scale, self.seconds)
                rows = x.unflatten(1, (self.experts, -1)).transpose(0, 1).flatten(1, 2)
                with annotate("EP"):
                    rows = sleep(rows * expert_scale, self.seconds)
                x = rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)
        return x


def loss(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target)
