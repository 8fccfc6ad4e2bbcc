"""One process per device, on this machine: compiled once, sent as plans.

The workers read the saved program, map the weights from one file, and get the optimizer by value;
they find each other through a file. All files are in a folder that only this user can read, and no
port is open to other machines. An error in one worker ends all of them; the caller learns which
device, which instruction and why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from piper.base.errors import CapacityError, PiperError
from piper.ir.plan.plan import Plan
from piper.launch.device.worker_group import ProfileKind, Refusal, Report, T
from piper.launch.torch_flags import Flags
from piper.launch.workers.calls import Call, Failure, SwitchTask, WorkerTask, dumped, receive
from piper.launch.workers.custom_ops import defining_modules
from piper.launch.workers.rank import refuse_too_few_gpus
from piper.launch.workers.worker_folder import write_program, write_weights
from piper.launch.workers.worker_process import WorkerProcess, spawned
from piper.program.program import Program
from piper.runtime.feeding import cut
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice

_GRACE = 2.0
"""Seconds that workers get to exit by themselves."""
_LOOK = 1.0
"""Seconds between liveness checks. Usually a dead worker's connection closes at once; the checks
find dead workers whose connection another process holds open."""
_FINISHING = ("written part", "restore", "read part", "give part")
"""Calls in which workers first finish copying the state being saved."""


class WorkerError(PiperError):
    """A worker failed; ``__cause__`` is the error that it raised, if it could be pickled."""


class ProcessWorkerGroup:
    """A process for each device of a program."""

    damaged = False  # a failed step ends the workers

    rank = 0
    trainers = 1

    def once(self, call: Callable[[], T]) -> T:
        return call()

    def everyone(self, mine: Any) -> list[Any]:
        return [mine]

    def largest(self, number: int) -> int:
        return number

    def __init__(
        self,
        program: Program,
        *,
        timeout: float = 600.0,
        start_timeout: float = 120.0,
        threads: int | None = None,
        imports: Sequence[str] = (),
        share_gpus: bool = False,
        cuda_graphs: bool = False,
        shake: int | None = None,
    ) -> None:
        """``timeout`` is the seconds that one step may take, ``start_timeout`` the seconds until
        all workers must be ready. ``threads`` is the CPU threads of each worker, by default an even
        share. ``imports`` are modules that workers import first, because they define operations
        that the model uses (those made with ``torch.library.custom_op`` are found automatically).
        On GPUs, with ``share_gpus`` several workers may share one; with ``cuda_graphs`` steps are
        captured and replayed; ``shake`` is the seed of random stream delays, to find races."""
        if program.device.type == "cuda":
            refuse_too_few_gpus(len(program.devices), share=share_gpus)
        self._program = program
        self._next: tuple[Program, list[WorkerProcess], list[list[Slice]]] | None = None
        """During a switch: the next program, the workers started for it, and the slices that each
        worker requests."""
        self._switches = 0
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="piper-")
        self._path = Path(self._folder.name)
        self._workers: list[WorkerProcess] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: Callable[[], Sequence[Plan]] | None = None
        """Returns the plans that the workers run now, if any; None until they are ready."""
        self._copying = False
        """Whether the next step copies the state being saved."""
        self._finalizer = weakref.finalize(self, _end, self._processes, self._folder)
        self._task = WorkerTask(
            device=0,
            local=0,
            waits=False,
            threads=self._share(program),
            timeout=timeout,
            start_timeout=start_timeout,
            paths=tuple(sys.path),
            imports=tuple(imports),
            script=None,
            share_gpus=share_gpus,
            cuda_graphs=cuda_graphs,
            shake=shake,
        )
        """The settings that all workers share."""
        try:
            write_program(self._path, "program", program)
            write_weights(self._path, program)
            self._workers = self._spawn_all(program, program.devices, waits=False)
            self._answers(start_timeout)
            self._running = tuple
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> None:
        """None: all rows."""
        return

    def step(
        self, batch: Sequence[Tensor], *, report: bool = True, own_rows: bool = False
    ) -> Report:
        return self._run("step", batch, report)

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        return self._run("profile", batch, what)

    def evaluate(self, batch: Sequence[Tensor], *, own_rows: bool = False) -> Report:
        return self._run("evaluate", batch)

    def export(self, only: frozenset[str] | None = None) -> list[list[Slice]]:
        return self._all("export", only)

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        return

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._all("restore", dict(tensors))

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        return self._all("write part", folder)

    def begin_parts(self, folder: Path) -> None:
        self._all("begin part", folder)
        self._copying = not self._task.cuda_graphs

    def written_parts(self, *, wait: bool) -> list[Part | Refusal] | None:
        if not wait and not all(self._all("part is written", None)):
            return None
        return [part for parts in self._all("written part", None) for part in parts]

    def export_parts(self, folder: Path, targets: Mapping[str, Slice]) -> list[Any]:
        return self._all("export part", (folder, dict(targets)))

    def refusals(self, folder: Path, index: Index) -> list[str]:
        return [why for row in self._all("refusals", (folder, index)) for why in row]

    def read_parts(self, folder: Path, index: Index) -> None:
        self._all("read part", (folder, index))

    def give_parts(self) -> list[Part | Refusal]:
        return self._all("give part", None)

    def prepare_switch(self, program: Program, index: Index) -> list[str]:
        """Starts workers for new devices; they wait. Workers without a device in the next program
        end once it runs."""
        known = {worker.device for worker in self._workers}
        devices = [device for device in program.devices if device not in known]
        if program.device.type == "cuda":
            try:
                refuse_too_few_gpus(len(known) + len(devices), share=self._task.share_gpus)
            except PiperError as error:
                return [str(error)]
        self._switches += 1
        name = f"program.{self._switches}"
        write_program(self._path, name, program)
        try:
            new = self._spawn_all(program, devices, waits=True)
            self._workers += new
            self._next = program, new, []
            if new:
                self._answers_of(new, self._start_timeout)
        except BaseException:
            self._end_workers(0.0)
            raise
        members = tuple(sorted(worker.device for worker in self._workers))
        task = SwitchTask(name, members, self._share(program), index)
        answers = self._all("prepare switch", task)
        self._next = program, new, [requests for _, requests in answers]
        return [why for whys, _ in answers for why in whys]

    def finish_switch(self) -> None:
        assert self._next is not None
        program, _, requests = self._next
        pairs = zip(self._workers, requests, strict=True)
        self._all("finish switch", {worker.device: rows for worker, rows in pairs})
        self._program, self._next = program, None
        self._retire([w for w in self._workers if w.device not in program.devices])
        self._workers.sort(key=lambda worker: worker.device)

    def abandon_switch(self) -> None:
        if not self._workers:
            return  # they have ended with an error
        self._all("abandon switch", None)
        if self._next is not None:
            self._retire(self._next[1])
            self._next = None

    def _retire(self, workers: Sequence[WorkerProcess]) -> None:
        """End some of the workers."""
        for worker in workers:
            worker.send(dumped(Call("stop")))
        deadline = time.monotonic() + _GRACE
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.wait()
            worker.release()
            self._workers.remove(worker)

    def _all(self, method: str, argument: Any) -> list[Any]:
        """Send one call to all workers, and return their answers."""
        self._running = tuple
        self._copying = self._copying and method not in _FINISHING
        return self._ask([dumped(Call(method, argument))] * len(self._workers))

    def close(self, error: BaseException | None = None) -> None:
        """End all workers. Those that wait for a call exit by themselves, others are killed."""
        for worker in self._workers:
            worker.send(dumped(Call("stop")))
        self._end_workers(_GRACE)

    def _end_workers(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()  # kills the workers that are left, which unblocks their senders
        for worker in self._workers:
            worker.release()
        self._workers.clear()

    # starting

    def _share(self, program: Program) -> int:
        """The CPU threads of each worker."""
        return self._threads or max(1, (os.cpu_count() or 1) // len(program.devices))

    def _spawn_all(
        self, program: Program, devices: Iterable[int], *, waits: bool
    ) -> list[WorkerProcess]:
        """Start workers; they answer when they are ready."""
        used = {worker.local for worker in self._workers}
        free = (local for local in itertools.count() if local not in used)
        modules, script = defining_modules(program)
        imports = (*self._task.imports, *modules)
        workers = []
        for device, local in zip(devices, free, strict=False):
            workers.append(spawned(device, local, self._path))
            self._processes.append(workers[-1].process)
        flags = Flags.here()
        for worker in workers:
            task = replace(
                self._task,
                device=worker.device,
                local=worker.local,
                waits=waits,
                threads=self._share(program),
                imports=imports,
                script=script,
            )
            worker.send(dumped(Call("start", task, flags)))
        return workers

    # running

    def _run(self, method: str, batch: Sequence[Tensor], how: ProfileKind | bool = True) -> Report:
        program = self._program
        step = program.steps[method == "evaluate"]
        plans, code = step.plans, step.code
        copying = self._copying and method == "step"
        self._copying = self._copying and method == "evaluate"
        self._running = (lambda: program.saving.plans) if copying else (lambda: plans)
        of = {device: plan for plan in plans for device in plan.devices}
        flags = Flags.here()

        def message(worker: WorkerProcess) -> bytes:
            worker.forget_pc()
            given = [x.cpu().clone() for x in cut(of[worker.device], code, worker.device, batch)]
            return dumped(Call(method, (given, how), flags))

        # one by one: the first worker can begin while the next one's part is cut
        reports: list[Report] = self._ask(map(message, self._workers))
        return Report.joined(reports)

    def _ask(self, messages: Iterable[bytes]) -> list[Any]:
        """Send a message to each worker, and return their answers. Any interruption ends all
        workers: a call that only some received, or an unread answer, would be mistaken for another
        one later."""
        if not self._workers:
            raise WorkerError("the workers have ended after an error: launch the program again")
        try:
            for worker, message in zip(self._workers, messages, strict=True):
                worker.send(message)
            return self._answers(self._timeout)
        except BaseException:
            self._end_workers(0.0)
            raise

    def _answers(self, timeout: float) -> list[Any]:
        """The answers of all workers; the first that fails or dies ends all."""
        return self._answers_of(self._workers, timeout)

    def _answers_of(self, workers: Sequence[WorkerProcess], timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(workers):
            waiting = [w for w in workers if w.device not in answers]
            left = deadline - time.monotonic()
            ready = wait([w.connection for w in waiting], timeout=min(_LOOK, max(0.0, left)))
            for worker in waiting:
                if worker.connection in ready:
                    answers[worker.device] = self._answer(worker)
                elif worker.process.poll() is not None and not worker.connection.poll():
                    self._fail_with_death(worker)
            if left <= 0:
                self._fail_with_silence(timeout, waiting)
        return [answers[worker.device] for worker in workers]

    def _answer(self, worker: WorkerProcess) -> Any:
        try:
            answer = receive(worker.connection)
        except (EOFError, OSError):
            self._fail_with_death(worker)
        if isinstance(answer, Failure):
            self._fail_with(worker, answer)
        return answer

    def _fail_with(self, worker: WorkerProcess, failure: Failure) -> None:
        """Raise a worker's failure. A failed communication is most likely a consequence, so first
        look for its cause in the other workers."""
        deadline = time.monotonic() + _GRACE / 2
        while failure.consequence and time.monotonic() < deadline:
            for other in self._workers:
                if other.process.poll() not in (None, 0):
                    self._fail_with_death(other)
            for other in self._workers:
                message = _said(other.connection)
                if isinstance(message, Failure) and not message.consequence:
                    worker, failure = other, message
            time.sleep(0.02)
        cause: BaseException | None = None
        if failure.cause is not None:
            import cloudpickle

            with contextlib.suppress(Exception):
                cause = cloudpickle.loads(failure.cause)
        at = self._at(worker)
        self._end_workers(0.0)
        text = (
            f"the worker of device {worker.device} failed{at}: {failure.summary}\n{failure.trace}"
        )
        if isinstance(cause, CapacityError):
            raise cause from WorkerError(text)
        raise WorkerError(text) from cause

    def _fail_with_death(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_GRACE)
        text = f"the worker of device {worker.device} died{self._at(worker)}: {worker.ended}"
        self._end_workers(0.0)
        raise WorkerError(text)

    def _fail_with_silence(self, timeout: float, workers: Sequence[WorkerProcess]) -> None:
        lines = [f"no answer within {timeout:g} s"]
        lines += [f"  from the worker of device {w.device}{self._at(w)}" for w in workers]
        self._end_workers(0.0)
        raise WorkerError("\n".join(lines))

    def _at(self, worker: WorkerProcess) -> str:
        """The instruction that a worker runs or ran last, as text for errors."""
        if self._running is None:
            return " before it was ready"
        pc = worker.pc
        plans = [plan for plan in self._running() if worker.device in plan.devices]
        if not plans or pc is None:
            return ""
        return f" at instruction {pc} ({plans[0].instructions[pc].name})"


def _said(connection: Connection) -> Any:
    """The next message of a worker, if one has arrived."""
    with contextlib.suppress(EOFError, OSError):
        if connection.poll():
            return receive(connection)
    return None


def _end(
    processes: list[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str]
) -> None:
    """Kill the processes that are left, and remove their shared folder."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    processes.clear()
    folder.cleanup()
