"""A step of ours beside the same schedule of ``torch.distributed.pipelining`` and DeepSpeed.

One dense transformer (8 blocks, width 256, sequence 128, vocabulary 1,024), cut at the same places,
the same weights, batches and AdamW, fp32; two gloo workers of one thread, each pinned to a core:

    1F1B, interleaved 1F1B, ZB-V, DualPipeV, each against torch's own; 1F1B against DeepSpeed too;
    then our best against their best

All sides take turns, so that a change of the machine's speed affects all of them; turns.py explains
the timing. The losses of all steps must agree: a faster wrong answer fails.

    python bench/pipelines.py [--microbatches 8] [--microbatches 16] [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from deepspeed_peers import Pipeline, missing
from options import Dim, File, Fused, Keep, Layers, Rounds, Seq, Turn, Vocab, Warm, chosen
from peers import Piped, stages_of
from report import Case, Comparison, best, theirs
from turns import turns
from work import Work, evenly, reference
from workers import ENVIRONMENT, Way, starter

import piper
from piper.launch.workers.fork_server import KEEPING
from piper.strategies import mesh

WORKERS = 2
SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our schedule names, and torch's names of the same schedules."""


def program(
    work: Work, schedule: str, device: str = "cpu", costs: piper.Costs | None = None
) -> piper.Program:
    """The work under one of our schedules."""
    x, y = work.batch(0)
    return piper.compile(
        work.model(),
        mesh(
            pp=work.workers,
            schedule=schedule,
            microbatches=work.microbatches,
            by=evenly(work.config.layers, stages_of(SCHEDULES[schedule], work.workers)),
        ),
        inputs=(x,),
        targets=(y,),
        loss=work.loss,
        optimizer=work.optimizer,
        device=device,
        costs=costs or piper.Cluster.of("CPU", work.workers).costs(),
    )


def _sides(work: Work, schedule: str, deepspeed: bool) -> dict[str, piper.Program | Way]:
    """The sides that run a schedule."""
    sides: dict[str, piper.Program | Way] = {
        f"piper {schedule}": program(work, schedule),
        f"torch {SCHEDULES[schedule]}": Piped(work, SCHEDULES[schedule]),
    }
    if schedule == "1f1b" and deepspeed:
        sides["DeepSpeed 1F1B"] = Pipeline(work)
    return sides


def main(
    microbatches: Annotated[list[int] | None, typer.Option(help="Of a step: 8 and 16.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name; or all.")] = None,
    layers: Layers = 8,
    dim: Dim = 256,
    seq: Seq = 128,
    vocab: Vocab = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of half a microbatch.")] = 1,
    fused: Fused = True,
    keep: Keep = False,
    rounds: Rounds = 8,
    turn: Turn = 2,
    warm: Warm = 3,
    file: File = None,
) -> None:
    """Compare pipelines."""
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    config = reference(layers, dim, seq, vocab)
    absent = missing()
    cases = []
    for count in microbatches or (8, 16):
        work = Work(config, WORKERS, count, rows, fused)
        names = chosen(schedule, SCHEDULES)
        sides = [_sides(work, name, deepspeed=not absent) for name in names]
        together = {side: way for some in sides for side, way in some.items()}
        found = turns(work.batch, together, starter(WORKERS), rounds=rounds, turn=turn, warm=warm)
        for name, some in zip(names, sides, strict=True):
            case = {side: found[side] for side in some}
            cases.append(Case(f"{count} microbatches, {name}", best(case, theirs(case)), case))
        against = best(found, theirs(found))
        ours = best(found, found.keys() - theirs(found))
        case = {side: found[side] for side in (ours, against)}
        cases.append(Case(f"{count} microbatches, the best of each", against, case))
    where = f"{WORKERS} workers, {rows * WORKERS} x {seq} tokens a microbatch"
    comparison = Comparison(
        "pipelines",
        f"{where}, torch {torch.__version__}",
        cases,
        [absent] if absent else [],
        rounding="DeepSpeed",
    )
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
