"""Sums over the whole batch, computed before a step: the divisors of token-weighted means.

A mean over the counted targets is divided by their number in the whole batch, which no single part
of the batch determines. It depends on the batch alone: it is computed before the step, part by
part, and is passed to every part with its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.graphs import named_device
from piper.ir.passes import Pass


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole batch, as a function of one of its equal parts."""

    program: ChunkProgram
    """From the tensors of a part to the terms that are summed over all parts."""
    means: tuple[bool, ...]
    """Whether each sum is divided by the number of parts."""
    parts: int
    """The number of parts of a batch, each one call of the program."""
    complete: bool
    """Whether the loss counts only what these sums count: rows that add nothing to them have no
    effect on it."""
    batches: int | None
    """Which of the sums counts the parts; its total is the number of batches. Regions on groups of
    other sizes have other numbers of parts, so each divides by its own."""

    def of(self, batch: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The totals of a batch of ``rows`` rows."""
        return self.of_sums(self.sums(batch, rows), self.parts)

    def sums(self, batch: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The terms of a batch of ``rows`` rows, summed over its parts."""
        size = rows // self.parts
        return summed(self.part(_rows(batch, rows, i * size, size)) for i in range(self.parts))

    def part(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The terms of one part."""
        function = self.program.functions[Pass.F]
        module = named_device(function.module, tensors[0].device)
        with torch.no_grad():
            return [
                x.to(torch.float64) for x in module(*(tensors[r.index] for r in function.arguments))
            ]

    def of_sums(self, sums: Sequence[Tensor], parts: float) -> list[Tensor]:
        """The totals from the terms summed over ``parts`` parts."""
        totals = [
            _for_all(x / parts if mean else x) for x, mean in zip(sums, self.means, strict=True)
        ]
        if self.batches is not None and self.batches < len(totals):
            totals[self.batches] = totals[self.batches] / self.parts
        return totals


def summed(parts: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """The sums of the terms of all parts."""
    return [torch.stack(list(terms)).sum(0) for terms in zip(*parts, strict=True)]


def _rows(batch: Sequence[Tensor], rows: int, start: int, size: int) -> list[Tensor]:
    return [x[start : start + size] if x.dim() and x.shape[0] == rows else x for x in batch]


def _for_all(x: Tensor) -> Tensor:
    """``x`` in a shape with no dimension that could be taken for the rows of the batch."""
    return x.unsqueeze(0) if x.dim() else x
