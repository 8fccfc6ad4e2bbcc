"""This process is one device of many that ``torchrun`` started, on one machine or several.

Every process runs the same script, compiles the same program and gives the same global batch; each
computes its own part, and every one of them gets the same loss.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from piper.checkpoint.index import Index
from piper.checkpoint.pretrained import Target
from piper.errors import PiperError
from piper.launch.agreeing import (
    Batches,
    Weights,
    everyone,
    fingerprints,
    lost_peers,
    refuse_other_programs,
)
from piper.launch.clock import seconds_ahead
from piper.launch.guard import Guard
from piper.launch.rank import Rank, choose_gpu
from piper.launch.worker_group import ProfileKind, Refusal, Report, T
from piper.program import Program
from piper.runtime.feeding import cut
from piper.runtime.first_tensors import Fetch
from piper.runtime.parts import Part
from piper.runtime.portable import Portions


class TorchrunWorkerGroup:
    """This process's device, and what it knows of the others."""

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
        ``share_gpus`` several processes may share a GPU; with ``cuda_graphs`` steps are captured
        and replayed; ``shake`` is the seed of random delays of streams, by which races are found.
        The first weights of all processes are compared, unless ``check_weights`` is False, and
        their first three batches, then every ``check_batches``-th; 0 compares none.
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
                f"the program runs on {len(devices)} devices, but torchrun started "
                f"{dist.get_world_size()} processes: use --nproc-per-node and --nnodes so that "
                "they are as many"
            )
        self._number = devices[dist.get_rank()]
        self._batches = Batches(check_batches, self._objects)
        self._evaluated = Batches(check_batches, self._objects)
        weights = Weights(fetch)
        store = _own_store(self._objects)
        self._guard: Guard | None = None
        if where.type == "cuda":
            self._guard = Guard(store, program, self._number, timeout)
        with self._guarded():
            if where.type == "cuda":
                _refuse_shared(store, where, self._number, allowed=share_gpus)
            self._rank = Rank(
                program,
                self._number,
                where,
                store,
                weights if check_weights else fetch,
                timeout=timeout,
                cuda_graphs=cuda_graphs,
                shake=shake,
            )
        if self._guard is not None:
            self._guard.look_at(self._rank.device)
        if check_weights:
            weights.refuse_others(self._objects)

    @property
    def damaged(self) -> bool:
        return self._rank.device.state.changing

    def once(self, call: Callable[[], T]) -> T:
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [call()]
            except PiperError as error:
                found = [Refusal(str(error))]
        lost_peers(lambda: dist.broadcast_object_list(found, group=self._objects, group_src=0))
        if isinstance(found[0], Refusal):
            raise PiperError(found[0].why)
        return cast(T, found[0])

    def any_of(self, flag: bool) -> bool:
        found = torch.tensor(int(flag))
        lost_peers(lambda: dist.all_reduce(found, dist.ReduceOp.MAX, group=self._objects))
        return bool(found)

    def step(self, batch: Sequence[Tensor], *, report: bool = True) -> Report:
        program = self._program
        plan = program.plan_of(self._number)
        self._batches.refuse_others(batch)
        with self._guarded():
            given = cut(plan, program.code, self._number, batch)
            return self._rank.step(given, report=report)

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        program = self._program
        plan = program.plan_of(self._number)
        self._batches.refuse_others(batch)
        given = cut(plan, program.code, self._number, batch)
        ahead = seconds_ahead(self._objects)
        with self._guarded():
            report = self._rank.profile(given, what).on_host().at_clock(ahead)
        return Report.joined([report, *everyone(report, self._objects)])

    def evaluate(self, batch: Sequence[Tensor]) -> Report:
        program = self._program
        plan = program.evaluation_plan_of(self._number)
        self._evaluated.refuse_others(batch)
        with self._guarded():
            given = cut(plan, program.evaluation_code, self._number, batch)
            return self._rank.evaluate(given)

    def export(self, only: frozenset[str] | None = None) -> list[Portions]:
        return everyone(self._rank.export(only), self._objects)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._rank.restore(tensors)

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        return self._at_first(self._rank.write_part(folder))

    def export_parts(self, folder: Path, targets: Mapping[str, Target]) -> list[Any]:
        return self._at_first(self._rank.export_part(folder, targets))

    def _at_first(self, mine: Any) -> list[Any]:
        """What every process has, in the first one."""
        found: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
        lost_peers(
            lambda: dist.gather_object(mine, found or None, group=self._objects, group_dst=0)
        )
        return found

    def refusals(self, folder: Path, index: Index) -> list[str]:
        rows = everyone(self._rank.refusals(folder, index), self._objects)
        return [why for row in rows for why in row]

    def read_parts(self, folder: Path, index: Index) -> None:
        failed = ""
        try:
            self._rank.read_part(folder, index)
        except (OSError, PiperError) as error:
            failed = f"rank {dist.get_rank()}: {error}"
        if whys := [why for why in everyone(failed, self._objects) if why]:
            self._rank.device.state.changing = True
            raise PiperError(f"the checkpoint could not be read to its end: {whys[0]}")

    def close(self, error: BaseException | None = None) -> None:
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


def _join(timeout: float) -> None:
    """Be part of torch's default process group, if the caller is not yet."""
    if dist.is_initialized():
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    # not before: torch could not begin again on the same rendezvous, for another program
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_store(objects: Any) -> dist.Store:
    """A part of the job's store that no other trainer of the job uses."""
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
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return choose_gpu(local, number, share=share_gpus, alone=alone)


def _refuse_shared(store: dist.Store, where: torch.device, number: int, *, allowed: bool) -> None:
    """NCCL would refuse two processes on one GPU with a message that helps nobody."""
    gpu = torch.cuda.get_device_properties(where).uuid
    first = store.compare_set(f"gpu {gpu}", "", str(number)).decode()
    if first != str(number) and not allowed and "NCCL_HOSTID" not in os.environ:
        raise PiperError(
            f"devices {first} and {number} are on one GPU ({where}): give each process a GPU of "
            "its own (torchrun sets LOCAL_RANK, and this machine may have fewer GPUs than "
            "processes), or say share_gpus=True, which lets several share one, over sockets"
        )
