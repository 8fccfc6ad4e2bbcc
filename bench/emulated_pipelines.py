"""Schedules with emulated kernels: the share of their theoretical speed that a runtime reaches.

Blocks sleep instead of computing (see emulated.py), F : BI : BW = 1 : 1 : 1, so that more workers
than cores still show the schedule. Everything else is real: processes, gloo, the loopback. Ours and
``torch.distributed.pipelining`` take turns:

    4 workers x 8 microbatches, 8 x 16, 16 x 32

The ideal is the schedule on paper, where sending takes no time; "of ideal" is what is left of it.

    python bench/emulated_pipelines.py [--workers 4] [--seconds 0.02] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from emulated import FLOPS, Block, Blocks, loss
from peers import Piped, stages_of
from report import Case, Comparison, print_cases
from torch import Tensor, nn
from turns import Side, turns
from work import evenly
from workers import ENVIRONMENT, Launched, Peers, Way, chosen

import piper
from piper.strategies import mesh, schedule_named, timed

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Ours, and what torch calls the same."""
DIM = 64


@dataclass(frozen=True, slots=True)
class Asleep:
    """Two blocks a worker, trained on random rows."""

    workers: int
    microbatches: int
    seconds: tuple[float, float, float]
    """Of a block: its forward, the gradient of its input, that of its weight."""

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

    def ideal(self, schedule: str) -> float:
        """Seconds of a step if nothing but sleeping took time."""
        each = self.layers // stages_of(SCHEDULES[schedule], self.workers)
        forward, inputs, weights = (each * x for x in self.seconds)
        found = timed(
            schedule_named(schedule, self.workers, self.microbatches, None),
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
        )
        return max(cell.end for row in found.cells for cell in row)


def main(
    workers: Annotated[list[int] | None, typer.Option(help="4, 8 and 16, or some.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name; or all.")] = None,
    seconds: Annotated[float, typer.Option(help="Of a block's forward, and each backward.")] = 0.02,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 4,
    turn: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 1,
    warm: Annotated[int, typer.Option(min=1, help="Steps before anything is timed.")] = 2,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare schedules of sleeping blocks."""
    os.environ |= ENVIRONMENT
    cases = []
    for count in workers or (4, 8, 16):
        work = Asleep(count, 2 * count, (seconds, seconds, seconds))

        def start(
            way: piper.Program | Way, stack: contextlib.ExitStack, count: int = count
        ) -> Side:
            if isinstance(way, piper.Program):
                return Launched(way, stack)
            return Peers(way, count, stack)

        for name in chosen(schedule, SCHEDULES):
            ours, theirs = f"piper {name}", f"torch {SCHEDULES[name]}"
            ways: dict[str, piper.Program | Way] = {
                ours: work.program(name),
                theirs: Piped(work, SCHEDULES[name]),
            }
            found = turns(work.batch, ways, start, rounds=rounds, turn=turn, warm=warm)
            label = f"{count} workers x {work.microbatches} microbatches, {name}"
            cases.append(Case(label, theirs, found, dict.fromkeys(found, work.ideal(name))))
    where = f"blocks sleep {1e3 * seconds:g} ms a pass, torch {torch.__version__}"
    comparison = Comparison("emulated pipelines", where, cases)
    print_cases(comparison)
    if file is not None:
        comparison.write(file)
    comparison.check()


if __name__ == "__main__":
    typer.run(main)
