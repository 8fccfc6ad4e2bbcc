"""The schedules: their published formulas, refusals, tables, and training to the numbers of one
device."""

from __future__ import annotations

import ast
import csv
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    get_schedule_class,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import piper
from piper.base.errors import DirectiveError
from piper.cost.tasks import Tasks
from piper.ir.collectives import Move
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Collective, Compute
from piper.ir.passes import Pass
from piper.lower.lower import Settings, lower
from piper.strategies import (
    Action,
    MeshLayout,
    Row,
    Schedule,
    breadth_first,
    dualpipe,
    dualpipev,
    from_csv,
    gpipe,
    interleaved,
    mesh,
    one_f_one_b,
    schedule_named,
    straight,
    timed,
    to_csv,
    v_half,
    zb_h1,
    zb_v,
)
from piper.view.busy import Exposure, Span, all_to_all
from tests.facts import chain
from tests.runtime.test_runtime import Experts, Tower, mean_loss
from tests.training import ULPS, Run, assert_same, compiled, plain, shared_captures, train

F, BI, BW = 1, 1, 1
B = BI + BW

Make = Callable[[int, int], Schedule]
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Known:
    """The published properties of a schedule, for ``p`` ranks and ``m`` microbatches."""

    make: Make
    smallest: Callable[[int], int]
    """The smallest number of microbatches."""
    bubble: Callable[[int], float] | None
    activations: Callable[[int, int], int]
    """The largest number of activations on a rank, counted as stages times microbatches."""
    ranks: Sequence[int] = RANKS
    pairs: bool = False


def looped(virtual: int) -> Make:
    return lambda p, m: interleaved(p, m, virtual)


KNOWN: dict[str, Known] = {
    "gpipe": Known(gpipe, lambda p: 1, lambda p: (p - 1) * (F + B), lambda p, m: m),
    "1f1b": Known(one_f_one_b, lambda p: 1, lambda p: (p - 1) * (F + B), lambda p, m: min(p, m)),
    # F and B are of a stage, 1/V of a rank: the bubble is that of 1F1B divided by V
    "interleaved": Known(
        interleaved, lambda p: p, lambda p: (p - 1) * (F + B), lambda p, m: min(2 * m, 3 * p - 1)
    ),
    "interleaved, 3 stages": Known(
        looped(3), lambda p: p, lambda p: (p - 1) * (F + B), lambda p, m: min(3 * m, 4 * p - 1)
    ),
    "breadth-first": Known(
        breadth_first, lambda p: p, lambda p: (p - 1) * (F + B), lambda p, m: 2 * m
    ),
    "zb-h1": Known(
        zb_h1, lambda p: 1, lambda p: (p - 1) * (F + B - 2 * BW), lambda p, m: min(p, m)
    ),
    "zb-v": Known(zb_v, lambda p: 2 * p - 1, lambda p: 0, lambda p, m: min(2 * p, 2 * m)),
    # the formulas count stages: PP = 2p
    "dualpipev": Known(
        dualpipev,
        lambda p: 2 * p,
        lambda p: (2 * p / 2 - 1) * ((F + B) + B - 3 * BW),
        lambda p, m: 2 * p + 1,
        pairs=True,
    ),
    "dualpipe": Known(
        dualpipe,
        lambda p: 2 * p,
        lambda p: (p / 2 - 1) * ((F + B) + B - 3 * BW),
        lambda p, m: p + 1,
        ranks=(2, 4, 8),
        pairs=True,
    ),
    # no formula is published for few ranks: the numbers follow from its building block
    "v-half": Known(
        v_half, lambda p: 1, None, lambda p, m: {1: 2, 2: 4, 4: 6, 8: 11}[p] if m >= p else 2 * m
    ),
}
CASES = [(name, p) for name, known in KNOWN.items() for p in known.ranks]


# formulas


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_bubble_and_the_activations_of_the_literature(name: str, ranks: int) -> None:
    """With F = BI = BW = 1; a pair is one block, as in the formulas."""
    known = KNOWN[name]
    for microbatches in (2 * ranks, 4 * ranks, 6 * ranks):
        found = timed(known.make(ranks, microbatches))
        assert max(found.activations) == known.activations(ranks, microbatches)
        if known.bubble is not None:
            assert found.bubble == known.bubble(ranks)


