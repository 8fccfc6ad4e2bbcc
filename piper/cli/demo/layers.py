"""The layers that all language models here share: rotary tables, attention, SwiGLU, and the losses.

Activations [batch, seq, dim] enter and leave; losses take a model's output and target tokens.
Shapes are static and no forward changes a tensor in place, so that every layer can be exported.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ModelOutput: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Logits [batch, seq, vocab], or (logits, auxiliary loss): a scalar to add to the mean loss."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for softmax and loss: fp32, or fp64 if the model runs in fp64."""
    # Not torch.promote_types, which export would record as an operation.
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rotary(nn.Module):
    """Tables of the rotary position embedding: `rotary(seq)` -> (cos, sin), each [seq, dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, max_seq: int, base: float) -> None:
        super().__init__()
        self.dim, self.max_seq, self.base = dim, max_seq, base
        # Not persistent: a checkpoint should not fix max_seq of a later run.
        for name in ("cos", "sin"):
            table = torch.empty(max_seq, dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the tables. Call it again after `to_empty`, which leaves them undefined."""
        device = self.cos.device
        # Always fp32: bf16 cannot even represent all positions beyond 256.
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        position = torch.arange(self.max_seq, dtype=torch.float32, device=device)
        angle = torch.outer(position, self.base**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        return self.cos[:seq], self.sin[:seq]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of x [batch, heads, seq, head_dim] by its position."""
    # The tables may stay fp32 in a bf16 model; they must not promote the activations.
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; each of `kv_heads` key and value heads serves a group of heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.w_qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.w_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.w_qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            # Only if needed: fewer kernels support grouped heads.
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.w_out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated MLP: w_out(silu(w_gate x) * w_in x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(dim, hidden, bias=False)
        self.w_gate = nn.Linear(dim, hidden, bias=False)
        self.w_out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(F.silu(self.w_gate(x)) * self.w_in(x))


def lm_loss(output: ModelOutput, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, plus the model's auxiliary loss if it returns one.

    With ignored tokens (-100), a plain mean over microbatches is not the mean over tokens: use
    `lm_loss_sum` there.
    """
    logits, aux = _parts(output)
    loss = F.cross_entropy(logits, targets.flatten())
    return loss if aux is None else loss + aux


def lm_loss_sum(
    output: ModelOutput, targets: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(sum, count): cross-entropy summed over the tokens that are not ignored, and their number.

    The auxiliary loss is multiplied by the count, so that the sum divided by the global count
    contains its token-weighted mean over microbatches.
    """
    logits, aux = _parts(output)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum()
    return (total if aux is None else total + aux * count), count


def _parts(output: ModelOutput) -> tuple[Tensor, Tensor | None]:
    """Logits as [tokens, vocab] in at least fp32, and the auxiliary loss if there is one."""
    logits, aux = output if isinstance(output, tuple) else (output, None)
    return logits.flatten(0, 1).to(at_least_fp32(logits.dtype)), aux
