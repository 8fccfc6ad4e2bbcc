"""The workload of the comparisons with real kernels: the same for them and for us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss


def reference(layers: int, dim: int, seq: int, vocab: int) -> DenseConfig:
    """The model of the comparisons, in the given size."""
    return DenseConfig(
        vocab=vocab, dim=dim, layers=layers, heads=dim // 64, mlp_dim=4 * dim, max_seq=seq
    )


@dataclass(frozen=True, slots=True)
class Work:
    """A transformer, dense or with experts, trained by ``workers`` workers on random tokens."""

    config: DenseConfig
    workers: int
    microbatches: int
    rows: int
    """Sequences of a microbatch for each worker."""
    fused: bool = True
    """Whether AdamW is fused."""
    dtype: torch.dtype = torch.float32

    def model(self) -> Any:
        torch.manual_seed(0)
        kind = MoETransformer if isinstance(self.config, MoEConfig) else DenseTransformer
        return kind(self.config).to(self.dtype)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return lm_loss

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        return partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=self.fused)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        shape = (self.workers * self.microbatches * self.rows, self.config.max_seq + 1)
        draws = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.config.vocab, shape, generator=draws)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def modules(self, stages: int, numbers: Sequence[int]) -> list[nn.Module]:
        """The pipeline stages with these numbers."""
        whole = self.model()
        return [Stage(whole, evenly(self.config.layers, stages), number) for number in numbers]

    def ends(self, stages: int, number: int) -> tuple[Tensor, Tensor]:
        """The input and the output of a stage for one microbatch."""
        shape = (self.workers * self.rows, self.config.max_seq)
        tokens = torch.zeros(shape, dtype=torch.int64)
        hidden = torch.zeros(*shape, self.config.dim, requires_grad=True)
        logits = torch.zeros(*shape, self.config.vocab, requires_grad=True)
        return (hidden if number else tokens), (logits if number == stages - 1 else hidden)


def evenly(layers: int, stages: int) -> list[int]:
    """The number of layers of each stage."""
    least, more = divmod(layers, stages)
    return [least + (stage < more) for stage in range(stages)]


class Stage(nn.Module):
    """Consecutive blocks of a model; the first stage has the embedding, the last norm and head."""

    def __init__(self, whole: DenseTransformer, counts: Sequence[int], number: int) -> None:
        super().__init__()
        start, last = sum(counts[:number]), number == len(counts) - 1
        self.rotary = whole.rotary
        self.embedding = whole.embedding if number == 0 else None
        self.layers = nn.ModuleList(list(whole.layers)[start : start + counts[number]])
        self.norm = whole.norm if last else None
        self.head = whole.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers:
            x = block(x, *self.rotary(x.shape[1]))
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
