"""The decoder with a mixture of experts in each block: top-k routing, with a fixed capacity for
each expert or dropless.

Tokens [batch, seq] enter; logits leave, or (logits, auxiliary loss) if `aux_loss_weight` is not 0.
All shapes depend only on the input's shape. Region "EP" contains the experts and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.capture.operators.grouped_mm import grouped_mm
from piper.capture.regions import annotate
from piper.cli.demo.dense import Block, Decoder, DenseConfig
from piper.cli.demo.layers import ModelOutput, at_least_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(DenseConfig):
    """The shape of a decoder whose MLPs are mixtures of experts."""

    experts: int
    """Number of experts in each block."""
    top_k: int = 2
    """Number of experts for each token."""
    capacity_factor: float | None = 1.25
    """Capacity of each expert, as a multiple of its equal share. None is dropless: rows are sorted
    by expert, and each expert takes all rows routed to it."""
    aux_loss_weight: float = 0.0
    """Weight of the load-balancing loss (mean over blocks); 0: the model returns only logits."""

    def __post_init__(self) -> None:
        DenseConfig.__post_init__(self)  # slots=True replaces the class, which breaks super()
        if not 1 <= self.top_k <= self.experts:
            raise PiperError(f"top_k={self.top_k}: must be from 1 to experts={self.experts}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise PiperError(f"capacity_factor={self.capacity_factor}: must be more than 0")
        if self.aux_loss_weight < 0:
            raise PiperError(f"aux_loss_weight={self.aux_loss_weight}: must not be negative")

    def capacity(self, tokens: int) -> int:
        """How many of `tokens` tokens one expert accepts."""
        assert self.capacity_factor is not None
        return math.ceil(self.capacity_factor * tokens * self.top_k / self.experts)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token. Choices are [k, tokens]; slots number the rows of all experts."""

    probs: Tensor
    """Router probabilities [tokens, experts]."""
    expert: Tensor
    """The expert of each choice [k, tokens]."""
    weight: Tensor
    """The weight of each choice in its token's output [k, tokens], also of dropped choices."""
    slot: Tensor | None
    """expert * capacity + position of each choice [k, tokens]; experts * capacity if dropped; None
    in a dropless model."""


class Router(nn.Module):
    """Chooses experts for tokens [tokens, dim]; drops choices beyond an expert's capacity."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        experts, k = self.config.experts, self.config.top_k
        logits = self.gate(x)
        probs = torch.softmax(logits, dim=-1, dtype=at_least_fp32(logits.dtype))
        weight, expert = probs.topk(k, dim=-1)
        if k > 1:
            # With k = 1 the weight would be the constant 1, and the router would get no gradient.
            weight = weight / weight.sum(dim=-1, keepdim=True)
        expert = expert.t()
        if self.config.capacity_factor is None:
            return Routing(probs=probs, expert=expert, weight=weight.t(), slot=None)
        capacity = self.config.capacity(x.shape[0])
        # Choice-major: first choices fill an expert before second choices.
        flat = expert.flatten()
        chosen = (flat.unsqueeze(1) == torch.arange(experts, device=x.device)).long()
        position = (chosen.cumsum(dim=0) * chosen).sum(dim=1) - 1
        slot = torch.where(position < capacity, flat * capacity + position, experts * capacity)
        return Routing(probs=probs, expert=expert, weight=weight.t(), slot=slot.view(k, -1))


class Experts(nn.Module):
    """SwiGLU experts over expert-major rows: [experts, rows, dim] enters and leaves; or [rows, dim]
    sorted by expert, with `offsets`, the end of each expert's rows."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w_gate = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        # The graph contains no size, so it runs unchanged on a shard of the experts.
        if offsets is None:
            gate, up = torch.bmm(x, self.w_gate), torch.bmm(x, self.w_in)
            return torch.bmm(F.silu(gate) * up, self.w_out)
        gate, up = (grouped_mm(x, w, offsets) for w in (self.w_gate, self.w_in))
        return grouped_mm(F.silu(gate) * up, self.w_out, offsets)


