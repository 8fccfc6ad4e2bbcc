"""Layouts of expert rows for all-to-all dispatch and combine."""

from __future__ import annotations

import torch
from torch import Tensor

from piper.capture.operators.grouped_mm import regroup
from piper.ir.collectives import packing, unpacking


def pack(x: Tensor, dim: int, ways: int) -> Tensor:
    """The parts of ``x`` along ``dim``, one to send to each device. A dispatch sends rows for the
    experts of each device (``dim`` 0), a combine the rows of each device (1)."""
    sizes, order = packing(x.shape, dim, ways)
    return x.reshape(sizes).permute(order).contiguous()


def unpack(x: Tensor, dim: int) -> Tensor:
    """The received parts, joined along ``dim``: 1 after a dispatch, 0 after a combine."""
    order, sizes = unpacking(x.shape, dim)
    return x.permute(order).reshape(sizes)


def padded(x: Tensor, counts: Tensor, room: int) -> Tensor:
    """A block of ``room`` rows for each of ``counts``: its rows of ``x``, which are consecutive,
    then filler rows that are never read."""
    starts = (counts.cumsum(0) - counts).unsqueeze(1)
    places = (starts + torch.arange(room, device=x.device)).clamp_(max=len(x) - 1)
    return x.index_select(0, places.flatten())


def packed(x: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The inverse of ``padded``: ``rows`` rows that begin with the rows counted in ``counts``."""
    ends, room = counts.cumsum(0), len(x) // len(counts)
    places = torch.arange(rows, device=x.device)
    of = torch.searchsorted(ends, places, right=True).clamp_(max=len(counts) - 1)
    places += of * room - (ends - counts)[of]
    return x.index_select(0, places.clamp_(max=len(x) - 1))


def beyond(counts: Tensor, x: Tensor) -> Tensor:
    """A mask, broadcastable to ``x``, of the rows after those counted in ``counts``."""
    places = torch.arange(len(x), device=x.device)
    return (places >= counts.sum()).view(-1, *(1,) * (x.dim() - 1))


def counts_within(counts: Tensor, start: int, size: int, rest: bool) -> Tensor:
    """Rows per expert among the ``size`` sorted rows from ``start``. ``counts`` has the rows per
    expert among all. With ``rest``, a last number counts rows without an expert."""
    ends = counts.flatten().cumsum(0).clamp_(start, start + size)
    last = [ends.new_full((1,), start + size)] if rest else []
    return torch.cat([ends.new_full((1,), start), ends, *last]).diff().to(counts.dtype)


def own_counts(counts: Tensor, runs: int) -> Tensor:
    """Rows per expert among a device's own rows. If these are several sorted ranges, ``counts`` has
    a row for each range, whose last number counts rows without an expert."""
    return counts.flatten() if runs == 1 else counts[:, :-1].sum(0, dtype=counts.dtype)


def merged(x: Tensor, counts: Tensor) -> Tensor:
    """The rows of several sorted ranges, sorted as one."""
    order, _ = regroup(counts.t(), len(x))
    return x.index_select(0, order)


def unmerged(x: Tensor, counts: Tensor) -> Tensor:
    """The inverse of ``merged``."""
    _, back = regroup(counts.t(), len(x))
    return x.index_select(0, back)
