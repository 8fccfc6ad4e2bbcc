"""How expert-major rows are laid out for all-to-all dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
