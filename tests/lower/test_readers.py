"""A value that several regions read: their backwards run at the same time, on any devices, and the
gradient equals the sum of one device bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper import annotate
from piper.ir.dag.dag import Dag
from piper.ir.ops import Add, Compute
from piper.ir.passes import Pass
from piper.ir.plan.instructions import Verb
from piper.ir.plan.plan import Plan
from piper.strategies.directives import Directive, order, place, remat, replicate, shard, split
from tests.plan_checker import PlanError, check
from tests.training import (
    Batch,
    adamw,
    assert_same,
    compiled,
    plain,
    sgd,
    shared_captures,
    single,
    train,
)

WIDTH, ROWS, LONG = 24, 16, 8


class Branches(nn.Module):
    """A stem whose output all branches and the join read."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(branches))
        self.head = nn.Linear(WIDTH, WIDTH)

    def branch(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x))

    def join(self, x: Tensor, made: list[Tensor]) -> Tensor:
        for y in made:
            x = x * y
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stem"):
            x = torch.tanh(self.stem(x))
        made = []
        for i, layer in enumerate(self.branches):
            with annotate("branch"):
                made.append(self.branch(i, layer, x))
        with annotate("join"):
            return self.join(x, made)


class Twice(Branches):
    """Branches that use the value several times: the sum has a term for each use."""

    def branch(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(layer(x)) * x.exp()


class Apart(Branches):
    """The join does not read the value: the branches' terms are the only ones."""

    def join(self, x: Tensor, made: list[Tensor]) -> Tensor:
        return self.head(torch.stack(made).sum(0))


class Detached(Branches):
    """Two branches give no gradient to the value; one of them has no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.branches[2].requires_grad_(False)

    def branch(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x.detach() if i in (1, 2) else x))


class Turned(Branches):
    """Terms with other strides than the value: transposed or expanded."""

    def branch(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        y = torch.tanh(layer(x))
        return x.transpose(1, 2).contiguous().cos().transpose(1, 2) * y if i % 2 else y + x.sum()

    def join(self, x: Tensor, made: list[Tensor]) -> Tensor:
        return self.head(x.transpose(0, 1).contiguous().sin().transpose(0, 1) * sum(made))


class Chain(Branches):
    """Every branch also reads the previous one: their backwards are sequential anyway."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stem"):
            x = torch.tanh(self.stem(x))
        y = x
        for i, layer in enumerate(self.branches):
            with annotate("branch"):
                y = y * self.branch(i, layer, x)
        with annotate("join"):
            return self.join(x, [y])


MODELS = [Branches, Twice, Apart, Detached, Turned, Chain]


@pytest.fixture(scope="module", autouse=True)
def _captured_once() -> Iterator[None]:
    with shared_captures():
        yield


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, ROWS, LONG, WIDTH, generator=generator) for _ in range(3)]
    return [((x,), (y,)) for x, y in pairs]


@functools.cache
def built(make: type[nn.Module]) -> nn.Module:
    """One model for all tests, which must not change it."""
    torch.manual_seed(0)
    return make()


def placed(
    *branches: Sequence[int], others: Sequence[int] = (0,), parts: int = 2
) -> list[Directive]:
    rows = [place({"branch": i}, devices=list(group)) for i, group in enumerate(branches)]
    return [split(into="MB", parts=parts), place({"branch": "-"}, devices=list(others)), *rows]


def halves(*branches: int) -> list[Directive]:
    return [order({"branch": i, "PASS": "BI"}, {"branch": i, "PASS": "BW"}) for i in branches]


FOUR = placed([0], [1], [2], [3])
STRATEGIES = {
    "four": FOUR,
    "one": placed([0], [0], [0], [0]),
    "two": placed([0], [0], [1], [1]),
    "mixed": placed([1], [0], [1], [2]),
    "others": placed([1], [2], [2], [3], others=[4]),
    "halves": [*FOUR, *halves(0, 1, 2, 3)],
    "some halves": [*placed([0], [1], [0], [1]), *halves(1, 3)],
    "remat": [*FOUR, remat({"branch": [0, 2]}, "all")],
    "by microbatch": [
        split(into="MB", parts=2),
        place({"branch": "-", "MB": 0}, devices=[0]),
        place({"branch": "-", "MB": 1}, devices=[3]),
        *(place({"branch": i, "MB": 0}, devices=[i]) for i in range(4)),
        *(place({"branch": i, "MB": 1}, devices=[3 - i]) for i in range(4)),
        replicate({}),
    ],
}


def most_slow(makes: Sequence[type[nn.Module]], names: Iterable[str]) -> list[Any]:
    """Every model under one strategy, and every strategy with one model; other pairs are slow."""
    pairs = list(itertools.product(enumerate(makes), enumerate(names)))
    return [
        pytest.param(make, name, marks=() if i == 1 or i == j else pytest.mark.slow)
        for (i, make), (j, name) in pairs
    ]


