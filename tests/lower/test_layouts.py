"""Values that are not contiguous in memory, expanded or transposed, are sent between devices:
results equal one device, and bytes are counted as sent."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

import piper
from tests.plan_checker import check

ROWS, WIDTH, LONG = 8, 4, 64


class Wide(nn.Module):
    """Region 0 ends with an expanded value, region 1 with a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            short = torch.tanh(self.first(x)).mean(1, keepdim=True)
            h = short.expand(-1, LONG, -1)
        with piper.annotate("PP"):
            out = (self.second(h) + h).transpose(1, 2)
        with piper.annotate("PP"):
            return torch.tanh(out)


def compiled(devices: list[list[int]]) -> piper.Program:
    x, y = batch()
    places = [piper.place({"PP": i}, devices=group) for i, group in enumerate(devices)]
    last = piper.place({"loss": 0}, devices=devices[-1])
    return piper.compile(
        Wide(),
        piper.Strategy([piper.split(into="MB", parts=2), *places, last]),
        inputs=(x,),
        targets=(y,),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 4, WIDTH), torch.randn(ROWS, WIDTH, LONG)


@functools.cache
def on_one_device() -> list[float]:
    """The losses of plain PyTorch."""
    model, (x, y) = Wide(), batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [[[0], [1], [0]], [[0, 1], [2, 3], [2, 3]], [[0], [1, 2], [3, 4]]],
    ids=str,
)
def test_what_is_not_contiguous_goes_between_devices(devices: list[list[int]]) -> None:
    """All of a value is sent, and a device never holds more than predicted, copies for messages
    included."""
    program = compiled(devices)
    with piper.launch(program) as trainer:
        found = [trainer.step(*batch()).loss.item() for _ in range(3)]
        measured = trainer.measure_memory(*batch())
    assert found == pytest.approx(on_one_device(), rel=1e-6)
    for memory in program.memory:
        for device in memory.devices:
            assert measured[device].peak <= memory.peak
    whole = ROWS * LONG * WIDTH * 4
    crossing = sum(a != b for a, b in itertools.pairwise(devices))
    sent = sum(flow.of("send") * len(flow.devices) for flow in program.traffic)
    assert sent == 2 * crossing * whole  # the values, and their gradients back


def test_the_checker_counts_copies_itself() -> None:
    program = compiled([[0, 1], [2, 3], [2, 3]])
    check(program.dag, program.plans, program.memory, models=program.models, optimizer_bytes=0)
