"""Devices of unequal speed share the work in proportion, and train like one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.cost.device_speeds import device_speeds
from piper.cost.tasks import Task, TaskKind, Work
from piper.ir.dag.facts import OpCost
from piper.ir.ops import Compute
from piper.ir.passes import Pass, RematPolicy
from piper.strategies import mesh, uneven
from piper.strategies.replicas.lost_replica import without_replica
from piper.strategies.replicas.replicas import round_robin
from piper.strategies.replicas.uneven import shares_of
from tests.scripts.cases import SEQ, VOCAB, Net, mean_loss, sum_and_count
from tests.training import Run, assert_same, sgd, single, train

ROWS = 48
SCHEDULES = (
    "1f1b", "gpipe", "zb-h1", "dualpipe", "zb-v", "v-half", "dualpipev", "interleaved",
    "breadth-first",
)  # fmt: skip
MESHES: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4, "speeds": [1.0, 0.6, 0.7, 0.6]},
    *({"dp": d, "zero": z, "microbatches": 4, "speeds": s}
      for z, (d, s) in itertools.product(range(4), [(2, [1.0, 0.6]), (3, [0.4, 1, 1])])),
    *({"pp": 2, "dp": 2, "zero": i % 4, "microbatches": 4, "schedule": s, "speeds": [3, 1, 3, 1]}
      for i, s in enumerate(SCHEDULES)),
    {"pp": 2, "dp": 2, "schedule": "dualpipe", "microbatches": 4, "speeds": [7, 1, 7, 1]},
    {"dp": 4, "ep": 2, "zero": 2, "microbatches": 3, "speeds": [1, 1, 0.5, 0.5]},
    {"dp": 4, "zero": 3, "within": 2, "microbatches": 3, "speeds": [1, 1, 0.5, 0.6]},
    {"dp": 2, "tp": 2, "parameters": {"embed": 0}, "microbatches": 4, "speeds": [1, 1, 1, 0.5]},
]  # fmt: skip
"""Every level of ZeRO and every schedule."""


def batches() -> list[Any]:
    draws = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        x, y = torch.randint(VOCAB, (2, ROWS, SEQ), generator=draws)
        y[torch.rand(ROWS, SEQ, generator=draws) < 0.3] = -100
        found.append(((x,), (y,)))
    return found


@functools.cache
def captured(loss: Any) -> tuple[piper.Capture, Net]:
    torch.manual_seed(0)
    model = Net(dropout=0.2, tied=True).double()
    inputs, targets = batches()[0]
    return piper.capture(model, inputs=inputs, targets=targets, loss=loss, optimizer=sgd), model


@functools.cache
def reference(loss: Any, microbatches: int) -> Run:
    return single(captured(loss)[1], loss, batches(), microbatches=microbatches)


@pytest.mark.cases(fast=1, slow=24)
@pytest.mark.parametrize("arguments", MESHES, ids=str)
def test_uneven_replicas_train_like_one_device(arguments: dict[str, Any]) -> None:
    loss = sum_and_count if arguments["dp"] == 2 else mean_loss
    program = captured(loss)[0].compile(mesh(**arguments))
    assert len({forwards(program, d) for d in program.devices}) > 1
    total = arguments["microbatches"] * arguments["dp"]
    assert_same(train(program, batches()), reference(loss, total), 1e-12)


def forwards(program: piper.Program, device: int) -> int:
    ops = [program.dag.nodes[x.node].op for x in program.plan_of(device).instructions]
    return sum(isinstance(op, Compute) and op.which is Pass.F for op in ops)


@pytest.mark.parametrize(
    ("speeds", "total", "shares"),
    [
        ([1.0, 0.6], 16, [10, 6]),
        ([1, 1, 1], 6, [2, 2, 2]),
        ([1, 1, 0.5], 6, [3, 2, 1]),
        ([2, 1], 3, [2, 1]),
        ([1, 0.5], 2, [1, 1]),
        ([100, 1], 101, [100, 1]),
    ],
)
def test_the_last_replica_finishes_early(
    speeds: Sequence[float], total: int, shares: list[int]
) -> None:
    found = shares_of(speeds, total)
    slowest = [max(n / v for n, v in zip(some, speeds, strict=True)) for some in (found, shares)]
    assert slowest[0] == slowest[1]
    assert sum(found) == total
    assert min(found) > 0


def test_no_other_assignment_is_faster() -> None:
    for speeds in itertools.product([1.0, 0.7, 0.35], repeat=3):
        for total in range(9, 14):
            best = min(
                max(n / v for n, v in zip(some, speeds, strict=True))
                for some in itertools.product(range(1, total), repeat=3)
                if sum(some) == total
            )
            found = shares_of(speeds, total)
            assert max(n / v for n, v in zip(found, speeds, strict=True)) == best


def test_parts_go_round_in_proportion() -> None:
    assert round_robin([2, 2]) == [[0, 2], [1, 3]]
    assert round_robin([3, 2, 2]) == [[0, 3, 6], [1, 4], [2, 5]]
    assert round_robin([5, 3]) == [[0, 2, 3, 5, 7], [1, 4, 6]]


def test_the_strategy_is_like_one_of_your_own() -> None:
    found = uneven(mesh(dp=2, microbatches=2, zero=1), [3, 1])
    rows = [
        [[{"PP": 0, "MB": m, "PASS": which}] for m in parts for which in ("F", "B")]
        for parts in ([0, 1, 3], [2])
    ]
    assert found == piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=1),
            piper.split(into="MB", parts=4),
            piper.place({"PP": 0, "MB": [0, 1, 3]}, devices=[0]),
            piper.place({"PP": 0, "MB": [2]}, devices=[1]),
            piper.replicate({}, zero=1),
            *(piper.order(*row) for row in rows),
        ]
    )


def test_a_strategy_without_split_or_order() -> None:
    mine = piper.Strategy([piper.place({}, devices=[4, 5, 6, 7]), piper.replicate({}, zero=2)])
    text = str(uneven(mine, {4: 1, 5: 1, 6: 1, 7: 1}))
    assert text == str(mine)
    mine = piper.Strategy([piper.split(parts=2), *mine.directives])
    found = str(uneven(mine, {4: 3, 5: 1, 6: 2, 7: 2}))
    assert "split({}, into='MB', parts=8)" in found
    assert "place({'MB': [0, 3, 7]}, devices=[4])" in found
    assert "place({'MB': [4]}, devices=[5])" in found


@functools.cache
def eight() -> piper.Capture:
    """Eight layers, and one before them."""
    x = torch.zeros(48, 8)
    return piper.capture(
        torch.nn.Sequential(torch.nn.Linear(8, 64), *(torch.nn.Linear(64, 64) for _ in range(8))),
        inputs=(x,),
        loss=lambda y: y.square().mean(),
        optimizer=sgd,
        tags={"[1-8]": "layer"},
    )


def test_stages_of_faster_devices_are_larger() -> None:
    for speeds, sizes in (([3, 1], [6, 2]), ([1, 1], [4, 4]), ({0: 1, 1: 3}, [2, 6])):
        found = eight().compile(mesh(pp=2, microbatches=2, speeds=speeds))
        assert list(found.dag.stages["PP"]) == sizes


def test_a_fast_replica_of_slow_stages() -> None:
    """Stages are sized by all devices of a rank, replicas by what their slowest rank then takes."""
    found = mesh(pp=2, dp=2, microbatches=3, speeds=[2, 1, 1, 0.5])
    assert found.directives[0] == piper.partition("layer", into="PP", parts=2, speeds=[1.0, 0.5])
    assert [d.to_json()["where"]["MB"] for d in found.directives[2:6]] == [
        [0, 2, 3, 5], [1, 4],
    ] * 2  # fmt: skip
    counts = mesh(pp=2, dp=2, microbatches=3, speeds=[2, 1, 2, 1], by=[1, 3])
    assert "speeds" not in str(counts.directives[0])
    assert "MB" in str(counts.directives[2])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"dp": 2, "speeds": [1.0]}, r"1 number for 2 devices: give one for each"),
        ({"dp": 2, "speeds": {0: 1.0}}, r"none for the devices \[1\]: give one for each"),
        ({"dp": 2, "speeds": [1, 0]}, "0 is not a positive number; leave out devices"),
        ({"dp": 2, "speeds": [1, -2.0]}, r"-2\.0 is not a positive"),
        ({"dp": 2, "speeds": [1, "fast"]}, "'fast' is not a positive"),
        ({"dp": 2, "speeds": 3}, "speeds=3 must be a list"),
        ({"dp": 2, "speeds": [1, 0.1]}, "would get none of 2 microbatches.*give more microb"),
        ({"dp": 2, "ep": 2, "speeds": [1, 0.5]}, "one replica alone does not have all of the exp"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(piper.DirectiveError, match=why):
        mesh(**arguments)


def test_refused_speeds_of_stages_and_replicas() -> None:
    with pytest.raises(piper.DirectiveError, match="2 numbers for 3 stages: give one for each"):
        piper.Strategy([piper.partition("layer", into="PP", parts=3, speeds=[1, 2])])
    with pytest.raises(piper.DirectiveError, match="leave out speeds="):
        piper.Strategy([piper.partition("layer", into="PP", parts=2, by=[1, 2], speeds=[1, 2])])
    with pytest.raises(piper.DirectiveError, match="3 numbers for 2 replicas: give one for each"):
        uneven(mesh(dp=2), [1, 2, 3])
    with pytest.raises(piper.DirectiveError, match="there is only one, or each has microbatches"):
        uneven(mesh(dp=2, microbatches=2, speeds=[3, 1]), [3, 1])
    with pytest.raises(piper.DirectiveError, match="there is only one, or each has microbatches"):
        without_replica(mesh(dp=2, microbatches=2, speeds=[3, 1]))


def test_written_as_json() -> None:
    strategy = mesh(pp=2, dp=2, microbatches=4, speeds=[1.0, 0.5, 0.5, 0.5])
    assert piper.Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.to_json()[0]["speeds"] == [1.0, 2 / 3]


def test_the_simulator_shows_both() -> None:
    cluster = pair()
    assert cluster.speeds() == {0: 1.0, 1: 0.6}
    even = eight().compile(mesh(dp=2, microbatches=8)).simulate(cluster)
    found = eight().compile(mesh(dp=2, microbatches=8, speeds=cluster.speeds())).simulate(cluster)
    # 10 and 6 of 16 microbatches in place of 8 each
    assert found.seconds / even.seconds == pytest.approx(10 / (8 / 0.6), abs=0.01)
    assert found.bubble < 0.02 < 0.19 < even.bubble


def pair(speed: float = 0.6) -> piper.Cluster:
    """Two devices; the second has this speed."""
    fast = piper.Device("fast", {torch.float32: 1e9}, 2**34, 1e12)
    slow = piper.Device("slow", {torch.float32: speed * 1e9}, 2**34, 1e12)
    near = piper.Link(1e12, 0.0)
    return piper.Cluster((piper.Machine((fast, slow), near, near),))


def measured(layers: int = 8, speeds: dict[int, float] | None = None) -> piper.Recorded:
    """Costs of the chunks of ``eight``: layer[i] takes i + 1 seconds; its forward a third."""
    passes = []
    for i in range(layers):
        for which, seconds in ((Pass.F, (i + 1) / 3), (Pass.B, 2 * (i + 1) / 3)):
            work = Work(i, f"layer[{i}]", which, 2, 1, RematPolicy.NONE)
            passes.append((work, 8, 2 * seconds))
    return piper.Recorded.of(passes, [], speeds)


def test_regions_of_a_profile() -> None:
    assert measured().regions("layer") == pytest.approx({i: i + 1 for i in range(8)})
    halves = [
        (Work(i, region, which, 4, 1, RematPolicy.NONE), 8, seconds)
        for i, region in enumerate(["chunk 0", "layer[3]", "layer[3] EP[0]", "layer[4]", "loss[0]"])
        for which, seconds in ((Pass.F, 4.0), (Pass.BI, 8.0), (Pass.BW, 12.0))
    ]
    found = piper.Recorded.of(halves, [])
    assert found.regions("layer") == {3: 18.0, 4: 12.0}
    with pytest.raises(piper.PiperError, match="no region 'block'; it has: chunk 0, layer"):
        found.regions("block")


def test_stages_by_a_profile() -> None:
    strategy = mesh(pp=2, microbatches=2, by="profile")
    for costs in (measured(), piper.Costs(recorded=measured())):
        program = eight().compile(strategy, costs=costs)
        assert list(program.dag.stages["PP"]) == [5, 3]  # 15 and 21 seconds
        assert "by={0: 1.0" in str(program.strategy)
    fast_last = eight().compile(strategy, costs=measured(speeds={0: 0.3, 1: 1.0}))
    assert list(fast_last.dag.stages["PP"]) == [3, 5]  # 6 / 0.3 and 30 seconds
    with pytest.raises(piper.DirectiveError, match=r"compile with costs=profile\.recorded"):
        eight().compile(strategy)


def test_measured_speeds_count_in_a_simulation() -> None:
    costs = measured(speeds={0: 1.0, 1: 0.5})
    assert costs.duration(
        Task(TaskKind.PASS, (OpCost(1, 8),), work=costs.passes[0].work), (0, 1)
    ) == (2 * costs.passes[0].seconds)
    program = eight().compile(mesh(dp=2, microbatches=4))
    found = program.simulate(pair(1.0), costs)
    assert len(found.classes) == 2
    assert found.seconds == pytest.approx(2 * program.simulate(pair(1.0), measured()).seconds)
    assert costs + costs == costs
    with pytest.raises(piper.PiperError, match="one of these profiles has the speeds"):
        costs + measured()


def test_a_saved_profile_has_the_speeds(tmp_path: Path) -> None:
    costs = measured(speeds={0: 1.0, 7: 0.5})
    costs.save(tmp_path / "costs.json")
    assert piper.Recorded.load(tmp_path / "costs.json") == costs


def test_speeds_from_times() -> None:
    true = {0: 1.0, 1: 0.5, 2: 0.8, 3: 0.25}
    on = {"embed": (0, 1), "layer": (0, 1, 2), "wide": (2, 3), "head": (3,)}
    costs = {"embed": 2.0, "layer": 1.0, "wide": 5.0, "head": 9.0}
    times = [(d, task, costs[task] / true[d]) for task, row in on.items() for d in row]
    times += [(3, "head", 1000.0), (3, "head", 36.0)]
    assert device_speeds(times) == pytest.approx(true)
    with pytest.raises(piper.PiperError, match="devices 0 and 3 ran no equal passes"):
        device_speeds([one for one in times if one[1] != "wide"])


def test_a_profile_of_virtual_devices() -> None:
    program = eight().compile(mesh(pp=2, dp=2, microbatches=2))
    with piper.launch(program) as trainer:
        profile = trainer.profile(steps=2)
    assert list(profile.speeds) == [0, 1, 2, 3]
    assert max(profile.speeds.values()) == 1
    assert profile.by_device.speeds == profile.speeds
    assert not profile.recorded.speeds
