"""This process is one of many that ``torchrun`` started, on one or several machines, and has one
device.

Every process runs the same script and passes the same global batch, or its own rows of it. Each
computes its own part, and all get the same loss. Rank 0 compiles, and ``call`` scatters the parts
of its program.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from piper.base.errors import PiperError
from piper.base.units import counted
from piper.capture.code.codegen import Runners
from piper.launch.agreement import Agreement
from piper.launch.device.device import Options, WorkerDevice
from piper.launch.device.driving import alone
from piper.launch.device.local_devices import COMPUTING, STARTING, LocalDevices
from piper.launch.device.report import Refusal
from piper.launch.device.worker_group import Each, T
from piper.launch.watch.clock import seconds_ahead
from piper.launch.watch.watchdog import Watchdog
from piper.launch.workers.pickling import by_value, received
from piper.launch.workers.process_links import ProcessLinks
from piper.runtime.comm.protocol import Comm
from piper.state.device_program import DeviceProgram


class TorchrunWorkerGroup:
    """The device of this process, and its communication with the others."""

    def __init__(
        self,
        *,
        timeout: float = 600.0,
        share_gpus: bool = False,
        cuda_graphs: bool = False,
        shake: int | None = None,
        check_weights: bool = True,
        check_batches: int = 100,
    ) -> None:
        """``timeout`` is the seconds that one communication, or on GPUs one step, may take. With
        ``share_gpus`` several processes may share a GPU. With ``cuda_graphs`` steps are captured
        and replayed. ``shake`` is the seed of random stream delays, to find races. The initial
        weights of all processes are compared, unless ``check_weights`` is False. The first three
        batches are compared, then every ``check_batches``-th, each with the optimizer's settings; 0
        compares none.
        """
        _refuse_alone()
        self.agreement = Agreement(self.once, weights=check_weights, batches=check_batches)
        _join(timeout)
        self.rank, self.trainers = dist.get_rank(), dist.get_world_size()
        self._objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._links = _Links(self.once(lambda: uuid.uuid4().hex), timeout, share_gpus)
        self._options = Options(cuda_graphs, shake)
        self._members: list[int] = []
        """The device of each rank, in rank order."""
        self._seated: set[int] = set()
        """The devices that a call reaches; the others wait."""
        self.local = LocalDevices([], alone, cuda_graphs=cuda_graphs)

    @property
    def damaged(self) -> bool:
        return self.local.damaged

    @property
    def devices(self) -> list[int]:
        return [d for d in self._members[self.rank : self.rank + 1] if d in self._seated]

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        wanted = sorted(devices)
        if not self._members:
            if self.trainers != len(wanted):
                raise PiperError(
                    f"the program runs on {counted(len(wanted), 'device')}, but torchrun started "
                    f"{counted(self.trainers, 'process')}: use --nproc-per-node and --nnodes so "
                    "that they are as many"
                )
            self._members = wanted
            device = WorkerDevice(wanted[self.rank], self._links, self._options)
            self.local.devices = [device]
        for device_number in wanted:
            if device_number not in self._members:
                raise PiperError(
                    f"there is no process for device {device_number}: torchrun started "
                    f"{len(self._members)}, for devices {self._members}"
                )
        self._seated = set(wanted)

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answer of this process's device, if it is not one that waits."""
        ahead = seconds_ahead(self._objects) if method is WorkerDevice.profile else 0.0
        given = [self._from_rank_zero(x) if isinstance(x, Each) else x for x in arguments]
        if not self.devices:
            return []
        with self._watched(method):
            answers = self.local.call(method, given)
            if method is WorkerDevice.profile:
                answers = [answer.on_host().at_clock(ahead) for answer in answers]
        if method in (WorkerDevice.load, WorkerDevice.take):
            self._links.look_at(self.local.running)
        return answers

    @contextmanager
    def _watched(self, method: Callable[..., Any]) -> Iterator[None]:
        """Inside, a device that computes is watched, and the others learn of an error for which
        they would wait."""
        guard = self._links.guard if method in COMPUTING else None
        try:
            with nullcontext() if guard is None else guard.over():
                yield
        except BaseException as error:
            if method in STARTING and self._links.guard is not None:
                self._links.guard.tell(error)
            raise

    def _from_rank_zero(self, given: Each) -> Any:
        """The argument of this process's device, which rank 0 has made."""
        parts: list[Any] | None = None
        if self.rank == 0:
            try:
                made = [given.of(d) if d in self._seated else None for d in self._members]
            except PiperError as error:
                made = [Refusal(str(error))] * self.trainers
            parts = [by_value(x, given.own) for x in made]
        mine: list[Any] = [None]
        self._together(dist.scatter_object_list, mine, parts, group_src=0)
        part = received(mine[0], given.own)
        if isinstance(part, Refusal):
            raise PiperError(part.why)
        return part

    def once(self, call: Callable[..., T], *mine: Any) -> T:
        first = self.rank == 0
        given = []
        for one in mine:
            rows: list[Any] = [None] * self.trainers
            self._together(dist.gather_object, one, rows if first else None, group_dst=0)
            given.append(rows)
        result: Any = None
        if first:
            try:
                result = call(*given)
            except PiperError as error:
                result = Refusal(str(error))
        sent = [by_value(result) if first else None]
        self._together(dist.broadcast_object_list, sent, group_src=0)
        result = result if first else received(cast(bytes, sent[0]))
        if isinstance(result, Refusal):
            raise PiperError(result.why)
        return cast(T, result)

    def largest(self, number: int) -> int:
        largest = torch.tensor(number, device="cpu")
        self._together(dist.all_reduce, largest, dist.ReduceOp.MAX)
        return int(largest)

    def _together(self, collective: Callable[..., Any], *given: Any, **options: Any) -> None:
        """Take part in a collective; a PiperError if another participant is gone."""
        try:
            collective(*given, group=self._objects, **options)
        except RuntimeError as error:
            raise PiperError(
                f"the processes cannot be brought together ({str(error).splitlines()[0]}): one of "
                "them has ended or hangs; look at what it wrote first"
            ) from error

    def close(self, error: BaseException | None = None) -> None:
        guard = self._links.guard
        if guard is None:
            self.local.close(abandoned=error is not None)
        elif error is None:
            guard.close()
            self.local.close()
        else:
            with guard.closing(error):
                self.local.close(abandoned=True)


