"""The device of a worker process, and how it switches from one program to another. A worker without
a device in the running program waits for a switch."""

from __future__ import annotations

import mmap
import pickle
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.launch.device.weight_readers import FirstWeights
from piper.launch.device.worker_group import Refusal
from piper.launch.state.switch import Crossing, NextState
from piper.launch.workers.calls import SwitchTask, WorkerTask
from piper.launch.workers.custom_ops import define
from piper.launch.workers.rank import Rank, choose_gpu
from piper.program.program import Program
from piper.program.storage import load
from piper.state.checkpoint.index import Part
from piper.state.checkpoint.slices import Slice
from piper.state.device.device_state import DeviceState
from piper.state.weights.first_tensors import Fetch


class WorkerDevice:
    """This process's device of the running program, or a place for one if the worker waits."""

    def __init__(self, task: WorkerTask, folder: Path) -> None:
        sys.path[:] = [*task.paths, *(p for p in sys.path if p not in task.paths)]
        define(task.imports, task.script)
        torch.set_num_threads(task.threads)
        self._task = task
        self._folder = folder
        self._where: torch.device | None = None
        self._store = dist.FileStore(str(folder / "store"))  # a TCP port would be open to others
        self._store.set_timeout(timedelta(seconds=task.start_timeout))
        self._gives: Sequence[Slice] = ()
        self._next: tuple[SwitchTask, Program, NextState] | None = None
        self.present: Rank | None = None
        """None while this worker waits."""
        if not task.waits:
            program, init = self._load("program")
            _meet(self._store, len(program.devices))  # from here on a step's timeout applies
            self.present = self._begin("piper", program, _fetcher(folder, program, init))

    @property
    def rank(self) -> Rank:
        assert self.present is not None
        return self.present

    def _load(self, name: str) -> tuple[Program, Any]:
        """The program in a folder, and the ``init`` of its weights."""
        import cloudpickle

        callables = (self._folder / f"{name}.callables").read_bytes()
        optimizer, scheduler, init = cloudpickle.loads(callables)
        program = Program.of(load(self._folder / name, None, optimizer, scheduler))
        # every program that it can switch to has the same default dtype
        torch.set_default_dtype(program.training.default_dtype)
        return program, init

    def _place(self, program: Program) -> torch.device:
        """The torch device of this worker; chosen once."""
        if self._where is None:
            self._where = program.device
            if self._where.type == "cuda":
                task = self._task
                self._where = choose_gpu(task.local, task.device, share=task.share_gpus, alone=True)
        return self._where

    def _begin(self, name: str, program: Program, begin: Fetch | DeviceState) -> Rank:
        task = self._task
        rank = Rank(
            program,
            task.device,
            self._place(program),
            dist.PrefixStore(name, self._store),
            begin,
            timeout=task.timeout,
            cuda_graphs=task.cuda_graphs,
            shake=task.shake,
            alone=True,
        )
        rank.device.show_progress_in(_shared_place(self._folder / f"at.{task.device}"))
        return rank

    def give(self) -> Part | Refusal:
        part, self._gives = self.rank.device.give()
        return part

    def prepare_switch(self, task: SwitchTask) -> tuple[list[str], list[Slice]]:
        """Why this worker cannot switch, and its requests for slices from others."""
        program, _ = self._load(task.folder)
        room = NextState(
            program,
            self._task.device,
            self._place(program),
            task.index,
            None if self.present is None else self.present.device,
            capturable=self._task.cuda_graphs,
        )
        self._next = task, program, room
        return room.refused, room.requests

    def finish_switch(self, wants: Mapping[int, Sequence[Slice]]) -> None:
        assert self._next is not None
        (task, program, room), me = self._next, self._task.device
        torch.set_num_threads(task.threads)
        crossing = Crossing(
            task.members,
            dist.PrefixStore(f"{task.folder} switch", self._store),
            timedelta(seconds=self._task.timeout),
            alone=True,
        )
        room.receive(me, self._gives, wants, crossing)
        before, self.present = self.present, None
        if me in program.devices:
            self.present = self._begin(f"piper {task.folder}", program, room.settled())
        self.abandon_switch()
        if before is not None:
            before.close()

    def abandon_switch(self) -> None:
        self._next = None
        self._gives = ()

    def close(self) -> None:
        if self.present is not None:
            self.present.close()


def _meet(store: dist.Store, count: int) -> None:
    """A barrier: return when all workers have arrived."""
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
    """A number in a memory-mapped file that the parent can read."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
