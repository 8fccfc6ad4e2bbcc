"""The CPU seconds from a model's facts to all plans, and how they grow.

64 MoE layers in 16 stages, on 16 x 1 and on 16 x 1,024 devices, for growing numbers of
microbatches, in two orders: overlapped pairs like the steady state of DualPipeV, and ZB-H1, whose
backwards are split.

Then a captured model of 64 dense layers under other strategies than its first, with 32 microbatches
on 64 devices (pp 8 x tp 8) and on 512 (pp 8 x dp 8 x tp 8, two stages a rank).
"""

from __future__ import annotations

import gc
import itertools
import resource
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import piper
from piper.capture.captured_facts import facts_of
from piper.capture.model import capture
from piper.ir.dag.build import build
from piper.ir.dag.facts import Model
from piper.ir.passes import RematPolicy
from piper.lower.lower import lower
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies.directives import Directive, order, partition, place, replicate, shard, split
from piper.strategies.directives.order import Order
from piper.strategies.schedules.zb_h1 import zb_h1
from piper.strategies.strategy import Strategy


def model_facts(layers: int, batch: int) -> Model:
    """The facts of a small MoE transformer of that depth."""
    shape = {"vocab": 64, "dim": 16, "heads": 2, "mlp_dim": 16, "max_seq": 4}
    with torch.device("meta"):
        model = MoETransformer(MoEConfig(**shape, layers=layers, experts=1024, top_k=1))
        tokens = torch.zeros(batch, 4, dtype=torch.int64)
    captured = capture(model, inputs=(tokens,), targets=(tokens,), loss=lm_loss, microbatches=batch)
    return facts_of(captured, RematPolicy.NONE)


def steady(stage: int, stages: int, microbatches: int) -> Directive:
    """Warm-up forwards, then overlapped pairs of a forward and a backward, then the rest."""
    ahead = min(stages - stage, microbatches)
    groups = [[_pass(stage, m, "F")] for m in range(ahead)]
    for m in range(ahead, microbatches):
        groups.append([_pass(stage, m, "F"), _pass(stage, m - ahead, "B")])
    groups += [[_pass(stage, m, "B")] for m in range(microbatches - ahead, microbatches)]
    return order(*groups)


def _pass(stage: int, microbatch: int, which: str) -> dict[str, int | str]:
    return {"PP": stage, "MB": microbatch, "PASS": which}


ORDERS = {
    "pairs": lambda stages, n: [steady(stage, stages, n) for stage in range(stages)],
    "zb-h1": lambda stages, n: [d for d in zb_h1(stages, n).directives() if isinstance(d, Order)],
}
"""The order of each stage, by stages and microbatches."""


def strategy(orders: str, stages: int, replicas: int, microbatches: int) -> Strategy:
    groups = [range(s * replicas, (s + 1) * replicas) for s in range(stages)]
    return Strategy(
        [
            partition("layer", into="PP", parts=stages),
            *(place({"PP": s}, devices=groups[s]) for s in range(stages)),
            replicate({"EP": "-"}, zero=1),
            shard({"EP": "*"}),
            split(parts=microbatches),
            *ORDERS[orders](stages, microbatches),
        ]
    )


OTHERS: dict[int, list[dict[str, int | str]]] = {
    64: [{"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "gpipe"}],
    512: [
        {"dp": 8, "schedule": "interleaved"},
        {"dp": 8, "schedule": "zb-v"},
        {"dp": 8, "schedule": "interleaved", "zero": 1},
    ],
}
"""By number of devices, the strategies of one captured model, beside pp 8 x tp 8. The first makes
all traces."""


def other_strategies(layers: int) -> Table:
    """The CPU seconds to compile a captured model under the strategies after its first."""
    shape = {"vocab": 1024, "dim": 256, "heads": 8, "mlp_dim": 512}
    with torch.device("meta"):
        model = DenseTransformer(DenseConfig(**shape, layers=layers))
        tokens = torch.zeros(8 * 32 * 8, 16, dtype=torch.int64)
    captured = piper.capture(model, inputs=(tokens,), targets=(tokens,), loss=lm_loss)
    table = Table(title=f"another strategy for a captured model of {layers} layers")
    for column in ("devices", "strategy", "nodes", "CPU s", "MiB"):
        table.add_column(column, justify="right")
    for devices, strategies in OTHERS.items():
        for number, how in enumerate(strategies):
            start = time.process_time()
            made = captured.compile(
                piper.strategies.mesh(pp=8, tp=8, microbatches=32, **how), cache=False
            )
            seconds = time.process_time() - start
            if number:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                name = ", ".join(f"{key}={value}" for key, value in how.items())
                nodes = len(made.dag.nodes)
                table.add_row(str(devices), name, f"{nodes:,}", f"{seconds:.1f}", f"{peak:.0f}")
    return table


def main(
    microbatches: Annotated[list[int] | None, typer.Option()] = None,
    replicas: Annotated[list[int] | None, typer.Option()] = None,
    layers: int = 64,
    stages: int = 16,
    captured: bool = True,
) -> None:
    """Print time and memory from facts to plans."""
    torch.set_num_threads(1)
    console = Console(width=100)
    if captured:
        console.print(other_strategies(layers))
    counts = microbatches or [16, 64, 256]
    with console.status("capturing"):
        facts = model_facts(layers, max(counts))
    table = Table(title="from DAG to all distinct plans, CPU seconds")
    table.add_column("order")
    for column in ("replicas", "microbatches", "nodes", "plans", "directives s", "lower s", "MiB"):
        table.add_column(column, justify="right")
    for orders, n in itertools.product(ORDERS, replicas or [1, 1024]):
        for count in counts:
            start = time.process_time()
            gc.disable()  # as piper.compile does
            placed = strategy(orders, stages, n, count).apply(build(facts))
            middle = time.process_time()
            lowered = lower(placed, {n: facts})
            end = time.process_time()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            table.add_row(
                orders,
                str(n),
                str(count),
                f"{len(lowered.dag.nodes):,}",
                str(len(lowered.plans)),
                f"{middle - start:.1f}",
                f"{end - middle:.1f}",
                f"{peak:.0f}",
            )
            del placed, lowered
            gc.enable()
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
