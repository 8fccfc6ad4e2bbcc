"""DeepSpeed's ZeRO and pipelines, used as its documentation recommends. Piper does not install
DeepSpeed: see ``missing``."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peers import Divided
from torch import Tensor, nn
from work import Work
from workers import Step

from piper.models import DenseTransformer


def missing() -> str | None:
    """The reason to skip DeepSpeed, or None."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed here: skipped (`make bench` installs it)"
    return None


@dataclass(frozen=True, slots=True)
class Zero(Divided):
    """``deepspeed.initialize`` with ZeRO."""

    stage: int
    bucket_mb: float

    def begin(self) -> Step:
        work = self.work
        deepspeed = _deepspeed()
        elements = round(self.bucket_mb * 2**20 / 4)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": elements,
        }
        if self.stage < 3:
            zero["allgather_bucket_size"] = elements
        else:
            zero["stage3_prefetch_bucket_size"] = elements
            zero["stage3_param_persistence_threshold"] = 0
        model = work.model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=work.optimizer(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": work.rows,
                "gradient_accumulation_steps": work.microbatches,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
            },
        )

        def step(xs: list[Tensor], ys: list[Tensor]) -> float:
            total = torch.zeros(())
            for x, y in zip(xs, ys, strict=True):
                loss = work.loss(engine(x), y)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(xs)
            return total.item()

        return step


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``PipelineModule``: 1F1B, one stage per worker."""

    work: Work

    def rows(self, x: Tensor, rank: int) -> list[Tensor]:
        return [x.clone()]

    def begin(self) -> Step:
        deepspeed = _deepspeed()
        work = self.work
        module = deepspeed.pipe.PipelineModule(
            layers=_sequence(work.model()),
            num_stages=work.workers,
            loss_fn=work.loss,
            partition_method="type:InnerBlock",
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=work.optimizer([p for p in module.parameters() if p.requires_grad]),
            config={
                "train_micro_batch_size_per_gpu": work.workers * work.rows,
                "gradient_accumulation_steps": work.microbatches,
            },
        )
        knows = engine.is_last_stage()

        def step(xs: list[Tensor], ys: list[Tensor]) -> float:
            parts = zip(xs[0].chunk(work.microbatches), ys[0].chunk(work.microbatches), strict=True)
            loss = engine.train_batch(data_iter=iter(parts))
            return float(loss) if knows else math.nan

        return step


class FirstBlock(nn.Module):
    """The embedding."""

    def __init__(self, whole: DenseTransformer) -> None:
        super().__init__()
        self.embedding = whole.embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)


class InnerBlock(nn.Module):
    """One block."""

    def __init__(self, whole: DenseTransformer, number: int) -> None:
        super().__init__()
        self.block, self.rotary = whole.layers[number], whole.rotary

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, *self.rotary(x.shape[1]))


class LastBlock(nn.Module):
    """The head."""

    def __init__(self, whole: DenseTransformer) -> None:
        super().__init__()
        self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def _sequence(whole: DenseTransformer) -> list[nn.Module]:
    blocks = [InnerBlock(whole, i) for i in range(len(whole.layers))]
    return [FirstBlock(whole), *blocks, LastBlock(whole)]


def _deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("MASTER_PORT", "0")
    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    assert dist.is_initialized()
    return deepspeed