def test_v_half_holds_about_half_of_1f1b() -> None:
    """Half of 2 * ranks stages, and a few whose weight passes are delayed. The bubble is never
    longer than that of 1F1B, 6(p - 1) in the same units."""
    for ranks in (4, 8, 12):
        found = timed(v_half(ranks, 4 * ranks))
        assert ranks < max(found.activations) <= ranks + 3 + ranks // 8
        assert found.bubble <= 2 * 3 * (ranks - 1)


class Unit:
    """Costs: one unit per pass of a stage, two per whole backward, none for communication."""

    def __init__(self, dag: Dag) -> None:
        self.stage = {node.compute.chunk: node.tags["PP"] for node in dag.nodes}
        passes = {(node.compute.chunk, node.compute.which) for node in dag.nodes}
        self.count = Counter((self.stage[chunk], which) for chunk, which in passes)

    def duration(self, task: piper.Task, devices: tuple[int, ...]) -> float:
        if task.work is None:
            return 0.0
        which = task.work.which
        return (2.0 if which is Pass.B else 1.0) / self.count[self.stage[task.work.chunk], which]


@pytest.mark.parametrize(("name", "ranks"), [case for case in CASES if case[1] in (2, 4)])
def test_plans_have_the_bubble_of_their_schedule(name: str, ranks: int) -> None:
    """Without communication, one half of a pair runs first and sends its result at once, not at
    the end of both: this halves the published bubble of DualPipe and DualPipeV."""
    schedule = KNOWN[name].make(ranks, 4 * ranks)
    model = replace(chain(schedule.stages), batch=4 * schedule.microbatches)
    dag = mesh(pp=ranks, schedule=schedule).apply(build(model))
    lowered = lower(dag, {1: model, 2: model}, Settings(costs=Unit(dag)))
    times = lowered.schedule
    waits = []
    for rank in range(ranks):
        mine = [
            i
            for i, node in enumerate(lowered.dag.nodes)
            if isinstance(node.op, Compute) and rank in node.devices
        ]
        start, end = min(times.start[i] for i in mine), max(times.end[i] for i in mine)
        waits.append(end - start - sum(times.end[i] - times.start[i] for i in mine))
    expected = timed(schedule).bubble / (2 if KNOWN[name].pairs else 1)
    assert max(waits) == pytest.approx(expected)


# training


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@functools.cache
def tower() -> torch.nn.Module:
    torch.manual_seed(0)
    return Tower(16)


ROWS_OF_A_MICROBATCH = 2


@functools.cache
def batches(microbatches: int) -> list[tuple[tuple[torch.Tensor], tuple[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS_OF_A_MICROBATCH * microbatches
    found = [torch.randint(11, (2, rows, 4), generator=generator) for _ in range(2)]
    return [((x,), (y,)) for x, y in found]


@functools.cache
def expected(microbatches: int) -> Run:
    return plain(tower(), mean_loss, batches(microbatches), microbatches=microbatches)


@pytest.mark.cases(fast=12, slow=10)
@pytest.mark.parametrize(
    "more", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["smallest", "more"]
)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] == 8 else ()) for case in CASES],
)
def test_it_trains_as_one_device(name: str, ranks: int, more: int) -> None:
    """Bit for bit, except DualPipe: there two ranks sum their gradients of a stage."""
    known = KNOWN[name]
    microbatches = known.smallest(ranks) + more * max(2, ranks)
    schedule = known.make(ranks, microbatches)
    if schedule.stages > 16:
        pytest.skip("more stages than layers")
    strategy = mesh(pp=ranks, schedule=schedule)
    program = compiled(tower(), strategy.directives, mean_loss, batches(microbatches))
    assert_same(
        train(program, batches(microbatches)),
        expected(microbatches),
        ULPS if name == "dualpipe" else 0.0,
    )


