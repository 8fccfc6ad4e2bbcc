"""Steps of a mixture of experts without dropped tokens on two workers: ours beside TorchTitan's
dispatch.

One transformer, the same weights, batches and AdamW, fp32. The experts are sharded over the
workers, everything else is replicated. Ours runs in two orders: one microbatch after another, and
in pairs that overlap the all-to-alls of one microbatch with the computation of another. It also
runs with two capacities: room for all rows on each worker, and for twice the even share.

With ``--slow`` the workers are connected by a link of that many Mbit/s, in a network namespace.

    python bench/expert_parallel.py [--slow 2000] [--json FILE]
"""

from __future__ import annotations

import os
from typing import Annotated

import slow_link
import torch
import typer
from expert_peers import Dispatched
from options import Dim, File, Fused, Keep, Layers, Rounds, Seq, Slow, Turn, Vocab, Warm
from report import Case, Comparison, best, theirs
from turns import turns
from work import Work
from workers import ENVIRONMENT, Way, starter

import piper
from piper.launch.workers.fork_server import KEEPING
from piper.models import MoEConfig
from piper.strategies import mesh

WORKERS = 2


def program(
    work: Work, schedule: str, capacity: float | None, costs: piper.Costs, device: str = "cpu"
) -> piper.Program:
    x, y = work.batch(0)
    strategy = mesh(
        dp=work.workers,
        ep=work.workers,
        schedule=schedule,
        microbatches=work.microbatches,
        capacity=capacity,
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


def mixture(layers: int, dim: int, seq: int, vocab: int, experts: int) -> MoEConfig:
    """The model of the comparison, in the given size."""
    return MoEConfig(
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=dim // 64,
        mlp_dim=2 * dim,
        max_seq=seq,
        experts=experts,
        capacity_factor=None,
    )


def main(
    layers: Layers = 4,
    dim: Dim = 256,
    seq: Seq = 128,
    vocab: Vocab = 1024,
    experts: Annotated[int, typer.Option(help="Experts of each block.")] = 8,
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
    """Compare steps of experts."""
    slow_link.enter(slow)
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    config = mixture(layers, dim, seq, vocab, experts)
    work = Work(config, WORKERS, microbatches, rows, fused)
    costs = slow_link.costs(slow, WORKERS)
    sides: dict[str, piper.Program | Way] = {
        "piper": program(work, "1f1b", None, costs),
        "piper, capacity=2": program(work, "1f1b", 2.0, costs),
    }
    if microbatches > 1:
        sides["piper, pairs"] = program(work, "dualpipev", None, costs)
    sides["torch, dispatched by counts"] = Dispatched(work)
    found = turns(work.batch, sides, starter(WORKERS), rounds=rounds, turn=turn, warm=warm)
    comparison = Comparison(
        f"experts, {slow_link.described(slow, microbatches)}",
        f"{WORKERS} workers, {experts} experts, {WORKERS * rows} x {seq} tokens a microbatch, "
        f"torch {torch.__version__}",
        [Case("dropless experts", best(found, theirs(found)), found)],
    )
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
