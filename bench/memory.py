"""Peak memory of a device, ours and theirs, with pipeline and data parallelism: PP 8 x DP 4.

The same dense transformer, cut into the same stages, 1F1B with the same microbatches, AdamW, fp32:

    ours     mesh(pp=8, dp=4, zero=0..3), one bucket per block
    theirs   torch.distributed.pipelining with fully_shard on each block, as in TorchTitan:
             reshard_after_forward=False stands for ZeRO-2, True for ZeRO-3 (see pipelining.py)

The count is bytes of live tensors on the device that needs most: parameters, gradients, optimizer
state, activations, buffers. Ours is predicted (``program.memory``) and measured on virtual devices
(``trainer.measure_memory``). Theirs is measured, rank by rank. Both use the same tracker; theirs is
checked on PP 2 x DP 2 against processes that communicate through gloo.

There are two models: in "state", parameters, gradients and optimizer state take the most memory; in
"activations", saved activations do. The first table has one batch size. The second has the largest
batch that fits a memory limit; the limits are what our ZeRO-2 needs at some batch sizes. Batches
grow by the rows of a microbatch, since the number of microbatches changes little under 1F1B. Theirs
is searched on the rank that needed most in the first table: if another rank needed more, theirs
would fit less.

    python bench/memory.py [--model state] [--remat] [--virtual 2] [--json FILE]
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pipelining
import torch
import typer
from pipelining import Case
from rich.console import Console
from rich.table import Table
from work import evenly

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.program.storage import with_plans
from piper.strategies import mesh

LEVELS = range(4)
RESHARD = {2: False, 3: True}
"""Their ``reshard_after_forward``, by our ZeRO level."""
MIB = 2**20


# The embedding is as large as a block, so that our buckets are aligned with blocks.
MODELS = {
    "state": DenseConfig(vocab=4096, dim=256, layers=32, heads=8, mlp_dim=768, max_seq=4),
    "activations": DenseConfig(vocab=1024, dim=64, layers=8, heads=4, mlp_dim=128, max_seq=256),
}


@dataclass(frozen=True)
class Predicted:
    """The class of our devices with the highest peak."""

    peak: int
    at: str
    holders: dict[str, int]


@dataclass(frozen=True)
class Level:
    """One line of the first table, in bytes."""

    zero: int
    theory: int
    """Parameters, gradients and optimizer state of the largest stage, sharded by ZeRO."""
    predicted: Predicted
    measured: int
    measured_at: str
    theirs: list[int] | None
    """The peak of each rank."""


@dataclass(frozen=True)
class Fit:
    """The most rows of a microbatch that fit a memory limit."""

    limit: int
    zero: int
    ours: int
    theirs: int
    ours_measured: int | None = None
    """The measured peak of ours with that many rows, in bytes."""


def theory(case: Case, zero: int) -> int:
    with torch.device("meta"):
        model = DenseTransformer(case.model)
    stages = [pipelining.Stage(model, case, number) for number in range(case.stages)]
    ranks = [stages[rank :: case.pp] for rank in range(case.pp)]
    largest = max(sum(p.nbytes for s in rank for p in s.parameters()) for rank in ranks)
    whole = {0: 4, 1: 2, 2: 1, 3: 0}[zero]  # of parameters, gradients and optimizer state (2)
    return whole * largest + (4 - whole) * largest // case.dp


def strategy(case: Case, zero: int) -> piper.Strategy:
    with torch.device("meta"):
        block = DenseTransformer(case.model).layers[0]
    return mesh(
        pp=case.pp,
        dp=case.dp,
        schedule="1f1b" if case.virtual == 1 else "interleaved",
        virtual=case.virtual,
        microbatches=case.microbatches,
        zero=zero,
        by=evenly(case.model.layers, case.stages),
        bucket_mb=sum(p.nbytes for p in block.parameters()) / MIB,
    )


def batch(case: Case) -> torch.Tensor:
    rows = case.rows * case.dp * case.microbatches
    return torch.zeros(rows, case.model.max_seq, dtype=torch.int64)


def compiled(case: Case, zero: int) -> piper.Program:
    with torch.device("meta"):
        model = DenseTransformer(case.model)
    x = batch(case)
    return piper.compile(
        model,
        strategy(case, zero),
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=pipelining.adamw,
        init=model.init_parameter,
        device="cpu",
        remat="all" if case.remat else "none",
    )


@cache
def predicted(case: Case) -> dict[int, Predicted]:
    """The peak at each ZeRO level: the model is captured once, and lowered for each level."""
    program = compiled(case, 0)
    found = {}
    for zero in LEVELS:
        lowered = with_plans(replace(program, strategy=strategy(case, zero)), piper.Program).lowered
        most = max(range(len(lowered.memory)), key=lambda i: lowered.memory[i].peak)
        memory = lowered.memory[most]
        at = lowered.plans[most].instructions[memory.peak_at].name
        holders = {holder.value: nbytes for holder, nbytes in memory.at_peak.items() if nbytes}
        found[zero] = Predicted(memory.peak, at, holders)
    return found


def measured(case: Case, zero: int) -> tuple[int, str]:
    """The highest peak of a device in the second step, and the instruction at which it occurs."""
    x = batch(case)
    with piper.launch(compiled(case, zero), on="virtual") as trainer:
        trainer.step(x, x)
        alive = trainer.measure_memory(x, x).values()
    most = max(alive, key=lambda one: one.peak)
    return most.peak, most.at


@cache
def theirs(case: Case, zero: int, rank: int) -> int:
    return pipelining.alone(case, rank, RESHARD[zero]).peak


def largest(peak: Callable[[int], int], limit: int, low: int, high: int) -> int:
    """The largest number whose ``peak`` is within ``limit``. ``peak`` grows almost linearly;
    ``low`` and ``high`` are a first guess of the bounds."""
    if peak(low) > limit:
        return largest(peak, limit, 1, low) if low > 1 else 0
    while peak(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        share = (limit - peak(low)) / (peak(high) - peak(low))
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low


def main(
    model: Annotated[list[str] | None, typer.Option(help="state, activations")] = None,
    pp: Annotated[int, typer.Option(min=2, help="Ranks of the pipeline.")] = 8,
    dp: Annotated[int, typer.Option(min=2, help="Devices of each.")] = 4,
    microbatches: Annotated[int | None, typer.Option(help="By default 2 for each rank.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks, if not the model's own.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary, if not the model's own.")] = None,
    virtual: Annotated[int, typer.Option(help="Stages a rank; more than 1: interleaved.")] = 1,
    remat: Annotated[bool, typer.Option(help="Compute blocks again in the backward.")] = False,
    rows: Annotated[int, typer.Option(help="Of a microbatch, in the first table.")] = 2,
    fit: Annotated[
        list[int] | None, typer.Option(help="Rows of a microbatch that our ZeRO-2 shall just fit.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Check theirs against gloo first.")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare peak memory, and the largest batch within a memory."""
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch.set_num_threads(1)
    console = Console(width=132)
    result: dict[str, Any] = {}
    if check:
        result["check"] = _checked(console)
    for name in model or MODELS:
        own = MODELS[name]
        config = replace(own, layers=layers or own.layers, vocab=vocab or own.vocab)
        case = Case(config, pp, dp, microbatches or 2 * pp, rows, virtual, remat)
        with console.status(f"{name}: one batch"):
            levels = [_level(case, zero) for zero in LEVELS]
        _print_levels(console, f"{name}, PP {pp} x DP {dp}", case, levels)
        with console.status(f"{name}: the largest batch"):
            fits = [x for rows in fit or (8, 32) for x in _fits(case, rows, levels)]
            fits[:2] = [_validated(case, x) for x in fits[:2]]  # more rows take too long
        _print_fits(console, fits)
        result[name] = {"levels": list(map(asdict, levels)), "fits": list(map(asdict, fits))}
    if out is not None:
        out.write_text(json.dumps(result, indent=1))


