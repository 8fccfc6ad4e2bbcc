"""What overlapping hides: experts on two processes whose network is as slow as their compute.

Runs in a network namespace of its own, whose loopback is slowed until all exchanges of a step take
as long as all its computations. There, with the same model and microbatches, side by side:

    1F1B; DualPipeV without its pairs; DualPipeV

The three take turns, so that a noisy machine hits all of them. Beside the step times: the share of
the exchanges that nothing covers, as the plan foretells it and as it was measured.

    python bench/overlap.py
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
from piper.ir.dag import Collective, CollectiveKind, Compute
from piper.launch.profile import Profile
from piper.lower.sizes import Sizes
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.strategies import Schedule, dualpipev, mesh, one_f_one_b

INSIDE = "PIPER_BENCH_SLOW_LOOPBACK"
VOCAB, SEQ, WORKERS = 256, 128, 2


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def main(
    dim: Annotated[int, typer.Option(help="The model's width.")] = 128,
    layers: Annotated[int, typer.Option(help="Its layers, at least 2.")] = 4,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch on each worker.")] = 8,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    rounds: Annotated[int, typer.Option(help="How often each strategy is timed.")] = 7,
) -> None:
    """Compare three schedules over a slow network."""
    if INSIDE not in os.environ:
        sys.exit(_inside_namespace())
    _run("ip", "link", "set", "lo", "up")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"dim": dim, "heads": 4, "mlp_dim": 2 * dim, "max_seq": SEQ, "layers": layers}
    config = MoEConfig(vocab=VOCAB, experts=4, top_k=2, **sizes)
    model = MoETransformer(config)
    x = torch.randint(VOCAB, (WORKERS * rows * microbatches, SEQ))
    schedules = {
        "1F1B": one_f_one_b(1, microbatches),
        "DualPipeV without pairs": dualpipev(1, microbatches).without_pairs(),
        "DualPipeV": dualpipev(1, microbatches),
    }

    def compiled(schedule: Schedule, costs: piper.Costs | None = None) -> piper.Program:
        strategy = mesh(pp=1, dp=WORKERS, ep=WORKERS, schedule=schedule)
        what = {"inputs": (x,), "targets": (x,), "loss": lm_loss, "optimizer": sgd}
        return piper.compile(model, strategy, costs=costs, **what)

    costs = _slow_down(compiled(schedules["1F1B"]), x)
    programs = {name: compiled(schedule, costs) for name, schedule in schedules.items()}
    with contextlib.ExitStack() as stack:
        trainers = {
            name: stack.enter_context(piper.launch(program, on="processes", threads=1))
            for name, program in programs.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        losses: dict[str, set[float]] = {name: set() for name in trainers}
        for _ in range(rounds + 1):
            for name, trainer in trainers.items():
                result = trainer.step(x, x)
                seconds[name].append(result.seconds)
                losses[name].add(float(result.loss))
        profiles = {name: trainer.profile(x, x) for name, trainer in trainers.items()}
    assert len({frozenset(found) for found in losses.values()}) == 1, "the losses differ"
    _print(programs, {name: row[1:] for name, row in seconds.items()}, profiles, costs)


def _inside_namespace() -> int:
    """Run this again where the loopback is ours; 0 if that is not allowed here."""
    namespace = ["unshare", "--user", "--map-root-user", "--net"]
    tools = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if tools:
        typer.echo(f"skipped: {', '.join(tools)} not found (util-linux, iproute2)")
        return 0
    tried = subprocess.run([*namespace, "tc", "qdisc", "show"], capture_output=True, text=True)
    if tried.returncode:
        typer.echo(f"skipped: no network namespace of our own here ({tried.stderr.strip()})")
        return 0
    again = [*namespace, sys.executable, *sys.argv]
    return subprocess.run(again, env={**os.environ, INSIDE: "1"}).returncode


def _slow_down(program: piper.Program, x: Tensor) -> piper.Costs:
    """Slow the loopback until exchanges take as long as computations; how fast both are then."""
    with piper.launch(program, on="processes", threads=1) as trainer:
        trainer.step(x, x)
        profile = trainer.profile(x, x)
    dag, sizes = program.dag, Sizes(program.dag, program.models)
    ops = [node.op for node in dag.nodes]
    computing = statistics.mean(
        sum(span.end - span.start for span in spans if isinstance(ops[span.node], Compute))
        for spans in profile.spans.values()
    )
    flops = sum(sizes.facts(op, WORKERS).flops for op in ops if isinstance(op, Compute))
    exchanged = sum(
        sizes.nbytes(node.reads[0])
        for node in dag.nodes
        if isinstance(node.op, Collective) and node.op.kind is CollectiveKind.ALL_TO_ALL
    )
    # of each worker's part one half stays; the two workers' other halves share the loopback
    rate = exchanged / computing
    shape = ("rate", f"{rate * 8:.0f}bit", "burst", "256kb", "latency", "200ms")
    _run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", *shape)
    return piper.Costs(flops / computing, rate)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _print(
    programs: dict[str, piper.Program],
    seconds: dict[str, list[float]],
    profiles: dict[str, Profile],
    costs: piper.Costs,
) -> None:
    best = statistics.median(seconds["DualPipeV"])
    table = Table(title=f"{WORKERS} workers, loopback at {costs.bytes_per_second / 1e6:.1f} MB/s")
    for column in ("schedule", "step (s)", "over DualPipeV", "uncovered: plan", "measured"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, program in programs.items():
        median = statistics.median(seconds[name])
        planned, measured = program.schedule.exchanges, profiles[name].exchanges
        ratio, shares = f"{median / best:.2f}", (f"{planned.share:.0%}", f"{measured.share:.0%}")
        table.add_row(name, f"{median:.3f}", ratio, *shares)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
