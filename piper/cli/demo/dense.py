"""A pre-norm decoder-only language model, and the base classes of other decoders.

Tokens [batch, seq] (int64) enter; logits [batch, seq, vocab] leave, in the dtype of the weights.
Regions "embed", "layer" (one for each block) and "head" cover every operation of the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.capture.regions import annotate
from piper.cli.demo.layers import Attention, Rotary, SwiGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """The shape of a decoder."""

    vocab: int
    """Number of tokens; 256 for bytes."""
    dim: int
    """Width of the residual stream: `heads` heads of equal, even width."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads."""
    mlp_dim: int
    """Hidden width of the MLP, or of each expert."""
    kv_heads: int | None = None
    """Number of key and value heads, a divisor of `heads`; None means as many as `heads`."""
    max_seq: int = 2048
    """The longest sequence; the size of the rotary tables."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms; explicit, because torch's default depends on the dtype."""
    dropout: float = 0.0
    """Probability of dropout on the embedding and on each residual branch."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's weight."""

    def __post_init__(self) -> None:
        sizes = ("vocab", "dim", "layers", "heads", "mlp_dim", "max_seq")
        for field in sizes:
            if getattr(self, field) < 1:
                raise PiperError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise PiperError(
                f"dim={self.dim} does not divide into heads={self.heads} heads of even width "
                f"(rotary embedding turns pairs): use a multiple of {2 * self.heads}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise PiperError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise PiperError(f"dropout={self.dropout}: must be at least 0 and less than 1")


def dropout(p: float) -> nn.Module:
    """Dropout, or the identity for p = 0, so that an exported graph has no random op."""
    return nn.Dropout(p) if p > 0 else nn.Identity()


class Block(nn.Module):
    """Attention and `mlp`, each on its own normalized residual branch; subclasses call `mlp`."""

    def __init__(self, config: DenseConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.heads, config.kv_heads or config.heads)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = mlp
        self.dropout = dropout(config.dropout)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x plus the attention branch."""
        return x + self.dropout(self.attention(self.attention_norm(x), cos, sin))


class DenseBlock(Block):
    """A block whose MLP maps x to x."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attend(x, cos, sin)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head; the forward of a subclass calls the blocks."""

    def __init__(self, config: DenseConfig, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.embedding_dropout = dropout(config.dropout)
        self.rotary = Rotary(config.dim // config.heads, config.max_seq, config.rope_base)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.reset_parameters()

    def init_parameter(
        self, name: str, tensor: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Initializes the parameter `name`; `piper.compile(init=...)` takes it for a meta model."""
        std = 0.02
        if "w_out" in name.split("."):
            # Each block adds two branches to the residual stream; this keeps its variance constant.
            std /= math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            if tensor.ndim == 1:  # the scale of a norm
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, std, generator=generator)

    def reset_parameters(self) -> None:
        """Initializes all parameters, from torch's RNG, and all tables; also after `to_empty`."""
        if self.config.tie_embeddings:  # here, because `to_empty` unties the weights
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter)
        self.rotary.reset_parameters()

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens to the residual stream [batch, seq, dim]."""
        if tokens.shape[1] > self.config.max_seq:
            raise PiperError(
                f"a sequence of {tokens.shape[1]} tokens is longer than "
                f"max_seq={self.config.max_seq}: raise max_seq in the model's config"
            )
        return self.embedding_dropout(self.embedding(tokens))


class DenseTransformer(Decoder):
    """The decoder with a SwiGLU MLP in each block."""

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embedding": "row",
        "*.w_qkv": "column",
        "*.attention.w_out": "row",
        "*.mlp.w_in": "column",
        "*.mlp.w_gate": "column",
        "*.mlp.w_out": "row",
        "head": "column",
    }
    """How tensor parallelism shards its modules."""

    def __init__(self, config: DenseConfig) -> None:
        mlps = (SwiGLU(config.dim, config.mlp_dim) for _ in range(config.layers))
        super().__init__(config, (DenseBlock(config, mlp) for mlp in mlps))

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        with annotate("embed"):
            x = self.embed(tokens)
        for block in self.layers:
            # Each layer slices the tables, so that no layer depends on another's slice.
            with annotate("layer"):
                x = block(x, *self.rotary(seq))
        with annotate("head"):
            return self.head(self.norm(x))
