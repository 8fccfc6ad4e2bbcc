"""The workload of the comparisons with emulated kernels: blocks that sleep (see emulated.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from emulated import FLOPS, Block, Blocks, loss, pause, sleep, slowly
from peers import stages_of
from torch import Tensor, nn
from work import evenly

import piper
from piper.strategies import mesh, schedule_named, timed

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our schedule names, and torch's names of the same schedules."""
DIM = 64


@dataclass(frozen=True, slots=True)
class Asleep:
    """Two blocks per worker, trained on random rows."""

    workers: int
    microbatches: int
    seconds: tuple[float, float, float]
    """Of a block: forward, gradient of the input, gradient of the weight."""

    @property
    def layers(self) -> int:
        return 2 * self.workers

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return loss

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        return partial(torch.optim.SGD, lr=1e-3)

    def blocks(self) -> list[Block]:
        return [Block(DIM, *self.seconds) for _ in range(self.layers)]

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(seed)
        x = torch.randn(self.microbatches, DIM, generator=draws)
        return x, x.flip(0).contiguous()

    def modules(self, stages: int, numbers: Sequence[int]) -> list[nn.Module]:
        counts, blocks = evenly(self.layers, stages), self.blocks()
        starts = [sum(counts[:number]) for number in numbers]
        return [
            nn.Sequential(*blocks[start : start + counts[number]])
            for start, number in zip(starts, numbers, strict=True)
        ]

    def ends(self, stages: int, number: int) -> tuple[Tensor, Tensor]:
        hidden = torch.zeros(1, DIM, requires_grad=True)
        return (hidden if number else torch.zeros(1, DIM)), hidden

    def program(self, schedule: str) -> piper.Program:
        x, y = self.batch(0)
        stages = stages_of(SCHEDULES[schedule], self.workers)
        strategy = mesh(
            pp=self.workers,
            schedule=schedule,
            microbatches=self.microbatches,
            by=evenly(self.layers, stages),
        )
        return piper.compile(
            Blocks(self.blocks()),
            strategy,
            inputs=(x,),
            targets=(y,),
            loss=loss,
            optimizer=self.optimizer,
            costs=piper.Costs(flops_per_second=FLOPS, bytes_per_second=1.5e9, overhead=1e-4),
        )

    def lengths(self) -> tuple[float, float, float]:
        """Seconds that the operators of a block's three passes take alone: slightly more than the
        sleep in each."""
        x, scale = torch.zeros(1, DIM), torch.ones(DIM)
        forward, inputs, weights = self.seconds
        found = []
        for call in (
            lambda: sleep(x, forward, inputs) * slowly(scale, weights),
            lambda: pause(x * scale, inputs),
            lambda: pause((x * x).sum(0), weights),
        ):
            taken = []
            for _ in range(9):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
            found.append(statistics.median(taken))
        return found[0], found[1], found[2]

    def ideal(self, schedule: str, lengths: tuple[float, float, float]) -> float:
        """Seconds of a step in which only passes of these lengths take time."""
        each = self.layers // stages_of(SCHEDULES[schedule], self.workers)
        forward, inputs, weights = (each * x for x in lengths)
        found = timed(
            schedule_named(schedule, self.workers, self.microbatches, None),
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
        )
        return max(cell.end for row in found.cells for cell in row)
