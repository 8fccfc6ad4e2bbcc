"""How much communication overlapping hides on a GPU: experts without dropped tokens, on ranks that
share the GPU.

The width of the experts is adjusted until the all-to-alls of a 1F1B step take as long as all its
computation. Then these run in turns, with the same model and microbatches:

    1F1B; DualPipeV; with the weights' backwards apart; the same, ordered by a profile of it

Beside the step times stands the exposed share of the all-to-alls, predicted by the plan from the
1F1B profile, and measured by events. It is given for all of them, and for those in pairs, since at
the start and end of a step there is nothing to pair with.

Sequences and microbatches are long, so that attention takes a realistic share, and a microbatch
takes longer than the host needs to launch it.

Ranks communicate over the loopback, which is slow, and share the GPU's SMs: only the ratio of
communication to computation is that of a cluster.

    python bench/nccl_overlap.py [--ranks 4] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from options import Device, File, Inside, Layers, Limit, Ranks, Seq, Vocab
from overlap import computing_seconds, costs_if, note
from ranks import Here, entered, run_comparison, skip_without
from report import Case, Comparison
from turns import Found
from work import Work

import piper
from piper.ir.ops import Collective
from piper.launch.watch.step_profile import Profile
from piper.models import MoEConfig
from piper.strategies import Schedule, dualpipev, mesh, one_f_one_b

TRIES = 3
"""The most corrections of the experts' width."""
NEAR = 0.1
"""The allowed distance from 1 of the ratio of all-to-all time to compute time."""
APART = "DualPipeV with weights apart"


def captured(work: Work, device: str) -> piper.Capture:
    x, y = work.batch(0)
    return piper.capture(
        work.model(),
        inputs=(x,),
        targets=(y,),
        loss=work.loss,
        optimizer=work.optimizer,
        device=device,
    )


def strategy(work: Work, schedule: Schedule) -> piper.Strategy:
    return mesh(dp=work.workers, ep=work.workers, schedule=schedule)


@dataclass(frozen=True, slots=True)
class Balanced:
    """A model whose all-to-alls take about as long as its computation."""

    work: Work
    captured: piper.Capture
    costs: piper.Costs
    """Measured on rank 0, the same on all ranks."""
    ratio: float
    """All-to-all time over compute time."""


def profiled(here: Here, program: piper.Program, work: Work) -> Profile:
    _make_room(here)
    batch = [part.to(here.device) for part in work.batch(0)]
    with piper.launch(program, on="torchrun", timeout=here.limit) as trainer:
        for _ in range(2):
            trainer.step(*batch)
        return trainer.profile(*batch, steps=2)


def balanced(here: Here, work: Work, microbatches: int) -> Balanced:
    """``work`` with the experts' width that balances all-to-alls and computation."""
    for number in range(TRIES):
        model = captured(work, here.device)
        program = model.compile(strategy(work, one_f_one_b(1, microbatches)))
        profile = profiled(here, program, work)
        seconds = computing_seconds(program, profile), profile.all_to_all.seconds / work.workers
        (computing, communicating), recorded = here.everyone((seconds, profile.recorded))[0]
        ratio, width = communicating / computing, work.config.mlp_dim
        if dist.get_rank() == 0:
            print(f"experts of width {width}: all-to-alls take {ratio:.2f} of computing")
        wanted = max(64, round(width * ratio**2 / 64) * 64)  # about half the compute is in experts
        if abs(ratio - 1) <= NEAR or wanted == width or number == TRIES - 1:
            break
        work = replace(work, config=replace(work.config, mlp_dim=wanted))
    costs = costs_if(program, computing, communicating, work.workers)
    return Balanced(work, model, replace(costs, recorded=recorded), ratio)


