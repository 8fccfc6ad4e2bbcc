"""Causal attention for context parallelism: each device has a head part and a tail part.

Device i of n has the queries of parts i and 2n - 1 - i of 2n. They see i + 1 and 2n - i parts of
the keys: 2n + 1 on every device, out of 4n without the causal mask.

    n = 2       keys 0 1 2 3               keys 0 1 2 3
    device 0  part 0 #         device 1  part 1 # #
              part 3 # # # #             part 2 # # #

The rank is a tensor, so this is one operation with the same shapes on all devices. On a CPU it
slices the keys. On a GPU it uses kernels for sequences of different lengths, and the host never
reads the rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

aten = torch.ops.aten
_BOTTOM_RIGHT = 2
"""The causal mask type of torch's memory-efficient kernels in which the last query sees the last
key."""
_ALIGNED = 8
"""The head width of those kernels must be a multiple of this."""


@torch.library.custom_op("piper::head_tail_attention", mutates_args=())
def head_tail_attention(
    query: Tensor, key: Tensor, value: Tensor, rank: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The attention of device ``rank``'s queries, and the log-sum-exp of the softmax for the
    backward. ``query`` is ``[batch, heads, head and tail, width]``. ``key`` and ``value`` have the
    whole sequence, and may have fewer heads (grouped-query attention)."""
    key, value = _repeated(query, key), _repeated(query, value)
    if query.device.type == "cpu":
        query, key, value = map(_adjacent, (query, key, value))
        parts = [
            aten._scaled_dot_product_flash_attention_for_cpu(
                q, key[:, :, :seen], value[:, :, :seen], attn_mask=_mask(q, seen), scale=scale
            )
            for q, seen in _parts(query, key, rank)
        ]
        return torch.cat([x for x, _ in parts], 2), torch.cat([x for _, x in parts], 2)
    packed = _Packed(query, key, rank)
    attended, sums, *_ = aten._efficient_attention_forward(
        packed.queries(query),
        packed.keys(key),
        packed.keys(value),
        None,
        *packed.lengths,
        0.0,
        _BOTTOM_RIGHT,
        True,
        scale=scale,
    )
    return packed.unpacked(attended), sums


@head_tail_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, rank: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, seq, _ = query.shape
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = (batch, heads, seq)
    if query.device.type != "cpu":
        shape = (2 * batch, heads, math.ceil(seq / 2 / 32) * 32)
    made = query.new_empty(batch, heads, seq, value.shape[-1])
    return made, query.new_empty(shape, dtype=dtype)


@torch.library.custom_op("piper::head_tail_attention_backward", mutates_args=())
def head_tail_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    made: Tensor,
    sums: Tensor,
    rank: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, and the share of these queries in the gradients of all keys and
    values."""
    heads = key.shape[1]
    key, value = _repeated(query, key), _repeated(query, value)
    if query.device.type == "cpu":
        gradients = _backward_by_parts((gradient, query, made, sums), key, value, rank, scale)
    else:
        packed = _Packed(query, key, rank)
        for_queries, for_keys, for_values, _ = aten._efficient_attention_backward(
            packed.queries(gradient),
            packed.queries(query),
            packed.keys(key),
            packed.keys(value),
            None,
            packed.queries(made),
            *packed.lengths,
            sums,
            0.0,
            torch.zeros((), dtype=torch.int64, device=query.device),
            torch.zeros((), dtype=torch.int64, device=query.device),
            _BOTTOM_RIGHT,
            False,
            scale=scale,
        )
        gradients = packed.unpacked(for_queries), packed.added(for_keys), packed.added(for_values)
    return gradients[0], _summed(gradients[1], heads), _summed(gradients[2], heads)


@head_tail_attention_backward.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, rank, scale = inputs
    ctx.save_for_backward(query, key, value, *output, rank)
    ctx.scale = scale


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, rank = ctx.saved_tensors
    gradients = head_tail_attention_backward(gradient, *saved, rank, ctx.scale)
    return *gradients, None, None


head_tail_attention.register_autograd(_backward, setup_context=_keep)
HEAD_TAIL = torch.ops.piper.head_tail_attention.default


@register_flop_formula(torch.ops.piper.head_tail_attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * 2 * _products(query, key)


@register_flop_formula(torch.ops.piper.head_tail_attention_backward)
def _backward_flops(_: torch.Size, query: torch.Size, key: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * 5 * _products(query, key)


def _products(query: torch.Size, key: torch.Size) -> int:
    """Multiplications of queries with the keys they see. A part of the keys on the causal diagonal
    counts as a whole part."""
    batch, heads, own, width = query
    part = own // 2
    return batch * heads * part * (key[2] + part) * width


def _backward_by_parts(
    of_queries: tuple[Tensor, ...], key: Tensor, value: Tensor, rank: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``of_queries`` are the gradients, the queries, their results and the log-sum-exps."""
    for_queries, for_keys, for_values = [], torch.zeros_like(key), torch.zeros_like(value)
    *rows, sums = of_queries
    gradient, query, made, key, value = map(_adjacent, (*rows, key, value))
    halves = zip(*(x.chunk(2, 2) for x in (gradient, made, sums)), strict=True)
    for (q, seen), (g, x, s) in zip(_parts(query, key, rank), halves, strict=True):
        shown = key[:, :, :seen], value[:, :, :seen]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, *shown, x, s, 0.0, False, attn_mask=_mask(q, seen), scale=scale
        )
        for_queries.append(dq)
        for_keys[:, :, :seen] += dk
        for_values[:, :, :seen] += dv
    return torch.cat(for_queries, 2), for_keys, for_values


