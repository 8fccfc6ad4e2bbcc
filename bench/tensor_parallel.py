"""Tensor parallel steps on two workers: ours beside torch's ``parallelize_module``.

One dense transformer, the same weights, batches and AdamW, fp32. The matrices of every block, the
embedding and the head are sharded over the workers, and the logits stay sharded; with and without
sequence parallelism. Ours runs in two orders: one microbatch after another, and in pairs that
overlap the collectives of one microbatch with the computation of another.

With ``--slow`` the workers are connected by a link of that many Mbit/s, in a network namespace.

    python bench/tensor_parallel.py [--slow 2000] [--json FILE]
"""

from __future__ import annotations

import os
from typing import Annotated

import slow_link
import torch
import typer
from options import Dim, File, Fused, Keep, Layers, Rounds, Seq, Slow, Turn, Vocab, Warm
from peers import Tensored
from report import Case, Comparison, best, theirs
from turns import turns
from work import Work, reference
from workers import ENVIRONMENT, Way, starter

import piper
from piper.launch.workers.fork_server import KEEPING
from piper.strategies import Schedule, mesh, one_f_one_b

WORKERS = 2


def program(
    work: Work, sequence: bool, schedule: str | Schedule, costs: piper.Costs, device: str = "cpu"
) -> piper.Program:
    x, y = work.batch(0)
    strategy = mesh(
        tp=work.workers,
        sequence_parallel=sequence,
        schedule=schedule,
        microbatches=work.microbatches,
    )
    return piper.compile(
        work.model(),
        strategy,
        inputs=(x,),
        targets=(y,),
        loss=work.loss,
        optimizer=work.optimizer,
        device=device,
        costs=costs,
    )


def main(
    layers: Layers = 4,
    dim: Dim = 256,
    seq: Seq = 128,
    vocab: Vocab = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch for each worker.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 4,
    slow: Slow = None,
    fused: Fused = True,
    keep: Keep = False,
    rounds: Rounds = 8,
    turn: Turn = 2,
    warm: Warm = 3,
    file: File = None,
) -> None:
    """Compare tensor parallel steps."""
    slow_link.enter(slow)
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    work = Work(reference(layers, dim, seq, vocab), WORKERS, microbatches, rows, fused)
    costs = slow_link.costs(slow, WORKERS)
    cases = []
    for sequence in (False, True):
        sides: dict[str, piper.Program | Way] = {"piper": program(work, sequence, "1f1b", costs)}
        apart = one_f_one_b(1, microbatches).with_weights_apart()
        sides["piper, weights apart"] = program(work, sequence, apart, costs)
        if microbatches > 1:
            sides["piper, pairs"] = program(work, sequence, "dualpipev", costs)
        sides["torch parallelize_module"] = Tensored(work, sequence)
        found = turns(work.batch, sides, starter(WORKERS), rounds=rounds, turn=turn, warm=warm)
        name = "sequence parallel" if sequence else "tensor parallel"
        cases.append(Case(name, best(found, theirs(found)), found))
    comparison = Comparison(
        f"tensor parallel, {slow_link.described(slow, microbatches)}",
        f"{WORKERS} workers, {WORKERS * rows} x {seq} tokens a microbatch, "
        f"torch {torch.__version__}",
        cases,
    )
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