def compare(here: Here, work: Work, microbatches: int, rounds: int) -> Comparison:
    found = balanced(here, work, microbatches)
    work = found.work
    pairs = dualpipev(1, microbatches)
    makes = {
        "1F1B": strategy(work, one_f_one_b(1, microbatches)),
        "DualPipeV": strategy(work, pairs),
        APART: strategy(work, pairs.with_weights_apart()),
    }
    programs = {
        name: found.captured.compile(make, costs=found.costs) for name, make in makes.items()
    }
    recorded = here.everyone(profiled(here, programs[APART], work).recorded)[0]
    known = replace(found.costs, recorded=recorded)
    programs[f"{APART}, by a profile"] = found.captured.compile(makes[APART], costs=known)
    trainers = {
        name: piper.launch(program, on="torchrun", timeout=here.limit)
        for name, program in programs.items()
    }
    sides = {name: Found() for name in trainers}
    profiles = {}
    for number in range(rounds + 1):
        for name, trainer in trainers.items():
            batch = [part.to(here.device) for part in work.batch(number)]
            _make_room(here)
            trainer.step(*batch)
            here.barrier()
            if number == rounds:
                profiles[name] = trainer.profile(*batch, steps=3)
                continue
            start = time.perf_counter()
            result = trainer.step(*batch)
            here.barrier()
            sides[name].seconds.append(time.perf_counter() - start)
            sides[name].losses.append(float(result.loss))
    for trainer in trainers.values():  # not after an error: close waits for other ranks
        trainer.close()
    size = f"experts of width {work.config.mlp_dim}, all-to-alls {found.ratio:.2f} of computing"
    return Comparison(
        f"experts without dropped tokens, {work.workers} ranks over NCCL on one GPU",
        f"{size}, torch {torch.__version__}",
        [
            Case(
                f"{microbatches} microbatches, {work.config.layers} layers of {work.config.dim}",
                "piper 1F1B",
                {f"piper {name}": one for name, one in sides.items()},
            )
        ],
        [
            link_note(programs["1F1B"], profiles["1F1B"]),
            *(note(name, programs[name], profile) for name, profile in profiles.items()),
        ],
        tolerance=1e-3,
    )


def link_note(program: piper.Program, profile: Profile) -> str:
    """The spread of all-to-all times when nothing overlaps them."""
    ops = [node.op for node in program.dag.nodes]
    tenths = statistics.quantiles(
        (
            1e3 * (span.end - span.start)
            for spans in profile.spans.values()
            for span in spans
            if isinstance(op := ops[span.node], Collective) and op.rows is not None
        ),
        n=10,
    )
    spread = f"{tenths[0]:.1f} to {tenths[-1]:.1f}"
    return f"1F1B: an all-to-all of rows takes {tenths[4]:.1f} ms, 10-90% {spread}"


def _make_room(here: Here) -> None:
    """Free the memory that the allocator caches for the streams of the previous side."""
    if here.device == "cuda":
        here.barrier()
        torch.cuda.empty_cache()


def main(
    ranks: Ranks = 2,
    layers: Layers = 6,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    seq: Seq = 8192,
    vocab: Vocab = 1024,
    experts: Annotated[int, typer.Option(help="Experts of each block.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Of a step.")] = 8,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch, for each rank.")] = 8,
    width: Annotated[int, typer.Option(help="Of experts, to begin with.")] = 1536,
    device: Device = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 4,
    limit: Limit = 240,
    file: File = None,
    inside: Inside = False,
) -> None:
    """Compare schedules of ranks that share a GPU."""
    skip_without(device)
    file = file or Path("bench-results") / f"nccl-overlap-{ranks}.json"
    if inside:
        config = MoEConfig(
            vocab=vocab,
            dim=dim,
            layers=layers,
            heads=dim // 64,
            mlp_dim=width,
            max_seq=seq,
            experts=experts,
            capacity_factor=None,
        )
        work = Work(config, ranks, microbatches, rows, True, torch.bfloat16)
        with entered(device, limit) as here:
            comparison = compare(here, work, microbatches, rounds)
            if dist.get_rank() == 0:
                comparison.write(file)
        return
    run_comparison(file, ranks, limit)


if __name__ == "__main__":
    typer.run(main)
