"""Small mixtures of experts under all schedules, ZeRO levels and expert parallelism, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import piper
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh
from tests.training import compile_shared

LARGE = DenseConfig(vocab=8192, dim=512, layers=8, heads=8, mlp_dim=1536, max_seq=256)
CONFIG = MoEConfig(vocab=67, dim=32, layers=4, heads=4, mlp_dim=48, experts=4)
ROOMY = replace(CONFIG, capacity_factor=2.0)
"""The experts' capacity is the same however the batch is split: nothing is rounded."""
DROPLESS = replace(CONFIG, capacity_factor=None)
ROWS, LENGTH = 16, 17
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "v-half", "dualpipev",
    "dualpipe",
)  # fmt: skip

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=0.01)
halving = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


@dataclass(frozen=True)
class Case:
    """The model under one strategy."""

    strategy: piper.Strategy
    options: Mapping[str, Any] = field(default_factory=dict)
    config: DenseConfig = CONFIG
    saves: bool = False
    """Whether it is also saved and loaded."""
    exact: bool = True
    """Whether only the loss and the norm are summed over more than two devices."""

    def compile(self, device: str = "cuda") -> piper.Program:
        x, y = batch(0, self.config)
        options: dict[str, Any] = {"optimizer": sgd, "loss": lm_loss, **self.options}
        return compile_shared(
            source(self.config).model,
            self.strategy,
            inputs=(x,),
            targets=(y,),
            device=device,
            **options,
        )

    def load(self, path: Any) -> piper.Program:
        return piper.Program.load(
            path,
            source=source(self.config),
            optimizer=self.options.get("optimizer", sgd),
            scheduler=self.options.get("scheduler"),
        )


@functools.cache
def source(config: DenseConfig) -> piper.Source:
    torch.manual_seed(0)
    kind = MoETransformer if isinstance(config, MoEConfig) else DenseTransformer
    return piper.Source(kind(config))


def batch(seed: int, config: DenseConfig = CONFIG) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    length = LENGTH if config in (CONFIG, ROOMY, DROPLESS, PLAIN) else config.max_seq + 1
    x = torch.randint(config.vocab, (ROWS, length), generator=draws)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def numbers(trainer: piper.Trainer, steps: int = 2) -> dict[str, Tensor]:
    """All results of a short training."""
    found = {}
    for i in range(steps):
        result = trainer.step(*batch(i))
        assert result.grad_norm is not None
        found |= {f"loss of step {i}": result.loss, f"norm of step {i}": result.grad_norm}
    found["loss after"] = trainer.evaluate(*batch(100)).loss
    return {name: x.cpu() for name, x in (found | trainer.state_dict()).items()}


def differences(found: Mapping[str, Tensor], should: Mapping[str, Tensor], exact: bool) -> str:
    """What differs: bit for bit if ``exact``, except sums over all devices."""
    wrong = []
    for name, x in found.items():
        y = should[name]
        scalar = name.startswith(("loss", "norm"))
        far = float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))
        if far > (1e-6 if scalar or not exact else 0.0) or far != far:
            wrong.append(f"{name} by {far:.1e}")
    return ", ".join(wrong[:6])


TURNED = piper.Strategy(
    [
        piper.partition("layer", into="PP", parts=1),
        piper.split(into="MB", parts=2),
        piper.place({}, devices=[1, 0]),
        piper.replicate({"EP": "-"}, zero=3, bucket_mb=0.02),
        piper.shard({"EP": "*"}),
    ]
)
SHARING = piper.Strategy(
    [
        piper.partition("layer", into="PP", parts=3),
        piper.split(into="MB", parts=4),
        piper.place({"PP": 0}, devices=[0]),
        piper.place({"PP": 1}, devices=[0, 1]),
        piper.place({"PP": 2}, devices=[1]),
        piper.replicate({}, zero=2),
    ]
)


def experts_apart(attention: Sequence[int], experts: piper.Mesh) -> piper.Strategy:
    """Experts on other devices than the rest, along the axis ``ep``."""
    return piper.Strategy(
        [
            piper.split(into="MB", parts=2),
            piper.place({"EP": "-"}, devices=attention),
            piper.place({"EP": "*"}, devices=experts),
            piper.shard({"EP": "*"}, axis="ep"),
            piper.replicate({"EP": "-"}, zero=3, bucket_mb=0.02),
        ]
    )


PLAIN = DenseConfig(vocab=68, dim=32, layers=4, heads=4, mlp_dim=48, max_seq=16)


def tensor(**options: Any) -> Case:
    """A dense model under tensor or context parallelism."""
    return Case(mesh(**options), config=PLAIN, exact=False)


SMALL = {"bucket_mb": 0.02}
"""Small enough for several buckets."""

