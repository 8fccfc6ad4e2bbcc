"""Load balancing without an auxiliary loss: a bias on the router's scores, a buffer that changes
between steps by the experts' load. Expert and pipeline parallelism equal one device."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.strategies import mesh
from tests.runtime.test_dropless import Experts, square_loss
from tests.training import Run, assert_same, sgd

EXPERTS = 4
RATE = 0.2


class Layer(nn.Module):
    """Each row goes to the expert with the largest score; the bias affects only the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).argmax(1, keepdim=True)
        made: Tensor = self.experts(x, chosen.squeeze(1)) * scores.gather(1, chosen)
        return x + made


class Looped(nn.Module):
    """The same as a loop over the experts, which counts their rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts
        self.register_buffer("bias", layer.bias)
        self.load = torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).argmax(1, keepdim=True)
        made, e = x, self.experts
        for i in range(EXPERTS):
            mine = (x @ e.up[i] + e.bias[i]).relu() @ e.down[i]
            made = made + mine * (chosen == i)
            self.load[i] += (chosen == i).sum()
        return x + made * scores.gather(1, chosen)


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) / 4
        return x


@cache
def balanced() -> nn.Module:
    torch.manual_seed(0)
    return Balanced().double()


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(32, 8).double() + 0.5, torch.randn(32, 8).double()) for _ in range(4)]


def corrected(bias: Tensor, load: Tensor, rate: float = RATE) -> Tensor:
    """Lowers the bias of experts with more rows than the mean, and raises that of the others."""
    return bias + rate * (load.double().mean() - load.double()).sign()


@cache
def one_device(microbatches: int, rate: float = RATE) -> Run:
    model = copy.deepcopy(balanced())
    model.layers = nn.ModuleList(Looped(layer) for layer in model.layers)
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for x, y in batches():
        parts = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
        total = torch.zeros((), dtype=torch.float64)
        for rows, wanted in parts:
            loss = square_loss(model(rows), wanted) / microbatches
            loss.backward()
            total += loss.detach()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        for layer in model.layers:
            layer.bias.copy_(corrected(layer.bias, layer.load, rate))
            layer.load.zero_()
    return Run(tuple(losses), tuple(norms), model.state_dict())


STRATEGIES = {
    "ep 2": (4, mesh(dp=2, ep=2, microbatches=2, zero=1)),
    "pp 2, ep 2": (8, mesh(pp=2, dp=2, ep=2, microbatches=4)),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_bias_by_load(name: str) -> None:
    microbatches, strategy = STRATEGIES[name]
    (x, y), *_ = batches()
    program = piper.compile(
        balanced(),
        strategy,
        inputs=(x,),
        targets=(y,),
        loss=square_loss,
        tags={"layers.*": "layer", "layers.*.experts": "EP"},
        optimizer=sgd,
    )
    biases = {f"layers.{i}.experts": torch.zeros(EXPERTS).double() for i in range(2)}
    losses, norms = [], []
    with piper.launch(program) as trainer:
        for batch in batches():
            result = trainer.step(*batch)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            for experts, load in result.expert_load.items():
                biases[experts] = corrected(biases[experts], load)
            changed = {k.replace("experts", "bias"): bias for k, bias in biases.items()}
            trainer.load_state_dict(changed, strict=False)
        state = trainer.state_dict()
    expected = one_device(microbatches)
    assert_same(Run(tuple(losses), tuple(norms), state), expected, 1e-12)
    assert one_device(microbatches, rate=0.0).losses[-1] != expected.losses[-1]


@pytest.mark.slow
def test_what_is_not_the_models_is_refused() -> None:
    x, y = batches()[0]
    program = piper.compile(
        balanced(), mesh(), inputs=(x,), targets=(y,), loss=square_loss, tags={"layers.*": "layer"}
    )
    with piper.launch(program) as trainer:
        before = trainer.state_dict()
        with pytest.raises(piper.PiperError, match=r"not in the model: layers.0.gate"):
            trainer.load_state_dict({"layers.0.gate": torch.zeros(4)}, strict=False)
        with pytest.raises(piper.PiperError, match=r"layers.0.bias, \[3\] instead of \[4\]"):
            trainer.load_state_dict({"layers.0.bias": torch.zeros(3)}, strict=False)
        with pytest.raises(piper.PiperError, match="are missing: "):
            trainer.load_state_dict({"layers.0.bias": torch.zeros(4)})
        after = trainer.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
