"""A step of ours beside torch's and DeepSpeed's data parallelism, on two worker processes.

One model (a dense transformer), the same weights, batches and AdamW, in fp32; two gloo workers of
one thread, each pinned to a core. Level by level:

    zero=0   mesh(dp=2, zero=0)    DistributedDataParallel; ours with zero=1 and 2 beside
    zero=1   mesh(dp=2, zero=1)    DeepSpeed 1
    zero=2   mesh(dp=2, zero=2)    fully_shard, reshard_after_forward=False; DeepSpeed 2
    zero=3   mesh(dp=2, zero=3)    fully_shard, reshard_after_forward=True; DeepSpeed 3

Each runs in several settings, and the best one counts: the bucket size, when gathers begin, whether
gradients are reduced in every microbatch or after the last. With several microbatches ours also
runs breadth first (all microbatches of a layer before the next layer, so that more computation can
hide communication). With ``--slow 200`` everything runs in a network namespace whose loopback
carries 200 Mbit/s each way.

turns.py explains the timing. The losses of all steps must agree: a faster wrong answer fails.

    python bench/data_parallel.py [--microbatches 4] [--level 0] [--slow 200] [--json FILE]
"""

from __future__ import annotations

import os
from typing import Annotated

import slow_link
import torch
import typer
from deepspeed_peers import Zero, missing
from options import Dim, File, Fused, Keep, Layers, Rounds, Seq, Slow, Turn, Vocab, Warm
from peers import Replicated, Sharded
from report import Case, Comparison, best, theirs
from turns import turns
from work import Work, reference
from workers import ENVIRONMENT, Way, starter

import piper
from piper.launch.workers.fork_server import KEEPING
from piper.strategies import mesh

WORKERS = 2
BUCKETS, SLOW = (25, 4), (4, 1)
"""Bucket sizes in MB for all sides: torch's default and a smaller one; those for slow links."""


def program(
    work: Work,
    zero: int,
    bucket_mb: float,
    schedule: str,
    costs: piper.Costs,
    device: str = "cpu",
) -> piper.Program:
    x, y = work.batch(0)
    virtual = work.config.layers if schedule == "breadth-first" else None
    strategy = mesh(
        dp=work.workers,
        zero=zero,
        schedule=schedule,
        virtual=virtual,
        microbatches=work.microbatches,
        bucket_mb=bucket_mb,
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


def sides(
    work: Work, zero: int, buckets: tuple[int, ...], costs: piper.Costs, deepspeed: bool
) -> dict[str, piper.Program | Way]:
    found: dict[str, piper.Program | Way] = {}
    small = buckets[-1]
    for size in buckets:
        found[f"piper, {size} MB"] = program(work, zero, size, "1f1b", costs)
    if work.microbatches > 1:
        broad = program(work, zero, small, "breadth-first", costs)
        found[f"piper breadth-first, {small} MB"] = broad
    if zero == 0:
        for more in (1, 2):  # equal gradient sums, sharded update, later gather
            found[f"piper zero={more}, {small} MB"] = program(work, more, small, "1f1b", costs)
        found |= {f"DDP, {size} MB": Replicated(work, size) for size in buckets}
    if zero >= 2:
        for each in (True, False) if work.microbatches > 1 else (True,):
            label = "" if work.microbatches == 1 else " sums each," if each else " sums once,"
            for ahead in (False, True):
                name = f"FSDP2,{label} gathers {'ahead' if ahead else 'when used'}"
                found[name] = Sharded(work, zero == 3, ahead, each)
    if deepspeed and zero:
        found |= {f"DeepSpeed {zero}, {size} MB": Zero(work, zero, size) for size in buckets}
    return found


def main(
    level: Annotated[list[int] | None, typer.Option(help="ZeRO levels: 0 to 3; or all.")] = None,
    layers: Layers = 8,
    dim: Dim = 256,
    seq: Seq = 128,
    vocab: Vocab = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch on each worker.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 1,
    slow: Slow = None,
    fused: Fused = True,
    keep: Keep = False,
    rounds: Rounds = 8,
    turn: Turn = 2,
    warm: Warm = 3,
    file: File = None,
) -> None:
    """Compare data parallel steps."""
    slow_link.enter(slow)
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    config = reference(layers, dim, seq, vocab)
    work = Work(config, WORKERS, microbatches, rows, fused)
    costs = slow_link.costs(slow, WORKERS)
    absent = missing()
    cases = []
    for zero in level if level is not None else (0, 1, 2, 3):
        buckets = BUCKETS if slow is None else SLOW
        ways = sides(work, zero, buckets, costs, deepspeed=not absent)
        found = turns(work.batch, ways, starter(WORKERS), rounds=rounds, turn=turn, warm=warm)
        if others := theirs(found):
            cases.append(Case(f"zero={zero}", best(found, others), found))
    comparison = Comparison(
        f"data parallel, {slow_link.described(slow, microbatches)}",
        f"{WORKERS} workers, {rows} x {seq} tokens a microbatch each, torch {torch.__version__}",
        cases,
        [absent] if absent else [],
        rounding="DeepSpeed",
    )
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
