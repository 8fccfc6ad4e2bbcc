"""Sums over the elements of a tensor, from which its statistics follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ElementSums:
    """Sums over the elements of a tensor, or of a device's part of it."""

    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    """The largest absolute value."""
    zeros: int = 0
    elements: int = 0

    @staticmethod
    def of(x: Tensor) -> ElementSums:
        """The sums of a tensor that has elements; waits for the GPU."""
        exact = x.detach().double()
        return ElementSums(
            float(exact.sum()),
            float(exact.square().sum()),
            float(exact.abs().max()),
            int((exact == 0).sum()),
            exact.numel(),
        )

    def __add__(self, other: ElementSums) -> ElementSums:
        return ElementSums(
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            self.elements + other.elements,
        )
