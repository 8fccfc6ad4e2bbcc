"""This process is one of many that ``torchrun`` started, on one or several machines, and has one
device.

Every process runs the same script, compiles the same program and passes the same global batch, or
its own rows of it. Each computes its own part, and all get the same loss.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from piper.base.errors import PiperError
from piper.base.units import counted
from piper.launch.agreement import (
    BatchChecks,
    Optimizers,
    Weights,
    everyone,
    fingerprints,
    lost_peers,
    refuse_other_programs,
    refuse_other_tensors,
)
from piper.launch.device.worker_group import ProfileKind, Refusal, Report, T
from piper.launch.state.switch import Crossing, NextState
from piper.launch.watch.clock import seconds_ahead
from piper.launch.watch.watchdog import Watchdog
from piper.launch.workers.rank import Rank, choose_gpu
from piper.program.program import Program
from piper.runtime.feeding import cut, rows_read
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice
from piper.state.device.device_state import DeviceState
from piper.state.device.optimizer_groups import export_groups
from piper.state.weights.first_tensors import Fetch, FirstTensor


class TorchrunWorkerGroup:
    """The device of this process, and its communication with the others."""

    def __init__(
        self,
        program: Program,
        fetch: Fetch,
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
        self._program = program
        where = _where(program, share_gpus)
        _join(timeout)
        self._objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        refuse_other_programs(fingerprints(program), self._objects)
        devices = program.devices
        if dist.get_world_size() != len(devices):
            raise PiperError(
                f"the program runs on {counted(len(devices), 'device')}, but torchrun started "
                f"{counted(dist.get_world_size(), 'process')}: use --nproc-per-node and --nnodes "
                "so that they are as many"
            )
        self._members = devices
        """The device of each rank, in rank order."""
        self._number = devices[dist.get_rank()]
        self._where = where
        self._timeout = timeout
        self._share_gpus = share_gpus
        self._cuda_graphs = cuda_graphs
        self._shake = shake
        self._gives: Sequence[Slice] = ()
        self._next: tuple[Program, NextState, list[list[Slice]], Optimizers] | None = None
        self._optimizers = Optimizers(program, self._objects)
        self._batches = BatchChecks(check_batches, self._objects)
        self._evaluated = BatchChecks(check_batches, self._objects)
        self._rank: Rank | None = None
        """None if the program has no device for this process; it then waits."""
        self._guard: Watchdog | None = None
        weights = Weights(fetch)
        self._begin(weights if check_weights else fetch)
        if check_weights:
            weights.refuse_others(self._objects)

    def _begin(self, begin: Fetch | DeviceState) -> None:
        """Load the plans of this process's device."""
        program, number, where = self._program, self._number, self._where
        store = _own_store(self._objects)
        self._rows: list[int] = []
        if number not in program.devices:
            return
        read = (rows_read(step.plan_of(number), step.code, number) for step in program.steps)
        self._rows = sorted(set().union(*read))
        if where.type == "cuda":
            self._guard = Watchdog(store, program, number, self._timeout)
        with nullcontext() if self._guard is None else self._guard.telling():
            if where.type == "cuda":
                _refuse_shared(store, where, number, allowed=self._share_gpus)
            self._rank = Rank(
                program,
                number,
                where,
                store,
                begin,
                timeout=self._timeout,
                cuda_graphs=self._cuda_graphs,
                shake=self._shake,
                connecting=self._guarded(),  # not around compilation, which may exceed the timeout
            )
        if self._guard is not None:
            self._guard.look_at(self._rank.device)

    @property
    def damaged(self) -> bool:
        return self._rank is not None and self._rank.device.state.changing

    @property
    def rows(self) -> Sequence[int]:
        return self._rows

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def trainers(self) -> int:
        return dist.get_world_size()

    def once(self, call: Callable[[], T]) -> T:
        result: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                result = [call()]
            except PiperError as error:
                result = [Refusal(str(error))]
        lost_peers(lambda: dist.broadcast_object_list(result, group=self._objects, group_src=0))
        if isinstance(result[0], Refusal):
            raise PiperError(result[0].why)
        return cast(T, result[0])

    def everyone(self, mine: Any) -> list[Any]:
        return everyone(mine, self._objects)

    def largest(self, number: int) -> int:
        largest = torch.tensor(number, device="cpu")
        lost_peers(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._objects))
        return int(largest)

    def step(
        self, batch: Sequence[Tensor], *, report: bool = True, own_rows: bool = False
    ) -> Report:
        rows = self.rows if own_rows else None
        self._refuse_other_steps(batch, rows)
        mine = None
        if self._rank is not None:
            step = self._program.training_step
            plan = step.plan_of(self._number)
            with self._guarded():
                given = cut(plan, step.code, self._number, batch, rows)
                mine = self._rank.step(given, report=report)
        return self._told(mine)

    def _refuse_other_steps(self, batch: Sequence[Tensor], rows: Sequence[int] | None) -> None:
        if self._batches.refuse_others(batch, rows):
            rank = self._rank
            self._optimizers.refuse_others([] if rank is None else export_groups(rank.device.state))

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        self._refuse_other_steps(batch, None)
        ahead = seconds_ahead(self._objects)
        report = None
        if self._rank is not None:
            step = self._program.training_step
            given = cut(step.plan_of(self._number), step.code, self._number, batch)
            with self._guarded():
                report = self._rank.profile(given, what).on_host().at_clock(ahead)
        reports = [one for one in everyone(report, self._objects) if one is not None]
        return Report.joined([*([] if report is None else [report]), *reports])

    def evaluate(self, batch: Sequence[Tensor], *, own_rows: bool = False) -> Report:
        rows = self.rows if own_rows else None
        self._evaluated.refuse_others(batch, rows)
        mine = None
        if self._rank is not None:
            step = self._program.evaluation_step
            plan = step.plan_of(self._number)
            with self._guarded():
                given = cut(plan, step.code, self._number, batch, rows)
                mine = self._rank.evaluate(given)
        return self._with_rows(self._told(mine))

    def _with_rows(self, report: Report) -> Report:
        """``report`` with the output rows of all processes."""
        if not any(plan.returned for plan in self._program.evaluation_step.plans):
            return report
        mine = {device: [x.cpu() for x in row] for device, row in report.returned.items()}
        by_rank = everyone(mine, self._objects)
        return replace(report, returned={d: row for rows in by_rank for d, row in rows.items()})

    def _told(self, mine: Report | None) -> Report:
        """The report of a step, also for processes that wait: the program's first device sends it
        to them."""
        if self._members == self._program.devices:
            assert mine is not None
            return mine
        source = self._members.index(self._program.devices[0])
        sent: list[Any] = [None]
        if dist.get_rank() == source:
            assert mine is not None
            sent = [mine.on_host()]
        lost_peers(lambda: dist.broadcast_object_list(sent, group=self._objects, group_src=source))
        return cast(Report, sent[0]) if mine is None else mine

    def export(self, only: frozenset[str] | None = None) -> list[list[Slice]]:
        mine = None if self._rank is None else self._rank.export(only)
        return [one for one in everyone(mine, self._objects) if one is not None]

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        refuse_other_tensors(tensors, self._objects)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self._rank is not None:
            self._rank.restore(tensors)

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        return self._at_first(None if self._rank is None else self._rank.write_part(folder))

    def begin_parts(self, folder: Path) -> None:
        if self._rank is not None:
            self._rank.begin_part(folder)

    def written_parts(self, *, wait: bool) -> list[Part | Refusal] | None:
        rank = self._rank
        if not wait and self.largest(int(rank is not None and not rank.writing.done)):
            return None
        written = self._at_first([] if rank is None else rank.written_part())
        return [part for parts in written for part in parts]

    def export_parts(self, folder: Path, targets: Mapping[str, Slice]) -> list[Any]:
        rank = self._rank
        return self._at_first(None if rank is None else rank.export_part(folder, targets))

    def _at_first(self, mine: Any) -> list[Any]:
        """Gather ``mine`` on rank 0, without the None of processes that wait; empty elsewhere."""
        by_rank: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
        lost_peers(
            lambda: dist.gather_object(mine, by_rank or None, group=self._objects, group_dst=0)
        )
        return [one for one in by_rank if one is not None]

    def refusals(self, folder: Path, index: Index) -> list[str]:
        mine = [] if self._rank is None else self._rank.refusals(folder, index)
        return [why for row in everyone(mine, self._objects) for why in row]

    def read_parts(self, folder: Path, index: Index) -> None:
        failed = ""
        try:
            if self._rank is not None:
                self._rank.read_part(folder, index)
        except (OSError, PiperError) as error:
            failed = f"rank {dist.get_rank()}: {error}"
        if whys := [why for why in everyone(failed, self._objects) if why]:
            if self._rank is not None:
                self._rank.device.state.changing = True
            raise PiperError(f"the checkpoint could not be read to its end: {whys[0]}")

    def give_parts(self) -> list[Part | Refusal]:
        part = None
        if self._rank is not None:
            part, self._gives = self._rank.device.give()
        return self._at_first(part)

    def prepare_switch(self, program: Program, index: Index) -> list[str]:
        """Each rank keeps its device number; ranks without a device in ``program`` wait."""
        refuse_other_programs(fingerprints(program), self._objects)
        optimizers = Optimizers(program, self._objects)
        for device in program.devices:
            if device not in self._members:
                return [
                    f"there is no process for device {device}: torchrun started "
                    f"{len(self._members)}, for devices {list(self._members)}"
                ]
        room = NextState(
            program,
            self._number,
            self._where,
            index,
            None if self._rank is None else self._rank.device,
            capturable=self._cuda_graphs,
        )
        by_rank = everyone((room.refused, room.requests), self._objects)
        self._next = program, room, [requests for _, requests in by_rank], optimizers
        return [why for whys, _ in by_rank for why in whys]

    def finish_switch(self) -> None:
        assert self._next is not None
        program, room, requests, self._optimizers = self._next
        store = _own_store(self._objects)
        limit = timedelta(seconds=self._timeout)
        crossing = Crossing(self._members, store, limit, alone=False)
        wants = dict(zip(self._members, requests, strict=True))
        room.receive(self._number, self._gives, wants, crossing)
        self.abandon_switch()
        self.close()
        self._rank, self._guard, self._program = None, None, program
        self._begin(room.settled() if room.state is not None else _nothing)

    def abandon_switch(self) -> None:
        self._next = None
        self._gives = ()

    def close(self, error: BaseException | None = None) -> None:
        if self._rank is None:
            return
        if self._guard is None:
            self._rank.close(abandoned=error is not None)
        elif error is None:
            self._guard.close()
            self._rank.close()
        else:
            with self._guard.closing(error):
                self._rank.close(abandoned=True)

    def _guarded(self) -> AbstractContextManager[None]:
        return nullcontext() if self._guard is None else self._guard.over()


def _nothing(name: str) -> FirstTensor:
    raise AssertionError(f"a process that waits asks for {name}")


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


def _own_store(objects: Any) -> dist.Store:
    """A prefix of the job's store that no other trainer of the job uses."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=objects, group_src=0)
    return dist.PrefixStore(f"piper {name[0]}", dist.distributed_c10d._get_default_store())


def _refuse_alone() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise PiperError(
            f"on='torchrun' needs {', '.join(missing)} in the environment: start the script with "
            "torchrun --nproc-per-node N script.py"
        )


def _where(program: Program, share_gpus: bool) -> torch.device:
    if program.device.type != "cuda":
        return program.device
    local, number = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "RANK"))
    here, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    alone = here is not None and here == world
    return choose_gpu(local, number, share=share_gpus, alone=alone)


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
