"""Grouped matrix products: rows sorted by expert, each multiplied by its expert's weight.

``offsets[i]`` is where the rows of expert i end, so that only contents depend on the data, never a
shape. Torch's own products leave the rows after the last offset undefined; here they are zero.
These operators have shapes for tracing and a backward, are exact on a CPU in every dtype, and are
torch's fused kernels on a GPU in bf16.
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
        made: Tensor = torch._grouped_mm(_packed(x), _aligned(weight), offs=offsets)
        return made.masked_fill_(_after(offsets, len(x)), 0)
    if _captured(x):
        out = x.new_zeros(x.shape[0], weight.shape[2])
        for mine, one in zip(_members(offsets, len(x)), weight, strict=True):
            out = torch.where(mine, x @ one, out)
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
        fused: Tensor = torch._grouped_mm(_packed(x).t(), _packed(y), offs=offsets)
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
    """For each row, what ``x`` [experts, ...] has for its expert."""
    places = torch.arange(rows, device=x.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets, places, right=True, out_int32=True)
    found = x.index_select(0, expert.clamp_(max=len(x) - 1))
    return found.masked_fill_((places >= offsets[-1]).view(-1, *(1,) * (x.dim() - 1)), 0)


@torch.library.custom_op(_OURS + "expert_sums", mutates_args=())
def expert_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each expert's rows of ``x`` [rows, ...]: [experts, ...]."""
    starts = torch.cat([offsets.new_zeros(1), offsets])
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    found = torch.segment_reduce(wide, "sum", offsets=starts, axis=0, unsafe=True, initial=0)
    return found.to(x.dtype)


@torch.library.custom_op(_OURS + "expert_counts", mutates_args=())
def expert_counts(offsets: Tensor) -> Tensor:
    """How many rows each expert has, [experts, 1]."""
    return offsets.diff(prepend=offsets.new_zeros(1)).unsqueeze(1)


@torch.library.custom_op(_OURS + "expert_offsets", mutates_args=())
def expert_offsets(counts: Tensor) -> Tensor:
    """Where the rows of each expert end, whichever of the devices in ``counts`` [experts, devices]
    they are from."""
    return counts.sum(1).cumsum(0, dtype=torch.int32)


@torch.library.custom_op(_OURS + "regroup", mutates_args=())
def regroup(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """How rows that came from several devices are sorted by expert. ``counts`` [experts, devices]
    says how many came for which expert from which device; they lie by device, and then by expert,
    with room for ``rows``. The order in which they are taken, and that in which they are put
    back."""
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
EXPERT_SUMS = torch.ops.piper.expert_sums.default
REGROUP = torch.ops.piper.regroup.default

EAGER: Mapping[object, Callable[..., Any]] = {
    one._opoverload: one._init_fn
    for one in (
        grouped_mm, grouped_outer, expert_rows, expert_sums, expert_counts, expert_offsets, regroup
    )
}  # fmt: skip
"""What each of these operators does, without the way through torch's dispatcher."""


@register_flop_formula(torch.ops.piper.grouped_mm)
def _product_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """As if every row had an expert."""
    return int(2 * x[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.piper.grouped_outer)
def _outer_flops(x: Any, y: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * x[1] * y[1])


def working_memory(node: fx.Node) -> int:
    """Bytes that one of these operators needs while it runs, beside what it makes."""
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
    """Whether torch has a kernel that needs no offsets on the host."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which the host cannot know the offsets: then each
    expert is given all rows."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _members(offsets: Tensor, rows: int) -> Iterator[Tensor]:
    """For each expert, which rows are its, as a column."""
    places = torch.arange(rows, device=offsets.device).unsqueeze(1)
    start: Tensor | int = 0
    for end in offsets:
        yield (places >= start) & (places < end)
        start = end


def _packed(x: Tensor) -> Tensor:
    return x.contiguous()


def _aligned(weight: Tensor) -> Tensor:
    """``weight`` where the kernel can read it: in a flat buffer it may begin anywhere."""
    return weight.clone() if weight.data_ptr() % 16 else weight


def _after(offsets: Tensor, rows: int) -> Tensor:
    """Which rows are after the last offset, as a column."""
    return (torch.arange(rows, device=offsets.device) >= offsets[-1]).unsqueeze(1)


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each expert that has rows, with where they begin and end."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, start, end
        start = end
