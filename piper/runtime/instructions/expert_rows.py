"""How the rows of experts are laid out for all-to-all dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from piper.capture.operators.grouped_mm import regroup

Arrange = Callable[[Tensor], Tensor]


def dispatch(ways: int) -> tuple[Arrange, Arrange]:
    """From all experts with one's own rows to one's own experts with all rows: what is sent, and
    how what arrives is put together."""

    def pack(x: Tensor) -> Tensor:
        experts, rows, *rest = x.shape
        return x.reshape(ways, experts // ways, rows, *rest).contiguous()

    def unpack(x: Tensor) -> Tensor:
        _, experts, rows, *rest = x.shape
        return x.transpose(0, 1).reshape(experts, ways * rows, *rest)

    return pack, unpack


def combine(ways: int) -> tuple[Arrange, Arrange]:
    """The way back."""

    def pack(x: Tensor) -> Tensor:
        experts, rows, *rest = x.shape
        return x.reshape(experts, ways, rows // ways, *rest).transpose(0, 1).contiguous()

    def unpack(x: Tensor) -> Tensor:
        _, experts, rows, *rest = x.shape
        return x.reshape(ways * experts, rows, *rest)

    return pack, unpack


def padded(x: Tensor, counts: Tensor, room: int) -> Tensor:
    """``room`` rows for each of ``counts``: those of ``x`` that are its, one after another, and
    others that nobody reads."""
    starts = (counts.cumsum(0) - counts).unsqueeze(1)
    places = (starts + torch.arange(room, device=x.device)).clamp_(max=len(x) - 1)
    return x.index_select(0, places.flatten())


def packed(x: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The way back: ``rows`` rows, of which the first are those that ``counts`` are of."""
    ends, room = counts.cumsum(0), len(x) // len(counts)
    places = torch.arange(rows, device=x.device)
    of = torch.searchsorted(ends, places, right=True).clamp_(max=len(counts) - 1)
    places += of * room - (ends - counts)[of]
    return x.index_select(0, places.clamp_(max=len(x) - 1))


def beyond(counts: Tensor, x: Tensor) -> Tensor:
    """Which rows of ``x`` are after those that ``counts`` are of, as a mask that fits it."""
    places = torch.arange(len(x), device=x.device)
    return (places >= counts.sum()).view(-1, *(1,) * (x.dim() - 1))


def counts_within(counts: Tensor, start: int, size: int, rest: bool) -> Tensor:
    """How many of ``size`` sorted rows from ``start`` on each expert has, if it has ``counts`` of
    all; and, as the last, how many of them have none, where the ``rest`` is wanted."""
    ends = counts.flatten().cumsum(0).clamp_(start, start + size)
    last = [ends.new_full((1,), start + size)] if rest else []
    return torch.cat([ends.new_full((1,), start), ends, *last]).diff().to(counts.dtype)


def own_counts(counts: Tensor, runs: int) -> Tensor:
    """How many rows each expert has of a device's own, which are of one sorted range or of several:
    then ``counts`` has a row for each, with how many have no expert as its last."""
    return counts.flatten() if runs == 1 else counts[:, :-1].sum(0, dtype=counts.dtype)


def merged(x: Tensor, counts: Tensor) -> Tensor:
    """The rows of several sorted ranges, sorted."""
    order, _ = regroup(counts.t(), len(x))
    return x.index_select(0, order)


def unmerged(x: Tensor, counts: Tensor) -> Tensor:
    """The way back."""
    _, back = regroup(counts.t(), len(x))
    return x.index_select(0, back)
