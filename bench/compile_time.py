"""What compiling costs: by depth, for other rows, in evaluation mode, at a second start.

    python -m bench.compile_time                                # all cases, about ten minutes
    python -m bench.compile_time --case llama-pp --layers 24
    python -m bench.compile_time --case workers                 # bench/start.py

The models are Llama of ``transformers`` with its default settings, 64 wide, and Piper's own:

- ``llama-pp``, ``llama-tp``: under a pipeline, and under tensor and sequence parallelism.
- ``llama-8b``: Llama 3 8B on the meta device, with PP 4 x DP 4.
- ``rows``: ``llama-pp`` again, for a model that was compiled with half as many microbatches.
- ``modes``: ``llama-pp`` with dropout, so that evaluation mode computes something else.
- ``cache``: ``llama-pp`` in a second process, which finds the program in the cache.
- ``dense``, ``moe``: only the capture, of Piper's own models.
- ``workers``: the start of 8, 64 and 128 worker processes.

Each row is a process of its own. "before" is its CPU time before it compiles: the imports of torch,
transformers and Piper, and the model. "MiB" is the growth of its peak memory while it compiles.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
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
from bench.start import per_worker
from piper.capture.model import capture
from piper.models import (
    DenseConfig,
    DenseTransformer,
    MoEConfig,
    MoETransformer,
    lm_loss,
)
from piper.strategies import mesh

Run = Callable[[], str]
"""What is timed; it returns what it made."""


def own(layers: int, *, experts: int = 0) -> Run:
    """Captures one of Piper's own models."""
    shape = {"vocab": 1024, "dim": 256, "layers": layers, "heads": 8, "mlp_dim": 512}
    with torch.device("meta"):
        module = (
            MoETransformer(MoEConfig(**shape, experts=experts))
            if experts
            else DenseTransformer(DenseConfig(**shape))
        )
        tokens = torch.zeros(8, 128, dtype=torch.int64)

    def run() -> str:
        made = capture(module, inputs=(tokens,), targets=(tokens,), loss=lm_loss, microbatches=4)
        return f"{len(made.chunks)} chunks, {len(made.unique_programs)} programs"

    return run


def small(layers: int, *, dropout: float = 0.0) -> piper.Capture:
    """Llama, 64 wide, with 8 rows."""
    return llama(
        8,
        32,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attention_dropout=dropout,
    )


def eight_billion(layers: int) -> piper.Capture:
    """Llama 3 8B with so many layers, and 32 rows."""
    return llama(
        32,
        4096,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def llama(rows: int, tokens: int, **sizes: Any) -> piper.Capture:
    """A model of that configuration on the meta device."""
    import transformers

    with torch.device("meta"):
        module: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
        batch = torch.zeros(rows, tokens, dtype=torch.int64)

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    return piper.capture(
        module,
        inputs=(batch,),
        targets=(batch,),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        init=lambda name, tensor, generator: None,
        tags={"model.layers.*": "layer"},
    )


def compiled(model: piper.Capture, strategy: piper.Strategy) -> Run:
    """Compiles a model, or finds it in the cache."""

    def run() -> str:
        program = model.compile(strategy, cache=True, progress=False)
        programs = next(iter(program.training_step.code.programs.values()))
        distinct = len(set(map(id, programs)))
        evaluation = program.timings.get("capturing evaluation mode", 0.0)
        seconds = sum(program.timings.values())
        how = program.tracing.partition("\n")[0].rpartition(": ")[2]
        return (
            f"{len(programs)} chunks, {distinct} programs; {how}; "
            f"evaluation {100 * evaluation / seconds:.0f}%"
        )

    return run


def other_rows(layers: int) -> Run:
    """Compiles a model that was compiled with half as many microbatches."""
    model = small(layers)
    compiled(model, mesh(pp=4, microbatches=4))()
    return compiled(model, mesh(pp=4, microbatches=8))


@dataclass(frozen=True, slots=True)
class Case:
    """What is compiled at some depths."""

    made: Callable[[int], Run]
    depths: Sequence[int]
    starts: int = 1
    """How many processes compile it, of which the last is measured."""


PIPELINE = mesh(pp=4, microbatches=4)
CASES = {
    "llama-pp": Case(lambda n: compiled(small(n), PIPELINE), (8, 24, 32, 126)),
    "llama-tp": Case(
        lambda n: compiled(small(n), mesh(tp=2, sequence_parallel=True)), (8, 24, 32, 126)
    ),
    "llama-8b": Case(
        lambda n: compiled(eight_billion(n), mesh(pp=4, dp=4, microbatches=8)), (8, 32)
    ),
    "rows": Case(other_rows, (24, 126)),
    "modes": Case(lambda n: compiled(small(n, dropout=0.1), PIPELINE), (24,)),
    "cache": Case(lambda n: compiled(small(n), PIPELINE), (24,), starts=2),
    "dense": Case(own, (4, 16, 64)),
    "moe": Case(lambda n: own(n, experts=8), (4, 16, 64)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one process."""

    case: str
    layers: int
    before: float
    cpu_seconds: float
    seconds: float
    peak_mib: float
    about: str


def measured(case: str, layers: int) -> Row:
    torch.set_num_threads(1)
    run = CASES[case].made(layers)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    about = run()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Row(case, layers, cpu, cpu_seconds, seconds, grown, about)


def main(
    case: Annotated[list[str] | None, typer.Option(help=", ".join([*CASES, "workers"]))] = None,
    depths: Annotated[list[int] | None, typer.Option("--layers", help="depths to try")] = None,
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON here")] = None,
) -> None:
    """Print CPU time and memory of each case at several depths."""
    rows = []
    context = multiprocessing.get_context("spawn")
    chosen = case or [*CASES, "workers"]
    for name in (x for x in chosen if x != "workers"):
        for depth in depths or CASES[name].depths:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["PIPER_CACHE"] = folder if CASES[name].starts > 1 else "off"
                for _ in range(CASES[name].starts):
                    with context.Pool(1) as pool:
                        row = pool.apply(measured, (name, depth))
            print(row, flush=True)
            rows.append(row)
    console = Console(width=150)
    if rows:
        console.print(_table(rows))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if "workers" in chosen:
        console.print(per_worker(["dp", "pp"], [8, 64, 128]))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="compile time, one core")
    for column in ("case", "layers", "before, CPU s", "CPU s", "seconds", "MiB"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        figures = f"{row.before:.1f}", f"{row.cpu_seconds:.2f}", f"{row.seconds:.1f}"
        table.add_row(row.case, str(row.layers), *figures, f"{row.peak_mib:.0f}", row.about)
    return table


if __name__ == "__main__":
    typer.run(main)
