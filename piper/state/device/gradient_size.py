"""Sums over the elements of gradients, from which statistics follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientSums:
    """Sums over the elements of a gradient, or of a device's part of it."""

    squares: float
    largest: float
    zeros: int
    elements: int

    @staticmethod
    def of(gradient: Tensor) -> GradientSums:
        """The sums of a gradient that has elements; waits for the GPU."""
        size = gradient.abs().double()
        return GradientSums(
            float(size.square().sum()), float(size.max()), int((size == 0).sum()), size.numel()
        )

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            self.elements + other.elements,
        )
