"""Regions that Piper chooses for a model that names none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.capture.chosen_regions import chosen_tags
from piper.strategies import mesh
from tests.training import Batch, assert_same, plain, sgd, train

WIDTH = 4


class Block(nn.Module):
    """A residual block with experts, if asked."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.mixture = nn.ModuleDict({"experts": Experts(experts)} if experts else {})

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.up(x))
        for experts in self.mixture.values():
            x = x + experts(x.expand(len(experts.weights), *x.shape)).sum(0)
        return x


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weights)


class Named(nn.Sequential):
    """A stack that names its layers itself, even in a ``try``."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            try:
                with piper.annotate("part"):
                    x = layer(x)
            except Exception:  # noqa: BLE001 - as models do
                raise AssertionError("annotate must not fail in the model's code") from None
        return x


class Uncalled(nn.Sequential):
    """A stack whose layers are never called: it reads their weights."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(F.linear(x, layer.weight))
        return x


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def conv(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.BatchNorm2d(width))


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleList(blocks)


SHARED = Block()
CASES: dict[str, tuple[Callable[[], nn.Module], Mapping[str, str]]] = {
    "one layer": (lambda: nn.Linear(4, 4), {}),
    "one of each": (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), {}),
    "a stack": (lambda: nn.Sequential(*linears(3)), {"*": "layer"}),
    "activations between": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        {"0": "layer", "2": "layer"},
    ),
    "between an embedding and a head": (
        lambda: nn.Sequential(nn.Embedding(9, 4), Block(), Block(), nn.Linear(4, 9)),
        {"1": "layer", "2": "layer"},
    ),
    "blocks before larger single layers": (
        lambda: nn.ModuleDict({"head": stack(*linears(2)), "body": stack(Block(), Block())}),
        {"body.*": "layer"},
    ),
    "small blocks behind single layers": (
        lambda: nn.ModuleDict({"tower": stack(*linears(9)), "body": stack(Block(), Block())}),
        {"tower.*": "layer", "body.*": "layer"},
    ),
    "the outermost": (
        lambda: nn.ModuleList(nn.Sequential(*linears(2)) for _ in range(2)),
        {"*": "layer"},
    ),
    "several stacks": (
        lambda: nn.ModuleDict(
            {"encoder": stack(Block(), Block()), "decoder": stack(conv(4), conv(4))}
        ),
        {"encoder.*": "layer", "decoder.*": "layer"},
    ),
    "by name": (
        lambda: nn.Sequential(OrderedDict(stem=conv(2), a=Block(), b=Block())),
        {"a": "layer", "b": "layer"},
    ),
    "one module at several places": (lambda: nn.Sequential(SHARED, SHARED), {"*": "layer"}),
    "experts": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([Block(2), Block(2)])}),
        {"layers.*": "layer", "layers.*.mixture.experts": "EP"},
    ),
    "experts in some": (
        lambda: nn.ModuleList([Block(), Block(2), Block(2)]),
        {"*": "layer", "*.mixture.experts": "EP"},
    ),
    "not materialized": (lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_repeated_blocks_are_layers(name: str) -> None:
    make, expected = CASES[name]
    assert chosen_tags(make()) == expected


def captured(model: nn.Module, **options: Any) -> piper.Capture:
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    options = {"inputs": (x,), "targets": (y,), "loss": F.mse_loss, "optimizer": sgd, **options}
    return piper.capture(model, **options)


def chunks(model: nn.Module, **options: Any) -> list[str]:
    return [line.split()[0] for line in str(captured(model, **options)).splitlines()]


def test_print_says_what_was_chosen() -> None:
    assert str(captured(nn.Sequential(*linears(2)))).splitlines() == [
        "layer[0]        program A",
        "layer[1]        program B",
        "loss[0]         program C",
        'regions chosen by Piper: tags={"*": "layer"}; give others, or tags={} for none',
    ]


def test_names_of_the_user_switch_the_choice_off() -> None:
    assert chunks(nn.Sequential(*linears(2)), tags={}) == ["model", "loss[0]"]
    assert chunks(nn.Sequential(*linears(2)), tags={"1": "last"}) == ["last[0]", "loss[0]"]
    assert chunks(Named(*linears(2))) == ["part[0]", "part[1]", "loss[0]"]


def test_a_choice_that_cannot_be_traced_is_given_up() -> None:
    assert chunks(nn.Sequential(nn.Linear(4, 4), Uncalled(*linears(3))))[0] == "model"


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2, "zero": 2}, {"dp": 2, "ep": 2, "zero": 1}])
def test_a_model_without_names_trains_as_on_one_device(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Block(2), Block(2), nn.Linear(4, 4)).double()
    draw = torch.Generator().manual_seed(1)
    pairs = torch.randn(2, 2, 8, WIDTH, generator=draw, dtype=torch.float64)
    batches: list[Batch] = [((x,), (y,)) for x, y in pairs]
    (x,), (y,) = batches[0]
    options: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd}
    program = piper.compile(model, mesh(**axes), inputs=(x,), targets=(y,), **options)
    expected = plain(model, F.mse_loss, batches, microbatches=1)
    assert_same(train(program, batches), expected, 1e-12)


class OnlyInTraining(nn.Module):
    """Fewer blocks in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linears(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.training else self.blocks[:2]:
            x = torch.tanh(block(x))
        return x


def test_without_a_pipeline_evaluation_may_call_fewer_blocks() -> None:
    torch.manual_seed(0)
    model = OnlyInTraining()
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with piper.launch(captured(model).compile(mesh(dp=2, zero=3))) as trainer:
        found = trainer.evaluate(x, y).loss
    torch.testing.assert_close(found, F.mse_loss(model.eval()(x), y).detach())