def _level(case: Case, zero: int) -> Level:
    peak, at = measured(case, zero)
    others = [theirs(case, zero, rank) for rank in range(case.pp)] if zero in RESHARD else None
    return Level(zero, theory(case, zero), predicted(case)[zero], peak, at, others)


def _fits(case: Case, rows: int, levels: list[Level]) -> Iterable[Fit]:
    """The largest batches within the memory that our ZeRO-2 needs with ``rows`` rows."""
    limit = predicted(replace(case, rows=rows))[2].peak
    for zero in RESHARD:
        peaks = levels[zero].theirs or [0]
        rank = peaks.index(max(peaks))

        def ours(n: int, zero: int = zero) -> int:
            return predicted(replace(case, rows=n))[zero].peak

        def other(n: int, zero: int = zero, rank: int = rank) -> int:
            return theirs(replace(case, rows=n), zero, rank)

        most = largest(ours, limit, rows, rows + 1 if zero == 2 else 2 * rows)
        yield Fit(limit, zero, most, largest(other, limit, 1, rows))


def _validated(case: Case, fit: Fit) -> Fit:
    return replace(fit, ours_measured=measured(replace(case, rows=fit.ours), fit.zero)[0])


def _checked(console: Console) -> list[dict[str, Any]]:
    """Check theirs on a small case: each rank alone against all ranks over gloo."""
    config = DenseConfig(vocab=1024, dim=64, layers=4, heads=4, mlp_dim=192, max_seq=32)
    case = Case(config, pp=2, dp=2, microbatches=4, rows=2)
    found = []
    for reshard in RESHARD.values():
        with console.status("checking theirs against gloo"):
            real = pipelining.together(case, reshard)
            fake = [pipelining.alone(case, rank, reshard) for rank in range(case.pp)]
        for rank, (a, b) in enumerate(zip(fake, real, strict=True)):
            console.print(
                f"theirs, PP 2 x DP 2, {reshard=}, rank {rank}: alone {a.peak:,} bytes, "
                f"over gloo {b.peak:,}, ratio {a.peak / b.peak:.4f}"
            )
            if abs(a.peak / b.peak - 1) > 0.02:
                raise SystemExit("the two must agree to 2%")
            found.append({"reshard": reshard, "rank": rank, "alone": a.peak, "gloo": b.peak})
    return found


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def _print_levels(console: Console, title: str, case: Case, levels: list[Level]) -> None:
    what = f"{case.microbatches} microbatches of {case.rows} x {case.model.max_seq} tokens"
    columns = ("zero", "theory", "predicted", "measured", "theirs", "theirs / ours", "peak at")
    table = _table(f"{title}: MiB of the fullest device, {what}", *columns)
    for x in levels:
        other = max(x.theirs) if x.theirs else None
        ratio = "" if other is None else f"{other / x.measured:.2f}"
        figures = map(_mib, (x.theory, x.predicted.peak, x.measured, other))
        table.add_row(str(x.zero), *figures, ratio, x.measured_at)
    console.print(table)
    names = list(dict.fromkeys(name for x in levels for name in x.predicted.holders))
    table = _table("what holds the predicted peak, MiB", "zero", *names)
    for x in levels:
        table.add_row(str(x.zero), *(_mib(x.predicted.holders.get(name, 0)) for name in names))
    console.print(table)


def _print_fits(console: Console, fits: list[Fit]) -> None:
    columns = ("limit, MiB", "zero", "ours", "theirs", "ours / theirs", "ours measured, MiB")
    table = _table("the most rows of a microbatch within a memory", *columns)
    for x in fits:
        ratio = f"{x.ours / x.theirs:.2f}" if x.theirs else "none fits"
        row = (_mib(x.limit), str(x.zero), str(x.ours), str(x.theirs), ratio)
        table.add_row(*row, _mib(x.ours_measured))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
