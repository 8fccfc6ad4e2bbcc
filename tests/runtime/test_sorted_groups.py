"""Rows sorted by expert between groups of devices of different size equal one device: experts on
more devices than the rest, on fewer, and on numbers that do not divide each other."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import piper
from piper.ir.dag.build import build
from piper.ir.overlaps import most_overlaps
from piper.ir.plan.plan import Plan
from piper.lower.lower import Settings, lower
from piper.program.storage import with_plans
from piper.runtime.instructions.expert_rows import counts_within, merged, own_counts, unmerged
from piper.state.device.device_state import DeviceState
from piper.strategies import mesh
from piper.strategies.directives.place import Place
from tests.facts import at, dropless
from tests.plan_checker import check as check_plans
from tests.runtime.test_dropless import (
    Routed,
    by_hand,
    captured,
    reference,
    refused,
    routed,
    routed_model,
    square_loss,
)
from tests.runtime.test_dropless import batches as token_batches
from tests.training import Batch, assert_same, plain, sgd, steps, train

EXPERTS = 6


@cache
def routed_capture() -> piper.Capture:
    return capture(routed(random_choice()), routed_model(EXPERTS))


def capture(given: list[Batch], model: nn.Module) -> piper.Capture:
    inputs, targets = given[0]
    tags = {"layers.*": "layer", "layers.*.experts": "EP"}
    return piper.capture(
        model,
        inputs=inputs,
        targets=targets,
        loss=square_loss,
        tags=tags if isinstance(model, Deep) else {"experts": "EP"},
        optimizer=sgd,
    )


def apart(
    rest: Sequence[int] | piper.Mesh, experts: Sequence[int], zero: int = 0, **options: Any
) -> piper.Strategy:
    batch = {"batch": "dp"} if isinstance(rest, piper.Mesh) else {}
    return piper.Strategy(
        [
            piper.split(parts=2),
            piper.place({"EP": "-"}, devices=rest, **batch),
            piper.place({"EP": "*"}, devices=experts),
            piper.replicate({"EP": "-"}, zero=zero),
            piper.replicate({"EP": "*"}, zero=zero),
            piper.shard({"EP": "*"}, stream="ep", **options),
        ]
    )


def random_choice(rows: int = 48, experts: int = EXPERTS) -> Tensor:
    return torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(5))


CHOICES: dict[str, Callable[[], Tensor]] = {
    "random": random_choice,
    "skewed": lambda: random_choice() * (random_choice(96)[48:] > 4),
    "an expert without rows": lambda: random_choice(experts=EXPERTS - 1),
    "a microbatch all on one": lambda: random_choice().index_fill(0, torch.arange(24), 4),
    "all on the last": lambda: torch.full((48,), EXPERTS - 1),
}
GROUPS: dict[str, tuple[list[int] | piper.Mesh, list[int], dict[str, Any], str]] = {
    "3 to 2": ([0, 1, 2], [0, 1], {"zero": 1}, "random"),
    "2 to 4": ([0, 1], [0, 1, 2, 3], {"ways": 2, "zero": 3}, "skewed"),
    "4 to 2": ([0, 1, 2, 3], [0, 1], {"capacity": 2.0, "zero": 2}, "an expert without rows"),
    "2 to 3": ([0, 1], [0, 1, 2], {}, "a microbatch all on one"),
    "2 to 3 others": ([0, 1], [2, 3, 4], {"zero": 1}, "all on the last"),
    "4 to 6, 3 ways": ([0, 1, 2, 3], [3, 4, 5, 6, 7, 8], {"ways": 3, "zero": 3}, "random"),
    "3 to 1": ([0, 1, 2], [1], {}, "skewed"),
    "4 to 2, all experts on each": ([0, 1, 2, 3], [0, 1], {"ways": 1, "zero": 3}, "random"),
    "2 with the same rows to 4": (
        piper.Mesh([0, 1, 2, 3], dp=2, tp=2),
        [0, 1, 2, 3],
        {"ways": 2},
        "skewed",
    ),
}


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_different_size(groups: str) -> None:
    """The numbers, the plans (by the independent checker), and the memory."""
    rest, experts, options, choice = GROUPS[groups]
    given = routed(CHOICES[choice]())
    program = routed_capture().compile(apart(rest, experts, **options))
    check_all_plans(program)
    with piper.launch(program) as trainer:
        found = steps(trainer, given)
        load = trainer.step(*given[0][0], *given[0][1]).expert_load["experts"]
        measured = trainer.measure_memory(*given[0][0], *given[0][1])
    devices = 2 if isinstance(rest, piper.Mesh) else len(rest)
    assert_same(found, by_hand(routed_model(EXPERTS), given, 2 * devices), 1e-12)
    assert torch.equal(load, CHOICES[choice]().bincount(minlength=EXPERTS))
    predicted = {d: memory.peak for memory in program.memory for d in memory.devices}
    for device, one in measured.items():
        assert 0.5 * predicted[device] < one.peak <= predicted[device], device


def check_all_plans(program: piper.Program) -> None:
    dag, plans, memory = program.lowered.dag, program.plans, program.memory
    check_plans(dag, plans, memory, models=program.models, optimizer_bytes=1.0)


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize("capacity", [None, 1.0, 1.5])
@pytest.mark.parametrize("zero", range(3))
def test_plans_are_right(zero: int, capacity: float | None) -> None:
    """The independent checker accepts the plans and their memory, and their text parses back."""
    model = dropless(2, 12)
    sizes = {n: at(model, n) for n in range(1, 5)}
    pairs = itertools.permutations(range(1, 5), 2)
    for (rest, experts), others in itertools.product(pairs, (0, 4)):
        row = [others + d for d in range(experts)]
        strategy = apart(list(range(rest)), row, zero=zero, capacity=capacity)
        found = lower(strategy.apply(build(model)), sizes, Settings(clip=others == 0))
        check_plans(found.dag, found.plans, found.memory, models=sizes, clip=others == 0)
        for plan in found.plans:
            assert Plan.parse(str(plan)) == plan


def test_plans_say_what_is_sent() -> None:
    model = dropless(1, 12)
    sizes = {n: at(model, n) for n in (2, 4)}
    found = lower(apart([0, 1, 2, 3], [0, 1]).apply(build(model)), sizes)
    written = "\n".join(map(str, found.plans))
    rows = next(c.sorted_rows for c in sizes[4].chunks if c.sorted_rows is not None)
    assert f"0-3/1->0,1/1 dim 0 counts of {rows.rows} rows value" in written
    assert f"S(1)->S(0) 0,1 room for {4 * rows.rows} rows of 2 runs value" in written


@pytest.mark.thorough
def test_a_hugging_face_model() -> None:
    """Experts on all devices of a mesh, with attention on half as many parts of the batch."""
    rest = piper.Mesh([0, 1, 2, 3], dp=2, tp=2)
    program = captured("Mixtral").compile(apart(rest, [0, 1, 2, 3], zero=1))
    assert_same(train(program, token_batches()), reference("Mixtral", 4), 1e-12)


class Deep(nn.Module):
    """Layers in sequence."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(2)])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, chosen)
        return x


