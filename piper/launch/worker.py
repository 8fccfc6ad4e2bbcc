"""A worker process: one device, driven over a connection by the process that started it.

    python -m piper.launch.worker DESCRIPTOR FOLDER

The descriptor is its end of a connection; the folder holds the program, the weights and the
callables. Standard input is a pipe that the parent holds open: when that ends, so does the worker.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.launch.calls import Call, Failure, WorkerTask, receive, send
from piper.launch.faults import described
from piper.launch.fetching import FirstWeights
from piper.launch.monitor import Monitor
from piper.launch.rank import Rank, choose_gpu
from piper.launch.worker_group import Report
from piper.program import Program
from piper.runtime.executor import CommunicationError, InstructionError
from piper.runtime.first_tensors import Fetch
from piper.storage import load


class _NobodyThereError(Exception):
    """The parent has closed its end of the connection."""


def main(descriptor: int, folder: Path) -> None:
    """Serve until told to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends the run, and this with it
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            _serve_or_tell(connection, folder)
        except _NobodyThereError:
            threading.Event().wait(10)  # the parent is gone, or about to end this process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the communicators' threads need not be waited for


def _serve_or_tell(connection: Connection, folder: Path) -> None:
    try:
        _serve(connection, folder)
    except _NobodyThereError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
        _answer(connection, _failure(error))


def _end_with_parent(folder: Path) -> None:
    """Wait until the parent is gone; nobody else will clean up then."""
    os.read(0, 1)
    for _ in range(100):  # the other workers do the same, and hold files of it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)
    os._exit(1)


def _start(task: WorkerTask, folder: Path) -> Rank:
    import cloudpickle

    sys.path[:] = [*task.paths, *(p for p in sys.path if p not in task.paths)]
    for module in task.imports:
        importlib.import_module(module)
    torch.set_num_threads(task.threads)
    optimizer, scheduler, init = cloudpickle.loads((folder / "callables").read_bytes())
    program = load(folder / "program", None, optimizer, scheduler)
    where = program.device
    if where.type == "cuda":
        local = program.devices.index(task.device)
        where = choose_gpu(local, task.device, share=task.share_gpus, alone=True)
    store = dist.FileStore(str(folder / "store"))  # a port would be open to others
    store.set_timeout(timedelta(seconds=task.start_timeout))
    _meet(store, len(program.devices))  # from here on they are given the time of a step
    rank = Rank(
        program,
        task.device,
        where,
        dist.PrefixStore("piper", store),
        _fetcher(folder, program, init),
        timeout=task.timeout,
        cuda_graphs=task.cuda_graphs,
        shake=task.shake,
        alone=True,
    )
    rank.device.show_progress_in(_shared_place(folder / f"at.{task.device}"))
    return rank


def _meet(store: dist.Store, count: int) -> None:
    """Return when all workers are there."""
    if store.add("there", 1) == count:
        store.set("all there", "")
    store.wait(["all there"])


def _fetcher(folder: Path, program: Program, init: Any) -> Fetch:
    known: dict[str, Tensor] = torch.load(
        folder / "weights.pt", mmap=True, weights_only=True, map_location=None
    )
    located = pickle.loads((folder / "located").read_bytes())
    return FirstWeights(known, init, located, program.training.seed)


def _shared_place(path: Path) -> memoryview:
    """One number in a file that the parent can read."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def _serve(connection: Connection, folder: Path) -> None:
    task: WorkerTask = _next(connection).argument
    rank = _start(task, folder)
    monitor = _monitored(rank, task.timeout, connection) if rank.where.type == "cuda" else None
    _answer(connection, None)
    while True:
        match call := _next(connection):
            case Call("step", (given, report)):
                step = partial(rank.step, given, report=report)
                _answer(connection, _settled(rank, monitor, step))
            case Call("profile", (given, what)):
                _answer(connection, _settled(rank, monitor, lambda: rank.profile(given, what)))
            case Call("evaluate", (given, _)):
                _answer(connection, _settled(rank, monitor, lambda: rank.evaluate(given)))
            case Call("export", only):
                _answer(connection, rank.export(only))
            case Call("restore", tensors):
                rank.restore(tensors)
                _answer(connection, None)
            case Call("write part", checkpoint):
                _answer(connection, rank.write_part(checkpoint))
            case Call("export part", (exported, targets)):
                _answer(connection, rank.export_part(exported, targets))
            case Call("refusals", (checkpoint, index)):
                _answer(connection, rank.refusals(checkpoint, index))
            case Call("read part", (checkpoint, index)):
                rank.read_part(checkpoint, index)
                _answer(connection, None)
            case Call("stop"):
                if monitor is not None:
                    monitor.close()
                rank.close()
                return
            case _:
                raise AssertionError(f"a worker cannot {call.method}")


def _settled(rank: Rank, monitor: Monitor | None, run: Callable[[], Report]) -> Report:
    """What ``run`` reports, when it is over on the device too."""
    if monitor is None:
        return run().on_host()
    over = threading.Event()
    monitor.watch(over.is_set)
    report = run().on_host()
    over.set()
    return report


def _monitored(rank: Rank, timeout: float, connection: Connection) -> Monitor:
    """Tells the parent which communication hangs, and lets its file know where the GPU is."""

    def stuck(seconds: float) -> str | None:
        pc = rank.device.running.bound.unfinished()
        if pc is None or not seconds:
            return None
        rank.device.executor.at[0] = pc
        if seconds < timeout:
            return None
        what = described(rank.device.running.context.plan, pc, rank.number)
        return f"device {rank.number} has waited {seconds:.0f} s for {what}"

    def fail(text: str) -> None:
        with contextlib.suppress(OSError):
            send(connection, Failure(text, "", None, consequence=True))
        threading.Event().wait(10)  # the parent is about to end this process
        os._exit(1)

    return Monitor(stuck, fail)


def _next(connection: Connection) -> Call:
    try:
        call: Call = receive(connection)
    except (EOFError, OSError) as error:
        raise _NobodyThereError from error
    return call


def _answer(connection: Connection, message: Any) -> None:
    try:
        send(connection, message)
    except OSError as error:
        raise _NobodyThereError from error


def _failure(error: Exception) -> Failure:
    import cloudpickle

    cause = error.__cause__ if isinstance(error, InstructionError) and error.__cause__ else error
    try:
        travels: bytes | None = cloudpickle.dumps(cause)
    except Exception:  # noqa: BLE001 - an error of the user's that cannot be pickled is told as text
        travels = None
    consequence = isinstance(error, CommunicationError)
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), travels, consequence)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
