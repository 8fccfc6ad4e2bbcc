"""Grouped matrix products: rows sorted by expert, each multiplied by its expert's weight.

The rows of expert i end at ``offsets[i]``, so no shape depends on the data. Torch's own products
leave the rows after the last offset undefined; here they are zero. These operators can be traced
and differentiated. They are exact on a CPU in every dtype, and use torch's fused kernels on a GPU
in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

_OURS = "piper::"


@torch.library.custom_op(_OURS + "grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x`` [rows, k] by ``weight`` [experts, k, n]: [rows, n]."""
    if _fused(x):
        fused: Tensor = torch._grouped_mm(x.contiguous(), _aligned(weight), offs=offsets)
        return fused.masked_fill_(_after(offsets, len(x)), 0)
    if _captured(x):
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for mine, matrix in zip(_members(offsets, len(x)), weight, strict=True):
            out = torch.where(mine, x @ matrix, out)
        return out
    out = x.new_empty(x.shape[0], weight.shape[2])
    end = 0
    for expert, start, end in _groups(offsets):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
    out[end:].zero_()
    return out


@torch.library.custom_op(_OURS + "grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each expert's rows of ``x`` [rows, k] times ``y`` [rows, n]:
    [experts, k, n]."""
    if _fused(x):
        fused: Tensor = torch._grouped_mm(x.contiguous().t(), y.contiguous(), offs=offsets)
        return fused
    if _captured(x):
        zero = x.new_zeros(())
        return torch.stack(
            [
                torch.where(mine, x, zero).t() @ torch.where(mine, y, zero)
                for mine in _members(offsets, len(x))
            ]
        )
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    for expert, start, end in _groups(offsets):
        torch.mm(x[start:end].t(), y[start:end], out=out[expert])
    return out


@torch.library.custom_op(_OURS + "expert_rows", mutates_args=())
def expert_rows(x: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """For each row, its expert's entry of ``x`` [experts, ...]; zero after the last offset."""
    places = torch.arange(rows, device=x.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, places, right=True, out_int32=True)
    entries = x.index_select(0, expert.clamp_(max=len(x) - 1))
    return entries.masked_fill_((places >= offsets[-1]).view(-1, *(1,) * (x.dim() - 1)), 0)


@torch.library.custom_op(_OURS + "expert_sums", mutates_args=())
def expert_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each expert's rows of ``x`` [rows, ...]: [experts, ...]."""
    starts = torch.cat([offsets.new_zeros(1), offsets])
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    sums = torch.segment_reduce(wide, "sum", offsets=starts, axis=0, unsafe=True, initial=0)
    return sums.to(x.dtype)


@torch.library.custom_op(_OURS + "expert_counts", mutates_args=())
def expert_counts(offsets: Tensor) -> Tensor:
    """The number of rows of each expert, [experts, 1]."""
    return offsets.diff(prepend=offsets.new_zeros(1)).unsqueeze(1)


@torch.library.custom_op(_OURS + "expert_offsets", mutates_args=())
def expert_offsets(counts: Tensor) -> Tensor:
    """The end of each expert's rows, from all devices in ``counts`` [experts, devices]."""
    return counts.sum(1).cumsum(0, dtype=torch.int32)


@torch.library.custom_op(_OURS + "regroup", mutates_args=())
def regroup(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts rows received from several devices by expert, and its inverse.
    ``counts`` [experts, devices] has the number of rows for each expert from each device. The rows
    are ordered by device, then by expert, in a buffer of ``rows`` rows."""
    ends = counts.t().flatten().cumsum(0)
    places = torch.arange(rows, device=counts.device)
    expert = torch.searchsorted(ends, places, right=True, out_int32=True)
    none = expert == counts.numel()
    expert.remainder_(len(counts)).masked_fill_(none, len(counts))
    order = expert.sort(stable=True).indices
    back = torch.empty_like(order)
    back[order] = places
    return order, back


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


@expert_rows.register_fake
def _(x: Tensor, offsets: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


@expert_sums.register_fake
def _(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], *x.shape[1:])


@expert_counts.register_fake
def _(offsets: Tensor) -> Tensor:
    return offsets.new_empty(offsets.shape[0], 1)


@expert_offsets.register_fake
def _(counts: Tensor) -> Tensor:
    return counts.new_empty(counts.shape[0], dtype=torch.int32)


@regroup.register_fake
def _(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    order = counts.new_empty(rows, dtype=torch.int64)
    return order, torch.empty_like(order)


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    of_x, of_weight = ctx.needs_input_grad[:2]
    return (
        grouped_mm(gradient, weight.transpose(1, 2), offsets) if of_x else None,
        grouped_outer(x, gradient, offsets) if of_weight else None,
        None,
    )


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _rows_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (offsets,) = ctx.saved_tensors
    return expert_sums(gradient, offsets), None, None


grouped_mm.register_autograd(_product_backward, setup_context=_keep_product)
expert_rows.register_autograd(_rows_backward, setup_context=_keep_offsets)


GROUPED_MM = torch.ops.piper.grouped_mm.default
EXPERT_COUNTS = torch.ops.piper.expert_counts.default
EXPERT_OFFSETS = torch.ops.piper.expert_offsets.default
EXPERT_ROWS = torch.ops.piper.expert_rows.default
REGROUP = torch.ops.piper.regroup.default

EAGER: Mapping[object, Callable[..., Any]] = {
    operator._opoverload: operator._init_fn
    for operator in (
        grouped_mm, grouped_outer, expert_rows, expert_sums, expert_counts, expert_offsets, regroup
    )
}  # fmt: skip
"""The Python function of each operator, which bypasses torch's dispatcher."""


@register_flop_formula(torch.ops.piper.grouped_mm)
def _product_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """An upper bound: every row is assumed to have an expert."""
    return int(2 * x[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.piper.grouped_outer)
def _outer_flops(x: Any, y: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * x[1] * y[1])


def working_memory(node: fx.Node) -> int:
    """Temporary bytes that one of these operators needs while it runs, beyond its results."""
    if node.op != "call_function" or not str(node.target).startswith("piper."):
        return 0
    made, taken = node.meta["val"], [x.meta["val"] for x in node.all_input_nodes]
    match node.target:
        case torch.ops.piper.regroup.default:
            return 13 * made[0].numel() + 16 * taken[0].numel()
        case torch.ops.piper.expert_rows.default:
            return 9 * len(made) + 8
        case torch.ops.piper.expert_sums.default:
            narrow = taken[0].itemsize < torch.float32.itemsize
            wide = (taken[0].numel() + made.numel()) * torch.float32.itemsize
            return 8 * (len(made) + 2) + (wide if narrow else 0)
        case torch.ops.piper.expert_counts.default | torch.ops.piper.expert_offsets.default:
            return 16 * (len(made) + 1)
        case _:
            return 0


def _fused(x: Tensor) -> bool:
    """Whether torch has a kernel that does not need the offsets on the host."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured. The host cannot read the offsets then, so each expert
    computes all rows."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _members(offsets: Tensor, rows: int) -> Iterator[Tensor]:
    """For each expert, a mask [rows, 1] of its rows."""
    places = torch.arange(rows, device=offsets.device).unsqueeze(1)
    start: Tensor | int = 0
    for end in offsets:
        yield (places >= start) & (places < end)
        start = end


def _aligned(weight: Tensor) -> Tensor:
    """``weight`` aligned for the kernel; in a flat buffer it may begin at any address."""
    return weight.clone() if weight.data_ptr() % 16 else weight


def _after(offsets: Tensor, rows: int) -> Tensor:
    """A mask [rows, 1] of the rows after the last offset."""
    return (torch.arange(rows, device=offsets.device) >= offsets[-1]).unsqueeze(1)


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each expert that has rows, with the start and end of its rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, start, end
        start = end
