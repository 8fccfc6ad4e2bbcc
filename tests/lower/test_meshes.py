"""Regions on the same devices with different meshes: each has its own groups along an axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piper
from piper.ir.equal_numbers import EqualNumbers
from piper.strategies.directives import place, shard
from tests.training import assert_same, compiled, plain, train

WIDTH = 16
DEVICES = range(8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("A"):
            x = self.b(torch.tanh(self.a(x)))
        with piper.annotate("B"):
            return self.d(torch.tanh(self.c(x)))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_same_devices_form_two_meshes() -> None:
    torch.manual_seed(0)
    net, loss = Net().double(), nn.functional.mse_loss
    rows = [torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(4)]
    batches = [((rows[0],), (rows[1],)), ((rows[2],), (rows[3],))]
    strategy = [
        place({"A": 0}, devices=piper.Mesh(DEVICES, dp=2, more=2, tp=2), batch="dp"),
        place({"A": "-"}, devices=piper.Mesh(DEVICES, dp=2, tp=4), batch="dp"),
        shard({"A": 0}, axis="tp", parameters={"a.*": "column", "b.weight": "row"}),
        shard({"B": 0}, axis="tp", parameters={"c.*": "column", "d.weight": "row"}),
    ]
    program = compiled(net, strategy, loss, batches, optimizer=sgd)
    expected = plain(net, loss, batches, microbatches=2, optimizer=sgd)
    assert_same(train(program, batches), expected, 1e-9)


def test_equal_values_have_one_number_whatever_objects_they_are() -> None:
    numbers: EqualNumbers[tuple[int, ...]] = EqualNumbers()
    assert [numbers.of(tuple(range(n))) for n in (3, 4, 3, 5, 4)] == [0, 1, 0, 2, 1]
