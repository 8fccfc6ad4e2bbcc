"""Simulated step times beside measured ones.

Emulated: a model whose computations are sleeps of known length (see emulated.py) on 2 to 8 worker
processes, so that the number of cores does not matter. Each strategy is simulated twice: from the
lengths alone, with typical loopback costs (``Cluster.of("CPU")``) and nothing fitted; and from the
profile of one strategy, which has the real cost of processes and messages on this machine.

Real (``--real``): the MoE model on two workers, with real kernels. Two strategies are profiled. All
are simulated from those profiles, and the simulated ranking is compared with the measured one.

    python bench/prediction.py [--seconds 0.01] [--rounds 5] [--real] [--json FILE]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from emulated import FLOPS, Sleepers, loss
from rich.console import Console
from rich.table import Table

import piper
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh

EMULATED: Mapping[str, piper.Strategy] = {
    "gpipe, 2 x 1": mesh(pp=2, schedule="gpipe", microbatches=4),
    "1f1b, 2 x 1": mesh(pp=2, schedule="1f1b", microbatches=8),
    "1f1b, 4 x 1": mesh(pp=4, schedule="1f1b", microbatches=8),
    "1f1b, 8 x 1": mesh(pp=8, schedule="1f1b", microbatches=8),
    "interleaved, 4 x 1": mesh(pp=4, schedule="interleaved", microbatches=8),
    "zb-h1, 4 x 1": mesh(pp=4, schedule="zb-h1", microbatches=8),
    "zb-v, 4 x 1": mesh(pp=4, schedule="zb-v", microbatches=8),
    "dualpipev, 4 x 1": mesh(pp=4, schedule="dualpipev", microbatches=8),
    "dualpipe, 4 x 1": mesh(pp=4, schedule="dualpipe", microbatches=8),
    "data parallel, 4": mesh(dp=4, microbatches=4, zero=1),
    "1f1b, 2 x 2, experts": mesh(pp=2, dp=2, ep=2, schedule="1f1b", microbatches=4, zero=1),
    "dualpipev, 2 x 2, experts": mesh(pp=2, dp=2, ep=2, schedule="dualpipev", microbatches=4),
    "1f1b, 4 x 2, zero 3": mesh(pp=4, dp=2, schedule="1f1b", microbatches=8, zero=3),
}
PROFILED = mesh(pp=2, dp=2, ep=2, schedule="1f1b", microbatches=8, zero=3)
REAL: Mapping[str, piper.Strategy] = {
    "1f1b, 2 x 1": mesh(pp=2, schedule="1f1b", microbatches=8),
    "gpipe, 2 x 1, 2 microbatches": mesh(pp=2, schedule="gpipe", microbatches=2),
    "zb-v, 2 x 1": mesh(pp=2, schedule="zb-v", microbatches=8),
    "data parallel": mesh(dp=2, microbatches=2),
    "data parallel, experts divided": mesh(dp=2, ep=2, microbatches=2),
    "uneven stages": mesh(pp=2, schedule="1f1b", microbatches=8, by=[1, 5]),
}
PROFILED_REAL = ("1f1b, 2 x 1", "data parallel, experts divided")
LAYERS, EXPERTS, DIM, ROWS = 16, 4, 64, 32
TOKENS = 64


@dataclass(frozen=True)
class Row:
    """The times of one strategy, in seconds."""

    name: str
    measured: float
    spread: tuple[float, float]
    simulated: float
    """Simulated from a profile."""
    bubble: float
    from_lengths: float | None = None
    """Simulated from the lengths of the sleeps."""

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


def emulated(seconds: float, strategy: piper.Strategy) -> tuple[piper.Program, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, EXPERTS, DIM)
    program = piper.compile(
        Sleepers(LAYERS, EXPERTS, DIM, seconds),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        costs=piper.Costs(flops_per_second=FLOPS, bytes_per_second=1.5e9, overhead=1e-4),
    )
    return program, x


def real(strategy: piper.Strategy) -> tuple[piper.Program, torch.Tensor]:
    torch.manual_seed(0)
    config = MoEConfig(
        vocab=512, dim=128, layers=6, heads=4, mlp_dim=256, experts=4, max_seq=TOKENS
    )
    x = torch.randint(0, 512, (16, TOKENS))
    program = piper.compile(
        MoETransformer(config),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        costs=piper.Cluster.of("CPU", 2).costs(),
    )
    return program, x


def timed(program: piper.Program, x: torch.Tensor, rounds: int) -> list[float]:
    with piper.launch(program, on="processes", threads=1) as trainer:
        trainer.step(x, x)
        return [trainer.step(x, x).seconds for _ in range(rounds)]


def profiled(program: piper.Program, x: torch.Tensor) -> piper.Recorded:
    with piper.launch(program, on="processes", threads=1) as trainer:
        trainer.step(x, x)
        return trainer.profile(x, x, steps=5).recorded


def sleepers() -> piper.Cluster:
    """A cluster of devices that compute by sleeping, on one machine's loopback."""
    usual = piper.Cluster.of("CPU", 8).machines[0]
    device = piper.Device(
        name="sleeper",
        flops={torch.float32: FLOPS},
        memory=2**33,
        bandwidth=usual.devices[0].bandwidth,
        overhead=usual.devices[0].overhead,
        issue=usual.devices[0].issue,
        synchronous=True,
    )
    return piper.Cluster.of(device, 8, inside="loopback", sharing=piper.Sharing(links=0.0))


