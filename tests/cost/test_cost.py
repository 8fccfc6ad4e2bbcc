"""Clusters, costs and simulated steps, against figures computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from bench.emulated import FLOPS, Sleepers, loss
from piper.cost import cluster_toml as toml
from piper.cost.fallback import Fallback
from piper.cost.link_time import Way, communication_seconds
from piper.cost.measure.efficiency import Efficiency
from piper.cost.presets import DEVICES, LINKS
from piper.cost.simulate.replay import Communication, Track, replay
from piper.cost.tasks import Task, TaskKind, Tasks
from piper.ir.collectives import Move
from piper.ir.dag.facts import OpCost
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Collective, Compute, Transfer
from piper.ir.passes import Pass, RematPolicy
from piper.ir.plan.instructions import COMMUNICATING
from piper.ir.rules import Rest
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh

FREE = piper.Link(1e30, 0.0)
ALONE = piper.Sharing(links=0.0)
LAYERS = 8


def sleeper(**other: Any) -> piper.Device:
    """A device on which a sleep takes its stated time and everything else takes none."""
    given: dict[str, Any] = {"flops": {torch.float32: FLOPS}, "memory": 2**40, "bandwidth": 1e30}
    return piper.Device(**{"name": "sleeper", **given, **other})


def ideal(devices: int, link: piper.Link = FREE, **other: Any) -> piper.Cluster:
    return piper.Cluster.of(sleeper(**other), devices, inside=link, outside=link, sharing=ALONE)


@cache
def emulated(**arguments: Any) -> piper.Program:
    """Layers of two one-second sleeps forward and two backward, and nothing else."""
    x = torch.zeros(32, 4, 8)
    return piper.compile(
        Sleepers(LAYERS, 4, 8, 1.0),
        mesh(**arguments),
        inputs=(x,),
        targets=(x,),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        costs=piper.Costs(flops_per_second=FLOPS, bytes_per_second=1e30, overhead=0.0),
    )


@cache
def experts() -> piper.Program:
    config = MoEConfig(vocab=64, dim=32, layers=4, heads=2, experts=4, mlp_dim=32, max_seq=8)
    torch.manual_seed(0)
    x = torch.randint(0, 64, (32, 8))
    return piper.compile(
        MoETransformer(config),
        mesh(pp=2, dp=4, ep=2, schedule="dualpipev", zero=1, microbatches=4),
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        clip_norm=1.0,
    )


# --- the time of a step --------------------------------------------------------------------------


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_pipeline_takes_what_the_formula_says(
    schedule: str, stages: int, microbatches: int, synchronous: bool
) -> None:
    program = emulated(pp=stages, schedule=schedule, microbatches=microbatches)
    found = program.simulate(ideal(stages, synchronous=synchronous))
    of_stage = 4.0 * LAYERS / stages  # one forward and one backward
    assert found.seconds == pytest.approx((microbatches + stages - 1) * of_stage)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert found.bubble == pytest.approx(bubble)
    assert found.mfu == pytest.approx(1 - bubble)
    assert found.tokens_per_second == pytest.approx(32 * 4 * 8 / found.seconds)


def test_zb_v_has_less_of_a_bubble() -> None:
    one = emulated(pp=4, schedule="1f1b", microbatches=8).simulate(ideal(4))
    other = emulated(pp=4, schedule="zb-v", microbatches=8).simulate(ideal(4))
    assert other.bubble < one.bubble / 1.5


def test_messages_are_on_the_way_where_the_pipeline_fills() -> None:
    """The first microbatch crosses every border once forward, the last once backward. Then all four
    devices all-reduce the losses over a tree, two hops up and two down."""
    program = emulated(pp=4, schedule="gpipe", microbatches=4)
    still = program.simulate(ideal(4)).seconds
    slow = program.simulate(ideal(4, piper.Link(1e30, 0.5))).seconds
    assert slow == pytest.approx(still + 2 * 3 * 0.5 + 2 * 2 * 0.5)


def test_each_kernel_takes_its_overhead() -> None:
    program = emulated(pp=1, microbatches=4)
    tasks = Tasks(program.dag, Sizes(program.dag, program.models))
    computing = [x for x in program.plans[0].instructions if x.verb not in COMMUNICATING]
    operations = [tasks.of(program.dag.nodes[x.node]).kernels for x in computing]
    count = sum(each.count for pass_ in operations for each in pass_)
    assert count > len(computing)
    still, slow = program.simulate(ideal(1)), program.simulate(ideal(1, overhead=0.25))
    assert slow.seconds == pytest.approx(still.seconds + 0.25 * count)


def test_a_host_that_issues_slowly_is_the_limit() -> None:
    program = emulated(pp=1, microbatches=4)
    count = sum(len(row.pcs) for row in program.simulate(ideal(1)).spans)
    assert program.simulate(ideal(1, issue=100.0)).seconds >= 100.0 * (count - 1)


def test_a_slow_device_holds_up_its_pipeline_alone() -> None:
    """Replicas meet once, for the gradient reduction: the slower pipeline sets the time."""
    program = emulated(pp=2, dp=2, schedule="1f1b", microbatches=4)
    plain = ideal(4)
    (machine,) = plain.machines
    half = sleeper(name="half", flops={torch.float32: FLOPS / 2})
    one = replace(machine, devices=(half, *machine.devices[1:]))
    found = program.simulate(replace(plain, machines=(one,)))
    assert [one.devices for one in found.classes] == [(0,), (1,), (2,), (3,)]
    assert len(program.simulate(plain).classes) == 2
    other = replace(machine, devices=(half, machine.devices[1], half, machine.devices[3]))
    both = program.simulate(replace(plain, machines=(other,)))
    assert both.seconds == pytest.approx(2 * program.simulate(plain).seconds)
    assert program.simulate(plain).seconds < found.seconds <= both.seconds


@pytest.mark.slow
def test_equal_devices_are_one_class_however_many() -> None:
    found = experts().simulate(piper.Cluster.of("H100", 8))
    assert [len(one.devices) for one in found.classes] == [4, 4]
    split = experts().simulate(piper.Cluster.of("H100", 3, 3))  # groups that span machines
    assert len(split.classes) > 2
    assert sorted(d for one in split.classes for d in one.devices) == list(range(8))


@pytest.mark.slow
def test_exchanges_over_a_slow_link_take_longer() -> None:
    gpu = replace(DEVICES["H100"], overhead=0.0, issue=0.0)  # else launches take most of the time
    near = experts().simulate(piper.Cluster.of(gpu, 8))
    far = experts().simulate(piper.Cluster.of(gpu, 1, 8, outside="Ethernet-1G"))
    assert far.seconds > 2 * near.seconds
    assert far.exposed > near.exposed


# --- results of a simulated step -----------------------------------------------------------------


@pytest.mark.slow
def test_every_instruction_is_there_and_streams_run_in_order() -> None:
    program = experts()
    found = program.simulate(piper.Cluster.of("H100", 8))
    run = found.run()
    for a, b in zip(run.events, run.events[1:], strict=False):
        assert (a.row, a.start) <= (b.row, b.start)
        if a.row == b.row:
            assert a.end <= b.start + 1e-12
    for one, spans in zip(found.classes, found.spans, strict=True):
        plan = program.plans[one.plan]
        ends = dict(zip(spans.pcs, spans.end, strict=True))
        for pc, start in zip(spans.pcs, spans.start, strict=True):
            for other in plan.instructions[pc].waits:
                assert ends[other] <= start + 1e-12


def test_memory_over_time_has_the_predicted_peak() -> None:
    program = experts()
    found = program.simulate(piper.Cluster.of("H100", 8))
    for plan, memory in zip(program.plans, program.memory, strict=True):
        curve = found.memory(plan.devices[0])
        assert [t for t, _ in curve] == sorted(t for t, _ in curve)
        assert max(n for n, _ in memory.over_time) == max(n for _, n in curve) == memory.peak
    assert found.fits
    assert found.peak == max(memory.peak for memory in program.memory)


def test_the_critical_path_is_a_chain_to_the_end() -> None:
    program = emulated(pp=4, schedule="1f1b", microbatches=8)
    run = program.simulate(ideal(4)).run()
    path = [event for event in run.events if event.critical]
    assert max(event.end for event in path) == pytest.approx(run.seconds)
    busy = sum(event.end - event.start for event in path)
    assert busy == pytest.approx(run.seconds)  # communication is free: nothing on the path waits


def test_events_say_what_is_known_of_their_nodes() -> None:
    program = experts()
    run = program.simulate(piper.Cluster.of("H100", 8)).run("mine")
    assert run.title == "mine"
    exchange = next(e for e in run.events if e.kind == "all_to_all")
    assert exchange.nbytes > 0
    assert exchange.directive.startswith("shard(")
    assert exchange.microbatch is not None
    computing = next(e for e in run.events if e.kind == "F" and e.flops)
    assert computing.stage.startswith("PP ")
    assert "layer " in computing.tags
    assert isinstance(program.dag.nodes[computing.node].op, Compute)


def test_a_trace_names_every_slice(tmp_path: Path) -> None:
    found = experts().simulate(piper.Cluster.of("H100", 8))
    found.trace(tmp_path / "trace.json", beside=found)
    data = json.loads((tmp_path / "trace.json").read_text())
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    run = found.run()
    assert len(slices) == 2 * len(run.events)
    assert {e["name"] for e in slices} == {event.name for event in run.events}
    starts = [e for e in data["traceEvents"] if e["ph"] == "s"]
    ends = [e for e in data["traceEvents"] if e["ph"] == "f"]
    assert starts
    assert {e["id"] for e in starts} == {e["id"] for e in ends}


def test_a_simulation_prints_and_serializes() -> None:
    found = experts().simulate(piper.Cluster.of("H100", 8))
    assert "bubble" in str(found)
    again = json.loads(json.dumps(found.to_json()))
    assert again["seconds"] == found.seconds
    assert sum(len(one["devices"]) for one in again["classes"]) == 8


# --- the engine ----------------------------------------------------------------------------------


def track(*items: tuple[str, float | int, tuple[int, ...]], synchronous: bool = False) -> Track:
    """Each item: a stream; seconds (float) or a communication (int); the items waited for."""
    streams: dict[str, int] = {}
    return Track(
        [streams.setdefault(stream, len(streams)) for stream, _, _ in items],
        [waits for *_, waits in items],
        [0.0 if isinstance(x, int) else x for _, x, _ in items],
        [x if isinstance(x, int) else -1 for _, x, _ in items],
        [0.0] * len(items),
        synchronous,
    )


def test_an_exchange_beside_a_reduction_takes_longer() -> None:
    one = track(("dp", 0, ()), ("ep", 1, ()))
    comms = [Communication(10.0, 1, links=1), Communication(1.0, 1, links=1)]
    replay([one], comms, piper.Sharing(links=0.46))
    assert one.end == pytest.approx([10.0 + 0.46, 1.46])


def test_communications_on_different_links_do_not_meet() -> None:
    one = track(("dp", 0, ()), ("ep", 1, ()))
    replay(
        [one],
        [Communication(10.0, 1, links=2), Communication(1.0, 1, links=1)],
        piper.Sharing(links=0.46),
    )
    assert one.end == pytest.approx([10.0, 1.0])


def test_computing_and_communicating_slow_each_other() -> None:
    one = track(("compute", 2.0, ()), ("ep", 0, ()))
    replay([one], [Communication(1.0, 1, links=1)], piper.Sharing(compute=0.1, communication=0.5))
    assert one.end[1] == pytest.approx(1.5)
    assert one.end[0] == pytest.approx(2.0 + 0.1 * 1.5 / 1.1)


def test_a_stream_with_a_share_of_the_gpu_takes_that_share() -> None:
    one = track(("compute", 2.0, ()), ("ep", 0, ()))
    replay(
        [one], [Communication(1.0, 1, 1, slows=0.25)], piper.Sharing(compute=0.1, communication=0.5)
    )
    assert one.end[1] == pytest.approx(1.0)
    assert one.end[0] == pytest.approx(2.0 + 0.25 * 1.0 / 1.25)


def test_parties_wait_for_the_last() -> None:
    one = track(("compute", 3.0, ()), ("p2p", 0, (0,)))
    other = track(("p2p", 0, ()), ("compute", 1.0, (0,)))
    replay([one, other], [Communication(0.5, 2, links=1)], ALONE)
    assert other.start == pytest.approx([3.0, 3.5])
    assert other.end[1] == pytest.approx(4.5)


def test_a_synchronous_host_waits_before_it_issues_more() -> None:
    """On a GPU the second computation overtakes the wait for the message; on a CPU it cannot."""
    for synchronous, expected in ((False, 2.0), (True, 6.0)):
        one = track(("p2p", 0, ()), ("a", 1.0, (0,)), ("b", 1.0, ()), synchronous=synchronous)
        other = track(("compute", 4.0, ()), ("p2p", 0, (0,)))
        replay([one, other], [Communication(0.0, 2, links=1)], ALONE)
        assert one.end[2] == pytest.approx(expected - (not synchronous))


# --- communications ------------------------------------------------------------------------------

WAY = Way(8, 1e9, 1e-3, hop=1e-4, near=1.0, near_bandwidth=1e9, far_bandwidth=math.inf)


@pytest.mark.parametrize(
    ("kind", "nbytes", "seconds"),
    [
        (Move.ALL_REDUCE, 8 * 10**9, 2 * 7 + 2 * 7 * 1e-4),  # a ring
        (Move.ALL_GATHER, 8 * 10**9, 7 + 7e-4),
        (Move.REDUCE_SCATTER, 8 * 10**9, 7 + 7e-4),
        (Move.ALL_TO_ALL, 8 * 10**9, 7 + 1e-3),
    ],
)
def test_collectives(kind: Move, nbytes: int, seconds: float) -> None:
    assert communication_seconds(kind, WAY, nbytes) == pytest.approx(seconds)
    assert communication_seconds(kind, replace(WAY, members=1), nbytes) == 0


def test_few_bytes_are_reduced_along_a_tree() -> None:
    way = replace(WAY, hop=1e-3)
    assert communication_seconds(Move.ALL_REDUCE, way, 8) == pytest.approx(16e-9 + 2 * 3 * 1e-3)


def test_messages() -> None:
    seconds = communication_seconds(TaskKind.SEND, replace(WAY, members=2), 10**9)
    assert seconds == pytest.approx(1.001)


def test_ways_through_machines() -> None:
    cluster = piper.Cluster.of("H100", 4, 2, inside=piper.Link(400, 1), outside=piper.Link(10, 2))
    assert cluster.way((0, 1, 2)) == Way(3, 400, 1, 1, 1.0, 400, math.inf)
    # the four devices of each machine send at the same time; of 8 hops, 2 leave a machine
    assert cluster.way(tuple(range(8))) == Way(8, 40, 2, (6 * 1 + 2 * 2) / 8, 3 / 7, 400, 10)
    assert cluster.way((0, 4)) == Way(2, 10, 2, 2, 0.0, math.inf, 10)
    assert cluster.way((3,)).members == 1
    slow = replace(cluster, between={(0, 1): piper.Link(1, 5)})
    assert slow.way((0, 4)).bandwidth == 1
    assert slow.way((0, 4)).latency == 5


def test_a_crowded_network_slows_down_with_the_number_of_machines() -> None:
    cluster = piper.Cluster.of("H100", 2, 8, inside=FREE, outside=piper.Link(10, 0, crowding=0.5))
    each = [cluster.way(tuple(range(0, 2 * machines, 2))).bandwidth for machines in (1, 2, 4, 8)]
    assert each[1:] == pytest.approx([10, 10 / 2**0.5, 5])


def test_an_exchange_between_machines_is_held_up_by_the_way_out() -> None:
    cluster = piper.Cluster.of("H100", 4, 2, inside=piper.Link(400, 0), outside=piper.Link(10, 0))
    way = cluster.way(tuple(range(8)))
    # of 80 bytes, 40 go to the other machine
    assert communication_seconds(Move.ALL_TO_ALL, way, 80) == pytest.approx(4.0)


# --- devices -------------------------------------------------------------------------------------


def by_rows(*shares: float, **other: Any) -> Efficiency:
    """Shares of products of 16, 256, 4096... rows, whatever their other sizes."""
    sizes = tuple(16 ** (1 + i) for i in range(len(shares)))
    return Efficiency(sizes, tuple(((x,) * len(sizes),) * len(sizes) for x in shares), **other)


def test_efficiency_lies_between_measured_shapes() -> None:
    each = by_rows(0.1, 0.4)
    assert [each.of((m, 256, 256)) for m in (16, 64, 256, 4096)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.4]
    )
    corner = Efficiency((16, 256), (((0.1, 0.1), (0.1, 0.1)), ((0.1, 0.1), (0.1, 0.8))))
    assert corner.of((64, 64, 64)) == pytest.approx(0.1 * 8 ** (1 / 8))


def test_a_part_of_a_tile_takes_as_long_as_all_of_it() -> None:
    each = by_rows(0.5, tile=16)
    assert each.of((16, 16, 16)) == 0.5
    assert each.of((4, 16, 16)) == pytest.approx(0.5 / 4)
    assert each.of((40, 16, 16)) == pytest.approx(0.5 * 40 / 48)


def test_efficiency_depends_on_shapes_and_dtypes() -> None:
    """Tensor parallelism makes more and smaller products of the same FLOPs."""
    device = sleeper(efficiency={torch.float32: by_rows(0.25, 0.5), torch.bfloat16: by_rows(0.125)})
    flops = int(FLOPS)
    whole = [OpCost(1, flops, 0, (256, 256, 256))]
    parts = [OpCost(8, flops // 8, 0, (16, 256, 256))]
    assert [device.seconds(each, torch.float32) for each in (whole, parts)] == pytest.approx([2, 4])
    assert device.seconds(whole, torch.bfloat16) == pytest.approx(8)
    assert device.fastest(torch.bfloat16) == FLOPS / 8


def test_attention_has_an_efficiency_of_its_own_and_skips_what_is_masked() -> None:
    device = sleeper(attention=0.5)
    flops = int(FLOPS)
    assert device.seconds([OpCost(1, flops)], torch.float32) == pytest.approx(2)
    assert device.seconds([OpCost(1, flops, skipped=flops // 2)], torch.float32) == pytest.approx(1)


def test_operations_know_the_shapes_of_their_products() -> None:
    chunks = [c for c in experts().models[4].chunks if "EP" in c.tags]
    costs = chunks[0].variants[RematPolicy.NONE].passes[Pass.F].cost.each
    shapes = {each.product for each in costs if each.flops}
    assert shapes
    assert all(len(shape) == 3 for shape in shapes)
    for each in costs:
        if each.product:
            assert 2 * math.prod(each.product) == each.flops
    chunks = [*dense().compile(mesh(), cache=False).models[1].chunks]
    forwards = [chunk.variants[RematPolicy.NONE].passes[Pass.F].cost.each for chunk in chunks]
    attention = [each for costs in forwards for each in costs if each.flops and not each.product]
    assert attention
    assert all(each.skipped * 2 == each.flops for each in attention)


def test_each_kernel_takes_the_longer_of_computing_and_reading() -> None:
    device = sleeper(bandwidth=100.0, overhead=1.0)
    computing, reading = OpCost(1, int(2 * FLOPS), 100), OpCost(1, int(2 * FLOPS), 900)
    assert device.seconds([computing], torch.float32) == pytest.approx(3.0)
    assert device.seconds([reading], torch.float32) == pytest.approx(10.0)
    assert device.seconds([computing, reading], torch.float32) == pytest.approx(13.0)
    assert device.seconds([OpCost(3)], torch.float32) == 3.0


def test_bytes_are_those_that_operations_touch() -> None:
    """tanh(x @ w + b) of 4 rows and width 8: a product with its bias, then tanh."""
    program, _ = net(mesh(microbatches=4))
    rows, square, vector = 4 * 8 * 4, 8 * 8 * 4, 8 * 4
    facts = program.models[1].chunks[0].variants[RematPolicy.NONE].passes[Pass.F]
    product = rows + square + vector + rows
    flops = 2 * 4 * 8 * 8
    shape = 4, 8, 8
    assert facts.cost.each == (OpCost(1, flops, product, shape), OpCost(1, 0, 2 * rows))
    # fused: the product, and what is before and after it, which reads and writes the ends
    ends = (rows + square + vector) + rows
    assert facts.cost.fused == (OpCost(1, flops, product, shape), OpCost(2, 0, ends // 2))


@pytest.mark.parametrize("kind", sorted(DEVICES))
def test_presets_simulate(kind: str) -> None:
    found = experts().simulate(piper.Cluster.of(kind, 8))
    assert 0 < found.seconds < 60
    assert 0 < found.mfu < 1


@cache
def dense() -> piper.Capture:
    config = DenseConfig(vocab=32, dim=16, layers=2, heads=2, mlp_dim=24, max_seq=8)
    torch.manual_seed(0)
    x = torch.randint(0, 32, (8, 8))
    return piper.capture(DenseTransformer(config), inputs=(x,), targets=(x,), loss=lm_loss)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    "strategy",
    [
        mesh(),
        mesh(dp=2, zero=3),
        mesh(tp=2, sequence_parallel=True),
        mesh(tp=2, cp=2),
        piper.Strategy([piper.remat({}, "all"), *mesh(pp=2, tp=2, microbatches=2).directives]),
    ],
)
def test_the_operations_of_a_step_are_those_of_the_model(strategy: piper.Strategy) -> None:
    """However it is sharded, and whatever is computed again: in each layer the projections of
    attention, its two products, which cost 2.5 times as much backward, and the MLP; and the
    head."""
    program = dense().compile(strategy)
    tokens, seq, dim, mlp, vocab = 64, 8, 16, 24, 32
    weights = 2 * (4 * dim * dim + 3 * dim * mlp) + vocab * dim
    attention = 2 * 2 * tokens * seq * dim * 2
    assert program.simulate(piper.Cluster.of("H100", 4)).flops == (
        3 * 2 * tokens * weights + attention + attention * 5 // 2
    )


# --- files ---------------------------------------------------------------------------------------


def test_a_cluster_survives_its_file(tmp_path: Path) -> None:
    cluster = piper.Cluster.of("H100", 2, 3, name='the "big" one')
    tired = replace(cluster.machines[0].devices[0], name="tired", memory=2**33)
    machines = (*cluster.machines, replace(cluster.machines[0], devices=(tired,) * 2))
    cluster = replace(cluster, machines=machines, between={(0, 3): LINKS["Ethernet-1G"]})
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    assert piper.Cluster.load(path) == cluster


def test_the_example_in_the_docstring_is_read() -> None:
    text = toml.__doc__ or ""
    example = text[text.index("name = ") :].replace("\n    ", "\n")
    cluster = piper.Cluster(*toml.parse(example))
    assert len(cluster) == 2 * 8 + 3
    assert cluster.device(18).peak(torch.bfloat16) == 700e12
    assert cluster.device(18).peak(torch.float32) == DEVICES["H100"].peak(torch.float32)
    assert cluster.link(0, 2) == piper.Link(1.25e9, 3e-5)
    assert cluster.link(0, 1) == LINKS["InfiniBand-HDR"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("machines = ", "not TOML"),
        ("", "missing required field `machines`"),
        ("[[machines]]\ndevice = 'H999'", "no device 'H999'; known: A10,"),
        ("[[machines]]\ndevice = 'H100'\ninside = 'string'", "no link 'string'; known:"),
        (
            "[[machines]]\ndevice = 'H100'\nspeed = 3",
            "machines[0]: Object contains unknown field `speed`",
        ),
        ("[[machines]]\ndevice = 'H100'\ndevices = 0", "machines[0].devices: Expected `int` >= 1"),
        ("[[machines]]\ndevices = 2", "machines[0]: Object missing required field `device`"),
        ("[[machines]]\ndevice = ['H100']\ndevices = 2", "has 2 devices, but names 1"),
        ("[[machines]]\ndevice = []", "has no devices"),
        ("[[machines]]\ndevice = 'x'\n[devices.x]\nmemory = 1", "lacks flops, bandwidth"),
        (
            "[[machines]]\ndevice = 'x'\n[devices.x]\nlike = 'H100'\nmemory = 'much'",
            "[devices.x]: memory: Expected",
        ),
        (
            "[[machines]]\ndevice = 'x'\n[devices.x]\nlike = 'H100'\nflops = {float7 = 1}",
            "no dtype",
        ),
        ("[[machines]]\ndevice = 'H100'\ninside = {bandwidth = 0}", "must be positive"),
        ("[[machines]]\ndevice = 'H100'\n[[between]]\nmachines = [0, 1]\nlink = 'PCIe4'", "1 mach"),
        ("[[machines]]\ndevice = 'H100'\n[sharing]\nlinks = -1", "makes nothing faster"),
    ],
)
def test_wrong_files_are_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(piper.PiperError) as error:
        piper.Cluster.load(path)
    assert says in str(error.value)
    assert "c.toml" in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: piper.Cluster.of("H999"), "no device 'H999'"),
        (lambda: piper.Cluster.of("H100", 0), "has none"),
        (lambda: piper.Cluster(()), "must have a machine"),
        (lambda: piper.Link(0, 0), "must be positive"),
        (lambda: Efficiency((2, 1), (((0.5,) * 2,) * 2,) * 2), "must grow"),
        (lambda: Efficiency((1, 2), (((0.5,),),)), "2 x 2 x 2"),
        (lambda: Efficiency((1,), (((1.5,),),)), "at most 1"),
        (lambda: sleeper(attention=0.0), "attention must be"),
        (lambda: sleeper(flops={}), "must be positive"),
        (lambda: experts().simulate(piper.Cluster.of("H100", 4)), "up to number 7"),
        (lambda: experts().simulate("H100"), "must be a piper.Cluster"),  # type: ignore[arg-type]
        (
            lambda: experts().simulate(piper.Cluster.of("H100", 8), "x"),  # type: ignore[arg-type]
            "must be piper.Recorded",
        ),
    ],
)
def test_wrong_clusters_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(piper.PiperError, match=says):
        make()


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            with piper.annotate("layer"):
                x = torch.tanh(layer(x))
        return x


def net(
    strategy: piper.Strategy, costs: piper.CostModel | None = None
) -> tuple[piper.Program, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = Net(*(nn.Linear(8, 8) for _ in range(4)))
    program = piper.compile(
        model,
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        costs=costs,
    )
    return program, x


# --- shares of a GPU -----------------------------------------------------------------------------


def sharing(**asked: Any) -> piper.Program:
    """Two replicas of four layers, each layer reduced by itself; some streams have a share of the
    GPU's SMs."""
    streams = [piper.stream(None, name, sms=sms) for name, sms in asked.items()]
    each = piper.replicate({}, bucket_mb=1e-4)
    return net(piper.Strategy([piper.place({}, devices=[0, 1]), each, *streams]))[0]