GROUPS = {
    "2-2": placed([0, 1], [2, 3], [0, 1], [2, 3], others=[0, 1]),
    "1-2-4": placed([0], [1, 2], [3, 4, 5, 6], [0], others=[0]),
    "zero-3": [*placed([0, 1], [2, 3], [2, 3], [0, 1], others=[0, 1]), replicate({}, zero=3)],
}


@pytest.mark.cases(fast=5, slow=6)
@pytest.mark.parametrize(("make", "name"), most_slow(MODELS, STRATEGIES))
def test_the_same_as_pytorch_bit_for_bit(make: type[nn.Module], name: str) -> None:
    tolerance = 1e-6 if name == "by microbatch" else 0.0  # the weights are on two devices
    model = built(make)
    program = compiled(model, STRATEGIES[name], mse_loss, batches())
    check_plans(program)
    expected = plain(model, mse_loss, batches(), microbatches=2)
    assert_same(train(program, batches()), expected, tolerance)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("make", [Branches, Twice])
def test_groups_of_devices(make: type[nn.Module], name: str) -> None:
    model = built(make)
    program = compiled(model, GROUPS[name], mse_loss, batches())
    check_plans(program)
    assert_same(train(program, batches()), plain(model, mse_loss, batches(), microbatches=2), 1e-6)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize("make", MODELS)
def test_one_device_alone(make: type[nn.Module]) -> None:
    model = built(make)
    expected = plain(model, mse_loss, batches(), microbatches=2)
    found = single(model, mse_loss, batches(), microbatches=2)
    assert_same(found, replace(expected, norms=()))


def fp32_loss(found: Tensor, wanted: Tensor) -> Tensor:
    return mse_loss(found.float(), wanted.float())


def test_bf16() -> None:
    model = built(Twice)
    strategy = [*FOUR, *halves(0, 1)]
    program = compiled(model, strategy, fp32_loss, batches(), precision="bf16", optimizer=adamw)
    expected = plain(model, fp32_loss, batches(), microbatches=2, bf16=True, optimizer=adamw)
    assert_same(train(program, batches()), expected)


