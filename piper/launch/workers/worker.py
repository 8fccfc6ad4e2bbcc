"""A worker process: one device, driven over a connection by its parent process.

    python -m piper.launch.workers.worker DESCRIPTOR FOLDER

The descriptor is the worker's end of the connection; the folder holds the program, the weights and
the callables. Standard input is a pipe that the parent holds open: when it closes, the worker ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from piper.launch.device.worker_group import Report
from piper.launch.watch.faults import described
from piper.launch.watch.liveness import Monitor
from piper.launch.workers.calls import Call, Failure, WorkerTask, receive, send
from piper.launch.workers.rank import Rank
from piper.launch.workers.worker_device import WorkerDevice
from piper.runtime.executor import CommunicationError, InstructionError


class _NobodyThereError(Exception):
    """The parent has closed its end of the connection."""


def main(descriptor: int, folder: Path) -> None:
    """Serve until told to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends the run and its workers
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
    except Exception as error:  # noqa: BLE001 - any error is reported to the parent
        _answer(connection, _failure(error))


def _end_with_parent(folder: Path) -> None:
    """Wait until the parent is gone, then remove the folder: no other process does it."""
    os.read(0, 1)
    for _ in range(100):  # other workers remove it too, and may still hold files in it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)
    os._exit(1)


def _serve(connection: Connection, folder: Path) -> None:
    task: WorkerTask = _next(connection).argument
    worker = WorkerDevice(task, folder)
    monitor = _monitored(worker, task.timeout, connection)
    _answer(connection, None)
    while (call := _next(connection)).method != "stop":
        if call.method in _SWITCHING:
            answer = _SWITCHING[call.method](worker, call.argument)
            monitor = monitor or _monitored(worker, task.timeout, connection)
        else:
            answer = _done(worker.rank, monitor, call)
        _answer(connection, answer)
    if monitor is not None:
        monitor.close()
    worker.close()


_SWITCHING: Mapping[str, Callable[[WorkerDevice, Any], Any]] = {
    "give part": lambda worker, _: worker.give(),
    "prepare switch": WorkerDevice.prepare_switch,
    "finish switch": WorkerDevice.finish_switch,
    "abandon switch": lambda worker, _: worker.abandon_switch(),
}
"""The calls by which a worker switches to another program."""


def _done(rank: Rank, monitor: Monitor | None, call: Call) -> Any:
    """The result of a call."""
    match call:
        case Call("step", (given, report)):
            return _settled(monitor, partial(rank.step, given, report=report))
        case Call("profile", (given, what)):
            return _settled(monitor, lambda: rank.profile(given, what))
        case Call("evaluate", (given, _)):
            return _settled(monitor, lambda: rank.evaluate(given))
        case Call("export", only):
            return rank.export(only)
        case Call("restore", tensors):
            return rank.restore(tensors)
        case Call("write part", checkpoint):
            return rank.write_part(checkpoint)
        case Call("begin part", checkpoint):
            return rank.begin_part(checkpoint)
        case Call("part is written"):
            return rank.writing.done
        case Call("written part"):
            return rank.written_part()
        case Call("export part", (exported, targets)):
            return rank.export_part(exported, targets)
        case Call("refusals", (checkpoint, index)):
            return rank.refusals(checkpoint, index)
        case Call("read part", (checkpoint, index)):
            return rank.read_part(checkpoint, index)
        case _:
            raise AssertionError(f"a worker cannot {call.method}")


def _settled(monitor: Monitor | None, run: Callable[[], Report]) -> Report:
    """The report of ``run``, once the device has finished too."""
    if monitor is None:
        return run().on_host()
    over = threading.Event()
    monitor.watch(over.is_set)
    report = run().on_host()
    over.set()
    return report


def _monitored(worker: WorkerDevice, timeout: float, connection: Connection) -> Monitor | None:
    """A monitor for a GPU worker: it writes the GPU's program counter to the shared file, and
    reports a hanging communication to the parent."""
    if worker.present is None or worker.present.where.type != "cuda":
        return None

    def stuck(seconds: float) -> str | None:
        rank = worker.present
        pc = None if rank is None else rank.device.running.bound.unfinished()
        if rank is None or pc is None or not seconds:
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
    if call.flags is not None:
        call.flags.set()
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
    except Exception:  # noqa: BLE001 - a user's error that cannot be pickled is sent as text
        travels = None
    consequence = isinstance(error, CommunicationError)
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), travels, consequence)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