@pytest.mark.slow
def test_the_rest_of_the_sms_is_what_numbers_leave() -> None:
    gpu = piper.Device("gpu", {torch.float32: 1e4}, 2**30, 1e30, sms=132)
    cluster = piper.Cluster.of(gpu, 2, inside=piper.Link(1e4, 0.0))
    seconds = [
        sharing(**asked).simulate(cluster).seconds
        for asked in (
            {"other": 100, "reduce": "rest", "another": "rest"},
            {"reduce": 32},
            {"reduce": "rest"},
            {"reduce": 132},
        )
    ]
    assert seconds[0] == seconds[1] < seconds[2] == seconds[3]


def test_a_saved_program_has_its_shares(tmp_path: Path) -> None:
    program = sharing(other=100, reduce="rest")
    program.save(tmp_path)
    loaded = piper.Program.load(tmp_path)
    assert loaded.streams == program.streams
    assert loaded.streams["reduce"].sms is Rest.REST


def test_a_rest_of_nothing_is_refused() -> None:
    cluster = piper.Cluster.of("H100", 2)
    with pytest.raises(piper.PiperError, match=r"'reduce' asks for the rest .* ask for 132, and"):
        sharing(other=100, reduce="rest", another=32).simulate(cluster)


# --- recorded costs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled() -> tuple[piper.Program, Any]:
    program, x = net(mesh(pp=2, dp=2, microbatches=4, zero=1))
    with piper.launch(program, on="virtual") as trainer:
        trainer.step(x, x)
        return program, trainer.profile(steps=3)


