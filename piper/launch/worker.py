"""A worker process: one device, driven over a connection by the process that started it.

    python -m piper.launch.worker DESCRIPTOR FOLDER

The descriptor is its end of a connection; the folder holds the program, the weights and the
callables. Standard input is a pipe that the parent holds open: when that ends, so does the worker.
"""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Generator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.capture.codegen import Runners
from piper.errors import PiperError
from piper.launch.calls import Call, Failure, Task, receive, send
from piper.launch.crew import Report, Restored, Watch
from piper.launch.device import Device
from piper.launch.watching import watched
from piper.program import Program
from piper.runtime.distributed import Distributed
from piper.runtime.executor import CommunicationError, InstructionError
from piper.runtime.gloo import one_loop
from piper.runtime.pending import Pending
from piper.runtime.state import Fetch
from piper.weights import materialised


class _NobodyThereError(Exception):
    """The parent has closed its end of the connection."""


def main(descriptor: int, folder: Path) -> None:
    """Serve until told to stop."""
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


def _start(task: Task, folder: Path) -> tuple[Device, Distributed]:
    import cloudpickle

    sys.path[:] = [*task.paths, *(p for p in sys.path if p not in task.paths)]
    for module in task.imports:
        importlib.import_module(module)
    torch.set_num_threads(task.threads)
    optimizer, scheduler, init = cloudpickle.loads((folder / "callables").read_bytes())
    program = Program.load(folder / "program", optimizer=optimizer, scheduler=scheduler)
    devices = program.devices
    where = _where(program, task.device)
    timeout, start = timedelta(seconds=task.timeout), timedelta(seconds=task.start_timeout)
    store = dist.TCPStore("127.0.0.1", task.port, timeout=start)
    dist.init_process_group(
        "nccl" if where.type == "cuda" else one_loop(),
        store=store,
        rank=devices.index(task.device),
        world_size=len(devices),
        timeout=start,
    )
    dist.barrier()  # all are there: from here on they are given the time of a step
    plans = (*program.plans, *program.evaluation_plans)
    comm = Distributed(task.device, devices, plans, timeout, program.streams)
    fetch = _fetcher(folder, program, init)
    device = Device(program, task.device, where, comm, fetch, Runners(program.compiler))
    device.show_progress_in(_shared_place(folder / f"at.{task.device}"))
    return device, comm


def _where(program: Program, device: int) -> torch.device:
    if program.device.type != "cuda":
        return program.device
    index = program.devices.index(device)
    if index >= torch.cuda.device_count():
        raise PiperError(
            f"the program runs on {len(program.devices)} devices, but this machine has "
            f"{torch.cuda.device_count()} GPUs: use as many, or on='virtual', which puts all "
            "devices on one"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _fetcher(folder: Path, program: Program, init: Any) -> Fetch:
    known: dict[str, Tensor] = torch.load(
        folder / "weights.pt", mmap=True, weights_only=True, map_location=None
    )
    seed = program.training.seed

    def fetch(name: str) -> Tensor:
        tensor = known[name]
        return materialised(name, tensor, torch.device("cpu"), init, seed)

    return fetch


def _shared_place(path: Path) -> memoryview:
    """One number in a file that the parent can read."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def _serve(connection: Connection, folder: Path) -> None:
    device, comm = _start(_next(connection).argument, folder)
    _answer(connection, None)
    while True:
        match call := _next(connection):
            case Call("step", given):
                _answer(connection, _finished(device.step(given)))
            case Call("watch", (given, what)):
                _answer(connection, _watched(device, given, what))
            case Call("evaluate", given):
                _answer(connection, _finished(device.evaluate(given)))
            case Call("export", (optimizer, only)):
                _answer(connection, device.export(optimizer=optimizer, only=only))
            case Call("restore", Restored() as state):
                device.restore(state)
                _answer(connection, None)
            case Call("stop"):
                comm.close()
                return
            case _:
                raise AssertionError(f"a worker cannot {call.method}")


def _watched(device: Device, given: list[Tensor], what: Watch) -> Report:
    run = device.watch(given, what)
    return watched(lambda: _finished(run), what, device.state.where)


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


def _finished(run: Generator[Pending, None, Report]) -> Report:
    """Drive a step to its end, waiting where it must."""
    while True:
        try:
            pending = next(run)
        except StopIteration as end:
            report: Report = end.value
            norm = None if report.norm is None else report.norm.cpu()
            return replace(report, total=report.total.cpu(), norm=norm)
        try:
            pending.wait()
        except Exception as error:
            run.close()
            raise CommunicationError(f"{pending.name}: {type(error).__name__}: {error}") from error


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