ON_TWO: dict[str, Case] = {
    **{f"{s}": Case(mesh(pp=2, schedule=s, microbatches=4)) for s in SCHEDULES},
    **{f"ZeRO-{z}": Case(mesh(dp=2, zero=z, microbatches=2, **SMALL)) for z in range(4)},
    **{
        f"experts, ZeRO-{z}": Case(mesh(dp=2, ep=2, zero=z, microbatches=2, **SMALL), saves=True)
        for z in range(4)
    },
    "a group in turned order": Case(TURNED),
    "stages that share devices": Case(SHARING),
    "experts on more devices": Case(experts_apart([0], piper.Mesh([0, 1], ep=2)), config=ROOMY),
    "experts on fewer devices": Case(experts_apart([1, 0], piper.Mesh([1], ep=1)), config=ROOMY),
    "counted, clipped, scheduled": Case(
        mesh(dp=2, ep=2, zero=2, microbatches=2, **SMALL),
        {"loss": sum_and_count, "clip_norm": 0.1, "scheduler": halving, "optimizer": adamw},
        exact=False,
    ),
    "bf16": Case(mesh(pp=2, schedule="dualpipev", microbatches=4), {"precision": "bf16"}),
    "Inductor": Case(mesh(pp=2, microbatches=4), {"compiler": "inductor"}),
    "recomputed": Case(mesh(pp=2, schedule="zb-v", microbatches=4), {"remat": "all"}),
    "dropless": Case(mesh(dp=2, ep=2, zero=1, microbatches=2, **SMALL), config=DROPLESS),
    "dropless with a capacity": Case(
        mesh(dp=2, ep=2, zero=3, microbatches=2, capacity=1.9, **SMALL), config=DROPLESS, saves=True
    ),
    "dropless in bf16": Case(
        mesh(dp=2, ep=2, microbatches=2), {"precision": "bf16"}, config=DROPLESS
    ),
    "dropless on more devices": Case(
        experts_apart([0], piper.Mesh([0, 1], ep=2)), config=DROPLESS, saves=True
    ),
    "dropless on fewer devices": Case(
        experts_apart([1, 0], piper.Mesh([1], ep=1)), config=DROPLESS
    ),
    "tensor": replace(tensor(tp=2, microbatches=2), saves=True),
    "tensor, sequence": tensor(tp=2, microbatches=2, sequence_parallel=True),
    "tensor in pairs": tensor(tp=2, schedule="dualpipev", microbatches=4),
    "context": tensor(cp=2, microbatches=2),
    "context, keys gathered": tensor(cp=2, microbatches=2, attention="all_gather"),
}

ON_FOUR: dict[str, Case] = {
    **{
        f"{s}, experts, ZeRO-{z}": Case(
            mesh(pp=2, dp=2, ep=2, zero=z, schedule=s, microbatches=4, **SMALL),
            exact=s != "dualpipe",  # it has two copies of each stage
        )
        for s in SCHEDULES
        for z in range(4)
    },
    **{
        f"four replicas, ZeRO-{z}": Case(mesh(dp=4, zero=z, **SMALL), exact=False) for z in range(4)
    },
    "four stages": Case(mesh(pp=4, microbatches=8)),
    "four experts' shares": Case(mesh(dp=4, ep=4, zero=1, **SMALL), exact=False),
    "experts on more devices": Case(
        experts_apart([0, 1], piper.Mesh([3, 1, 2, 0], ep=4)), config=ROOMY, saves=True
    ),
    "experts on other devices": Case(experts_apart([0, 1], piper.Mesh([2, 3], ep=2)), config=ROOMY),
    "experts along the first axis": Case(
        experts_apart([0, 2], piper.Mesh([0, 1, 2, 3], ep=2, dp=2)), config=ROOMY
    ),
    **{
        f"tensor, sequence, ZeRO-{z}": tensor(
            dp=2, tp=2, zero=z, microbatches=2, sequence_parallel=True, **SMALL
        )
        for z in range(4)
    },
    "dropless": Case(
        mesh(pp=2, dp=2, ep=2, zero=2, schedule="dualpipev", microbatches=4, **SMALL),
        config=DROPLESS,
    ),
    "dropless with a capacity": Case(
        mesh(dp=4, ep=4, zero=1, capacity=3.5, **SMALL), config=DROPLESS, exact=False
    ),
    "dropless on other devices": Case(
        experts_apart([0, 1], piper.Mesh([2, 3], ep=2)), config=DROPLESS
    ),
    "dropless on more devices": Case(
        experts_apart([0, 1], piper.Mesh([3, 1, 2, 0], ep=4)), config=DROPLESS, saves=True
    ),
    "dropless on fewer devices": Case(
        experts_apart([2, 0, 3, 1], piper.Mesh([1, 2], ep=2)), config=DROPLESS, exact=False
    ),
    "tensor four ways": tensor(tp=4, microbatches=2),
    "tensor in stages": tensor(pp=2, tp=2, schedule="zb-h1", microbatches=4),
    "tensor and context": tensor(tp=2, cp=2, microbatches=2, zero=1),
    "tensor and context, keys gathered": tensor(
        tp=2, cp=2, microbatches=2, zero=1, attention="all_gather"
    ),
    "clipped in bf16": Case(
        mesh(pp=2, dp=2, ep=2, zero=3, schedule="dualpipev", microbatches=4, **SMALL),
        {"precision": "bf16", "clip_norm": 0.1},
        saves=True,
        exact=False,
    ),
}
CASES = {2: ON_TWO, 4: ON_FOUR}
"""By the number of ranks."""

LARGER: dict[str, Case] = {
    "1f1b": Case(mesh(pp=2, microbatches=8), config=LARGE),
    "dualpipev": Case(mesh(pp=2, schedule="dualpipev", microbatches=8), config=LARGE),
    **{
        f"ZeRO-{z}": Case(mesh(dp=2, zero=z, microbatches=4, bucket_mb=4), config=LARGE)
        for z in range(4)
    },
}
"""On two ranks, large enough to measure."""