def main(
    seconds: Annotated[float, typer.Option(help="Of one emulated computation.")] = 0.01,
    rounds: Annotated[int, typer.Option(help="Measured steps of each.")] = 5,
    real_: Annotated[bool, typer.Option("--real", help="Real kernels, from a profile.")] = False,
    only: Annotated[str, typer.Option(help="Strategies whose name contains this.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare simulated with measured step times."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    console = Console(width=110)
    rows = _real(console, rounds) if real_ else _emulated(console, seconds, rounds, only)
    names = ("strategy", "measured s", "10-90%", "simulated s", "ratio", "from lengths", "bubble")
    table = Table(*names)
    for row in rows:
        low, high = row.spread
        span = f"{low:.3f} to {high:.3f}"
        figures = f"{row.measured:.4f}", span, f"{row.simulated:.4f}", f"{row.ratio:.3f}"
        plain = "" if row.from_lengths is None else f"{row.from_lengths / row.measured:.3f}"
        table.add_row(row.name, *figures, plain, f"{row.bubble:.1%}")
    console.print(table)
    worst = max(abs(row.ratio - 1) for row in rows)
    console.print(f"largest difference {worst:.1%}; {_order(rows)}")
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _emulated(console: Console, seconds: float, rounds: int, only: str) -> list[Row]:
    cluster = sleepers()
    with console.status("profiling one strategy"):
        recorded = profiled(*emulated(seconds, PROFILED))
    rows = []
    for name, strategy in EMULATED.items():
        if only in name:
            with console.status(name):
                program, x = emulated(seconds, strategy)
                found = program.simulate(cluster, recorded)
                row = _row(name, timed(program, x, rounds), found)
                rows.append(replace(row, from_lengths=program.simulate(cluster).seconds))
    return rows


def _real(console: Console, rounds: int) -> list[Row]:
    """The strategies take turns, so that a noisy machine affects all of them."""
    cluster = piper.Cluster.of("CPU", 2)
    times: dict[str, list[float]] = {name: [] for name in REAL}
    recorded = None
    with contextlib.ExitStack() as stack, console.status("compiling") as status:
        trainers = {}
        for name, strategy in REAL.items():
            program, x = real(strategy)
            trainers[name] = stack.enter_context(piper.launch(program, on="processes", threads=1))
            trainers[name].step(x, x)
        status.update("profiling")
        for name in PROFILED_REAL:
            one = trainers[name].profile(x, x, steps=7).recorded
            recorded = one if recorded is None else recorded + one
        for number in range(rounds):
            status.update(f"round {number + 1} of {rounds}")
            for name, trainer in trainers.items():
                times[name] += [trainer.step(x, x).seconds for _ in range(2)]
        return [
            _row(name, times[name], trainer.program.simulate(cluster, recorded))
            for name, trainer in trainers.items()
        ]


def _row(name: str, times: list[float], found: piper.Simulation) -> Row:
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else times * 2
    return Row(name, statistics.median(times), (cuts[0], cuts[-1]), found.seconds, found.bubble)


def _order(rows: list[Row]) -> str:
    """How many pairs of strategies the simulator ranks as measured."""
    pairs = list(itertools.combinations(rows, 2))
    agree = sum((a.measured < b.measured) == (a.simulated < b.simulated) for a, b in pairs)
    wrong = [
        f"{a.name} / {b.name} (measured {a.measured / b.measured:.3f})"
        for a, b in pairs
        if (a.measured < b.measured) != (a.simulated < b.simulated)
    ]
    return f"{agree} of {len(pairs)} pairs in the measured order" + "".join(
        f"\n  not: {w}" for w in wrong
    )


if __name__ == "__main__":
    typer.run(main)
