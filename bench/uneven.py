"""Devices of unequal speed, with emulated kernels on worker processes.

Blocks sleep instead of computing (see emulated.py), and the last worker sleeps longer: it has 0.6
of the speed of the others. The even strategy is profiled; the uneven one has the speeds that were
measured. Each is simulated twice: from the lengths of the sleeps alone, with typical loopback
costs; and from that profile, device by device.

With ``--lost``, all workers are equally fast, and one is killed under ``recover="reroute"``: the
throughput of the others, which have its rows, beside that of all and the share of workers left.

    python bench/uneven.py [--workers 2] [--microbatches 8] [--speed 0.6] [--seconds 0.02]
    python bench/uneven.py --lost --workers 4 --microbatches 8
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from asleep import DIM
from emulated import FLOPS, SPEEDS, Block, Blocks, loss
from prediction import sleepers
from workers import ENVIRONMENT

import piper
from piper.launch.workers.processes import ProcessWorkerGroup
from piper.strategies import mesh


def compiled(strategy: piper.Strategy, rows: int, seconds: float) -> piper.Program:
    """Two blocks for each pass of a microbatch; F : B = 1 : 2."""
    torch.manual_seed(0)
    x = torch.randn(rows, DIM)
    return piper.compile(
        Blocks([Block(DIM, seconds / 2, seconds / 2, seconds / 2) for _ in range(2)]),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        costs=piper.Costs(flops_per_second=FLOPS, bytes_per_second=1.5e9, overhead=1e-4),
        cache=False,
    )


@contextlib.contextmanager
def trainer_of(program: piper.Program, speed: float) -> Iterator[tuple[piper.Trainer, list[int]]]:
    """A trainer whose last worker has this speed, and the worker processes."""
    with tempfile.NamedTemporaryFile("w") as speeds:
        os.environ[SPEEDS] = speeds.name
        with piper.launch(program, on="processes", threads=1) as trainer:
            pids = pids_of(trainer)
            Path(speeds.name).write_text(f"{pids[-1]} {speed}\n")
            yield trainer, pids


def pids_of(trainer: piper.Trainer) -> list[int]:
    group = trainer._session.devices
    group = getattr(group, "_group", group)
    assert isinstance(group, ProcessWorkerGroup)
    return [worker.process.pid for worker in group.workers.processes]


def measured(trainer: piper.Trainer, x: torch.Tensor, steps: int) -> float:
    """The median step, in seconds, after two others."""
    taken = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        float(trainer.step(x, x).loss)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def compare(workers: int, microbatches: int, speed: float, seconds: float, steps: int) -> None:
    rows = workers * microbatches
    x = torch.randn(rows, DIM)
    even = compiled(mesh(dp=workers, microbatches=microbatches), rows, seconds)
    with trainer_of(even, speed) as (trainer, _):
        before = measured(trainer, x, steps)
        profile = trainer.profile(x, x, steps=3)
    found = ", ".join(f"{v:.3f}" for v in profile.speeds.values())
    strategy = mesh(dp=workers, microbatches=microbatches, speeds=profile.speeds)
    uneven = compiled(strategy, rows, seconds)
    with trainer_of(uneven, speed) as (trainer, _):
        after = measured(trainer, x, steps)
    cluster = mixed(workers, speed)
    print(f"{workers} workers x {microbatches} microbatches, measured speeds {found}")
    print(f"{'':22} measured s  from the profile  from lengths")
    for name, program, taken in (("even", even, before), ("uneven", uneven, after)):
        theirs = program.simulate(cluster, profile.by_device).seconds
        alone = program.simulate(cluster).seconds
        print(f"{name:22} {taken:10.4f} {theirs:17.4f} {alone:13.4f}")
    pairs = [
        [p.simulate(cluster, costs).seconds for p in (uneven, even)]
        for costs in (profile.by_device, None)
    ]
    ratios = [a / b for a, b in ([after, before], *pairs)]
    print(f"{'uneven / even':22} {ratios[0]:10.3f} {ratios[1]:17.3f} {ratios[2]:13.3f}")


def mixed(workers: int, speed: float) -> piper.Cluster:
    """The sleepers, of which the last one has this speed."""
    box = sleepers().machines[0]
    fast = box.devices[0]
    slow = replace(fast, name="slow", flops={k: speed * v for k, v in fast.flops.items()})
    machine = replace(box, devices=(fast,) * (workers - 1) + (slow,))
    return piper.Cluster((machine,), sharing=piper.Sharing(links=0.0))


def lose(workers: int, microbatches: int, seconds: float, steps: int) -> None:
    rows = workers * microbatches
    x = torch.randn(rows, DIM)
    program = compiled(mesh(dp=workers, microbatches=microbatches), rows, seconds)
    with (
        warnings.catch_warnings(),
        piper.launch(program, on="processes", threads=1, recover="reroute", restarts=1) as trainer,
    ):
        warnings.simplefilter("ignore")
        before = measured(trainer, x, steps)
        os.kill(pids_of(trainer)[1], signal.SIGKILL)
        after = measured(trainer, x, steps)
        (recovery,) = trainer.recoveries
        assert len(recovery.lost) == 1
    left = (workers - 1) / workers
    most = microbatches / -(-microbatches * workers // (workers - 1))
    print(
        f"1 of {workers} lost, {microbatches} microbatches: step {before:.4f} s, then "
        f"{after:.4f} s; "
        f"throughput {before / after:.3f} of before, {before / after / left:.3f} of the {left:.3f} "
        f"that are left (whole microbatches allow {most / left:.3f})"
    )


def main(
    workers: Annotated[list[int] | None, typer.Option(help="How many, or several.")] = None,
    microbatches: Annotated[int, typer.Option(help="Of each worker, in the mean.")] = 8,
    speed: Annotated[float, typer.Option(help="Of the last worker; of the others it is 1.")] = 0.6,
    seconds: Annotated[float, typer.Option(help="Of a forward; a backward has twice that.")] = 0.02,
    steps: Annotated[int, typer.Option(help="Measured steps of each.")] = 5,
    lost: Annotated[bool, typer.Option("--lost", help="Lose a replica instead.")] = False,
) -> None:
    """Compare even with uneven replicas, or all replicas with those left by a fault."""
    os.environ |= ENVIRONMENT
    torch.set_num_threads(1)
    for count in workers or ([4, 8] if lost else [2, 4]):
        if lost:
            lose(count, microbatches, seconds, steps)
        else:
            compare(count, microbatches, speed, seconds, steps)


if __name__ == "__main__":
    typer.run(main)
