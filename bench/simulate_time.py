"""How long a simulation of thousands of devices takes: one core.

MoE layers in 16 stages, 64 replicas with expert parallel size 8: 8,192 devices, 64 microbatches.
Once on identical machines, and once with a few slow devices and a slow link. These split the
replicas into more equivalence classes, each of which is simulated separately.

    python bench/simulate_time.py [--layers 64] [--json FILE]
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import piper
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh


def program(
    layers: int, stages: int, replicas: int, ways: int, microbatches: int, schedule: str
) -> piper.Program:
    shape = {"vocab": 1024, "dim": 1024, "heads": 8, "mlp_dim": 1024, "max_seq": 128}
    with torch.device("meta"):
        model = MoETransformer(MoEConfig(**shape, layers=layers, experts=ways, top_k=1))
        x = torch.zeros(microbatches * replicas * ways, 128, dtype=torch.int64)
    strategy = mesh(
        pp=stages, dp=replicas * ways, ep=ways, schedule=schedule, microbatches=microbatches, zero=1
    )
    return piper.compile(
        model,
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        init=model.init_parameter,
    )


def uneven(cluster: piper.Cluster) -> piper.Cluster:
    """``cluster`` with a slow device in every hundredth machine, and one slow link."""
    machines = list(cluster.machines)
    for number in range(0, len(machines), 100):
        first = machines[number].devices[0]
        slow = replace(first, name="slow", flops={dtype: x / 2 for dtype, x in first.flops.items()})
        machines[number] = replace(machines[number], devices=(slow, *machines[number].devices[1:]))
    machines[7] = replace(machines[7], outside=piper.Link(5e9, 2e-5))
    return replace(cluster, machines=tuple(machines), name="uneven")


def main(
    layers: int = 64,
    stages: int = 16,
    replicas: int = 64,
    ways: int = 8,
    microbatches: int = 64,
    schedule: Annotated[list[str] | None, typer.Option()] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print the time of compilations and simulations."""
    torch.set_num_threads(1)
    console = Console(width=110)
    columns = (
        "schedule",
        "cluster",
        "devices",
        "instructions",
        "classes",
        "compile s",
        "simulate s",
    )
    table = Table(*columns, "step s", "bubble")
    rows = []
    for name in schedule or ["1f1b", "dualpipev"]:
        start = time.perf_counter()
        with console.status(f"compiling {name}"):
            found = program(layers, stages, replicas, ways, microbatches, name)
        compiling = time.perf_counter() - start
        plain = piper.Cluster.of("H100", 8, stages * replicas * ways // 8)
        for cluster in (plain, uneven(plain)):
            start = time.perf_counter()
            simulation = found.simulate(cluster)
            seconds = simulation.seconds
            taken = time.perf_counter() - start
            count = sum(len(row.pcs) for row in simulation.spans)
            row = {
                "schedule": name,
                "cluster": cluster.name,
                "devices": len(found.devices),
                "instructions": count,
                "classes": len(simulation.classes),
                "compile_seconds": compiling,
                "simulate_seconds": taken,
                "step_seconds": seconds,
                "bubble": simulation.bubble,
            }
            rows.append(row)
            table.add_row(*(f"{x:,.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
