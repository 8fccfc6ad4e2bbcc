"""Sides that train in worker processes: ours and those of peers, driven alike.

Every worker has one thread and, after warm-up, its own core. Workers of peers are started like
ours, as separate programs. They receive their rows over a connection, train on them, and answer
with the loss.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import piper
from piper.launch.workers.processes import ProcessWorkerGroup

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Set for every worker, before it imports torch."""

Step = Callable[[list[Tensor], list[Tensor]], Tensor | float]
"""Takes a step and returns the loss, or NaN on a worker that does not know it."""


class Way(Protocol):
    """How a peer trains; sent to its workers."""

    def rows(self, x: Tensor, rank: int) -> list[Tensor]:
        """The rows of a batch that the worker of a rank gets."""
        ...

    def begin(self) -> Step:
        """In a worker, once the process group exists: the function that takes a step."""
        ...


class Workers:
    """Processes, their CPU time and their memory."""

    pids: list[int]

    def settle(self) -> None:
        """Pin each worker, with all its threads, to its own core; new threads inherit it."""
        cores = sorted(os.sched_getaffinity(0))
        for rank, pid in enumerate(self.pids):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), {cores[rank % len(cores)]})

    def running(self) -> float:
        """CPU seconds so far of all threads, averaged over the workers."""
        threads = (t for pid in self.pids for t in Path(f"/proc/{pid}/task").iterdir())
        seconds = sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e9
        return seconds / len(self.pids)

    def peak(self) -> int:
        """The largest peak memory of a worker, in bytes."""
        statuses = (Path(f"/proc/{pid}/status").read_text() for pid in self.pids)
        return max(int(s.split("VmHWM:")[1].split()[0]) * 1024 for s in statuses)


class Launched(Workers):
    """The workers of a Piper program."""

    def __init__(self, program: piper.Program, stack: contextlib.ExitStack) -> None:
        """``stack`` ends the workers."""
        self._trainer = stack.enter_context(piper.launch(program, on="processes", threads=1))
        group = self._trainer._session.devices
        assert isinstance(group, ProcessWorkerGroup)
        self.pids = [worker.process.pid for worker in group.workers.processes]

    def step(self, x: Tensor, y: Tensor) -> float:
        return float(self._trainer.step(x, y).loss)


class Peers(Workers):
    """The workers of a peer."""

    def __init__(self, way: Way, count: int, stack: contextlib.ExitStack) -> None:
        """``stack`` ends the workers."""
        self._way = way
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self.pids = []
        for rank in range(count):
            here, there = Pipe()
            command = [sys.executable, __file__, str(there.fileno())]
            process = subprocess.Popen(command, pass_fds=[there.fileno()])
            there.close()  # so that the worker's exit closes the connection
            stack.callback(_end, process, here)
            here.send_bytes(pickle.dumps((sys.path, rank, count, self._store.port)))
            here.send_bytes(pickle.dumps(way))
            self.pids.append(process.pid)
            self._ends.append(here)
        self._answers()

    def step(self, x: Tensor, y: Tensor) -> float:
        for rank, end in enumerate(self._ends):
            end.send_bytes(pickle.dumps([_bytes(self._way.rows(t, rank)) for t in (x, y)]))
        return statistics.mean(loss for loss in self._answers() if loss == loss)

    def _answers(self) -> list[float]:
        return [end.recv() for end in self._ends]


def _bytes(tensors: Iterable[Tensor]) -> list[Any]:
    """As NumPy arrays: pickled tensors would be sent as files in shared memory."""
    return [x.numpy() for x in tensors]


def _serve(connection: Connection) -> None:
    paths, rank, count, port = pickle.loads(connection.recv_bytes())
    sys.path[:] = paths
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
    }
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    way: Way = pickle.loads(connection.recv_bytes())
    step = way.begin()
    connection.send(0.0)
    while (given := pickle.loads(connection.recv_bytes())) is not None:
        x, y = ([torch.from_numpy(a) for a in arrays] for arrays in given)
        connection.send(float(step(x, y)))
    dist.destroy_process_group()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(None))
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def starter(
    count: int,
) -> Callable[[piper.Program | Way, contextlib.ExitStack], Launched | Peers]:
    """A function that starts a side of ``count`` workers."""

    def start(what: piper.Program | Way, stack: contextlib.ExitStack) -> Launched | Peers:
        return (
            Launched(what, stack) if isinstance(what, piper.Program) else Peers(what, count, stack)
        )

    return start


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
