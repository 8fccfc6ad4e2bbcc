"""Published strategies on models that mark their own stages: the loss joins the last stage."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import DirectiveError, order, partition, place, split
from piper.ir.dag.build import build
from piper.strategies.strategy import Strategy
from tests.facts import chain

PUBLISHED = """
[
  {"op": "place", "filter": {"PP": 0}, "device": 0, "stream": "pp_stream"},
  {"op": "place", "filter": {"PP": 1}, "device": [1], "stream": "pp_stream"},
  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
  {"op": "order", "filters": [
    [{"PP": 1, "MB": 0, "PASS": "F"}],
    [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
    [{"PP": 1, "MB": 1, "PASS": "B"}]]}
]
"""


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.first(x))
        with piper.annotate("PP"):
            return self.second(x)


def test_a_published_strategy_on_a_model_that_marks_its_stages() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    program = piper.compile(
        Stages(),
        Strategy.from_json(PUBLISHED),
        inputs=(x,),
        targets=(y,),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    placed = {node.tags["loss"]: node.devices for node in program.dag.nodes if "loss" in node.tags}
    assert placed == {0: (1,)}
    model = Stages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with piper.launch(program) as trainer:
        for _ in range(3):
            wanted = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            wanted.backward()
            optimizer.step()
            assert trainer.step(x, y).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_what_follows_the_last_placed_region_joins_it() -> None:
    """But not a region whose tag is used to place other regions: its place was forgotten."""
    model = chain(2)
    ends = {tag for chunk in model.chunks for tag in chunk.tags} - {"embed", "layer"}
    assert ends
    embed, layers = place({"embed": 0}, devices=[0]), place({"layer": "*"}, devices=[1, 2])
    after = Strategy([embed, layers]).apply(build(model))
    assert {n.devices for n in after.nodes if not n.tags.keys().isdisjoint(ends)} == {(1, 2)}
    after = Strategy([embed, place({"layer": 0}, devices=[1])]).apply(build(model))
    assert {n.devices for n in after.nodes if n.tags.get("layer") == 1} == {()}
    after = Strategy([layers]).apply(build(model))  # earlier regions do not join
    assert {n.devices for n in after.nodes if "embed" in n.tags} == {()}


def test_device_beside_devices() -> None:
    data = {"op": "place", "filter": {"PP": 0}, "device": 3}
    assert Strategy.from_json([data]) == Strategy([place({"PP": 0}, devices=[3])])
    with pytest.raises(DirectiveError, match="both 'device' and 'devices' are given"):
        Strategy.from_json(json.dumps([{**data, "devices": [3]}]))


@pytest.mark.parametrize("devices", [([0], [1]), ([0, 1], [2, 3]), ([0, 1], [1, 2])], ids=str)
def test_an_order_across_devices_that_agrees_with_the_data(
    devices: tuple[list[int], list[int]],
) -> None:
    steps = [
        [{"PP": stage, "MB": batch, "PASS": which}]
        for batch in range(2)
        for which, stages in (("F", (0, 1)), ("B", (1, 0)))
        for stage in stages
    ]
    first = [partition("layer", into="PP", parts=2), split(into="MB", parts=2)]
    places = [place({"PP": i}, devices=group) for i, group in enumerate(devices)]
    after = Strategy([*first, *places, order(*steps)]).apply(build(chain(4)))
    assert all(node.ordered_by for node in after.nodes)
