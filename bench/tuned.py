"""Whether the tuner's first choice is the fastest: the best candidates of a search, measured.

The tuner searches for a transformer on two worker processes, from typical costs of a CPU, nothing
fitted. The best candidates are then measured, and so is the order of their estimates from the
profile of one of them, which is the last in the first order.

    python bench/tuned.py [--count 12] [--steps 7] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.program.tune.candidate import Candidate

LAYERS, DIM, TOKENS, ROWS = 8, 192, 128, 16


def captured() -> tuple[piper.Capture, torch.Tensor]:
    torch.manual_seed(0)
    config = DenseConfig(
        vocab=512, dim=DIM, layers=LAYERS, heads=4, mlp_dim=4 * DIM, max_seq=TOKENS
    )
    x = torch.randint(0, 512, (ROWS, TOKENS))
    made = piper.capture(
        DenseTransformer(config),
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    return made, x


def spread(found: piper.Tuned, count: int) -> list[Candidate]:
    """Candidates of different splits, schedules and microbatches: the best of each."""
    kinds: dict[object, Candidate] = {}
    for x in found.fitting:
        c = x.candidate
        kinds.setdefault((c.traced, c.pp, c.schedule, c.zero, bool(c.recomputed)), c)
    return list(kinds.values())[:count]


def main(
    count: Annotated[int, typer.Option(help="Measured strategies.")] = 12,
    steps: Annotated[int, typer.Option(help="Measured steps of each.")] = 7,
    seconds: Annotated[float, typer.Option(help="Of the search.")] = 60.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure the best candidates of a search, and compare the order with the tuner's."""
    model, x = captured()
    cluster = piper.Cluster.of("CPU", 2)
    found = piper.tune(model, cluster, seconds=seconds, schedules=("1f1b", "interleaved", "zb-h1"))
    measured: dict[Candidate, float] = {}
    recorded = None
    for c in reversed(spread(found, count)):
        program = model.compile(c.strategy, costs=cluster)
        with piper.launch(program, on="processes", threads=1) as trainer:
            trainer.step(x, x)
            measured[c] = statistics.median(trainer.step(x, x).seconds for _ in range(steps))
            if recorded is None:
                recorded = trainer.profile(x, x, steps=3).recorded
    rows = []
    for c, took in measured.items():
        rough = model.estimate(c.strategy, cluster).seconds
        rows.append((c, took, rough, model.estimate(c.strategy, cluster, costs=recorded).seconds))
    rows.sort(key=lambda row: row[1])
    table = Table("strategy", "measured", "estimated", "from one profile")
    for c, *figures in rows:
        table.add_row(str(c), *(f"{1000 * s:.1f} ms" for s in figures))
    best = rows[0][1]
    regret = {
        name: min(rows, key=lambda row: row[i])[1] / best - 1
        for i, name in ((2, "estimated"), (3, "from one profile"))
    }
    console = Console(width=110)
    console.print(table)
    for name, share in regret.items():
        console.print(f"{name}: the first choice is {share:.1%} slower than the best measured")
    if out is not None:
        figures = [{"strategy": c.code, "seconds": list(rest)} for c, *rest in rows]
        out.write_text(json.dumps({"rows": figures, "regret": regret}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
