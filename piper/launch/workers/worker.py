"""A worker process: one device, driven over a connection by its parent process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from piper.base.errors import InstructionError
from piper.capture.code.codegen import Runners
from piper.launch.device.device import WorkerDevice
from piper.launch.device.driving import alone
from piper.launch.device.local_devices import COMPUTING, LocalDevices
from piper.launch.messages.calls import Call, Failure, WorkerTask, send
from piper.launch.status.published import Published
from piper.launch.watch.faults import described
from piper.launch.watch.liveness import Monitor
from piper.launch.workers.process_links import ProcessLinks
from piper.runtime.comm.protocol import Comm
from piper.runtime.executor import CommunicationError
from piper.state.device_program import DeviceProgram
from piper.state.optimizer.untraced import leave_out_tracer


class _NobodyThereError(Exception):
    """The parent has closed its end of the connection."""


def main(descriptor: int, folder: Path) -> None:
    """Serve until told to stop. ``descriptor`` is the worker's end of the connection; in ``folder``
    the workers find each other. The standard input is a pipe that the parent holds open."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends the run and its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
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


def _end_with_parent() -> None:
    """Wait until the parent is gone; usually the fork server then kills this process."""
    os.read(0, 1)
    os._exit(1)


def _serve(connection: Connection, folder: Path) -> None:
    task: WorkerTask = _next(connection)
    sys.path[:] = [*task.paths, *(p for p in sys.path if p not in task.paths)]
    leave_out_tracer()
    for module in task.options.imports:
        importlib.import_module(module)
    links = _Links(task, folder)
    device = WorkerDevice(task.device, links, task.options)
    local = LocalDevices([device], alone, cuda_graphs=task.options.cuda_graphs)
    published = Published(os.open(folder / f"at.{task.local}", os.O_RDWR))
    monitor: Monitor | None = None
    while isinstance(call := _next(connection), Call):
        call.flags.set()
        published.begin()
        if torch.get_num_threads() != call.threads:
            torch.set_num_threads(call.threads)
        try:
            answer = _called(local, monitor, call)
        except Exception as error:
            if not task.options.restarts:
                raise
            answer = _failure(error)
        if isinstance(answer, Failure):
            _answer(connection, answer)
            published.forget()
            local.drop(keep=call.method in COMPUTING)
            gc.collect()  # connections end with the last reference, and then the others fail, too
            continue
        published.end(device, links.job)
        if monitor is None and not device.waits and device.state.where.type == "cuda":
            monitor = _monitor(device, task.options.timeout, connection, published)
        _answer(connection, answer)
    if monitor is not None:
        monitor.close()
    local.close()


class _Links(ProcessLinks):
    """The workers of one machine find each other in a file of the folder: a TCP port would be open
    to others."""

    def __init__(self, task: WorkerTask, folder: Path) -> None:
        store: dist.Store
        if task.store is None:
            store = dist.FileStore(str(folder / "store"))
        else:
            store = dist.TCPStore(task.store.host, task.store.port)
        store.set_timeout(timedelta(seconds=task.options.start_timeout))
        alone, own = task.store is None, None if task.store is None else task.store.own
        super().__init__(store, task.local, task.options, alone=alone, address=own)

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Comm, Runners]:
        if self.store.add(f"{job} there", 1) == len(program.devices):
            self.store.set(f"{job} all there", "")
        self.store.wait([f"{job} all there"])  # from here on a step's timeout applies
        return super().connect(job, program, where)


def _called(local: LocalDevices, monitor: Monitor | None, call: Call) -> Any:
    """The answer to a call, once the device has finished too."""
    over = threading.Event()
    computes = call.method in COMPUTING
    if computes and monitor is not None:
        monitor.watch(over.is_set)
    (answer,) = local.call(call.method, call.arguments)
    if computes:
        answer = answer.on_host()
    over.set()
    return answer


def _monitor(
    device: WorkerDevice, timeout: float, connection: Connection, published: Published
) -> Monitor:
    """A monitor for a GPU worker: it writes the GPU's program counter to the shared file, ends the
    communications of a call that failed elsewhere, and reports a hanging one to the parent."""

    def stuck(seconds: float) -> str | None:
        if device.waits or not seconds:
            return None
        loaded = device.loaded
        if published.is_given_up:
            loaded.end_waiting()
            return None
        pc = loaded.unfinished()
        if pc is None or seconds < timeout:
            return None
        what = described(loaded.running.context.plan, pc, device.number)
        return f"device {device.number} has waited {seconds:.0f} s for {what}"

    def fail(text: str) -> None:
        with contextlib.suppress(OSError):
            send(connection, Failure(text, "", None, consequence=True))
        threading.Event().wait(10)  # the parent is about to end this process
        os._exit(1)

    return Monitor(stuck, fail)


def _next(connection: Connection) -> Any:
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError) as error:
        raise _NobodyThereError from error
    return pickle.loads(message)


def _answer(connection: Connection, message: Any) -> None:
    try:
        send(connection, message)
    except OSError as error:
        raise _NobodyThereError from error


def _failure(error: Exception) -> Failure:
    cause = error.__cause__ if isinstance(error, InstructionError) and error.__cause__ else error
    try:
        travels: bytes | None = cloudpickle.dumps(cause)
    except Exception:  # noqa: BLE001 - a user's error that cannot be pickled is sent as text
        travels = None
    consequence = isinstance(error, CommunicationError)
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), travels, consequence)
