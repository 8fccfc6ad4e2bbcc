"""Warnings about models that would train otherwise than meant: a loss on microbatches that is not
that of the whole batch, parameters without a gradient or in half precision, activation
checkpointing without effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from piper.base.errors import CaptureError, warn
from piper.base.units import counted
from piper.capture.loss.row_mixing import MixingKind, RowMixing
from piper.capture.model import Captured
from piper.strategies.directives.remat import Remat
from piper.strategies.directives.shard import Shard
from piper.strategies.strategy import Strategy

_SAID = {
    MixingKind.STATISTICS: (
        "{op} takes its statistics from {rows} of the {size} rows of a batch at a time: those of "
        "one microbatch on one replica, as gradient accumulation has them everywhere. For those of "
        "the whole batch, give one microbatch and one replica, or use a norm of each row "
        "(LayerNorm, GroupNorm)"
    ),
    MixingKind.ROWS: (
        "{op} computes rows of the batch from one another, and sees {rows} of {size} rows at a "
        "time: those of one microbatch on one replica. The result is not that of the whole batch: "
        "give one microbatch and one replica, or do it outside the step"
    ),
    MixingKind.MEAN: (
        "the loss is not linear in its sum or mean over rows: {op} is computed from {rows} of "
        "{size} rows at a time, one microbatch on one replica, and the loss is the mean of the "
        "results. It is not that of the whole batch: give one microbatch and one replica, or a "
        "loss that is a mean over rows"
    ),
}


def warn_of_mixing(captured: Iterable[Captured]) -> None:
    """Warn of the first operation that needs the whole batch, if a device sees only part of it."""
    for each in captured:
        if each.mixing is not None and each.microbatches > 1:
            size = each.example.size
            _say(each.mixing, size // each.microbatches, size)
            return


def warn_of_untrained(names: Set[str]) -> None:
    """Warn of parameters that require grad, and that the loss does not depend on."""
    if names:
        some = ", ".join(sorted(names)[:3])
        warn(
            f"{counted(len(names), 'parameter')} of the model will not be trained, because the "
            f"loss has no gradient for {some}{', ...' if len(names) > 3 else ''}: unused, under "
            "torch.no_grad or detached. If that is meant, freeze them with requires_grad_(False)"
        )


def warn_of_half_precision(trained: Mapping[str, torch.dtype]) -> None:
    """Warn of parameters that are updated in half precision."""
    halves = [name for name, kind in trained.items() if kind in (torch.bfloat16, torch.float16)]
    if halves:
        warn(
            f"{counted(len(halves), 'parameter')} of the model, such as {halves[0]}, would be "
            f"updated in {trained[halves[0]]}, which rounds small updates away: give "
            "precision='bf16', which computes in bf16 and updates fp32 weights, or load the model "
            "in fp32 (dtype=torch.float32 of from_pretrained)"
        )


def warn_of_checkpointing(model: nn.Module, strategy: Strategy, lines: Sequence[str]) -> None:
    """Warn that the model's own activation checkpointing, at ``lines``, has no effect: the strategy
    decides what is recomputed."""
    if lines and not any(isinstance(d, Remat) for d in strategy.directives):
        warn(
            f"{type(model).__name__} asks for activation checkpointing "
            f"(torch.utils.checkpoint, at {lines[0]}), which changes no number here and saves "
            "no memory: what is computed again is said by the strategy; add "
            "piper.remat({...}, 'all') for the regions meant, or give remat= to compile"
        )


def warn_of_derived_plans(strategy: Strategy, given: Strategy) -> None:
    """Warn of ``parameters=`` in ``strategy`` that ``given`` does not have."""
    for directive, before in zip(strategy.directives, given.directives, strict=True):
        if isinstance(directive, Shard) and directive != before:
            warn(
                "the model declares no plan for tensor parallelism; one was derived that "
                f"communicates least. To fix or change it: parameters={directive.parameters}"
            )


def _say(mixing: RowMixing, rows: int, size: int) -> None:
    at = f"\n{mixing.at}" if mixing.at else ""
    if mixing.kind is MixingKind.OFFSETS:
        raise CaptureError(
            f"a tensor of the batch holds offsets ({mixing.op} of it) and would be cut into "
            f"microbatches and replicas like rows, {rows} of {size} numbers each: pad the "
            "sequences to rows of one length, or give one microbatch and one replica" + at
        )
    warn(_SAID[mixing.kind].format(op=mixing.op, rows=rows, size=size) + at)