class Looped(nn.Module):
    """A layer with a loop over its experts; rows without an expert stay unchanged."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.last = whole.first, whole.experts, whole.last

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.first(x)
        made = x
        for i, up in enumerate(self.experts.up):
            hidden = x @ up
            if hasattr(self.experts, "bias"):
                hidden = hidden + self.experts.bias[i]
            made = made + hidden.relu() @ self.experts.down[i] * (chosen == i).unsqueeze(1)
        return self.last(made)


@cache
def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep(lambda: Routed(EXPERTS)).double()


def with_experts_on(
    strategy: piper.Strategy, devices: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> piper.Strategy:
    """``strategy`` with the experts of its stages sharded over other devices."""
    found: list[Any] = []
    for one in strategy.directives:
        if isinstance(one, Place):
            found.append(replace(one, where={**one.where, "EP": "-"}))
            found.append(replace(one, where={**one.where, "EP": "*"}, devices=devices(one.devices)))
        else:
            found.append(one)
    last = max(i for i, one in enumerate(found) if isinstance(one, Place))
    return piper.Strategy([*found[: last + 1], piper.shard({"EP": "*"}), *found[last + 1 :]])


PIPELINES: dict[str, tuple[int, Callable[[], piper.Strategy]]] = {
    "pp 2, 2 to 3": (
        2,
        lambda: (
            with_experts_on(mesh(pp=2, dp=2, microbatches=4, zero=1), lambda g: (*g, g[0] + 4))
            + piper.Strategy([piper.remat({}, "all")])
        ),
    ),
    "DualPipeV, 3 to 2": (
        3,
        lambda: with_experts_on(
            mesh(pp=1, dp=3, schedule="dualpipev", microbatches=4), lambda g: g[:2]
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines(pipeline: str) -> None:
    devices, make = PIPELINES[pipeline]
    given = routed(random_choice(96))
    program = capture(given, deep()).compile(make())
    whole = copy.deepcopy(deep())
    whole.layers = nn.ModuleList(Looped(layer) for layer in whole.layers)
    expected = plain(whole, square_loss, given, microbatches=4 * devices)
    assert_same(train(program, given), expected, 1e-12)
    check_all_plans(program)


@pytest.mark.slow
def test_over_gloo() -> None:
    """The numbers of virtual devices; then an error for more rows than the capacity."""
    given = routed(CHOICES["an expert without rows"]())
    program = routed_capture().compile(apart([0, 1, 2], [1, 2], capacity=1.5))
    with piper.launch(program, on="processes") as trainer:
        found = steps(trainer, given)
        (x, _), (y,) = given[0]
        with pytest.raises(piper.CapacityError, match="room for 18"):
            trainer.step(x, CHOICES["all on the last"](), y)
    assert_same(found, train(program, given))


class Unrouted(nn.Module):
    """Experts that do not get all rows: the last expert number means none."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 8, 12))
        self.down = nn.Parameter(torch.randn(experts, 12, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        experts, order = chosen.sort(stable=True)
        each = nn.functional.one_hot(experts, len(self.up) + 1).sum(0)
        offsets = each[:-1].cumsum(0).to(torch.int32)
        hidden = torch.nn.functional.grouped_mm(x[order], self.up, offs=offsets).relu()
        made = torch.nn.functional.grouped_mm(hidden, self.down, offs=offsets)
        return x.index_add(0, order, made)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
    ("rest", "experts", "waits"),
    [
        ([0, 1, 2], [0, 1], False),
        ([0, 1, 2], [0, 1], True),
        ([0, 1], [0, 1], True),
        ([0, 1], [0, 1], False),
    ],
    ids=["3 to 2, padded", "3 to 2", "2 to 2", "2 to 2, padded"],
)
def test_rows_without_an_expert(
    rest: list[int], experts: list[int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back as zeros, also where rows are padded to the capacity."""
    torch.manual_seed(0)
    model = Routed(EXPERTS)
    model.experts = Unrouted(EXPERTS)
    model.double()
    given = routed(random_choice(experts=EXPERTS + 1))
    program = capture(given, model).compile(apart(rest, experts))
    if not waits:
        settings = replace(program.settings, gpu=True)
        program = with_plans(replace(program, settings=settings), piper.Program)
        assert all(", padded" in str(plan) for plan in program.plans if 0 in plan.devices)
        always = property(lambda _: True, lambda *_: None)
        monkeypatch.setattr(DeviceState, "capturable", always, raising=False)
    expected = plain(Looped(copy.deepcopy(model)), square_loss, given, microbatches=2 * len(rest))
    assert_same(train(program, given), expected, 1e-12)


def test_too_many_rows() -> None:
    given = routed(CHOICES["all on the last"]())
    program = routed_capture().compile(apart([0, 1, 2], [0, 1], capacity=1.5))
    said = refused(program, given)
    assert "EP[0]" in said
    assert "device 1 is sent 24 rows for its experts ([12, 12] from each device)" in said
    assert "room for 18" in said


def test_others_need_the_rows_as_they_were_sorted() -> None:
    """The combining chunk, on as many devices as the experts, is refused."""
    model = dropless(1, 12)
    sizes = {n: at(model, n) for n in (2, 4)}
    strategy = piper.Strategy(
        [
            piper.place({"EP": "-"}, devices=[0, 1]),
            piper.place({"EP": "*"}, devices=[0, 1, 2, 3]),
        ]
    )
    dag = strategy.apply(build(model))
    combines = max(i for i, c in enumerate(model.chunks) if c.tags.get("layer") == 0)
    moved = {
        i: structs.replace(node, devices=(0, 1, 2, 3))
        for i, node in enumerate(dag.nodes)
        if node.compute.chunk == combines
    }
    with pytest.raises(piper.DirectiveError, match="only experts can take them in other parts"):
        lower(dag.with_nodes(moved), sizes)


@pytest.mark.parametrize(("source", "target"), [(2, 3), (3, 2), (4, 2), (4, 3), (2, 4), (5, 3)])
def test_ranges_of_sorted_rows(source: int, target: int) -> None:
    """The counts of a range are those of its rows; merged rows are sorted, and unmerge again."""
    rows, experts = 3 * target, 4
    torch.manual_seed(0)
    of = torch.randint(experts + 1, (source, rows)).sort(1).values  # the last means no expert
    counts = [row.bincount(minlength=experts + 1)[:experts].unsqueeze(1) for row in of]
    runs, size = most_overlaps(target, source), rows * source // target
    for rank, mine in enumerate(of.flatten().split(size)):
        found = torch.zeros(runs, experts + 1, dtype=torch.int64)
        place = 0
        for i in range(source):
            start, stop = max(rank * size, i * rows), min((rank + 1) * size, (i + 1) * rows)
            if start < stop:
                found[place] = counts_within(counts[i], start - i * rows, stop - start, rest=True)
                place += 1
        assert torch.equal(found.sum(0), mine.bincount(minlength=experts + 1))
        assert torch.equal(own_counts(found, 2), mine.bincount(minlength=experts + 1)[:-1])
        x = torch.stack([mine, torch.arange(size)], 1)
        done = merged(x, found)
        assert torch.equal(done[:, 0], mine.sort().values)
        assert torch.equal(unmerged(done, found), x)