def crossed() -> Schedule:
    """Two ranks that wait for each other."""
    first = Row({0: [0, 1]}).forward(0).backward(0).forward(0).backward(0)
    second = Row({1: [0, 1]}).forward(1).forward(1).backward(1).backward(1)
    return Schedule("crossed", 2, [first, second])


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: interleaved(4, 6), r"cannot run 6 microbatches: give a multiple .* \(4, 8, 12, ...\)"),
    (lambda: zb_v(4, 6), "cannot run 6 microbatches: give at least 7"),
    (lambda: dualpipev(4, 7), "cannot run 7 microbatches: give at least 8"),
    (lambda: dualpipe(4, 9), "cannot run 9 microbatches: give an even number, at least 8"),
    (lambda: dualpipe(4, 6), "cannot run 6 microbatches: give an even number, at least 8"),
    (lambda: dualpipe(3, 6), "dualpipe needs an even number of ranks, not 3"),
    (lambda: dualpipe(0, 8), "ranks=0 must be a positive whole number"),
    (lambda: interleaved(-3, 8), "ranks=-3 must be a positive whole number"),
    (lambda: zb_v(None, 8), "ranks=None must be a positive whole"),  # type: ignore[arg-type]
    (lambda: gpipe(2, 0), "must be a positive whole number"),
    (lambda: one_f_one_b(0, 2), "must be a positive whole number"),
    (lambda: mesh(pp=2, dp=4, ep=3), r"ep=3 does not divide .* \[1, 2, 4\] do"),
    (lambda: mesh(zero=5), "zero=5: must be 0, 1, 2 or 3"),
    (lambda: mesh(expert_zero=-1), "zero=-1: must be 0, 1, 2 or 3"),
    (lambda: mesh(dp=2, bucket_mb=-1), "bucket_mb=-1 must be a positive number"),
    (lambda: mesh(dp=2, zero=1, within=0), "within=0 must be a positive whole number"),
    (lambda: mesh(dp=2, within=2), "within=2 is the number of devices .* zero=0 shards nothing"),
    (lambda: mesh(dp=2, ep=2, capacity=-0.5), "capacity=-0.5 must be a positive number"),
    (lambda: mesh(attention="ring"), "attention='ring' is unknown"),
    (lambda: mesh(shedule="1f1b"), "no argument 'shedule': did you mean schedule\\? .* pp, dp"),  # type: ignore[call-arg]
    (lambda: mesh(2), r"mesh\(\): too many positional arguments"),  # type: ignore[misc]
    (lambda: mesh(schedule="zigzag"), "unknown: one of gpipe, 1f1b, zb-h1, dualpipe, zb-v"),
    (lambda: mesh(schedule="zb-v", virtual=3), "has 2 stages a rank; for others use interleaved"),
    (lambda: mesh(layout="sideways"), "layout='sideways' is unknown: one of pipeline-inner"),
    (lambda: mesh(pp=3, schedule=gpipe(2, 4)), "has 2 ranks and 4 microbatches"),
    (lambda: mesh(pp=2, microbatches=3, schedule=gpipe(2, 4)), "leave out virtual= and micro"),
    (lambda: mesh(schedule=3), "neither a name nor a Schedule"),  # type: ignore[arg-type]
    (lambda: gpipe(2, 4).directives([[0]]), "has 2 ranks, but devices are given for 1"),
    (lambda: straight("mine", 1, 2).directives(), "rank 0 leaves 2 forwards and 2 backwards"),
    (lambda: Row({0: [0]}).forward(1), "stage 1 is not on this rank; its stages are: 0"),
    (lambda: Row({0: [0]}).forward(0, times=2), "no forward left: all 1 are in the row"),
    (lambda: Row({0: [0]}).backward(0), "0B0: no forward before it"),
    (lambda: Row({0: [0]}).forwards_left(9), "stage 9 is not on this rank"),
    (lambda: Row({0: [0]}).run(), "one or more"),
    (lambda: Schedule("mine", 2).check(), "mine has no ranks"),
    (lambda: timed(gpipe(2, 4), forward=float("nan")), "forward=nan must be a length of time"),
    (lambda: mesh(pp=2, schedule=crossed()), "(?s)cannot continue.*rank 0 at 0B0"),
    (lambda: Row({0: [0]}).backward_weight(), "no backward for weights waits"),
    (lambda: Schedule("mine", 2, [Row({0: [0]}).forward(0).backward(0)]).check(), "each of the 2"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        act()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "dualpipe", "zb-v"])
def test_a_pipeline_has_twice_as_many_microbatches_as_ranks(schedule: str) -> None:
    strategy = mesh(pp=4, dp=2, schedule=schedule)
    assert strategy == mesh(pp=4, dp=2, schedule=schedule, microbatches=8)
    assert "split({}, into='MB', parts=8)" in str(strategy)
    assert mesh(dp=2) == mesh(dp=2, microbatches=1)


def test_weights_that_are_left_are_told() -> None:
    row = Row({0: [0]}).forward(0).backward_input(0)
    with pytest.raises(DirectiveError, match="leaves 1 backward for weights undone"):
        Schedule("mine", 1, [row]).check()