def _parts(query: Tensor, key: Tensor, rank: Tensor) -> list[tuple[Tensor, int]]:
    """The two parts of the queries, each with the number of keys it sees."""
    head, tail = query.chunk(2, 2)
    first = (int(rank) + 1) * head.shape[2]
    return [(head, first), (tail, key.shape[2] + head.shape[2] - first)]


def _mask(query: Tensor, seen: int) -> Tensor:
    """The additive causal mask [queries, seen keys] in which the last query sees the last key."""
    rows = query.shape[2]
    hidden = torch.full((rows, seen), -math.inf, dtype=query.dtype)
    return hidden.triu(seen - rows + 1)


def _adjacent(x: Tensor) -> Tensor:
    """``x`` with the numbers of a row side by side: torch's CPU kernel reads them so, whatever the
    strides say. A concatenation of rows of one number, for instance, may lie otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeated(query: Tensor, x: Tensor) -> Tensor:
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The gradient of ``heads`` heads, summed over their repetitions."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


class _Packed:
    """Head and tail parts of a batch, concatenated as sequences of different lengths."""

    def __init__(self, query: Tensor, key: Tensor, rank: Tensor) -> None:
        self._batch, self._width = query.shape[0], query.shape[3]
        part, whole = query.shape[2] // 2, key.shape[2]
        count = torch.arange(2 * self._batch + 1, device=query.device)
        head = (rank + 1) * part
        ends = count // 2 * (whole + part) + count % 2 * head
        self.lengths = (count * part).to(torch.int32), ends.to(torch.int32), part, whole
        place = torch.arange(whole + part, device=query.device)
        self._at = torch.where(place < head, place, place - head)
        self._whole = whole

    def queries(self, x: Tensor) -> Tensor:
        return self._aligned(x.transpose(1, 2).flatten(0, 1).unsqueeze(0))

    def keys(self, x: Tensor) -> Tensor:
        """The keys that the head part sees, then the keys that the tail part sees."""
        return self.queries(x.index_select(2, self._at))

    def unpacked(self, x: Tensor) -> Tensor:
        """The inverse of ``queries``."""
        apart = x.squeeze(0).unflatten(0, (self._batch, -1)).transpose(1, 2)
        return apart[..., : self._width].contiguous()

    def added(self, x: Tensor) -> Tensor:
        """The gradients of all keys, summed over head and tail."""
        apart = self.unpacked(x)
        shape = list(apart.shape)
        shape[2] = self._whole
        return apart.new_zeros(shape).index_add(2, self._at, apart)

    def _aligned(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % _ALIGNED)).contiguous()