def test_a_profile_knows_every_pass(profiled: tuple[piper.Program, Any], tmp_path: Path) -> None:
    program, profile = profiled
    recorded = profile.recorded
    recorded.save(tmp_path / "costs.json")
    assert piper.Recorded.load(tmp_path / "costs.json") == recorded
    cluster = ideal(4, overhead=1e6)  # an unrecorded cost would stand out
    found = program.simulate(cluster, recorded)
    assert found.seconds < 1e3
    busy = sum(one.computing for one in profile.busy.values())
    assert found.seconds < busy


def test_other_strategies_are_simulated_from_it(profiled: tuple[piper.Program, Any]) -> None:
    """Other numbers of rows, halves of a backward, other groups."""
    recorded = profiled[1].recorded
    cluster = ideal(4, overhead=1e6)
    for strategy in (
        mesh(pp=2, microbatches=2),
        mesh(pp=2, schedule="zb-h1", microbatches=4),
        mesh(dp=4, microbatches=1),
    ):
        found = net(strategy)[0].simulate(cluster, recorded)
        computing = [e for e in found.run().events if e.kind in ("F", "B", "BI", "BW")]
        assert all(0 <= e.end - e.start < 1e3 for e in computing)


def test_a_plan_is_ordered_by_it(profiled: tuple[piper.Program, Any], tmp_path: Path) -> None:
    """Measured times are used; figures for the rest."""
    profile = profiled[1]
    costs = piper.Costs(overhead=1e6, recorded=profile.recorded)
    again = net(mesh(pp=2, dp=2, microbatches=4, zero=1), costs)[0]
    found, tasks = again.schedule, Tasks(again.dag, Sizes(again.dag, again.models))
    known = 0
    for node, start, end in zip(again.dag.nodes, found.start, found.end, strict=True):
        seconds = profile.recorded.duration(tasks.of(node), node.devices)
        known += seconds is not None
        assert end - start == pytest.approx(1e6 if seconds is None else seconds, rel=1e-6)
    assert known > len(again.dag.nodes) * 0.9
    again.save(tmp_path)
    loaded = piper.Program.load(tmp_path)
    assert loaded.settings.costs == costs
    assert loaded.schedule.order == found.order