class MoE(nn.Module):
    """The mixture: x [batch, seq, dim] -> (output of the same shape, routing).

    A token's output is the weighted sum over its choices that are not dropped. If all are dropped
    it is zero, and only the residual stream carries the token on.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config.experts, config.dim, config.mlp_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        if routing.slot is None:
            return self.without_dropping(tokens, routing).view_as(x), routing
        rows = self.dispatch(tokens, routing.slot)
        with annotate("EP"):
            rows = self.experts(rows)
        out = self.combine(rows, routing)
        return out.view_as(x), routing

    def without_dropping(self, tokens: Tensor, routing: Routing) -> Tensor:
        """The dropless output [tokens, dim]: the experts run on rows sorted by expert."""
        expert, order = routing.expert.flatten().sort(stable=True)
        ids = torch.arange(self.config.experts, device=tokens.device)
        offsets = (expert.unsqueeze(1) == ids).sum(dim=0).cumsum(dim=0).to(torch.int32)
        rows = tokens.index_select(0, order % len(tokens))
        with annotate("EP"):
            rows = self.experts(rows, offsets)
        back = torch.empty_like(order).scatter(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen = rows.index_select(0, back).unflatten(0, routing.expert.shape)
        return (chosen * routing.weight.to(rows.dtype).unsqueeze(-1)).sum(dim=0)

    def dispatch(self, tokens: Tensor, slot: Tensor) -> Tensor:
        """Rows [experts, capacity, dim]: the token in each slot, zero where a slot is empty."""
        count, dim = tokens.shape
        slots = self.config.experts * self.config.capacity(count)
        token = torch.arange(count, device=tokens.device).expand_as(slot).flatten()
        # Scatter indices, not rows. Only the slot of dropped choices, which is cut off, is written
        # twice, so the table does not depend on the order of the writes.
        empty = torch.full((slots + 1,), count, device=tokens.device)
        source = empty.scatter(0, slot.flatten(), token)[:slots]
        padded = torch.cat((tokens, tokens.new_zeros(1, dim)))
        return padded.index_select(0, source).view(self.config.experts, -1, dim)

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """Tokens [tokens, dim]: the weighted sum of each token's rows, zero for dropped ones."""
        assert routing.slot is not None
        flat = rows.flatten(0, 1)
        padded = torch.cat((flat, flat.new_zeros(1, flat.shape[1])))
        chosen = padded.index_select(0, routing.slot.flatten()).unflatten(0, routing.slot.shape)
        return (chosen * routing.weight.to(rows.dtype).unsqueeze(-1)).sum(dim=0)


def load_balance(routing: Routing) -> Tensor:
    """experts * sum(share of choices * mean probability): 1 if even, `experts` at worst."""
    experts = routing.probs.shape[1]
    ids = torch.arange(experts, device=routing.probs.device)
    share = (routing.expert.unsqueeze(-1) == ids).to(routing.probs.dtype).mean(dim=(0, 1))
    return experts * (share * routing.probs.mean(dim=0)).sum()


class MoEBlock(Block):
    """A block that also returns the routing of its tokens."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        x = self.attend(x, cos, sin)
        y, routing = self.mlp(self.mlp_norm(x))
        return x + self.dropout(y), routing


class MoETransformer(Decoder):
    """The decoder with a mixture of experts in each block.

    Tokens of the whole batch compete for capacity, second choices after all first choices. So
    logits are causal only if the capacity suffices for all tokens.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, (MoEBlock(config, MoE(config)) for _ in range(config.layers)))
        self.aux_scale = config.aux_loss_weight / config.layers

    def forward(self, tokens: Tensor) -> ModelOutput:
        seq = tokens.shape[1]
        aux: Tensor | None = None
        with annotate("embed"):
            x = self.embed(tokens)
        for block in self.layers:
            with annotate("layer"):
                x, routing = block(x, *self.rotary(seq))
                if self.aux_scale > 0:
                    # A running sum: stages send one scalar, not one per layer.
                    term = self.aux_scale * load_balance(routing)
                    aux = term if aux is None else aux + term
        with annotate("head"):
            logits = self.head(self.norm(x))
        return logits if aux is None else (logits, aux)