class _Links(ProcessLinks):
    """The processes find each other in torchrun's store; on GPUs a watchdog watches them."""

    def __init__(self, job: str, timeout: float, share_gpus: bool) -> None:
        """``job`` is a name that no other trainer of the processes has."""
        here, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        super().__init__(
            dist.PrefixStore(f"piper {job}", dist.distributed_c10d._get_default_store()),
            int(os.environ.get("LOCAL_RANK", "0")),
            timeout=timeout,
            share_gpus=share_gpus,
            alone=here is not None and here == world,
        )
        self._seconds = timeout
        self.guard: Watchdog | None = None

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Comm, Runners]:
        if where.type != "cuda":
            return super().connect(job, program, where)
        if self.guard is not None:
            self.guard.close()
        store = dist.PrefixStore(job, self.store)
        self.guard = Watchdog(store, program.devices, program.device, self._seconds)
        with self.guard.telling():
            _refuse_shared(store, where, program.device, allowed=self._share_gpus)
        with self.guard.over():  # not around compilation, which may exceed the timeout
            return super().connect(job, program, where)

    def look_at(self, running: Sequence[WorkerDevice]) -> None:
        """Watch the device of this process, if it has a program."""
        if self.guard is not None and running:
            self.guard.look_at(running[0].loaded)
        elif self.guard is not None:
            self.guard.close()
            self.guard = None


def _join(timeout: float) -> None:
    """Join torch's default process group, unless the caller has done so."""
    if dist.is_initialized():
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    # leave only at exit: torch cannot initialise again on the same rendezvous for another program.
    # Trainers' finalizers are registered later, so they run before this one
    weakref.finalize(_leave, _leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_alone() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise PiperError(
            f"on='torchrun' needs {', '.join(missing)} in the environment: start the script with "
            "torchrun --nproc-per-node N script.py"
        )


def _refuse_shared(store: dist.Store, where: torch.device, number: int, *, allowed: bool) -> None:
    """Refuse two processes on one GPU: NCCL would do so with an unhelpful message."""
    gpu = torch.cuda.get_device_properties(where).uuid
    first = store.compare_set(f"gpu {gpu}", "", str(number)).decode()
    if first != str(number) and not allowed and "NCCL_HOSTID" not in os.environ:
        raise PiperError(
            f"devices {first} and {number} are on one GPU ({where}): give each process a GPU of "
            "its own (torchrun sets LOCAL_RANK, and this machine may have fewer GPUs than "
            "processes), or say share_gpus=True, which lets several share one, over sockets"
        )