def test_recorded_must_be_what_profiles_give(profiled: tuple[piper.Program, Any]) -> None:
    with pytest.raises(piper.PiperError, match=r"recorded=.* must be piper\.Recorded"):
        piper.Costs(recorded=profiled[1])


def test_passes_scale_by_their_operations(profiled: tuple[piper.Program, Any]) -> None:
    recorded = profiled[1].recorded
    one = max(recorded.passes, key=lambda timed: timed.flops)
    twice = replace(one.work, rows=2 * one.work.rows)
    assert recorded.pass_seconds(twice, 2 * one.flops) == pytest.approx(2 * one.seconds)
    assert recorded.pass_seconds(replace(one.work, chunk=99), one.flops) is None


def test_messages_lie_between_those_measured() -> None:
    recorded = piper.Recorded.of((), [("send", 2, 100, 1.0), ("send", 2, 300, 2.0)])
    sizes = (50, 100, 200, 300, 600)
    assert [recorded.moved_seconds("send", 2, n) for n in sizes] == [None, 1.0, 1.5, 2.0, None]
    assert recorded.moved_seconds("send", 4, 100) is None


def test_beyond_what_was_measured_the_model_says_the_difference() -> None:
    """The time of a few bytes is latency: in proportion, an all-reduce of a gigabyte would take
    days."""
    recorded = piper.Recorded.of(
        (), [("all_reduce", 2, 16, 5e-4), ("send", 2, 10**6, 1e-2), ("update", 1, 64, 1e-5)]
    )
    cluster = piper.Cluster.of("CPU", 2, inside=piper.Link(1e9, 1e-4))
    both = Fallback(recorded, cluster)
    large = Task(Move.ALL_REDUCE, nbytes=10**9, members=2)
    assert both.duration(large, (0, 1)) == pytest.approx(1.0 + 5e-4, rel=1e-3)
    small = Task(TaskKind.SEND, nbytes=10, members=2)  # 0.1 of 1.1 ms is latency
    assert both.duration(small, (0, 1)) == pytest.approx(1e-2 / 11, rel=1e-3)
    update = Task(TaskKind.UPDATE, (OpCost(1, 0, 5 * 10**10),), 10**10)
    assert both.duration(update, (0,)) == pytest.approx(5.0, rel=1e-2)
    unknown = Task(Move.ALL_GATHER, nbytes=10**9, members=2)
    assert both.duration(unknown, (0, 1)) == cluster.duration(unknown, (0, 1))


