"""All comparisons with other systems in one command: tables, JSON and a picture.

    pipelines   real kernels on two workers: 1F1B, interleaved, ZB-V, DualPipeV
    data        data parallelism and ZeRO on the loopback, with one microbatch and with several
    slow        the same at 200 Mbit/s, in a network namespace
    dropless    a mixture of experts without dropped tokens, beside TorchTitan's dispatch
    tensor      tensor and sequence parallelism, with one microbatch and with several
    emulated    schedules of sleeping blocks on 4, 8 and 16 workers
    experts     a mixture of experts over a link as slow as its compute
    host        host time of the runtime, besides the kernels
    gpu         whole steps on one GPU; skipped without one

Peers: ``torch.distributed.pipelining``, ``DistributedDataParallel``, ``fully_shard``,
``parallelize_module``, DeepSpeed. A peer that is not installed is named and skipped. Ratios are
meaningful only on otherwise idle cores.

    python bench/compare.py [SET ...] [--quick] [--rounds 2] [--out FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from report import Comparison, plot, print_cases
from rich.console import Console

HERE = Path(__file__).parent
SETS: dict[str, list[list[str]]] = {
    "pipelines": [["pipelines.py"]],
    "data": [["data_parallel.py"], ["data_parallel.py", "--microbatches", "4"]],
    "slow": [
        ["data_parallel.py", "--slow", "200"],
        ["data_parallel.py", "--slow", "200", "--microbatches", "4"],
    ],
    "dropless": [["expert_parallel.py", "--microbatches", "1"], ["expert_parallel.py"]],
    "tensor": [["tensor_parallel.py", "--microbatches", "1"], ["tensor_parallel.py"]],
    "emulated": [["emulated_pipelines.py"]],
    "experts": [["overlap.py", "--microbatches", "64", "--rows", "4"], ["overlap.py", "--emulate"]],
    "host": [["overhead.py"]],
    "gpu": [["gpu.py"]],
}
SMALL = ["--layers", "4", "--dim", "64", "--seq", "16", "--rounds", "3", "--turn", "1"]
QUICK = {
    "pipelines.py": [*SMALL, "--microbatches", "4"],
    "data_parallel.py": SMALL,
    "tensor_parallel.py": SMALL,
    "expert_parallel.py": SMALL,
    "emulated_pipelines.py": ["--workers", "4", "--seconds", "0.005", "--rounds", "2"],
    "overlap.py": ["--rows", "2", "--microbatches", "4", "--rounds", "3"],
    "overhead.py": ["--rounds", "5"],
    "gpu.py": ["--layers", "4", "--dim", "256", "--heads", "4", "--rounds", "3"],
}
"""Small sizes: they show that everything runs, and say nothing about speed."""


def main(
    sets: Annotated[list[str] | None, typer.Argument(help="Some of the sets; or all.")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes: does it run?")] = False,
    rounds: Annotated[int | None, typer.Option(help="Of each comparison; or its own.")] = None,
    out: Annotated[Path, typer.Option(help="Where results are written.")] = Path("bench-results"),
) -> None:
    """Run the comparisons."""
    wrong = [name for name in sets or () if name not in SETS]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is unknown: one of {', '.join(SETS)}")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=120)
    found: list[Comparison] = []
    failed: list[str] = []
    for name in sets or SETS:
        for number, (script, *options) in enumerate(SETS[name]):
            file = out / f"{name}-{number}.json"
            file.unlink(missing_ok=True)
            given = [*options, *(QUICK[script] if quick else []), "--json", str(file.resolve())]
            given += [] if rounds is None else ["--rounds", str(rounds)]
            began = time.monotonic()
            console.rule(f"{name}: {script} {' '.join(options)}")
            ended = subprocess.run([sys.executable, "-W", "ignore", str(HERE / script), *given])
            console.print(f"took {time.monotonic() - began:,.0f} s")
            if ended.returncode:
                failed.append(f"{name}: {script} ended with {ended.returncode}")
            if file.exists():
                found.append(Comparison.read(file))
    _write(found, out)
    console.print(f"written: {', '.join(str(f) for f in sorted(out.iterdir()))}")
    if failed:
        sys.exit("\n".join(failed))


def _write(found: list[Comparison], out: Path) -> None:
    """Write all tables and ratios, and the picture."""
    ratios = [
        {
            "comparison": comparison.title,
            "case": case.name,
            "against": case.against,
            "side": side,
            "seconds": one.median,
            "spread": one.spread,
            "time": case.time_ratio(side),
            "running": case.running_ratio(side),
            "memory": case.memory_ratio(side),
            "of_ideal": case.reached(side),
        }
        for comparison in found
        for case in comparison.cases
        for side, one in case.sides.items()
    ]
    (out / "ratios.json").write_text(json.dumps(ratios, indent=1))
    with (out / "tables.txt").open("w") as file:
        for comparison in found:
            print_cases(comparison, Console(width=120, file=file))
    try:
        plot(found, out / "ratios.svg")
    except ImportError:
        typer.echo("no picture: matplotlib is not installed")


if __name__ == "__main__":
    typer.run(main)