class Experts(nn.Module):
    """Two regions of experts and one without experts, all reading the same rows."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.w = nn.ParameterList(torch.randn(experts, WIDTH, WIDTH) * 0.3 for _ in range(2))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stem"):  # the tokens at position p of a sequence go to expert p
            x = self.stem(x)
            rows = x.unflatten(1, (4, -1)).transpose(0, 1).flatten(1, 2)
        made = []
        for w in self.w:
            with annotate("EP"):
                made.append(torch.tanh(torch.bmm(rows, w)))
        with annotate("join"):
            made.append(torch.tanh(self.layer(rows)))
            return sum(made).unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)


@pytest.mark.parametrize("first", [[0, 1], [2, 3]], ids=["same devices", "others"])
def test_experts(first: list[int]) -> None:
    """The experts' terms are added to the gradient after the all-to-all back; terms of other
    regions take part in no all-to-all."""
    model = built(Experts)
    strategy = [
        split(into="MB", parts=2),
        place({"EP": 0}, devices=first),
        place({"EP": 1}, devices=[0, 1]),
        place({"EP": "-"}, devices=[0, 1]),
        shard({"EP": "*"}, stream="ep"),
    ]
    program = compiled(model, strategy, mse_loss, batches())
    check_plans(program)
    assert_same(train(program, batches()), plain(model, mse_loss, batches(), microbatches=2), 1e-6)
    counts = [flow.count("all_to_all") for flow in program.traffic]
    # for each of two microbatches: the rows once per group, each region's output, and the gradients
    # there and back
    assert counts == ([2 * (1 + 2 * 3)] if first == [0, 1] else [2 * 4, 2 * 4])


def check_plans(program: piper.Program) -> None:
    dag, plans, memory = program.dag, program.plans, program.memory
    check(dag, plans, memory, models=program.models, optimizer_bytes=1.0)


# dependencies


def before(dag: Dag, number: int) -> set[int]:
    """All nodes that must end before a node can start."""
    seen: set[int] = set()
    left = [number]
    while left:
        new = set(dag.predecessors(left.pop())) - seen
        seen |= new
        left += new
    return seen


def backwards(dag: Dag) -> dict[int, int]:
    """For each branch, the node of its backward for the first microbatch."""
    return {
        node.tags["branch"]: i
        for i, node in enumerate(dag.nodes)
        if isinstance(node.op, Compute)
        and node.op.which is Pass.B
        and node.op.microbatch == 0
        and "branch" in node.tags
    }


@pytest.mark.parametrize("make", [Branches, Twice])
def test_no_branch_waits_for_another(make: type[nn.Module]) -> None:
    program = compiled(built(make), FOUR, mse_loss, batches())
    found = backwards(program.dag)
    assert sorted(found) == [0, 1, 2, 3]
    for one, other in itertools.permutations(found.values(), 2):
        assert other not in before(program.dag, one)
    for plan in program.plans[1:]:  # no plan makes it wait for terms from other devices
        places = [i for i, x in enumerate(plan.instructions) if x.op and x.verb is Verb.COMPUTE]
        sums = sums_from_others(plan)
        assert sums.isdisjoint(w for i in places for w in plan.instructions[i].waits)


def sums_from_others(plan: Plan) -> set[int]:
    """The receives whose content an Add reads."""
    read = {slot for x in plan.instructions if x.verb is Verb.ADD for slot in x.reads}
    return {
        i
        for i, x in enumerate(plan.instructions)
        if x.verb is Verb.RECV and not read.isdisjoint(x.writes)
    }


def test_one_message_goes_from_group_to_group() -> None:
    """One for each reader on another device than the next reader, whatever its number of uses."""
    for make in (Apart, Twice):
        program = compiled(built(make), FOUR, mse_loss, batches())
        sums = [len(sums_from_others(plan)) for plan in program.plans]
        # the join of Twice reads it last, on device 0; each sum is of two microbatches
        assert sums == ([2, 2, 2, 0] if make is Apart else [2, 2, 2, 2])


def test_the_gradient_is_added_up_from_the_last_reader_to_the_first() -> None:
    dag = compiled(built(Twice), placed([0], [1], [0], [1], parts=1), mse_loss, batches()).dag
    adds = [node for node in dag.nodes if isinstance(node.op, Add)]
    chunks = {c.index: c.tags.get("branch") for c in dag.model.chunks}
    assert [chunks[node.op.chunk] for node in adds if isinstance(node.op, Add)] == [3, 2, 1, 0]
    assert [node.devices for node in adds] == [(1,), (0,), (1,), (0,)]
    assert [len(node.reads) for node in adds] == [4, 4, 4, 4]  # the sum, and a term for each use


def test_the_checker_knows_the_order_of_the_terms() -> None:
    program = compiled(built(Twice), placed([0], [0], [0], [0], parts=1), mse_loss, batches())
    (plan,) = program.plans
    places = [i for i, x in enumerate(plan.instructions) if x.verb is Verb.ADD]
    for reads in ((0, 2, 1, 3), (0, 1, 2), (0, 1)):
        x = plan.instructions[places[1]]
        changed = list(plan.instructions)
        changed[places[1]] = structs.replace(x, reads=tuple(x.reads[i] for i in reads))
        with pytest.raises(PlanError):
            check(program.dag, [replace(plan, instructions=tuple(changed))], models=program.models)


def test_a_program_is_read_as_it_was_written(tmp_path: Path) -> None:
    program = compiled(built(Twice), FOUR, mse_loss, batches())
    program.save(tmp_path / "program")
    found = piper.Program.load(tmp_path / "program")
    assert found.plans == program.plans
    assert [Plan.parse(str(plan)) for plan in program.plans] == list(program.plans)


# time and memory


def test_branches_run_their_backwards_at_the_same_time() -> None:
    """Four branches on four devices, in simulated time."""
    with torch.device("meta"):
        model, batch = Apart(), torch.empty(64 * ROWS, LONG, WIDTH)
        model.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2**15), nn.Linear(2**15, WIDTH)) for _ in range(4)
        )
    strategy = placed([0], [1], [2], [3], parts=1)
    program = compiled(model, strategy, mse_loss, [((batch,), (batch,))])
    schedule, nodes = program.lowered.schedule, backwards(program.dag).values()
    assert max(schedule.start[i] for i in nodes) < min(schedule.end[i] for i in nodes)
    print(f"simulated: {1e3 * program.simulate(piper.Cluster.of('H100', 4)).seconds:.2f} ms")


@pytest.mark.cases(fast=99, slow=3)
@pytest.mark.parametrize(("make", "name"), most_slow(MODELS, ["one", "two", "four", "halves"]))
def test_memory_is_as_predicted(make: type[nn.Module], name: str) -> None:
    program = compiled(built(make), STRATEGIES[name], mse_loss, batches(), optimizer=sgd)
    check_plans(program)
    inputs, targets = batches()[0]
    with piper.launch(program) as trainer:
        trainer.step(*inputs, *targets)
        measured = trainer.measure_memory(*inputs, *targets)
    for memory in program.memory:
        for device in memory.devices:
            assert 0.7 * memory.peak < measured[device].peak <= memory.peak, device
