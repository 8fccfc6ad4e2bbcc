"""``piper.tune``: it finds what an exhaustive search finds, and says why nothing else is faster."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.program.tune.candidate import Candidate
from piper.program.tune.searched import searched, space_of
from piper.program.tune.space import Space

BOX = piper.Cluster.of("H100", 4, machines=2)


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


@cache
def captured(layers: int = 16, width: int = 4096, rows: int = 64) -> piper.Capture:
    with torch.device("meta"):
        model, x = Net(layers, width), torch.empty(rows, 512, width)
    return piper.capture(
        model, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW, tags={"layers.*": "layer"}, precision="bf16",
    )  # fmt: skip


BOUNDED = (
    Candidate(dp=8, microbatches=2, zero=1),
    Candidate(dp=4, pp=2, microbatches=4, zero=3, recomputed=16),
    Candidate(4, 2, microbatches=8, recomputed=5),
    Candidate(2, 4, schedule="interleaved", virtual=4, microbatches=4, zero=1),
    Candidate(4, 2, schedule="zb-h1", microbatches=8, by=(1, 5, 5, 5)),
)


def bounded(which: Iterable[Candidate]) -> None:
    _, work = space_of(captured(), BOX)
    for c in which:
        estimate = captured().estimate(c.strategy, BOX)
        assert work.seconds(c) <= estimate.seconds
        assert work.peak(c) <= estimate.peak
        assert work.seconds(c) > 0.2 * estimate.compute
        assert work.peak(c) > 0.2 * estimate.peak


def test_bounds_are_below_what_compiled_programs_take() -> None:
    bounded(BOUNDED)


@pytest.mark.slow
def test_the_best_is_within_3_percent_of_an_exhaustive_search() -> None:
    space, _ = space_of(captured(), BOX, schedules=("1f1b", "zb-h1"))
    everything = [c for c in space.candidates() if c.cp == 1 and c.parts in (16, 32)]
    found = searched(captured(), BOX, seconds=600, among=everything)
    estimates = [captured().estimate(c.strategy, BOX) for c in everything]
    assert found.best.seconds <= 1.03 * min(e.seconds for e in estimates if e.fits)
    assert found.within == 0
    bounded(everything[::9])


def test_a_search_can_end_at_any_time_and_says_what_is_open() -> None:
    nothing = searched(captured(), BOX, seconds=0)
    assert "none fits" in nothing.proven
    with pytest.raises(piper.PiperError, match=r"no strategy of .* fits"):
        _ = nothing.strategy
    some = [Candidate(dp=8, zero=n) for n in (0, 1)]
    found = searched(captured(), BOX, among=some)
    assert found.best.candidate in {x.candidate for x in found.fitting}
    assert found.best.seconds == min(x.seconds for x in found.fitting)
    assert captured().estimate(found.strategy, BOX).seconds == found.best.seconds


def test_what_does_not_fit_is_refused_with_its_limit() -> None:
    device = replace(BOX.device(0), memory=3 * 2**30)
    small = piper.Cluster.of(device, 8)
    some = [Candidate(dp=8)]
    found = searched(captured(), small, among=some)
    refused = {x.candidate: x.refused for x in found.candidates}
    assert "needs at least" in str(refused[some[0]])


def test_a_candidate_is_the_code_that_it_prints() -> None:
    c = Candidate(
        2, 2, schedule="interleaved", virtual=2, microbatches=4, zero=1, recomputed=3,
        by=(4, 4, 4, 4),
    )  # fmt: skip
    assert str(eval(c.code, {"piper": piper})) == str(c.strategy)
    assert str(Candidate(dp=8)) == "dp 8, mb 1"
    assert str(c) == "pp 2, dp 2, interleaved x2, mb 4, zero 1, remat 3, by 4,4,4,4"


def test_neighbours_differ_in_one_choice_and_can_run() -> None:
    space = Space(8, 64, 16, "layer", 4, tensor=False, experts=False)
    c = Candidate(2, 4, microbatches=4, zero=1)
    near = list(space.beside(c))
    assert replace(c, recomputed=1) in near
    assert replace(c, by=(7, 9)) in near
    assert all(x.devices == 8 for x in near)
    assert len(set(near)) == len(near)


def test_the_result_is_a_table_a_page_and_json(tmp_path: Path) -> None:
    some = [Candidate(dp=8, zero=z, microbatches=m) for z in (0, 1) for m in (1,)]
    found = searched(captured(), BOX, among=some)
    assert found.table().row_count == min(10, len(found.ways))
    assert "is" in found.why
    assert "candidates" in str(found)
    found.show(tmp_path / "tuned.html")
    page = (tmp_path / "tuned.html").read_text()
    assert "http-equiv" in page
    data = found.to_json()
    assert piper.Strategy.from_json(json.dumps(data["strategy"])) == found.strategy
    slower = found.sensitivity()["compute −20%"]
    assert slower[0] is not None
    assert slower[0] > found.best.seconds


@pytest.mark.slow
def test_measured_candidates_come_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 32)
    mine = piper.capture(
        Net(4, 32), inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW, tags={"layers.*": "layer"},
    )  # fmt: skip
    cluster = piper.Cluster.of("CPU", 2)
    found = piper.tune(mine, cluster, seconds=5, measure=2, on="virtual")
    assert [x.measured is not None for x in found.fitting[:2]] == [True, True]
    assert found.best.seconds == min(x.seconds for x in found.fitting[:2])
