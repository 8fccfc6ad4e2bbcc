"""Who sends which rows to whom, and how expert-major rows are laid out for an exchange."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from piper.ir.dag import Transfer

Message = tuple[int, int, int]
"""A peer, and the part of the rows, of how many, that goes to or comes from it."""
Arrange = Callable[[Tensor], Tensor]


def rows_sent(op: Transfer, device: int) -> list[Message]:
    """What ``device`` sends: its rows to the member in its place, divided among several if the
    target has more members."""
    mine = op.source.index(device)
    if len(op.target) >= len(op.source):
        k = len(op.target) // len(op.source)
        return [(op.target[mine * k + part], part, k) for part in range(k)]
    k = len(op.source) // len(op.target)
    return [(op.target[mine // k], 0, 1)]


def rows_received(op: Transfer, device: int) -> list[Message]:
    """What ``device`` receives: the counterpart of ``rows_sent``."""
    mine = op.target.index(device)
    if len(op.target) >= len(op.source):
        k = len(op.target) // len(op.source)
        return [(op.source[mine // k], 0, 1)]
    k = len(op.source) // len(op.target)
    return [(op.source[mine * k + part], part, k) for part in range(k)]


def exchange_out(ways: int) -> tuple[Arrange, Arrange]:
    """From all experts with one's own rows to one's own experts with all rows: what is sent, and
    how what arrives is put together."""

    def pack(x: Tensor) -> Tensor:
        experts, rows, *rest = x.shape
        return x.reshape(ways, experts // ways, rows, *rest).contiguous()

    def unpack(x: Tensor) -> Tensor:
        _, experts, rows, *rest = x.shape
        return x.transpose(0, 1).reshape(experts, ways * rows, *rest)

    return pack, unpack


def exchange_back(ways: int) -> tuple[Arrange, Arrange]:
    """The way back."""

    def pack(x: Tensor) -> Tensor:
        experts, rows, *rest = x.shape
        return x.reshape(experts, ways, rows // ways, *rest).transpose(0, 1).contiguous()

    def unpack(x: Tensor) -> Tensor:
        _, experts, rows, *rest = x.shape
        return x.reshape(ways * experts, rows, *rest)

    return pack, unpack