def test_the_middle_one_of_several_measurements_counts() -> None:
    recorded = piper.Recorded.of((), [("send", 2, 8, s) for s in (1.0, 2.0, 90.0)])
    assert recorded.moved_seconds("send", 2, 8) == 2.0
    both = recorded + piper.Recorded.of((), [("send", 2, 8, 4.0)])
    assert both.moved_seconds("send", 2, 8) == 3.0


def test_wrong_costs_are_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"format": "x"}'):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(piper.PiperError, match=r"c\.json"):
            piper.Recorded.load(tmp_path / "c.json")


def test_a_cluster_orders_what_a_strategy_leaves_open() -> None:
    costs = piper.Cluster.of("H100", 1, 2, outside="Ethernet-1G").costs(torch.bfloat16)
    assert costs.bytes_per_second == LINKS["Ethernet-1G"].bandwidth
    assert costs.flops_per_second == DEVICES["H100"].fastest(torch.bfloat16)
    assert 0.6 * 989e12 < costs.flops_per_second < 0.8 * 989e12


def test_facts(profiled: tuple[piper.Program, Any]) -> None:
    facts: Mapping[str, str] = profiled[1].facts
    assert facts["devices"] == "4"
    assert facts["steps measured"] == "3"
    assert "device 3: computes" in str(profiled[1])