def test_a_schedule_that_cannot_go_on_says_where() -> None:
    with pytest.raises(DirectiveError, match=r"(?s)cannot continue:.*rank 0 at 0B0.*rank 1 at 1F1"):
        timed(crossed())


# mesh


@pytest.mark.parametrize("name", ["ZB-V", "zb_v", "zbv", "1F1B", "GPipe", "v half", "DualPipeV"])
def test_names_may_be_spelled_as_people_do(name: str) -> None:
    assert schedule_named(name, 2, 4, None).ranks == 2


def test_layouts() -> None:
    def groups(layout: MeshLayout) -> list[object]:
        strategy = mesh(pp=2, dp=3, microbatches=2, layout=layout.value)
        return [list(d.devices) for d in strategy.directives if d.name == "place"]  # type: ignore[attr-defined]

    assert groups(MeshLayout.PIPELINE_OUTER) == [[0, 1, 2], [3, 4, 5]]
    assert groups(MeshLayout.PIPELINE_INNER) == [[0, 2, 4], [1, 3, 5]]
    inner = mesh(pp=2, dp=3, microbatches=2, layout=MeshLayout.PIPELINE_INNER)
    assert inner.directives == mesh(pp=2, dp=3, microbatches=2, layout="pipeline-inner").directives


def test_a_mesh_is_plain_directives_that_can_be_written_down() -> None:
    strategy = mesh(pp=2, dp=2, ep=2, schedule="dualpipev", zero=1, microbatches=4)
    assert piper.Strategy.from_json(strategy.to_json()).directives == strategy.directives
    assert eval(str(strategy), vars(piper)).directives == strategy.directives


COMPOSED = [
    ("1f1b", 2, 2, 1, 2),
    ("dualpipev", 2, 2, 2, 1),
    ("dualpipe", 2, 2, 2, 2),
    pytest.param("zb-v", 2, 2, 2, 0, marks=pytest.mark.slow),
    pytest.param("interleaved", 2, 4, 2, 1, marks=pytest.mark.slow),
]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("name", "pp", "dp", "ep", "zero"), COMPOSED)
def test_meshes_of_experts_train_as_one_device(
    name: str, pp: int, dp: int, ep: int, zero: int
) -> None:
    torch.manual_seed(0)
    model = Experts(4)
    strategy = mesh(pp=pp, dp=dp, ep=ep, schedule=name, zero=zero, microbatches=4)
    given = batches(4 * dp)
    reference = plain(model, mean_loss, given, microbatches=4 * dp)
    program = compiled(model, strategy.directives, mean_loss, given)
    assert_same(train(program, given), reference, ULPS)


# overlap


@pytest.mark.slow
@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("make", [dualpipev, dualpipe])
def test_pairs_cover_exchanges_of_experts(make: Make) -> None:
    """In the plan, with all-to-alls that take about as long as the computation between them."""
    torch.manual_seed(0)
    given = batches(16)
    shares = []
    for schedule in (make(2, 8), make(2, 8).without_pairs()):
        strategy = mesh(pp=2, dp=2, ep=2, schedule=schedule)
        costs = piper.Costs(flops_per_second=1e9, bytes_per_second=4e8, overhead=1e-6)
        program = compiled(Experts(4), strategy.directives, mean_loss, given, costs=costs)
        shares.append(program.schedule.all_to_all.share)
    assert shares[0] < 0.8 * shares[1]


def test_computations_that_overlap_cover_once() -> None:
    """Two streams compute from 1 to 3 and from 2 to 4, beside an all-to-all from 0 to 10."""
    strategy = mesh(dp=2, ep=2, schedule=one_f_one_b(1, 2))
    dag = compiled(Experts(4), strategy.directives, mean_loss, batches(4)).dag
    computations = [i for i, node in enumerate(dag.nodes) if isinstance(node.op, Compute)]
    exchange = next(
        i
        for i, node in enumerate(dag.nodes)
        if isinstance(node.op, Collective) and node.op.kind is Move.ALL_TO_ALL
    )
    spans = [Span(exchange, 0, 10), Span(computations[0], 1, 3), Span(computations[1], 2, 4)]
    assert all_to_all(dag, spans) == Exposure(10, 7)


