"""The processes that torchrun started, each with a trainer: how they join, and what all must know
goes through rank 0."""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from piper.base.errors import PiperError
from piper.launch.device.report import Refusal
from piper.launch.device.worker_group import T, WorkerGroup
from piper.launch.messages.pickling import Pickled, by_value, received
from piper.launch.recovery.fault import Recovery
from piper.program.program import Program

_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Torch's setting for the groups of a process."""
_ROUNDS = 8
"""How often rank 0 asks another rank for its time."""


class ManyTrainers:
    """The part of a worker group that is the same wherever several processes have a trainer."""

    recoveries: Sequence[Recovery] = ()

    def __init__(self, timeout: float) -> None:
        """``timeout`` is the seconds that one collective may take."""
        _refuse_alone()
        seconds = timedelta(seconds=timeout)
        with _few_connections():
            _join(timeout)
            self._objects = dist.new_group(backend="gloo", timeout=seconds)
        self.rank, self.trainers = dist.get_rank(), dist.get_world_size()

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
        return cast(T, _accepted(result if first else received(cast(bytes, sent[0]))))

    def scattered(self, parts: Callable[[], Sequence[Any]], own: Any) -> Any:
        """The part of this process, of those that rank 0 makes. ``own`` is in every part, and not
        sent."""
        mine: list[Any] = [None]
        if self.rank != 0:
            self._together(dist.scatter_object_list, mine, None, group_src=0)
            return _accepted(received(mine[0], own))
        pickled = Pickled()
        try:
            made = parts()
        except PiperError as error:
            made = [Refusal(str(error))] * self.trainers
        sent = [None, *(by_value(part, pickled, own) for part in made[1:])]
        self._together(dist.scatter_object_list, mine, sent, group_src=0)
        return _accepted(made[0])

    def switch(self: WorkerGroup, program: Program, move: Callable[[WorkerGroup], None]) -> None:
        move(self)

    def running(self, program: Program) -> Program:
        return program

    def largest(self, number: int) -> int:
        largest = torch.tensor(number, device="cpu")
        self._together(dist.all_reduce, largest, dist.ReduceOp.MAX)
        return int(largest)

    def seconds_ahead(self) -> float:
        """The seconds that this machine's monotonic clock is ahead of rank 0's, which asks every
        other rank for its time, several times. The answer with the shortest round trip is the most
        accurate: the other rank read its clock between rank 0's send and receive."""
        group = self._objects
        mine = torch.zeros(1, dtype=torch.float64)
        ahead = torch.zeros(self.trainers, dtype=torch.float64)
        if self.rank == 0:
            for other in range(1, self.trainers):
                ahead[other] = _asked(group, other, mine)
        else:
            for _ in range(_ROUNDS):
                dist.recv(mine, group=group, group_src=0)
                mine[0] = time.monotonic()
                dist.send(mine, group=group, group_dst=0)
        dist.broadcast(ahead, group=group, group_src=0)
        return float(ahead[self.rank])

    def _together(self, collective: Callable[..., Any], *given: Any, **options: Any) -> None:
        """Take part in a collective; a PiperError if another participant is gone."""
        try:
            collective(*given, group=self._objects, **options)
        except RuntimeError as error:
            raise PiperError(
                f"the processes cannot communicate ({str(error).splitlines()[0]}): one of "
                "them has ended or hangs; read its output first"
            ) from error


def _asked(group: dist.ProcessGroup, other: int, answer: Tensor) -> float:
    """How far another rank's clock is ahead of this one's."""
    samples = []
    for _ in range(_ROUNDS):
        start = time.monotonic()
        dist.send(answer, group=group, group_dst=other)
        dist.recv(answer, group=group, group_src=other)
        end = time.monotonic()
        samples.append((end - start, float(answer) - (start + end) / 2))
    return min(samples)[1]


def _accepted(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        raise PiperError(answer.why)
    return answer


@contextmanager
def _few_connections() -> Iterator[None]:
    """Inside, torch makes groups over gloo whose ranks connect when they first talk: to about
    2 log(n) others. Otherwise each connects to all n."""
    before = os.environ.get(_LAZY)
    os.environ.setdefault(_LAZY, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]


def _join(timeout: float) -> None:
    """Join torch's default process group, unless the caller has done so."""
    if dist.is_initialized():
        return
    seconds = timedelta(seconds=timeout)
    store, rank, size = next(dist.rendezvous("env://", timeout=seconds))
    store.set_timeout(seconds)
    store = _of_this_attempt(store, rank, size, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    # leave only at exit: torch cannot initialise again on the same rendezvous for another program.
    # Trainers' finalizers are registered later, so they run before this one
    weakref.finalize(_leave, _leave)


def _of_this_attempt(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """The part of ``store`` that only this attempt uses. After a fault torchrun starts all ranks
    anew with the same store, in which the addresses of the earlier ranks still are.

    Every rank asks under a name of its own, so that rank 0 answers the present ranks, too."""
    if rank:
        asked = uuid.uuid4().hex
        store.set(f"rank {rank}", asked)
        attempt = store.get(asked).decode()
        store.add(attempt, 1)
        return dist.PrefixStore(attempt, store)
    attempt = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    while store.add(attempt, 0) < size - 1:
        for other in range(1, size):
            if store.check([f"rank {other}"]):
                store.set(store.get(f"rank {other}").decode(), attempt)
        if time.monotonic() > deadline:
            raise PiperError(f"not all {size} processes of torchrun came within {timeout:g} s")
        time.sleep(0.02)
    return dist.PrefixStore(attempt, store)


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
