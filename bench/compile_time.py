"""How the cost of compiling grows with depth: time per layer, programs and peak memory.

The models are Piper's own, captured, and Llama of ``transformers`` with its default settings, 64
wide, compiled under a pipeline (``llama-pp``) or tensor and sequence parallelism (``llama-tp``).
Each depth runs in its own process, so that caches and memory of one depth do not affect the next.
From the root of the project: ``python -m bench.compile_time --model llama-pp --layers 24``. With
``--cache FOLDER``, a second call loads the programs that the first one has kept there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
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
    cpu_seconds: float
    peak_mib: float
    """Growth of the process's peak memory while the model compiles."""


def captured(model: str, layers: int) -> Callable[[], tuple[int, int]]:
    """Captures one of Piper's own models; returns the numbers of its chunks and programs."""
    shape = {"vocab": 1024, "dim": 256, "layers": layers, "heads": 8, "mlp_dim": 512}
    with torch.device("meta"):
        module = (
            DenseTransformer(DenseConfig(**shape))
            if model == "dense"
            else MoETransformer(MoEConfig(**shape, experts=8))
        )
        tokens = torch.zeros(8, 128, dtype=torch.int64)

    def run() -> tuple[int, int]:
        made = capture(module, inputs=(tokens,), targets=(tokens,), loss=lm_loss, microbatches=4)
        return len(made.chunks), len(made.unique_programs)

    return run


STRATEGIES: dict[str, Callable[[], piper.Strategy]] = {
    "llama-pp": lambda: piper.strategies.mesh(pp=4, microbatches=4),
    "llama-tp": lambda: piper.strategies.mesh(tp=2, sequence_parallel=True),
}


def llama(model: str, layers: int) -> Callable[[], tuple[int, int]]:
    """Compiles Llama; returns the numbers of its chunks and programs."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    with torch.device("meta"):
        module: nn.Module = transformers.LlamaForCausalLM(config).train()
    tokens = torch.zeros(8, 32, dtype=torch.int64)

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    def run() -> tuple[int, int]:
        program = piper.compile(
            module,
            STRATEGIES[model](),
            inputs=(tokens,),
            targets=(tokens,),
            loss=loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            init=lambda name, tensor, generator: None,
            tags={"model.layers.*": "layer"},
        )
        programs = next(iter(program.training_step.code.programs.values()))
        return len(programs), len(set(map(id, programs)))

    return run


def measure(model: str, layers: int) -> Row:
    torch.set_num_threads(1)
    run = (llama if model in STRATEGIES else captured)(model, layers)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    chunks, programs = run()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Row(model, layers, chunks, programs, seconds, cpu_seconds, grown)


def main(
    depths: Annotated[list[int] | None, typer.Option("--layers", help="depths to try")] = None,
    model: Annotated[list[str] | None, typer.Option(help="dense, moe, llama-pp, llama-tp")] = None,
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON here")] = None,
    cache: Annotated[Path | None, typer.Option(help="keep and load programs here")] = None,
) -> None:
    """Print time, programs and memory for several depths."""
    os.environ["PIPER_CACHE"] = "off" if cache is None else str(cache)
    rows = []
    console = Console()
    context = multiprocessing.get_context("spawn")
    for name in model or ["dense", "moe", *STRATEGIES]:
        usual = [8, 24, 32, 126] if name in STRATEGIES else [4, 8, 16, 32, 64]
        for depth in depths or usual:
            with console.status(f"{name}, {depth} layers"), context.Pool(1) as pool:
                rows.append(pool.apply(measure, (name, depth)))
    table = Table(title="compile time, one core")
    columns = ("model", "layers", "chunks", "programs", "seconds", "CPU s", "ms/layer", "added MiB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.layers),
            str(row.chunks),
            str(row.programs),
            f"{row.seconds:.2f}",
            f"{row.cpu_seconds:.2f}",
            f"{1000 * row.seconds / row.layers:.0f}",
            f"{row.peak_mib:.0f}",
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
