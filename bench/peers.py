"""Torch's own data parallelism and pipelines, used as their documentation recommends."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from work import Work
from workers import Step


@dataclass(frozen=True, slots=True)
class Divided:
    """Data parallel: every worker has its own rows."""

    work: Work

    def rows(self, x: Tensor, rank: int) -> list[Tensor]:
        """The rows of this rank, microbatch by microbatch: the same that our device gets."""
        workers = self.work.workers
        return [part.clone() for part in x.chunk(workers * self.work.microbatches)[rank::workers]]


@dataclass(frozen=True, slots=True)
class Replicated(Divided):
    """``DistributedDataParallel``."""

    bucket_mb: float
    device: str = "cpu"
    broadcasts: bool = True
    """Whether rank 0 broadcasts its buffers in each forward: DDP's default, though no buffer
    changes here."""
    reports: bool = False
    """Whether a step also computes the loss over all ranks and the gradient norm, as ours does."""

    def begin(self) -> Step:
        from torch.nn.parallel import DistributedDataParallel

        work = self.work
        net = DistributedDataParallel(
            work.model().to(self.device),
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
            **({} if self.broadcasts else {"broadcast_buffers": False}),
        )
        optimizer = work.optimizer(net.parameters())

        def step(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
            total = accumulated(net, work, xs, ys)
            if self.reports:
                _report(total, net)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step


def accumulated(net: Any, work: Work, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """Accumulate the gradients of all microbatches (DDP all-reduces them with the last one); return
    the mean loss."""
    total = torch.zeros((), device=xs[0].device)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        with net.no_sync() if i + 1 < len(xs) else contextlib.nullcontext():
            loss = work.loss(net(x), y) / len(xs)
            loss.backward()
        total += loss.detach()
    return total


@dataclass(frozen=True, slots=True)
class Sharded(Divided):
    """``fully_shard``, block by block."""

    scattered: bool
    """Whether parameters are freed after the forward and gathered again: ZeRO-3, not ZeRO-2."""
    ahead: bool
    """Whether gathers are prefetched one block ahead, which is not the default on CPUs."""
    each: bool
    """Whether gradients are reduce-scattered in each microbatch, so that only a shard is held, or
    after the last one."""
    device: str = "cpu"
    reports: bool = False
    """As for ``Replicated``."""

    def begin(self) -> Step:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        work = self.work
        net = work.model().to(self.device)
        for module in (*net.layers, net):
            fully_shard(module, reshard_after_forward=self.scattered)
        assert isinstance(net, FSDPModule)
        if self.ahead:
            _gather_ahead([m for m in (net, *net.layers) if isinstance(m, FSDPModule)])
        optimizer = work.optimizer(net.parameters())

        def step(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
            total = torch.zeros((), device=self.device)
            for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                last = i + 1 == len(xs)
                net.set_is_last_backward(last)
                net.set_requires_gradient_sync(last or self.each)
                net.set_reshard_after_backward(last or self.scattered)
                loss = work.loss(net(x), y) / len(xs)
                loss.backward()
                total += loss.detach()
            if self.reports:
                _report(total, net)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step


@dataclass(frozen=True, slots=True)
class Tensored:
    """``parallelize_module`` with TorchTitan's plan for such a model: column-parallel first
    matrices, row-parallel second ones, vocab-parallel embedding and head, and a loss on sharded
    logits."""

    work: Work
    sequence: bool
    """Whether norms and residuals compute on shards of the sequence."""
    device: str = "cpu"
    reports: bool = False
    """As for ``Replicated``."""

    def rows(self, x: Tensor, rank: int) -> list[Tensor]:
        return [part.clone() for part in x.chunk(self.work.microbatches)]

    def begin(self) -> Step:
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        work, ways = self.work, dist.get_world_size()
        mesh = dist.init_device_mesh(self.device, (ways,))
        net = work.model().to(self.device)
        for block in net.layers:
            _deal_heads(block.attention, ways)
        parallelize_module(net, mesh, _plan(len(net.layers), self.sequence))
        sharded = [p for p in net.parameters() if isinstance(p, DTensor)]
        others = [p for p in net.parameters() if not isinstance(p, DTensor)]
        groups = [{"params": group} for group in (sharded, others) if group]
        optimizer = work.optimizer(groups)

        def step(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
            total = torch.zeros((), device=self.device)
            with loss_parallel():
                for x, y in zip(xs, ys, strict=True):
                    loss = work.loss(net(x), y) / len(xs)
                    loss.backward()
                    found = loss.detach()
                    total += found.full_tensor() if isinstance(found, DTensor) else found
            if self.reports:
                for group in (sharded, others):
                    norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
                    if isinstance(norm, DTensor):
                        norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step


def _deal_heads(attention: Any, ways: int) -> None:
    """Reorder the rows of the fused projection so that each of ``ways`` shards has its own heads of
    queries, keys and values."""
    weight, width = attention.w_qkv.weight, attention.head_dim
    sizes = [n * width for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
    parts = [section.chunk(ways) for section in weight.detach().split(sizes)]
    with torch.no_grad():
        weight.copy_(torch.cat([part for shard in zip(*parts, strict=True) for part in shard]))
    attention.heads //= ways
    attention.kv_heads //= ways


def _plan(layers: int, sequence: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    rows = {"output_layouts": between}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **rows),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(layers):
        plan |= {
            f"layers.{i}.attention.w_qkv": ColwiseParallel(),
            f"layers.{i}.attention.w_out": RowwiseParallel(**rows),
            f"layers.{i}.mlp.w_in": ColwiseParallel(),
            f"layers.{i}.mlp.w_gate": ColwiseParallel(),
            f"layers.{i}.mlp.w_out": RowwiseParallel(**rows),
        }
        if sequence:
            plan |= {
                f"layers.{i}.attention_norm": SequenceParallel(),
                f"layers.{i}.attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                f"layers.{i}.mlp_norm": SequenceParallel(),
                f"layers.{i}.mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            }
    return plan | ({"norm": SequenceParallel()} if sequence else {})


def _report(loss: Tensor, net: nn.Module) -> None:
    """Make ``loss`` the mean over all ranks, and compute the norm of all gradients."""
    dist.all_reduce(loss, dist.ReduceOp.AVG if loss.is_cuda else dist.ReduceOp.SUM)
    if not loss.is_cuda:
        loss /= dist.get_world_size()
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm.full_tensor()


def _gather_ahead(modules: list[Any]) -> None:
    for module in modules:
        module._set_unshard_async_op(True)
    for module, following in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([module])


class Staged(Protocol):
    """Work that can be cut into stages."""

    workers: int
    microbatches: int

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]: ...

    def modules(self, stages: int, numbers: Sequence[int]) -> list[nn.Module]: ...

    def ends(self, stages: int, number: int) -> tuple[Tensor, Tensor]: ...


FOLDED = ("ZBVZeroBubble", "DualPipeV")
STRAIGHT = ("GPipe", "1F1B")


@dataclass(frozen=True, slots=True)
class Piped:
    """``torch.distributed.pipelining``, with the shapes given, so that it sends none."""

    work: Staged
    schedule: str
    """The name of the torch class, without "Schedule"."""
    device: str = "cpu"
    reports: bool = False
    """As for ``Replicated``."""

    def rows(self, x: Tensor, rank: int) -> list[Tensor]:
        return [x.clone()]

    def begin(self) -> Step:
        from torch.distributed.pipelining import PipelineStage, schedules

        work, rank = self.work, dist.get_rank()
        count = stages_of(self.schedule, work.workers)
        last = count - 1
        numbers = list(range(rank, count, work.workers))
        if self.schedule in FOLDED:
            numbers = [rank, last - rank]
        modules = [module.to(self.device) for module in work.modules(count, numbers)]
        optimizer = work.optimizer([p for module in modules for p in module.parameters()])
        stages = []
        for module, number in zip(modules, numbers, strict=True):
            enters, leaves = map(_shape_of, work.ends(count, number))
            ends = {"input_args": (enters,), "output_args": (leaves,)}
            stages.append(PipelineStage(module, number, count, torch.device(self.device), **ends))
        kind: Any = getattr(schedules, f"Schedule{self.schedule}")
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        run = kind(stages if several else stages[0], work.microbatches, loss_fn=work.loss)

        def step(xs: list[Tensor], ys: list[Tensor]) -> Tensor | float:
            losses: list[Tensor] = []
            inputs = xs if 0 in numbers else []
            targets = {"target": ys[0], "losses": losses} if last in numbers else {}
            run.step(*inputs, **targets, return_outputs=False)
            loss: Tensor | float = torch.stack(losses).detach().mean() if losses else math.nan
            if self.reports:
                loss = self._report(loss, modules)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def _report(self, loss: Tensor | float, modules: Sequence[nn.Module]) -> Tensor:
        """The loss of the last stage, sent to all ranks together with the norm of all gradients."""
        grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
        known = loss if isinstance(loss, Tensor) else torch.zeros((), device=self.device)
        both = torch.stack([known, nn.utils.get_total_norm(grads).square()])
        dist.all_reduce(both)
        return both[0]


def _shape_of(x: Tensor) -> Tensor:
    """A meta tensor like ``x``, which takes no memory."""
    return torch.empty_like(x, device="meta", requires_grad=x.requires_grad)


def stages_of(schedule: str, workers: int) -> int:
    """The number of stages of one of torch's schedules here."""
    return workers * (1 if schedule in STRAIGHT else 2)
