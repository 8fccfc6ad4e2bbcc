"""The links of a device that is alone in its process: communicators over a store, its GPU, and the
messages of a switch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from piper.base.errors import PiperError
from piper.capture.code.codegen import Runners
from piper.launch.device.device import WorkerDevice
from piper.launch.device.next_state import NextState
from piper.launch.launchers import ProcessOptions
from piper.launch.watch.watchdog import Watchdog
from piper.runtime.comm.communicators import Endpoint
from piper.runtime.comm.gloo import Gloo, Peers
from piper.runtime.comm.nccl import Nccl
from piper.runtime.comm.protocol import Comm
from piper.state.checkpoint.slices import Slice
from piper.state.device.resharding import exchange, parcels
from piper.state.device_program import DeviceProgram

_LOOPBACK = "127.0.0.1"
"""The address of this machine that is closed to others."""


class ProcessLinks:
    """How the device of this process reaches the others."""

    tracked = True

    def __init__(
        self,
        store: dist.Store,
        local: int,
        options: ProcessOptions,
        *,
        alone: bool,
        address: str | None = None,
    ) -> None:
        """``store`` is shared by all processes of this job and used by no other. ``local`` is the
        index of this process on its machine. ``alone`` says that all are on one machine; otherwise
        ``address`` is that of this machine, if known."""
        self.store = store
        self.gives: dict[int, Sequence[Slice]] = {}
        self.job = ""
        """The name of the last connection."""
        self._local = local
        self._timeout = timedelta(seconds=options.timeout)
        self._share_gpus = options.share_gpus
        self._alone = alone
        self._address = _LOOPBACK if alone else address
        self._where: torch.device | None = None
        self._kept: list[Nccl] = []
        """The last communicators on GPUs, and all that were aborted."""

    def place(self, kind: torch.device) -> torch.device:
        """The torch device of this process; chosen once."""
        if self._where is None:
            self._where = kind
            if kind.type == "cuda":
                self._where = choose_gpu(self._local, share=self._share_gpus, alone=self._alone)
        return self._where

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Comm, Runners]:
        self.job = job
        end = self._endpoint(program.device, job)
        plans = [plan for plan, _ in program.steps]
        comm: Comm
        if where.type == "cuda":
            comm = Nccl(end, plans, where, program.streams)
            self._kept = [*(one for one in self._kept if one.aborted), comm]
        else:
            comm = Gloo(end, plans)
        return comm, Runners(program.compiler, where)

    def exchange(
        self, job: str, number: int, room: NextState, wants: Mapping[int, Sequence[Slice]]
    ) -> None:
        if not any(wants.values()):
            return
        link = Peers(self._endpoint(number, f"{job} switch"), tuple(wants))
        gives = self.gives.get(number, ())
        exchange(number, gives, room.missing, parcels(room.index, wants, number), link)
        link.barrier()

    def _endpoint(self, device: int, job: str) -> Endpoint:
        store = dist.PrefixStore(job, self.store)
        return Endpoint(device, store, self._timeout, self._address)


class TorchrunLinks(ProcessLinks):
    """The processes find each other in torchrun's store; on GPUs a watchdog watches them."""

    def __init__(self, job: str, options: ProcessOptions) -> None:
        """``job`` is a name that no other trainer of the processes has."""
        here, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        store = dist.PrefixStore(f"piper {job}", dist.distributed_c10d._get_default_store())
        local = int(os.environ.get("LOCAL_RANK", "0"))
        super().__init__(store, local, options, alone=here is not None and here == world)
        self.watchdog: Watchdog | None = None

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Comm, Runners]:
        if where.type != "cuda":
            return super().connect(job, program, where)
        if self.watchdog is not None:
            self.watchdog.close()
        store, seconds = dist.PrefixStore(job, self.store), self._timeout.total_seconds()
        self.watchdog = Watchdog(store, program.devices, program.device, seconds)
        with self.watchdog.telling():
            _refuse_shared(store, where, program.device, allowed=self._share_gpus)
        with self.watchdog.over():  # not around compilation, which may exceed the timeout
            return super().connect(job, program, where)

    def look_at(self, running: Sequence[WorkerDevice]) -> None:
        """Watch the device of this process, if it has a program."""
        if self.watchdog is not None and running:
            self.watchdog.look_at(running[0].loaded)
        elif self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None


def choose_gpu(local: int, *, share: bool, alone: bool) -> torch.device:
    """The GPU of the process with index ``local`` on its machine. With ``share``, several processes
    may use one GPU: NCCL is told that each is on its own host, since it refuses only processes of
    one host. ``alone`` says that this machine has all processes."""
    refuse_too_few_gpus(1, share=share)
    count = torch.cuda.device_count()
    # torch's watchdog would end the process before our monitor can report why, and would wait a
    # minute at exit for its dump
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connect for all sizes at initialisation
    if alone:  # no other machine has to reach this process
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if share:
        os.environ.setdefault("NCCL_HOSTID", f"piper-{os.uname().nodename}-{os.getpid()}")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    # a process may see only its own GPU; two processes on one GPU are detected when they connect
    where = torch.device("cuda", local % count)
    torch.cuda.set_device(where)
    return where


def refuse_too_few_gpus(processes: int, *, share: bool) -> None:
    """Refuse a machine that lacks GPUs for its processes, unless they may share."""
    count = torch.cuda.device_count()
    if not count:
        raise PiperError("the program was compiled with device='cuda', but this machine has no GPU")
    if processes > count and not share:
        raise PiperError(
            f"{processes} processes of this machine need a GPU each, but it has {count}: use "
            "fewer, or share_gpus=True, which lets several share a GPU (to try things: they take "
            "turns and talk over sockets), or on='virtual', which puts all devices into one process"
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
