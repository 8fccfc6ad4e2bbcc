"""The start of many worker processes: what each costs, and how that grows with their number.

    python bench/start.py                       # 8, 64 and 128 workers
    python bench/start.py --workers 8 16 --programs dp

Each case launches one program and closes it without a step. "seconds" is the time of
``piper.launch``, "worker CPU" the CPU time of all processes that it starts, and "parent CPU" its
own, each divided by the number of workers. "MB" is the proportional share of memory (PSS) of all of
them, divided likewise. "sent" are the bytes of all messages to one worker, without the weights,
which workers map from one file. The connections are those of gloo, of one worker: a full mesh
within each of its communicators.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
from piper.launch.workers.processes import ProcessWorkerGroup
from piper.launch.workers.worker_process import WorkerProcess
from piper.runtime.comm.communicators import communicators_of

WIDTH = 64


class Net(nn.Module):
    """As many equal layers as a pipeline has stages."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def program_of(kind: str, workers: int) -> piper.Program:
    """A program with one axis of ``workers`` devices."""
    pipeline = kind == "pp"
    x = torch.zeros(8 if pipeline else workers, WIDTH)
    strategy = piper.strategies.mesh(
        **{kind: workers}, microbatches=8 if pipeline else 1, **({} if pipeline else {"zero": 1})
    )
    return piper.compile(
        Net(workers if pipeline else 8),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        tags={"layers.*": "layer"},
        progress=False,
    )


@dataclass(frozen=True, slots=True)
class Started:
    """The figures of one start, for each worker."""

    seconds: float
    cpu: float
    parent: float
    megabytes: float
    sent: int
    communicators: int
    connections: int


def started(program: piper.Program) -> Started:
    """Launch ``program`` in worker processes, and close it."""
    count = len(program.devices)
    program.plans  # noqa: B018 - made at first use, which is not a start
    sent = [0] * count
    send = WorkerProcess.send

    def counted(worker: WorkerProcess, message: bytes) -> None:
        sent[worker.device] += len(message)
        send(worker, message)

    WorkerProcess.send = counted  # type: ignore[method-assign]
    before, parent, start = _children(), time.process_time(), time.perf_counter()
    with piper.launch(program, on="processes", threads=1, start_timeout=600) as trainer:
        seconds, parent = time.perf_counter() - start, time.process_time() - parent
        WorkerProcess.send = send  # type: ignore[method-assign]
        group = trainer._session.devices
        assert isinstance(group, ProcessWorkerGroup)
        pids = [worker.process.pid for worker in group.workers.processes]
        memory = sum(map(_memory, _below(os.getpid())))
        connections = max(map(_connections, pids))
    made = max(len(communicators_of(program.plans, device)) for device in program.devices)
    return Started(
        seconds / count,
        (_children() - before) / count,
        parent / count,
        memory / count / 1e6,
        max(sent),
        made,
        connections,
    )


def _children() -> float:
    """CPU seconds of all processes below this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            yield child
            yield from _below(child)


def _memory(pid: int) -> int:
    """Bytes of a process, those that it shares divided by the number that share them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split("\nPss:")[1].split()[0]) * 1024


def _connections(pid: int) -> int:
    """Established TCP connections of a process."""
    files = [link for f in Path(f"/proc/{pid}/fd").iterdir() if (link := _target(f))]
    sockets = {f.removeprefix("socket:[")[:-1] for f in files if f.startswith("socket:[")}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(row[3] == "01" and row[9] in sockets for row in rows)


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


def per_worker(programs: Iterable[str], numbers: Sequence[int]) -> Table:
    """Starts each program with each number of workers."""
    table = Table(title="per worker")
    columns = ("seconds", "worker CPU s", "parent CPU s", "MB", "bytes sent")
    for column in ("program", "workers", *columns, "communicators", "connections"):
        table.add_column(column, justify="right")
    for kind in programs:
        for workers in numbers:
            x = started(program_of(kind, workers))
            table.add_row(
                kind,
                str(workers),
                f"{x.seconds:.2f}",
                f"{x.cpu:.2f}",
                f"{x.parent:.3f}",
                f"{x.megabytes:.0f}",
                f"{x.sent:,}",
                str(x.communicators),
                str(x.connections),
            )
            print(kind, workers, x, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 128])
    parser.add_argument("--programs", nargs="+", default=["dp", "pp"], choices=["dp", "pp"])
    arguments = parser.parse_args()
    Console(width=120).print(per_worker(arguments.programs, arguments.workers))


if __name__ == "__main__":
    main()