# --- cost models of other kinds ------------------------------------------------------------------


@dataclass(frozen=True)
class Seconds:
    """Everything takes one second, passes on the slow device two; updates are unknown."""

    slow: int

    def duration(self, task: piper.Task, devices: tuple[int, ...]) -> float | None:
        if task.kind is TaskKind.UPDATE:
            return None
        return 2.0 if task.kind is TaskKind.PASS and self.slow in devices else 1.0


def test_a_model_of_ones_own_orders_and_simulates(tmp_path: Path) -> None:
    own, figures = Seconds(slow=1), piper.Costs()
    program = net(mesh(pp=2, dp=2, microbatches=4, zero=1), own)[0]
    times, tasks = program.schedule, Tasks(program.dag, Sizes(program.dag, program.models))
    for node, start, end in zip(program.dag.nodes, times.start, times.end, strict=True):
        task = tasks.of(node)
        known = own.duration(task, node.devices)
        expected = figures.duration(task, node.devices) if known is None else known
        assert end - start == pytest.approx(expected)
    found = program.simulate(ideal(4, overhead=0.5), own)
    assert len(found.classes) == 4  # equal in the cluster, but not to the cost model
    taken = {
        (one.devices[0], task.kind, spans.end[i] - spans.start[i])
        for one, spans in zip(found.classes, found.spans, strict=True)
        for i, pc in enumerate(spans.pcs)
        for x in [program.plans[one.plan].instructions[pc]]
        for task in [tasks.of(program.dag.nodes[x.node])]
        if task.members == 1
    }
    seconds = {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}
    assert taken == {(d, TaskKind.PASS, s) for d, s in seconds.items()} | {
        (d, TaskKind.UPDATE, 0.5) for d in seconds
    }
    program.save(tmp_path)  # saves the model's answers, not the model
    loaded = piper.Program.load(tmp_path)
    assert loaded.plans == program.plans
    assert loaded.evaluation_step.plans == program.evaluation_step.plans
    assert (loaded.schedule.order, loaded.schedule.end) == (times.order, times.end)


