"""Expert parallelism as in TorchTitan: sort tokens by expert, exchange counts, dispatch rows by
``all_to_all_single`` with these splits, reorder them by expert, multiply expert by expert or with a
grouped product, and return the rows the same way. Everything else is ``DistributedDataParallel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import Divided, accumulated
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from workers import Step

from piper.cli.demo.moe import MoE, Routing


@dataclass(frozen=True, slots=True)
class Dispatched(Divided):
    """Experts sharded over all workers, everything else replicated."""

    device: str = "cpu"
    bucket_mb: float = 25

    def begin(self) -> Step:
        from torch.nn.parallel import DistributedDataParallel

        work, ways, rank = self.work, dist.get_world_size(), dist.get_rank()
        whole = work.model().to(self.device)
        experts: list[nn.Parameter] = []
        for block in whole.layers:
            block.mlp = _Experts(block.mlp, ways, rank)
            experts += block.mlp.shards
        names = [name for name, p in whole.named_parameters() if any(p is e for e in experts)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, names)
        net = DistributedDataParallel(
            whole, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True
        )
        optimizer = work.optimizer(net.parameters())

        def step(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
            total = accumulated(net, work, xs, ys)
            for shard in experts:  # the mean over workers, as for all other gradients
                assert shard.grad is not None
                shard.grad.div_(ways)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step


class _Experts(nn.Module):
    """An MoE layer whose experts are sharded over the workers."""

    def __init__(self, whole: MoE, ways: int, rank: int) -> None:
        super().__init__()
        self.router, self.config, self.ways = whole.router, whole.config, ways
        parts = [whole.experts.w_in, whole.experts.w_gate, whole.experts.w_out]
        self.w_in, self.w_gate, self.w_out = (
            nn.Parameter(p.detach().chunk(ways)[rank].clone()) for p in parts
        )

    @property
    def shards(self) -> list[nn.Parameter]:
        return [self.w_in, self.w_gate, self.w_out]

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        group: Any = dist.group.WORLD
        expert, order = routing.expert.flatten().sort(stable=True)
        counts = torch.bincount(expert, minlength=self.config.experts)
        with torch.no_grad():
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            matrix = theirs.view(self.ways, -1)
            sent = counts.view(self.ways, -1).sum(1).tolist()
            got = matrix.sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order % len(tokens)], got, sent, group)
        of = torch.arange(matrix.shape[1], device=x.device).repeat(self.ways)
        by_expert = of.repeat_interleave(matrix.flatten()).argsort(stable=True)
        made = self._experts(rows[by_expert], matrix.sum(0))
        unsorted = torch.empty_like(made)
        unsorted = unsorted.index_copy(0, by_expert, made)
        back = all_to_all_single_autograd(unsorted, sent, got, group)
        chosen = torch.empty_like(back).index_copy(0, order, back)
        chosen = chosen.unflatten(0, routing.expert.shape)
        out = (chosen * routing.weight.to(back.dtype).unsqueeze(-1)).sum(dim=0)
        return out.view_as(x), routing

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if rows.is_cuda and rows.dtype is torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = (torch._grouped_mm(rows, w, offs=ends) for w in (self.w_gate, self.w_in))
            return torch._grouped_mm(F.silu(gate) * up, self.w_out, offs=ends)
        parts = rows.split(counts.tolist())
        made = [
            (F.silu(part @ self.w_gate[i]) * (part @ self.w_in[i])) @ self.w_out[i]
            for i, part in enumerate(parts)
        ]
        return torch.cat(made)
