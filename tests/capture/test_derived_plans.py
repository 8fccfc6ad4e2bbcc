"""Tensor parallelism of models that declare no plan: the derived ``parameters=``, and that its
communication is that of a plan written by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh
from tests.training import Batch, assert_same, compiled, plain, train

VOCAB, DIM, HEADS = 32, 16, 4


class Attention(nn.Module):
    def __init__(self, heads: int, key_heads: int, fused: bool, bias: bool) -> None:
        super().__init__()
        size = DIM // heads
        self.shape, self.widths = (-1, size), [DIM, key_heads * size, key_heads * size]
        if fused:
            self.qkv = nn.Linear(DIM, sum(self.widths), bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(DIM, n, bias=bias) for n in self.widths)
        self.fused = fused
        self.out = nn.Linear(DIM, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made = (
            self.qkv(x).split(self.widths, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (y.unflatten(-1, self.shape).transpose(1, 2) for y in made)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 24, bias=bias), nn.Linear(DIM, 24, bias=bias)
        self.down = nn.Linear(24, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Own(nn.Module):
    """A decoder without tags, by hand."""

    def __init__(
        self,
        *,
        heads: int = HEADS,
        key_heads: int = HEADS,
        fused: bool = False,
        bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(8, DIM)
        self.mixers = nn.ModuleList(Attention(heads, key_heads, fused, bias) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp(bias) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(5))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        logits: Tensor = self.head(self.norms[4](x))
        return logits


def batches(steps: int = 2) -> list[Batch]:
    torch.manual_seed(0)
    draws = torch.randint(VOCAB, (steps, 2, 4, 8))
    return [((ids,), (labels,)) for ids, labels in draws]


def plan_of(program: piper.Program) -> dict[str, Any]:
    (shard,) = (d for d in program.strategy.to_json() if d["op"] == "shard")
    found: dict[str, Any] = shard["parameters"]
    return found


def collectives(program: piper.Program) -> Counter[str]:
    flows = program.traffic[0].flows
    return Counter({flow.kind: flow.count for flow in flows if flow.stream == "tp"})


PLAN = {
    "tokens": "row",
    "mixers.*.out": "row",
    "mlps.*.gate": "column",
    "mlps.*.up": "column",
    "mlps.*.down": "row",
}
QKV = {"mixers.*.q": "column", "mixers.*.k": "column", "mixers.*.v": "column"}
MODELS = {
    "q, k, v": ({}, {**PLAN, **QKV}),
    "fused": ({"fused": True}, {**PLAN, "mixers.*.qkv": "column"}),
    "untied, no biases": (
        {"tied": False, "bias": False},
        {**PLAN, **QKV, "head": "column"},
    ),
    "one key head": ({"key_heads": 1}, {**PLAN, **QKV}),
    "odd heads": (
        {"heads": 1, "key_heads": 1},
        {name: how for name, how in PLAN.items() if "mixers" not in name},
    ),
}


@pytest.mark.filterwarnings("ignore:the model declares no plan", "ignore:.*computed by each")
@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_written_by_hand(name: str) -> None:
    options, plan = MODELS[name]
    model = Own(**options).double()
    program = compiled(model, mesh(tp=2), lm_loss, batches())
    assert plan_of(program) == plan
    assert_same(train(program, batches()), plain(model, lm_loss, batches(), microbatches=1), 1e-12)


@pytest.mark.slow
def test_the_plan_is_shown_and_can_be_given() -> None:
    model, ((inputs, targets), *_) = Own(), batches()
    given: dict[str, Any] = {"inputs": inputs, "targets": targets, "loss": lm_loss, "cache": False}
    with pytest.warns(piper.PiperWarning, match=r"derived .* parameters=\{.*'tokens': 'row'"):
        program = piper.compile(model, mesh(tp=2), **given)
    again = piper.compile(model, mesh(tp=2, parameters=plan_of(program)), **given)
    assert str(again.strategy) == str(program.strategy)
    assert again.text() == program.text()


@pytest.mark.filterwarnings("ignore:the model declares no plan")
@pytest.mark.slow
def test_it_communicates_as_the_declared_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four all-reduces a layer, one of the embedding and one of the head."""
    torch.manual_seed(0)
    model = DenseTransformer(
        DenseConfig(vocab=64, dim=32, layers=2, heads=4, mlp_dim=48, max_seq=8)
    )
    ids = torch.randint(64, (4, 8))

    def made() -> piper.Program:
        return piper.compile(
            model, mesh(tp=2), inputs=(ids,), targets=(ids,), loss=lm_loss, cache=False
        )

    declared = made()
    monkeypatch.setattr(DenseTransformer, "tensor_plan", {})
    derived = made()
    assert "parameters" in str(derived.strategy)
    assert "parameters" not in str(declared.strategy)
    assert derived.traffic == declared.traffic
    assert collectives(derived)["all_reduce"] == 2 * 4 + 2 + 2


def test_a_model_without_anything_to_shard_is_refused() -> None:
    model, ids = nn.Sequential(nn.Embedding(3, 5), nn.Linear(5, 3)), torch.randint(3, (4, 8))
    with pytest.raises(piper.PiperError, match="declares no plan for tensor parallelism"):
        piper.compile(model, mesh(tp=4), inputs=(ids,), targets=(ids,), loss=lm_loss, cache=False)


@pytest.mark.filterwarnings("ignore:the model declares no plan")
@pytest.mark.slow
def test_plans_of_wrapped_models() -> None:
    """Those of a module inside are found, under its path, even if the wrapper passes attributes on;
    adapters change the layers that a plan names, so one is derived."""
    peft = pytest.importorskip("peft")
    from tests.hugging_face import FAMILIES

    model, batch = FAMILIES["Llama"].make(), FAMILIES["Llama"].batch()

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, **given: Tensor) -> Any:
            return self.inner(**given)

    program = piper.compile(Wrapper(model), mesh(tp=2), inputs=batch, cache=False)
    declared = collectives(program)
    assert declared["all_reduce"] == 2 * 4 + 2 + 2
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2)
    )
    plan = plan_of(piper.compile(adapted, mesh(tp=2), inputs=batch, cache=False))
    inner = "base_model.model.model.layers.*."
    assert plan[f"{inner}self_attn.q_proj.base_layer"] == "column"
    assert plan[f"{inner}self_attn.q_proj.lora_B.default"] == "column"
    assert plan[f"{inner}mlp.down_proj.base_layer"] == "row"
    assert plan[f"{inner}mlp.down_proj.lora_A.default"] == "row"