@pytest.mark.parametrize("make", [dualpipev, dualpipe])
def test_weights_apart_in_pairs(make: Make) -> None:
    torch.manual_seed(0)
    model, given = Experts(4), batches(16)
    strategy = mesh(pp=2, dp=2, ep=2, schedule=make(2, 8).with_weights_apart())
    program = compiled(model, strategy.directives, mean_loss, given)
    assert_same(train(program, given), plain(model, mean_loss, given, microbatches=16), ULPS)


def test_measured_passes_change_the_order_and_no_number() -> None:
    """Operation counts do not give pass times: here, the passes around experts take much longer."""
    torch.manual_seed(0)
    model, given = Experts(4), batches(16)
    strategy = mesh(dp=2, ep=2, schedule=dualpipev(1, 8).with_weights_apart())
    figures = piper.Costs(flops_per_second=1e9, bytes_per_second=4e8, overhead=1e-6)
    program = compiled(model, strategy.directives, mean_loss, given, costs=figures)
    dag = program.dag
    tasks = Tasks(dag, Sizes(dag, program.models))
    passes = []
    for node in dag.nodes:
        task = tasks.of(node)
        if task.work is not None:
            slower = 1 if task.work.chunk in dag.shards else 8
            seconds = slower * (figures.duration(task, node.devices) or 0.0)
            passes.append((task.work, task.flops, seconds))
    costs = replace(figures, recorded=piper.Recorded.of(passes, ()))
    measured = compiled(model, strategy.directives, mean_loss, given, costs=costs)
    assert measured.schedule.order != program.schedule.order
    assert_same(train(measured, given), plain(model, mean_loss, given, microbatches=16), ULPS)


def test_weights_apart_are_drawn() -> None:
    schedule = dualpipev(2, 8)
    apart = schedule.with_weights_apart()
    assert timed(apart).bubble == timed(schedule).bubble
    assert timed(apart).activations == timed(schedule).activations
    assert {len(g) for row in apart.rows for g in row.groups} == {1, 2, 3}
    assert "+" in str(apart)
    assert [row.groups for row in from_csv(to_csv(apart)).rows] == [r.groups for r in apart.rows]


# tables


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_tables_go_and_come_back(name: str, ranks: int, tmp_path: Path) -> None:
    schedule = KNOWN[name].make(ranks, 2 * ranks)
    text = to_csv(schedule, tmp_path / "table.csv")
    again = from_csv(tmp_path / "table.csv")
    assert [row.groups for row in from_csv(text).rows] == [row.groups for row in again.rows]
    assert [row.groups for row in again.rows] == [row.groups for row in schedule.rows]
    assert [row.stages for row in again.rows] == [
        dict(sorted(row.stages.items())) for row in schedule.rows
    ]
    assert (again.name, again.microbatches) == ("table", schedule.microbatches)
    for line, row in zip(text.splitlines(), schedule.rows, strict=True):  # torch reads them, too
        actions = [_Action.from_str(cell) for cell in line.split(",")]
        assert len([a for a in actions if a is not None]) == len(row.groups)


THEIRS = ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
"""Without 1F1B: torch's table of it has 1F1 to 1F4 instead of 1F0 to 1F3."""


@pytest.mark.parametrize("name", THEIRS)
def test_schedules_of_torch_train_as_one_device(name: str, tmp_path: Path) -> None:
    """Piper reads the tables that torch writes; two ranks, four microbatches."""
    schedule = from_csv(_table_of_torch(name, 2, 4, tmp_path / f"{name}.csv"))
    strategy = mesh(pp=2, schedule=schedule)
    program = compiled(tower(), strategy.directives, mean_loss, batches(4))
    assert_same(train(program, batches(4)), expected(4))