def test_a_plan_is_ordered_by_a_cluster() -> None:
    """A communication takes as long as its slowest group, a pass as on its slowest device."""
    machine = ideal(4).machines[0]
    slow = replace(sleeper(), name="slow", overhead=1.0)
    uneven = piper.Cluster(
        (
            replace(machine, devices=(machine.devices[0], slow)),
            replace(machine, devices=machine.devices[:2], outside=piper.Link(1.0, 3.0)),
        )
    )
    program = net(mesh(pp=2, dp=2, microbatches=4, zero=1), uneven)[0]
    times, tasks = program.schedule, Tasks(program.dag, Sizes(program.dag, program.models))
    for node, start, end in zip(program.dag.nodes, times.start, times.end, strict=True):
        groups = [node.devices]
        if isinstance(node.op, Collective):
            groups = list(node.op.groups)
        elif isinstance(node.op, Transfer):
            groups = list(zip(node.op.source, node.op.target, strict=True))
        expected = max(uneven.duration(tasks.of(node), group) for group in groups)
        assert end - start == pytest.approx(expected)
    passes = [node for node in program.dag.nodes if isinstance(node.op, Compute)]
    assert {uneven.duration(tasks.of(node), (1,)) >= 1.0 for node in passes} == {True}


def test_a_profile_alone_is_a_model(profiled: tuple[piper.Program, Any]) -> None:
    strategy, recorded = mesh(pp=2, dp=2, microbatches=4, zero=1), profiled[1].recorded
    one = net(strategy, recorded)[0]
    other = net(strategy, piper.Costs(recorded=recorded))[0]
    assert (one.schedule.order, one.schedule.end) == (other.schedule.order, other.schedule.end)


@pytest.mark.parametrize("answer", [-1.0, float("nan"), float("inf"), "1"])
def test_answers_that_are_no_times_are_refused(answer: Any) -> None:
    class Wrong:
        def duration(self, task: piper.Task, devices: tuple[int, ...]) -> Any:
            return answer

    with pytest.raises(piper.PiperError, match="returns seconds, at least 0"):
        net(mesh(pp=2, microbatches=4), Wrong())


def test_what_is_no_model_is_refused(profiled: tuple[piper.Program, Any]) -> None:
    program, profile = profiled
    with pytest.raises(piper.PiperError, match=r"must be piper\.Costs"):
        net(mesh(pp=2, microbatches=4), profile)
    with pytest.raises(piper.PiperError, match="up to number 3, and cluster"):
        net(mesh(pp=2, dp=2, microbatches=4), piper.Cluster.of("CPU", 2))
    with pytest.raises(piper.PiperError, match=r"must be piper\.Recorded or another"):
        program.simulate(ideal(4), profile)
