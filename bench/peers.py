"""Torch's own data parallelism and pipelines on two worker processes, driven over pipes as ours is.

A worker gets its rows as bytes, trains on them, and answers with its loss.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from pipelining import Case, Stage
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from piper.launch.calls import dumped, receive
from piper.models import DenseConfig, DenseTransformer, lm_loss

WORKERS = 2
Step = Callable[[list[Tensor], list[Tensor]], float]


@dataclass(frozen=True, slots=True)
class Work:
    """What is trained, on what."""

    config: DenseConfig
    microbatches: int
    rows: int
    """Sequences of a microbatch on each worker."""
    fused: bool
    """Whether AdamW is."""

    def model(self) -> DenseTransformer:
        torch.manual_seed(0)
        return DenseTransformer(self.config)

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        return partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=self.fused)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        shape = (WORKERS * self.microbatches * self.rows, self.config.max_seq + 1)
        draws = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.config.vocab, shape, generator=draws)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Divided:
    """Data parallel: every worker has rows of its own."""

    __slots__ = ()

    def rows(self, x: Tensor, rank: int, microbatches: int) -> list[Tensor]:
        """Those that our device of this rank gets, microbatch by microbatch."""
        return [part.clone() for part in x.chunk(WORKERS * microbatches)[rank::WORKERS]]


@dataclass(frozen=True, slots=True)
class Replicated(Divided):
    """``DistributedDataParallel``."""

    bucket_mb: float

    def __str__(self) -> str:
        return f"DDP, buckets of {self.bucket_mb:g} MB"

    def begin(self, work: Work) -> Step:
        net = DistributedDataParallel(
            work.model(), bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True
        )
        optimizer = work.optimizer(net.parameters())

        def step(xs: list[Tensor], ys: list[Tensor]) -> float:
            total = torch.zeros(())
            for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                with net.no_sync() if i + 1 < len(xs) else contextlib.nullcontext():
                    loss = lm_loss(net(x), y) / len(xs)
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total.item()

        return step


@dataclass(frozen=True, slots=True)
class Sharded(Divided):
    """``fully_shard``, block by block. Gradients are summed and divided with each microbatch, as
    ours are."""

    scattered: bool
    """Whether parameters are let go after the forward and gathered again: ZeRO-3, not ZeRO-2."""
    ahead: bool
    """Whether gathers are begun one block ahead, which on CPUs must be asked for."""

    def __str__(self) -> str:
        return f"fully_shard, gathers {'ahead' if self.ahead else 'when used'}"

    def begin(self, work: Work) -> Step:
        net = work.model()
        for module in (*net.layers, net):
            fully_shard(module, reshard_after_forward=self.scattered)
        assert isinstance(net, FSDPModule)
        if self.ahead:
            _gather_ahead([m for m in (net, *net.layers) if isinstance(m, FSDPModule)])
        optimizer = work.optimizer(net.parameters())

        def step(xs: list[Tensor], ys: list[Tensor]) -> float:
            total = torch.zeros(())
            for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                last = i + 1 == len(xs)
                net.set_is_last_backward(last)
                net.set_reshard_after_backward(last or self.scattered)
                loss = lm_loss(net(x), y) / len(xs)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total.item()

        return step


@dataclass(frozen=True, slots=True)
class Piped:
    """``torch.distributed.pipelining``, with shapes given, so that none are sent."""

    schedule: str
    """The name of its class, without "Schedule"."""

    def __str__(self) -> str:
        return f"torch {self.schedule}"

    @property
    def stages(self) -> int:
        return WORKERS * (1 if self.schedule in ("GPipe", "1F1B") else 2)

    def rows(self, x: Tensor, rank: int, microbatches: int) -> list[Tensor]:
        return [x.clone()]

    def begin(self, work: Work) -> Step:
        rank = dist.get_rank()
        case = Case(work.config, WORKERS, 1, work.microbatches, WORKERS * work.rows)
        case = replace(case, virtual=self.stages // WORKERS)
        last = self.stages - 1
        turns = self.schedule in ("ZBVZeroBubble", "DualPipeV")
        numbers = [rank, last - rank] if turns else list(range(rank, self.stages, WORKERS))
        whole = work.model()
        modules = [Stage(whole, case, number) for number in numbers]
        optimizer = work.optimizer([p for module in modules for p in module.parameters()])
        tokens = torch.zeros(case.rows, work.config.max_seq, dtype=torch.int64)
        shape = case.rows, work.config.max_seq
        hidden = torch.zeros(*shape, work.config.dim, requires_grad=True)
        logits = torch.zeros(*shape, work.config.vocab, requires_grad=True)
        stages = [
            PipelineStage(
                module,
                number,
                self.stages,
                torch.device("cpu"),
                input_args=(tokens if number == 0 else hidden,),
                output_args=(logits if number == last else hidden,),
            )
            for module, number in zip(modules, numbers, strict=True)
        ]
        kind: Any = getattr(schedules, f"Schedule{self.schedule}")
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        run = kind(stages if several else stages[0], work.microbatches, loss_fn=lm_loss)

        def step(xs: list[Tensor], ys: list[Tensor]) -> float:
            losses: list[Tensor] = []
            inputs = xs if 0 in numbers else []
            targets = {"target": ys[0], "losses": losses} if last in numbers else {}
            run.step(*inputs, **targets, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            return float(torch.stack(losses).detach().mean()) if losses else math.nan

        return step


def _gather_ahead(modules: list[FSDPModule]) -> None:
    for module in modules:
        module._set_unshard_async_op(True)
    for module, following in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([module])


Way = Replicated | Sharded | Piped


class Peers:
    """Two workers that train in one of these ways."""

    def __init__(self, work: Work, way: Way, stack: contextlib.ExitStack) -> None:
        """``stack`` ends them."""
        self._way, self._microbatches = way, work.microbatches
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self.pids: list[int] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(WORKERS):
            here, there = context.Pipe()
            what = (there, rank, self._store.port, work, way)
            process = context.Process(target=_serve, args=what, daemon=True)
            process.start()
            there.close()  # so that its end is noticed
            stack.callback(_end, process, here)
            assert process.pid is not None
            self.pids.append(process.pid)
            self._ends.append(here)
        for end in self._ends:
            receive(end)

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on a batch; the loss."""
        for rank, end in enumerate(self._ends):
            end.send_bytes(dumped([self._rows(x, rank), self._rows(y, rank)]))
        losses = [receive(end) for end in self._ends]
        return statistics.mean(loss for loss in losses if not math.isnan(loss))

    def _rows(self, x: Tensor, rank: int) -> list[Tensor]:
        return self._way.rows(x, rank, self._microbatches)


def _serve(connection: Connection, rank: int, port: int, work: Work, way: Way) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    step = way.begin(work)
    connection.send_bytes(dumped(None))
    while (given := receive(connection)) is not None:
        connection.send_bytes(dumped(step(*given)))
    dist.destroy_process_group()


def _end(process: Any, connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(dumped(None))
    process.join(5)
    if process.is_alive():
        process.kill()
