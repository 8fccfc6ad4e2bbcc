"""Predictions of training runs that others published: how well does the simulator choose?

Each run of ``bench/published/runs.csv`` (sources in ``SOURCES.md``) is estimated for its devices
and its cluster. A group has runs of one model on one cluster under several strategies. For
each group the table has:

- the rank correlation of predicted and published throughput,
- the regret: how much slower than the best published run the run is that the simulator puts first,
- predicted over published step time (median, and the shares within 15% and 30%) of the runs that
  reach a third of the best throughput,
- predicted over published peak memory, where it was published.

Figures of clusters are chosen once for each kind of cluster, never for a run.

    python -m bench.published --group US-8B-4n --group US-3B-8n
    python -m bench.published --every --json predictions.json   # hours; continues where it stopped

Not expressed: mixtures of experts, context parallelism, fp8, custom pipeline schedules. All dense
models are decoders with RMS norms, rotary embeddings and a gated MLP of the published width; models
with a plain MLP have a gated one of equal parameters.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import piper
from piper.cost.presets import DEVICES
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh

RUNS = Path(__file__).parent / "published" / "runs.csv"
USUAL = ("US-1B-8n", "US-3B-4n", "US-8B-4n", "US-8B-16n", "US-80B-16n")
"""The groups that are predicted unless others are asked for."""
_NEAR_BEST = 1 / 3
_GIB = 2**30
_H100_OF_TITAN = replace(
    DEVICES["H100"],
    name="H100-96GB",
    memory=96 * _GIB,
    bandwidth=2.4e12,
    flops={dtype: 0.8 * peak for dtype, peak in DEVICES["H100"].flops.items()},  # 500 W of 700
)
_DEVICES = {
    "H100": DEVICES["H100"],
    "H100-80GB": DEVICES["H100"],
    "H100-96GB (HBM2e 2.4TB/s, 500W limit)": _H100_OF_TITAN,
    "H200": DEVICES["H200"],
    "A100": DEVICES["A100-80"],
    "A100-80GB": DEVICES["A100-80"],
}
_OUTSIDE = {"US": "EFA-3200", "AA": "InfiniBand-HDR", "MPT": "InfiniBand-HDR"}
"""The link between machines, by the first part of a group's name; InfiniBand-NDR for others."""
_ZERO = {
    "": 0, "zero0": 0, "ddp": 0, "none": 0, "zero1": 1, "fsdp shard_grad_op": 2,
    "fsdp2": 3, "fsdp full shard": 3,
}  # fmt: skip
_REMAT = {
    "": None,
    "none": None,
    "full": "all",
    "full (every layer)": "all",
    "selective": "min-cut",
}


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    config: DenseConfig
    batch: int
    seq: int


@dataclass(frozen=True)
class Prediction:
    """A published run beside its prediction."""

    run: str
    group: str
    published_seconds: float
    seconds: float
    published_gib: float | None
    gib: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.published_seconds


class NotExpressedError(Exception):
    """The run has something that this program cannot say; the message is what."""


