"""A run that switches between several strategies.

    switched.py FOLDER

Under ``torchrun --nproc-per-node 4`` each process writes its losses, its state, and the error for a
program that it cannot switch to, to ``FOLDER/found.RANK``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Mesh, PiperError, annotate, place, replicate, shard, split
from piper.strategies.directives import Directive
from tests.training import compile_shared, one_f_one_b, pipeline, shared_captures, zero_bubble

WIDTH, ROWS = 8, 64


class Net(nn.Module):
    """Has dropout, experts, a tied weight and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)
        self.tied = self.down[0].bias
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            with annotate("layer"):
                x = x + down(torch.tanh(up(x)))
                if i == 1:
                    rows = x.unflatten(0, (-1, 4)).transpose(0, 1)
                    with annotate("EP"):
                        rows = torch.tanh(torch.bmm(rows, self.experts))
                    x = x + rows.transpose(0, 1).flatten(0, 1)
                if i == 2:
                    x = F.dropout(x * self.table + self.tied, 0.2, self.training)
                if i == 3:
                    x = x * self.gain
        return x


STRATEGIES: dict[str, list[Directive]] = {
    "zero3": [place({}, devices=[0, 1, 2, 3]), replicate({}, zero=3, bucket_mb=1e-3)],
    "one": [split({}, into="MB", parts=4), place({}, devices=[0])],
    "pp2": pipeline([[3], [1]], 4, *one_f_one_b(2, 4), by=[2, 2]),
    "ep4": [
        place({}, devices=[0, 1, 2, 3]),
        shard({"EP": "*"}),
        replicate({"EP": "-"}, zero=1),
    ],
    "tp2": [
        split({}, into="MB", parts=2),
        place({}, devices=Mesh([2, 0, 1, 3], dp=2, tp=2), batch="dp"),
        shard({"layer": [0, 3]}, axis="tp", parameters={"up.*": "column", "down.*": "row"}),
        replicate({}, zero=1),
    ],
    "pp4": pipeline([[3], [2], [1], [0]], 4, *zero_bubble(4, 4), by=[1, 1, 1, 1]),
    "hsdp": [place({}, devices=[4, 2, 0, 6]), replicate({}, zero=2, within=2)],
}
"""Each strategy splits the batch into four blocks, so that dropout draws the same."""
ON_FOUR = ["zero3", "one", "pp2", "ep4", "tp2", "pp4"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def model(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def compiled(name: str, net: nn.Module, **options: Any) -> piper.Program:
    x, y = batch(0)
    how: dict[str, Any] = {"optimizer": adamw, "scheduler": halving, "loss": F.mse_loss, **options}
    strategy = piper.Strategy(STRATEGIES[name])
    return compile_shared(net, strategy, inputs=(x,), targets=(y,), **how)


def losses(trainer: piper.Trainer, programs: list[piper.Program]) -> list[float]:
    """One step and one evaluation under each program, the first of which is running."""
    found = []
    for step, program in enumerate(programs):
        if step:
            trainer.switch(program)
        found.append(float(trainer.step(*batch(step)).loss))
        found.append(float(trainer.evaluate(*batch(step)).loss))
    return found


def main(folder: Path) -> None:
    net = model()
    with shared_captures():
        programs = [compiled(name, net) for name in ON_FOUR]
        absent = compiled("hsdp", net)
    with piper.launch(programs[0], on="torchrun", timeout=120) as trainer:
        found = losses(trainer, programs)
        trainer.switch(programs[1])  # three ranks are idle
        trainer.save(folder / "saved")
        trainer.load(folder / "saved")
        state = trainer.state_dict()
        try:
            trainer.switch(absent)
        except PiperError as error:
            why = str(error)
        found.append(float(trainer.step(*batch(9)).loss))
    content = {"losses": found, "state": state, "why": why}
    torch.save(content, folder / f"found.{os.environ['RANK']}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