def _table_of_torch(name: str, ranks: int, microbatches: int, path: Path) -> Path:
    """Write the order of one of torch's schedules for all ranks, in one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        kind = get_schedule_class(name)
        single = issubclass(kind, PipelineScheduleSingle)
        count = ranks if single else 2 * ranks
        mine = {"ZBVZeroBubble": [0, count - 1], "DualPipeV": [0, count - 1]}.get(name, [0, ranks])
        module, device = torch.nn.Linear(1, 1), torch.device("cpu")
        stages = [PipelineStage(module, stage, count, device) for stage in mine[: 2 - single]]
        made = kind(stages[0] if single else stages, microbatches, loss_fn=torch.nn.MSELoss())
        rows = made.pipeline_order
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows[rank] for rank in sorted(rows))
    finally:
        dist.destroy_process_group()
    return path


TABLES: list[tuple[str, str]] = [
    ("0F0,0X0", r"line 1, column 2 of the table: '0X0' is not an action"),
    ("0F0,0B0,0B0", "line 1 of the table: 0B0: the row already has it"),
    ("0F1,0B0", "line 1 of the table: 0B0: this rank does not run it"),
    ("0F0,0F0,0B0", "line 1 of the table: 0F0: the row already has it"),
    ("0F0,0B0\n\n1F0,1B0", "rank 1 has nothing to do"),
    ("0F2000000000,0B2000000000", "is not an action"),
    ("0F99999999,0B99999999", "but each of the 100000000 must pass it once"),
    ("0F0,0I0", "leaves 1 backward for weights undone"),
    ("0F0,0W0", "no backward for its inputs before it"),
    ("0F0,0B0,0F2,0B2", r"runs the microbatches \[0, 2\], but each of the 3"),
    (",,\n,", "the table has no actions"),
    ("1F0,1B0\n0F0,0F1,0B0,0B1", r"stage 1 runs the microbatches \[0\]"),
]


@pytest.mark.parametrize(("text", "message"), TABLES, ids=[text for text, _ in TABLES])
def test_tables_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        from_csv(text.splitlines())


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(DirectiveError, match=r"nowhere\.csv cannot be read: .*No such file"):
        from_csv("nowhere.csv")


def test_tables_of_spreadsheets() -> None:
    """Blanks, communication, empty lines at the end, and overlapping pairs."""
    lines = [" 0F0 ,0SEND_F0,0UNSHARD,0F1,,\t(0F2 ; 0B0) OVERLAP_F_B,0B1,0I2,0W2", "", ","]
    (row,) = from_csv(lines).rows
    pair = (Action(0, Pass.F, 2), Action(0, Pass.B, 0))
    assert row.groups[2] == pair
    assert len(row.groups) == 6


# drawings


def test_a_schedule_is_drawn() -> None:
    assert str(one_f_one_b(2, 2)).splitlines() == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches; bubble 3, activations 2",
        "rank 0  0F0 0F1         0B0----     0B1----   33% idle",
        "rank 1      1F0 1B0---- 1F1 1B1----           33% idle",
    ]


def test_pairs_are_visible() -> None:
    assert "0F2+1B1====" in str(dualpipev(1, 4)).splitlines()[1]


def test_a_program_is_drawn() -> None:
    strategy = mesh(pp=2, schedule="dualpipev", microbatches=4)
    program = compiled(tower(), strategy.directives, mean_loss, batches(4))
    first, second = str(program.schedule).splitlines()
    assert first.startswith("device 0  0F0")
    assert "+" in first
    assert second.rstrip().endswith("% idle")
    order = [cell.labels for cell in program.schedule.grid.lines[0].cells]
    assert [set(labels) for labels in order] == [
        {str(action) for action in group} for group in dualpipev(2, 4).rows[0].groups
    ]


def test_what_nothing_orders_is_drawn_too() -> None:
    strategy = [piper.split(parts=4), piper.place({}, devices=[0, 1])]
    program = compiled(tower(), strategy, mean_loss, batches(8))
    (line,) = str(program.schedule).splitlines()
    assert line.startswith("device 0,1  F0")


def test_a_narrow_drawing_has_letters() -> None:
    text = str(timed(zb_h1(2, 8)).grid.text(60))
    assert all(len(line) <= 60 for line in text.splitlines()[1:])
    assert "F" in text
    assert "W" in text


# statements of the docs and the examples


def test_the_lines_of_each_schedule_are_those_of_the_docs() -> None:
    """All lines of its file except docstrings, imports and empty lines."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "schedules.md").read_text()
    said = dict(re.findall(r"^\| `([\w-]+)` .*\| (\d+) \| \d*\s*\|$", page, re.MULTILINE))
    files = {"1f1b": "one_f_one_b"}
    assert len(said) == 9
    for name, lines in said.items():
        stem = files.get(name, name.replace("-", "_"))
        assert int(lines) == _lines(root / "piper" / "strategies" / "schedules" / f"{stem}.py"), (
            name
        )


def _lines(path: Path) -> int:
    text = path.read_text()
    tree = ast.parse(text)
    left = {n for n, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(tree):
        described = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if described or isinstance(node, ast.Import | ast.ImportFrom):
            left -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(left)