def integer(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number of a row."""
    if not row[name] and default is None:
        raise NotExpressedError(f"{name} is not published")
    return int(float(row[name])) if row[name] else int(default or 0)


def shape_of(row: Mapping[str, str]) -> Shape:
    """The model of a run."""
    if integer(row, "experts", 1) > 1:
        raise NotExpressedError("experts")
    heads, width = integer(row, "heads"), integer(row, "hidden")
    hidden = integer(row, "ffn", 4 * width)
    if row["group"].startswith(("MPT", "BS", "ML-A100")):
        hidden = 2 * hidden // 3
    seq = integer(row, "seq")
    config = DenseConfig(
        vocab=integer(row, "vocab"),
        dim=width,
        layers=integer(row, "layers"),
        heads=heads,
        kv_heads=integer(row, "kv_heads", heads),
        mlp_dim=hidden,
        max_seq=seq,
    )
    return Shape(config, integer(row, "global_batch"), seq)


def strategy_of(row: Mapping[str, str]) -> piper.Strategy:
    """The strategy of a run."""
    if integer(row, "cp", 1) > 1 or "8" in row["dtype"].lower().replace("bf16", ""):
        raise NotExpressedError("context parallelism" if row["cp"] not in ("", "1") else "fp8")
    if row["zero_fsdp"] not in _ZERO or row["recompute"] not in _REMAT:
        raise NotExpressedError(row["zero_fsdp"] + " " + row["recompute"])
    tp, pp, dp = (integer(row, name, 1) for name in ("tp", "pp", "dp"))
    zero = 1 if row["group"].startswith("AA") else _ZERO[row["zero_fsdp"]]  # else it would not fit
    rows = dp * integer(row, "microbatch")
    batch, virtual = integer(row, "global_batch"), integer(row, "vp", 1)
    if batch % rows:
        raise NotExpressedError("a batch that its microbatches do not divide")
    sequence = tp > 1 and (row["group"].startswith("US") or row["sequence_parallel"] == "1")
    strategy = mesh(
        pp=pp,
        dp=dp,
        tp=tp,
        zero=zero if dp > 1 else 0,
        microbatches=batch // rows,
        sequence_parallel=sequence,
        **({"schedule": "interleaved", "virtual": virtual} if virtual > 1 else {}),
    )
    policy = _REMAT[row["recompute"]]
    recomputing = [] if policy is None else [piper.remat({"layer": "*"}, policy)]
    return piper.Strategy([*strategy, *recomputing])


def cluster_of(row: Mapping[str, str]) -> piper.Cluster:
    """The cluster of a run."""
    if row["gpu"] not in _DEVICES:
        raise NotExpressedError(f"{row['gpu']} is not among the presets")
    devices, each = integer(row, "gpus"), integer(row, "gpus_per_node", 8)
    outside = _OUTSIDE.get(row["group"].split("-")[0], "InfiniBand-NDR")
    machines = -(-devices // each)
    return piper.Cluster.of(_DEVICES[row["gpu"]], min(devices, each), machines, outside=outside)


@cache
def captured_model(shape: Shape) -> piper.Capture:
    """The model of a group, without data."""
    with torch.device("meta"):
        model = DenseTransformer(shape.config)
        tokens = torch.zeros(shape.batch, shape.seq, dtype=torch.int64)
    return piper.capture(
        model,
        inputs=(tokens,),
        targets=(tokens,),
        loss=lm_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        precision="bf16",
        init=model.init_parameter,
    )


def predict(row: Mapping[str, str]) -> Prediction:
    """Estimate a run."""
    shape, strategy, cluster = shape_of(row), strategy_of(row), cluster_of(row)
    found = captured_model(shape).estimate(strategy, cluster)
    tokens = shape.batch * shape.seq
    return Prediction(
        run=row["id"],
        group=row["group"],
        published_seconds=tokens / float(row["tokens_per_s_per_gpu"]) / integer(row, "gpus"),
        seconds=found.seconds,
        published_gib=float(row["memory_gib"]) if row["memory_gib"] else None,
        gib=found.peak / _GIB,
    )


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal ones share their mean rank."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def table_of(predictions: Iterable[Prediction]) -> Table:
    """The figures of each group."""
    table = Table(title="predictions of published runs")
    columns = ("group", "runs", "rank corr.", "regret", "time ratio", "in 15%", "in 30%", "memory")
    for column in columns:
        table.add_column(column, justify="left" if column == "group" else "right")
    by_group: dict[str, list[Prediction]] = {}
    for one in predictions:
        by_group.setdefault(one.group, []).append(one)
    for group, runs in by_group.items():
        published = [run.published_seconds for run in runs]
        best = min(published)
        first = min(runs, key=lambda run: run.seconds)
        near = [run.ratio for run in runs if best / run.published_seconds >= _NEAR_BEST]
        memory = [run.gib / run.published_gib for run in runs if run.published_gib]
        several = len(runs) > 2
        correlation = (
            statistics.correlation(ranks(published), ranks([run.seconds for run in runs]))
            if several
            else None
        )
        table.add_row(
            group,
            str(len(runs)),
            "–" if correlation is None else f"{correlation:.2f}",
            f"{first.published_seconds / best - 1:.0%}" if several else "–",
            f"{statistics.median(near):.2f}",
            *(f"{sum(abs(r - 1) <= part for r in near) / len(near):.0%}" for part in (0.15, 0.3)),
            f"{statistics.median(memory):.2f}" if memory else "–",
        )
    return table


def main(
    group: Annotated[list[str] | None, typer.Option(help="Groups, by name.")] = None,
    every: Annotated[bool, typer.Option(help="All groups.")] = False,
    core: Annotated[bool, typer.Option(help="Only the best run of each tp and pp.")] = True,
    out: Annotated[
        Path | None, typer.Option("--json", help="Keeps predictions; read first.")
    ] = None,
) -> None:
    """Compare predictions with published runs."""
    torch.set_num_threads(1)
    console = Console(width=110)
    rows = list(csv.DictReader(RUNS.open()))
    names = group or ([*dict.fromkeys(row["group"] for row in rows)] if every else [*USUAL])
    if unknown := set(names) - {row["group"] for row in rows}:
        sys.exit(f"there is no group {unknown.pop()!r} in {RUNS.name}")
    done: dict[str, Prediction] = {}
    if out is not None and out.exists():
        done = {one["run"]: Prediction(**one) for one in json.loads(out.read_text())}
    chosen = [row for row in rows if row["group"] in names and (row["core"] == "1" or not core)]
    refused: dict[str, str] = {}
    with console.status("") as status:
        for number, row in enumerate(chosen):
            status.update(f"{number} of {len(chosen)}: {row['id']}, {row['group']}")
            if row["id"] in done:
                continue
            try:
                done[row["id"]] = predict(row)
            except (NotExpressedError, piper.PiperError) as error:
                refused[row["id"]] = f"{row['group']}: {str(error).splitlines()[0]}"
                continue
            if out is not None:
                out.write_text(json.dumps([asdict(one) for one in done.values()], indent=1))
    shown = {row["id"] for row in chosen}
    console.print(table_of(one for one in done.values() if one.run in shown))
    for reason, runs in _by_reason(refused).items():
        console.print(f"{len(runs)} not predicted ({', '.join(runs[:4])}…): {reason}", markup=False)


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for run, reason in refused.items():
        reasons.setdefault(reason, []).append(run)
    return reasons


if __name__ == "__main__":
    typer.run(main)
