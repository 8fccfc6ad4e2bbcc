"""One pipeline rank of ``torch.distributed.pipelining`` with ``fully_shard``, and its memory.

The stages hold the blocks of our own dense transformer and are wrapped as in TorchTitan: the
embedding, each block, and the head with its norm are units of ``fully_shard`` over the ranks of the
stage, then the stage itself. AdamW is fused, no outputs are kept, and shapes are given, so that no
forward runs to find them. A rank runs

    alone    with torch's fake process group, whose collectives do nothing, and fake tensors, which
             have a size but no data: 32 ranks of any model need one process
    gloo     with all others, one process each, with real tensors: this validates "alone"

The ``Tracker`` that counts our tensors also counts these, in a step for which the optimizer state
already exists. A DTensor counts as its local part. ``fully_shard`` resizes the storage of a
gathered parameter to zero when it frees it; the storage counts with its size at that time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from work import Stage, evenly

from piper.base.tracking import Tracker
from piper.models import DenseConfig, DenseTransformer, lm_loss

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The model, the parallelism and the batch: the same for them and for us."""

    model: DenseConfig
    pp: int
    dp: int
    microbatches: int
    rows: int
    """Sequences of a microbatch on each device, all of the model's maximum length."""
    virtual: int = 1
    """Stages of a rank: 1 for 1F1B, more for interleaved 1F1B."""
    remat: bool = False
    """Whether blocks are recomputed in the backward."""

    @property
    def stages(self) -> int:
        return self.pp * self.virtual


@dataclass(frozen=True)
class Found:
    """The memory of one rank, in bytes."""

    state: int
    """Parameters and optimizer state, before the step."""
    peak: int


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that updates in place, without temporary copies."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class ShardedStage(Stage):
    """A stage whose state is sharded over its ranks."""

    def __init__(self, whole: DenseTransformer, case: Case, number: int) -> None:
        super().__init__(whole, evenly(case.model.layers, case.stages), number)
        if case.remat:
            blocks = [checkpoint_wrapper(b, preserve_rng_state=False) for b in self.layers]
            self.layers = nn.ModuleList(blocks)

    def shard(self, mesh: DeviceMesh, reshard: bool) -> None:
        units = [self.embedding, *self.layers, [self.norm, self.head] if self.head else None]
        for unit in units:
            if unit is not None:
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self, mesh=mesh)

    def fill(self) -> None:
        """Give a model on the meta device memory and values."""
        self.to_empty(device=CPU)
        for parameter in self.parameters():
            local = parameter.detach()
            (local.to_local() if isinstance(local, DTensor) else local).normal_(0.0, 0.02)
        self.rotary.reset_parameters()


class Counter(Tracker):
    """A tracker that counts the local part of DTensors and follows resized storages."""

    def __init__(self) -> None:
        super().__init__()
        self._grown: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local tensors
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            before = storage.nbytes()
            plain(storage, size)
            self._resized(storage, storage.nbytes() - before)

        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010 - a method, for a while
        try:
            yield
        finally:
            setattr(torch.UntypedStorage, "resize_", plain)  # noqa: B010

    def _resized(self, storage: torch.UntypedStorage, more: int) -> None:
        key = id(storage)
        if key not in self._known:
            raise RuntimeError("a storage was resized that is not counted")
        if key not in self._grown:
            self._grown[key] = 0
            weakref.finalize(storage, lambda: self._shrink(self._grown.pop(key)))
        self._grown[key] += more
        self._shrink(-more)
        self.peak = max(self.peak, self.now)

    def _shrink(self, nbytes: int) -> None:
        self.now -= nbytes


class _Agreed:
    """The answer that all shapes are given, to a vote that would need the other ranks."""

    def item(self) -> int:
        return 1


class _Alone(PipelineStage):
    """A stage that does not ask its neighbours whether they know their shapes: they do not run."""

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Any:
        return _Agreed()

    def _warmup_backward_result(self, *_: Any, **__: Any) -> Any:
        return _Agreed()


class Rank:
    """The program of one rank."""

    def __init__(self, case: Case, number: int, mesh: DeviceMesh, reshard: bool, alone: bool):
        self.first, self.last = number == 0, number == case.pp - 1
        numbers = range(number, case.stages, case.pp)
        with torch.device("meta"):
            whole = DenseTransformer(case.model)
        modules = [ShardedStage(whole, case, n) for n in numbers]
        for module in modules:
            module.shard(mesh["dp"], reshard)
            module.fill()
        self.parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = adamw(self.parameters)
        self.tokens = torch.zeros(
            case.rows * case.microbatches, case.model.max_seq, dtype=torch.int64
        )
        make = _Alone if alone else PipelineStage
        stages = [
            make(module, n, case.stages, CPU, **_ends(case, n), group=mesh["pp"].get_group())
            for n, module in zip(numbers, modules, strict=True)
        ]
        self.schedule: Any = (
            Schedule1F1B(stages[0], case.microbatches, loss_fn=lm_loss)
            if case.virtual == 1
            else ScheduleInterleaved1F1B(list(stages), case.microbatches, loss_fn=lm_loss)
        )

    def prime(self) -> None:
        """Let the optimizer make its state."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        given = (self.tokens,) if self.first else ()
        wanted = {"target": self.tokens, "losses": []} if self.last else {}
        self.schedule.step(*given, return_outputs=False, **wanted)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _ends(case: Case, number: int) -> dict[str, Any]:
    """The input and the output of a stage, on the meta device."""
    shape = (case.rows, case.model.max_seq)
    like = partial(torch.empty, device="meta", requires_grad=True)
    inside = like(*shape, case.model.dim)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    logits = like(*shape, case.model.vocab)
    last = number == case.stages - 1
    return {
        "input_args": (inside if number else tokens,),
        "output_args": (logits if last else inside,),
    }


def _run(case: Case, number: int, mesh: DeviceMesh, reshard: bool, *, alone: bool) -> Found:
    counter = Counter()
    with counter, counter.seeing_resizes():
        rank = Rank(case, number, mesh, reshard, alone)
        rank.prime()
        state = counter.peak = counter.now
        rank.step()
    return Found(state, counter.peak)


def _mesh(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))


def alone(case: Case, number: int, reshard: bool) -> Found:
    """The memory of pipeline rank ``number``, which runs without the others."""
    world = case.pp * case.dp
    dist.init_process_group("fake", rank=number * case.dp, world_size=world, store=FakeStore())
    try:
        mesh = _mesh(case)
        with FakeTensorMode():
            return _run(case, number, mesh, reshard, alone=True)
    finally:
        dist.destroy_process_group()


def together(case: Case, reshard: bool) -> list[Found]:
    """The memory of each pipeline rank, where all run as processes and communicate by gloo."""
    world = case.pp * case.dp
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world, mp_context=spawn) as pool,
    ):
        store = str(Path(folder) / "store")
        parts = [pool.submit(_member, case, rank, store, reshard) for rank in range(world)]
        return [part.result() for part in parts[:: case.dp]]


def _member(case: Case, rank: int, store: str, reshard: bool) -> Found:
    torch.set_num_threads(1)
    world = case.pp * case.dp
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        found = _run(case, rank // case.dp, _mesh(case), reshard, alone=False)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
