"""How the cost of capture grows with depth: time per layer, traced programs and peak memory.

Each depth runs in its own process, so that caches and memory of one depth do not affect the next.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from piper.capture.model import capture
from piper.models import (
    DenseConfig,
    DenseTransformer,
    MoEConfig,
    MoETransformer,
    lm_loss,
)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    layers: int
    chunks: int
    programs: int
    seconds: float
    peak_mib: float
    """Growth of the process's peak memory during the capture."""


def measure(model: str, layers: int) -> Row:
    torch.set_num_threads(1)
    shape = {"vocab": 1024, "dim": 256, "layers": layers, "heads": 8, "mlp_dim": 512}
    with torch.device("meta"):
        module = (
            DenseTransformer(DenseConfig(**shape))
            if model == "dense"
            else MoETransformer(MoEConfig(**shape, experts=8))
        )
        tokens = torch.zeros(8, 128, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    captured = capture(module, inputs=(tokens,), targets=(tokens,), loss=lm_loss, microbatches=4)
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    chunks, programs = len(captured.chunks), len(captured.unique_programs)
    return Row(model, layers, chunks, programs, seconds, grown)


def main(
    depths: Annotated[list[int] | None, typer.Option("--layers", help="depths to try")] = None,
    model: Annotated[list[str] | None, typer.Option(help="dense, moe")] = None,
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON here")] = None,
) -> None:
    """Print time, programs and memory of a capture for several depths."""
    rows = []
    console = Console()
    context = multiprocessing.get_context("spawn")
    for name in model or ["dense", "moe"]:
        for depth in depths or [4, 8, 16, 32, 64]:
            with console.status(f"{name}, {depth} layers"), context.Pool(1) as pool:
                rows.append(pool.apply(measure, (name, depth)))
    table = Table(title="capture and autodiff, one core")
    for column in ("model", "layers", "chunks", "programs", "seconds", "ms/layer", "added MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.layers),
            str(row.chunks),
            str(row.programs),
            f"{row.seconds:.2f}",
            f"{1000 * row.seconds / row.layers:.0f}",
            f"{row.peak_mib:.0f}",
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
