"""Plans: their text for known strategies, their communication against the textbook, and whether the
plan checker finds every fault."""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from piper.base.errors import DirectiveError, PiperError
from piper.ir.dag.build import build
from piper.ir.dag.dag import name_of
from piper.ir.dag.facts import Model, ParameterFacts
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Compute, Group, Transfer, Update
from piper.ir.passes import Pass
from piper.ir.plan.instructions import (
    NO_ROWS,
    Instruction,
    MemoryKind,
    RowShards,
    Slot,
    Verb,
)
from piper.ir.plan.lowered import Lowered
from piper.ir.plan.plan import Plan
from piper.ir.plan.verify_plans import verify_plans
from piper.ir.rules import OptimizerCost
from piper.lower.lower import Settings, lower
from piper.strategies.directives import (
    Directive,
    order,
    partition,
    place,
    remat,
    replicate,
    shard,
    split,
    stream,
)
from piper.strategies.strategy import Strategy
from tests.facts import at, chain, changing, masked, mixed, moe, reading, skip, tied, tying
from tests.plan_checker import PlanError, check, implied_waits
from tests.strategies.test_strategy import PUBLISHED

SMALL = 0.0001
"""Mebibytes of a bucket for one parameter."""


def sizes(model: Model) -> dict[int, Model]:
    """``model`` as a group of each size sees it."""
    return {n: at(model, n) for n in (1, 2, 4)}


def lowered(model: Model, *directives: Directive, settings: Settings | None = None) -> Lowered:
    dag = Strategy(directives).apply(build(model))
    return lower(dag, sizes(model), settings)


def judged(model: Model, *directives: Directive, clip: bool = False) -> Lowered:
    found = lowered(model, *directives, settings=Settings(clip=clip))
    check(found.dag, found.plans, found.memory, clip=clip, models=sizes(model))
    return found


def published() -> Lowered:
    stages = Strategy([partition("layer", into="PP", parts=2)])
    return judged(moe(2, 4), *(stages + Strategy.from_json(PUBLISHED)).directives)


def two_devices(zero: int, *, microbatches: int = 2, bucket_mb: float = 25) -> Lowered:
    return judged(
        chain(2),
        split(parts=microbatches),
        place({}, devices=[0, 1]),
        replicate({}, zero=zero, bucket_mb=bucket_mb),
    )


# golden plans


def golden(name: str) -> str:
    return (Path(__file__).parent / "plans" / f"{name}.txt").read_text().rstrip("\n")


def printed(plan: Plan) -> str:
    """The plan without trailing blanks."""
    return "\n".join(line.rstrip() for line in str(plan).splitlines())


@pytest.mark.parametrize("zero", range(4))
def test_the_plan_of_two_devices(zero: int) -> None:
    (plan,) = two_devices(zero).plans
    assert printed(plan) == golden(f"zero_{zero}")


@pytest.mark.parametrize("stage", range(2))
def test_the_plans_of_the_published_example(stage: int) -> None:
    plans = published().plans
    assert [plan.devices for plan in plans] == [(0, 2), (1, 3)]
    assert printed(plans[stage]) == golden(f"published_{stage}")


@pytest.mark.parametrize("name", ["published", "uneven", "clipped", "following", "sharing"])
def test_the_text_of_a_plan_parses_back(name: str) -> None:
    for plan in MADE[name]().plans:
        assert Plan.parse(str(plan)) == plan
        odd = [structs.replace(x, stream='a "b" [c]', name="a: b # c") for x in plan.instructions]
        slots = [replace(s, names=tuple(f'{n}, "x" (y)' for n in s.names)) for s in plan.slots]
        changed = replace(plan, instructions=tuple(odd), slots=tuple(slots))
        assert Plan.parse(str(changed)) == changed


@pytest.mark.parametrize(
    "line",
    ["", "free s0", "   0 [compute] compute F: s0 -> s1", "slots 0: nothing 8 bytes",
     "   0 [compute] compute F: s0 -> s1 # 0 0X0 on 0",
     "   0 [s] collective x:  -> s0 # 0 R->P(sum) 0,1 loss 0",
     "   0 [s] collective x:  -> s0 # 0 R->S(0) 0,1 value 0",
     "   0 [s] collective x:  -> s0 # 0 P(sum)->R 0,1 profit 0"],
)  # fmt: skip
def test_text_that_is_no_plan_is_refused(line: str) -> None:
    with pytest.raises(PiperError, match="not a line of a plan"):
        Plan.parse(f"plan of devices 0\n{line}\nslots 0: batch 8 bytes")


def test_what_lowering_adds_says_which_directive_asked_for_it() -> None:
    dag = published().dag
    found: dict[str, set[str]] = {}
    for number, node in enumerate(dag.nodes):
        if not isinstance(node.op, Compute):
            what = name_of(dag, number).split(" layer")[0]
            found.setdefault(what, set()).add(dag.label(node.made_by))
    assert found == {
        "send 0,2->1,3": {"2:place"},
        "send 1,3->0,2": {"3:place"},
        "all_to_all 0,2": {"6:shard"},
        "all_to_all 1,3": {"7:shard"},
        "all_reduce 0,2": {"4:replicate"},
        "update bucket0": {"4:replicate"},
        "update bucket1": {"4:replicate"},
        "all_reduce 1,3": {"5:replicate"},
        "update bucket2": {"5:replicate"},
        "update bucket3": {"5:replicate"},
        "all_reduce 0,1,2,3 loss": {"0:build"},
        "all_reduce 0,1,2,3 norm": {"0:build"},
    }


# the scalars of a step


def two_stages(*, clip: bool, counted: bool) -> Lowered:
    return judged(
        chain(1, counted=counted),
        split(parts=2),
        place({"embed": 0}, devices=[0]),
        place({"embed": "-"}, devices=[1]),
        clip=clip,
    )


SCALARS: dict[tuple[bool, bool], list[str]] = {
    (False, False): [
        """
           4 [scalars] collective all_reduce 0,1 loss:  -> s4
           9 [compute] update bucket0: s7 -> s8
          10 [scalars] collective all_reduce 0,1 norm: s8 -> s9 waits 9
        """,
        """
           8 [scalars] collective all_reduce 0,1 loss: s11 s13 -> s15 waits 7
          17 [compute] update bucket1: s22 s19 -> s24
          18 [scalars] collective all_reduce 0,1 norm: s24 -> s25 waits 17
        """,
    ],
    (False, True): [
        """
           4 [scalars] collective all_reduce 0,1 loss:  -> s4
           9 [compute] update bucket0: s7 s4 -> s8 waits 4!
          10 [scalars] collective all_reduce 0,1 norm: s8 -> s9 waits 9
        """,
        """
           8 [scalars] collective all_reduce 0,1 loss: s11 s14 s12 s15 -> s17 waits 7
          17 [compute] update bucket1: s24 s21 s17 -> s26 waits 8!
          18 [scalars] collective all_reduce 0,1 norm: s26 -> s27 waits 17
        """,
    ],
    (True, False): [
        """
           4 [scalars] collective all_reduce 0,1 loss:  -> s4
           9 [scalars] collective all_reduce 0,1 norm: s7 -> s8 waits 8
          10 [compute] update bucket0: s7 s8 -> s9 waits 9!
        """,
        """
           8 [scalars] collective all_reduce 0,1 loss: s11 s13 -> s15 waits 7
          17 [scalars] collective all_reduce 0,1 norm: s22 s19 -> s24 waits 15
          18 [compute] update bucket1: s22 s19 s24 -> s25 waits 17!
        """,
    ],
    (True, True): [
        """
           4 [scalars] collective all_reduce 0,1 loss:  -> s4
           9 [scalars] collective all_reduce 0,1 norm: s7 -> s8 waits 8
          10 [compute] update bucket0: s7 s4 s8 -> s9 waits 4! 9!
        """,
        """
           8 [scalars] collective all_reduce 0,1 loss: s11 s14 s12 s15 -> s17 waits 7
          17 [scalars] collective all_reduce 0,1 norm: s24 s21 -> s26 waits 15
          18 [compute] update bucket1: s24 s21 s17 s26 -> s27 waits 8! 17!
        """,
    ],
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_updates_wait_for_the_scalars_they_need(clip: bool, counted: bool) -> None:
    """The embedding is alone on device 0; the loss, of two microbatches, is on device 1."""
    plans = two_stages(clip=clip, counted=counted).plans
    for plan, wanted in zip(plans, SCALARS[clip, counted], strict=True):
        lines = re.sub(r" (frees|weights|buckets|#) [^\n]*?(?= waits|\n|$)", "", printed(plan))
        found = [line for line in lines.splitlines() if "[scalars]" in line or "update" in line]
        assert textwrap.dedent("\n".join(found)) == textwrap.dedent(wanted.strip("\n")).rstrip()


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("clip", [False, True])
def test_the_scalars_are_two_whatever_the_buckets(zero: int, clip: bool) -> None:
    found = judged(
        chain(2, counted=True),
        split(parts=2),
        place({}, devices=[0, 1]),
        replicate({}, zero=zero, bucket_mb=SMALL),
        clip=clip,
    )
    assert len(found.dag.buckets) == 4
    contents = [x.content for x in found.plans[0].instructions if x.stream == "scalars"]
    assert contents == [Content.LOSS, Content.NORM]


def test_a_step_without_updates_has_no_norm() -> None:
    """As in an evaluation."""
    dag = Strategy([place({}, devices=[0])]).apply(build(chain(1)))
    nodes = tuple(node for node in dag.nodes if node.compute.which is Pass.F)
    found = lower(replace(dag, nodes=nodes), {}, Settings(clip=True))
    check(found.dag, found.plans, found.memory, clip=True)
    contents = {x.content for x in found.plans[0].instructions}
    assert contents == {None, Content.LOSS}


# against the textbook


def communication(found: Lowered) -> Counter[str]:
    """The collectives of a step, without its two scalars."""
    contents = Counter(x.content for x in found.plans[0].instructions)
    assert contents[Content.LOSS] == contents[Content.NORM] == 1
    every = Counter(n.op.kind.value for n in found.dag.nodes if isinstance(n.op, Collective))
    return every - Counter(all_reduce=2)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, SMALL])
def test_communication_of_each_level(microbatches: int, bucket_mb: float) -> None:
    def count(zero: int) -> Counter[str]:
        return communication(two_devices(zero, microbatches=microbatches, bucket_mb=bucket_mb))

    buckets = 1 if bucket_mb == 25 else 4
    regions = 4  # state that is sharded between passes is communicated region by region
    assert count(0) == {"all_reduce": buckets}
    assert count(1) == {"reduce_scatter": buckets, "all_gather": buckets}
    assert count(2) == {"reduce_scatter": regions * microbatches, "all_gather": regions}
    three = count(3)
    assert three["reduce_scatter"] == regions * microbatches
    assert set(three) == {"reduce_scatter", "all_gather"}


def test_the_first_parameters_have_what_is_left_of_a_bucket() -> None:
    """Their reduction comes last, and nothing hides it."""
    found = two_devices(0, bucket_mb=1024 / 2**20)
    sizes = {name: facts.nbytes for name, facts in found.dag.model.parameters.items()}
    assert [list(bucket.parameters) for bucket in found.dag.buckets] == [
        ["embed.weight"],
        ["layers.0.weight", "layers.1.weight", "head.weight"],
    ]
    assert sum(sizes.values()) - sizes["embed.weight"] == 1024


def test_updates_come_in_the_order_of_their_sums() -> None:
    """No update waits behind one whose reduction is still in flight."""
    found = two_devices(0, bucket_mb=SMALL)
    steps = found.plans[0].instructions
    sums = [x.of for x in steps if x.content is Content.GRADIENTS]
    updates = [x.op.bucket for x in steps if isinstance(x.op, Update)]
    assert updates == sums


def runs(found: Lowered) -> int:
    """How often, over one device's passes in order, a pass uses a bucket that the previous pass
    with parameters did not use."""
    dag = found.dag
    bucket_of = {p: i for i, b in enumerate(dag.buckets) for p in b.parameters}
    count, held = 0, set[int]()
    for x in found.plans[0].instructions:
        if x.verb is Verb.COMPUTE:
            op = dag.nodes[x.node].compute
            chunk = dag.model.chunks[op.chunk]
            used = set[int]()
            if chunk.variants[dag.policy(op.chunk)].passes[op.which].uses_parameters:
                used = {bucket_of[p] for p in chunk.parameters}
            count += len(used - held)
            held = used or held
    return count


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, SMALL])
def test_zero_3_gathers_once_for_each_run_of_uses(microbatches: int, bucket_mb: float) -> None:
    passes = [{"MB": m, "PASS": p} for p in "FB" for m in range(microbatches)]
    found = judged(
        chain(2),
        split(parts=microbatches),
        place({}, devices=[0, 1]),
        replicate({}, zero=3, bucket_mb=bucket_mb),
        order(*passes),
    )
    gathers = communication(found)["all_gather"]
    assert gathers == runs(found)
    # embed, 2 layers, head; head, 2 layers: the embedding's B needs no weights, and the first
    # head's B finds them still gathered
    assert gathers == 7 * microbatches - 1


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, SMALL])
def test_zero_3_gathers_nothing_that_is_held(microbatches: int, bucket_mb: float) -> None:
    """No order is given: the scheduler chooses, with and without the gathers."""
    found = two_devices(3, microbatches=microbatches, bucket_mb=bucket_mb)
    held: dict[int, int] = {}
    for x in found.plans[0].instructions:
        if "all_gather" in x.name:
            bucket = found.dag.extra[found.dag.nodes[x.node].writes[0] - found.dag.first_extra].of
            assert bucket not in held.values(), f"{x.name}: bucket {bucket} is gathered already"
            held[x.writes[0]] = bucket
        for slot in x.frees:
            held.pop(slot, None)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("ways", [2, 4])
def test_experts_exchange_four_times_a_microbatch(ways: int, policy: str, halves: bool) -> None:
    """Rows in and out of the forward, gradients in and out of the backward. The backward reads the
    experts' output where it already is."""
    passes = ("F", "BI", "BW") if halves else ("F", "B")
    found = judged(
        moe(2, 4),
        split(parts=4),
        place({}, devices=[0, 1, 2, 3]),
        shard({"EP": "*"}, ways=ways),
        remat({}, policy),
        order(*({"EP": "*", "MB": m, "PASS": p} for m in range(4) for p in passes)),
    )
    layers, microbatches = 2, 4
    assert communication(found)["all_to_all"] == layers * microbatches * 4


def test_one_device_communicates_nothing() -> None:
    for zero in range(4):
        found = judged(chain(2), split(parts=2), place({}, devices=[0]), replicate({}, zero=zero))
        assert not communication(found)


def test_higher_levels_keep_less() -> None:
    memory = [two_devices(zero).memory[0] for zero in range(4)]
    assert memory[0].optimizer > memory[1].optimizer == memory[2].optimizer == memory[3].optimizer
    assert memory[0].parameters == memory[1].parameters == memory[2].parameters
    assert memory[3].parameters * 2 == memory[0].parameters


# plans of several devices


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("zero", range(4))
def test_devices_that_differ_in_rank_share_a_plan(zero: int) -> None:
    def plans(n: int) -> tuple[Plan, ...]:
        steps = [
            partition("layer", into="PP", parts=2),
            split(parts=4),
            place({"PP": 0}, devices=range(n)),
            place({"PP": 1}, devices=range(n, 2 * n)),
            replicate({}, zero=zero),
        ]
        found = lower(Strategy(steps).apply(build(chain(4))), {})  # equal costs for every n
        check(found.dag, found.plans, found.memory)
        return found.plans

    few, many = plans(2), plans(64)
    assert [len(plan.devices) for plan in few] == [2, 2]
    assert [len(plan.devices) for plan in many] == [64, 64]
    own = {
        "name": "",
        "op": None,
        "rows": NO_ROWS,
        "beside": 0,
    }  # a bucket is padded to its devices
    for a, b in zip(few, many, strict=True):
        assert [structs.replace(x, **own) for x in a.instructions] == [
            structs.replace(x, **own) for x in b.instructions
        ]
        assert [g._replace(rows=NO_ROWS) for g in a.given] == [
            g._replace(rows=NO_ROWS) for g in b.given
        ]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, 4), (4, 2), (2, 2)])
def test_transfers_between_groups_of_different_size(first: int, second: int) -> None:
    found = judged(
        chain(2),
        partition("layer", into="PP", parts=2),
        split(parts=2),
        place({"PP": 0}, devices=range(first)),
        place({"PP": 1}, devices=range(first, first + second)),
    )
    for plan, verbs in zip(found.plans, ("SR", "RS"), strict=True):
        moved = [x for x in plan.instructions if x.verb in (Verb.SEND, Verb.RECV)]
        assert "".join(x.verb.name[0] for x in moved[:: len(moved) - 1]) == verbs
        assert len(moved) == 4


# faults that the checker found


def biased(model: Model) -> Model:
    """``model`` with a second parameter in every chunk that has parameters."""
    parameters = dict(model.parameters)
    chunks = []
    for chunk in model.chunks:
        names = chunk.parameters
        if names:
            parameters[f"bias.{chunk.index}"] = ParameterFacts((3,), 12, True)
            names = (*names, f"bias.{chunk.index}")
        chunks.append(replace(chunk, parameters=names))
    return replace(model, chunks=tuple(chunks), parameters=parameters)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("region", ["embed", "head"])
def test_a_shared_parameter_with_a_rule_beside_one_without(zero: int, region: str) -> None:
    """One chunk's gradients enter one reduction each microbatch and another at the end."""
    state = replicate({region: 0}, zero=zero, bucket_mb=SMALL)
    judged(biased(tied(2)), split(parts=2), place({}, devices=[0, 1]), state)


def backwards(found: Lowered) -> dict[str, Instruction]:
    return {
        x.name: x
        for plan in found.plans
        for x in plan.instructions
        if isinstance(x.op, Compute) and x.op.which is Pass.B
    }


def test_a_tied_gradient_is_summed_within_each_microbatch_first() -> None:
    """As on one device without microbatches: the last user's gradient is added to that of the user
    before, and so on; the first user's accumulates over the microbatches."""
    model = biased(tying(chain(3), "layers.0.weight", "layers.1.weight", "layers.2.weight"))
    found = backwards(judged(model, split(parts=2), place({}, devices=[0])))
    for m in range(2):
        rows = [found[f"B layer[{i}] MB[{m}]"] for i in range(3)]
        for earlier, later in itertools.pairwise(rows):
            assert later.writes[-1] in earlier.reads
            assert later.writes[-1] not in later.adds
    first = [found[f"B layer[0] MB[{m}]"] for m in range(2)]
    assert first[0].writes[-1] == first[1].adds[-1]


def test_a_tied_gradient_stays_with_its_microbatch_and_group() -> None:
    """Microbatch 0 has both users on device 0; microbatch 1 has one user on each device."""
    found = backwards(
        judged(
            tied(1),
            split(parts=2),
            place({"MB": 0}, devices=[0]),
            place({"MB": 1, "embed": 0}, devices=[0]),
            place({"MB": 1, "embed": "-"}, devices=[1]),
        )
    )
    reads = [len(found[f"B embed[0] MB[{m}]"].reads) for m in range(2)]
    assert reads == [3, 2]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("user", [0, 3], ids=["embed", "head"])
def test_a_tied_parameter_of_which_one_user_makes_no_gradient(user: int, zero: int) -> None:
    """It is held and read there, and updated with the other user's gradients."""
    model = biased(tied(2))
    chunks = list(model.chunks)
    chunks[user] = replace(chunks[user], detached=("embed.weight",))
    model = replace(model, chunks=tuple(chunks))
    found = judged(model, split(parts=2), place({}, devices=[0, 1]), replicate({}, zero=zero))
    rows = backwards(found)
    alone, both = (len(rows[f"B {name}[0] MB[0]"].writes) for name in ("embed", "head"))
    assert (alone, both) == (1, 2)  # its own gradients, and the tied ones that it hands on


@pytest.mark.parametrize("zero", range(4))
def test_parameters_of_which_a_chunk_shares_each_with_another(zero: int) -> None:
    """The second layer shares one parameter with the first and one with the third: no single order
    fits both."""
    model = biased(chain(3))
    names = {2: ("bias.1", "bias.2"), 3: ("layers.2.weight", "bias.2")}
    chunks = tuple(replace(c, parameters=names.get(c.index, c.parameters)) for c in model.chunks)
    unused = ("layers.1.weight", "bias.3")
    parameters = {name: p for name, p in model.parameters.items() if name not in unused}
    model = replace(model, chunks=chunks, parameters=parameters)
    found = judged(
        model, split(parts=2), place({}, devices=[0, 1]), replicate({}, zero=zero, bucket_mb=SMALL)
    )
    rows = backwards(found).values()
    made = {x.writes[-1] for x in rows if "layer" in x.name}
    assert made.isdisjoint(slot for x in rows for slot in x.reads)


@pytest.mark.parametrize(
    ("model", "wheres", "devices"),
    [
        (tied(1), [{"embed": 0}, {"embed": "-"}], [0]),
        (skip(3), [{"layer": [0, 1]}, {"layer": 2}, {"layer": "-", "embed": "-"}], [1]),
        (chain(2), [{"layer": 0}, {"layer": 1}, {"layer": "-"}], [0, 1]),
    ],
    ids=["tied gradients", "transfers", "gathers"],
)
def test_several_places_on_one_group_are_as_one(
    model: Model, wheres: list[dict[str, object]], devices: list[int]
) -> None:
    before = [place({"embed": 0}, devices=[0])] if devices == [1] else []
    rest = {"embed": "-"} if before else {}
    halves, state = split(parts=2), replicate({}, zero=3 if len(devices) > 1 else 0)
    one = judged(model, halves, *before, place(rest, devices=devices), state)
    apart = [place(where, devices=devices) for where in wheres]
    assert judged(model, halves, *before, *apart, state).plans == one.plans


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_parameter_on_two_devices(zero: int) -> None:
    judged(
        tied(1),
        split(parts=2),
        place({"embed": 0}, devices=[0]),
        place({"embed": "-"}, devices=[1]),
        replicate({}, zero=zero),
    )


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_parameter_beside_one_that_one_device_holds(zero: int) -> None:
    """The head's gradients enter a reduction (the tied weight) and an update (its bias)."""
    judged(
        biased(tied(1)),
        split(parts=2),
        place({"embed": 0}, devices=[0]),
        place({"embed": "-"}, devices=[1]),
        replicate({}, zero=zero, bucket_mb=SMALL),
    )


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_stage_on_two_groups(zero: int) -> None:
    judged(
        chain(1),
        split(parts=4),
        place({"MB": [0, 1]}, devices=[0]),
        place({"MB": [2, 3]}, devices=[1]),
        replicate({}, zero=zero),
    )


def experts_on_two_groups(other: list[int], zero: int) -> Lowered:
    return judged(
        moe(1, 4),
        split(parts=2),
        place({"MB": 0}, devices=[0, 1]),
        place({"MB": 1}, devices=other),
        shard({"EP": "*"}),
        replicate({}, zero=zero),
    )


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ([1, 0], "device . would hold two parts"),
        ([1, 2], "device 1 would hold two parts"),
        ([0, 2], "different numbers of devices"),
        ([2, 1], "different numbers of devices"),
    ],
    ids=str,
)
def test_experts_on_two_groups_that_disagree_on_who_holds_which(
    other: list[int], says: str, zero: int
) -> None:
    """[1, 0], [1, 2]: device 1 holds the second half of the experts for one microbatch and the
    first half for the other. [0, 2], [2, 1]: one half is on one device, the other half on two."""
    with pytest.raises(DirectiveError, match=says):
        experts_on_two_groups(other, zero)


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("other", [[0, 1], [2, 3]], ids=str)
def test_experts_on_two_groups_that_agree(other: list[int], zero: int) -> None:
    experts = [b for b in experts_on_two_groups(other, zero).dag.buckets if b.ways == 2]
    holders = ((0,), (1,)) if other == [0, 1] else ((0, 2), (1, 3))
    assert [b.groups for b in experts] == [holders]


def test_a_stream_without_a_name() -> None:
    with contextlib.suppress(DirectiveError):
        judged(chain(1), place({}, devices=[0]), stream({"PASS": "F"}, ""))


def test_a_tensor_of_the_batch_that_groups_of_different_size_read() -> None:
    """Device 0 has all rows of the mask; devices 1 and 2 have half of them each."""
    found = judged(
        masked(2),
        partition("layer", into="PP", parts=2),
        place({"PP": 0}, devices=[0]),
        place({"PP": 1}, devices=[1, 2]),
    )
    mask = masked(2).values[1].nbytes
    held = {
        plan.devices: plan.slots[given.slot].nbytes
        for plan in found.plans
        for given in plan.given
        if given.value == 1
    }
    assert held == {(0,): mask, (1, 2): mask // 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: stream({}, ["a"]),  # type: ignore[arg-type]
        lambda: replicate({}, bucket_mb=float("inf")),
        lambda: replicate({}, bucket_mb=float("nan")),
        lambda: replicate({}, reduce_stream=["a"]),  # type: ignore[arg-type]
    ],
    ids=["stream", "inf", "nan", "reduce_stream"],
)
def test_odd_arguments_are_refused(make: Callable[[], Directive]) -> None:
    with pytest.raises(DirectiveError):
        lowered(chain(1), place({}, devices=[0, 1]), make())


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("devices", [[0], [0, 1]], ids=str)
def test_an_update_waits_for_the_last_use_of_its_parameters(zero: int, devices: list[int]) -> None:
    """The head's gradient may be ready before its BI, which reads the weight, is done."""
    judged(
        chain(1),
        place({}, devices=devices),
        replicate({}, zero=zero, bucket_mb=SMALL),
        stream({"head": 0, "PASS": "B"}, "head"),
        order({"head": 0, "PASS": "BW"}, {"head": 0, "PASS": "BI"}),
    )


def test_an_update_waits_for_who_reads_its_parameters_without_a_gradient() -> None:
    """The first layer uses the second layer's weight, detached. Its backward runs after the second
    layer's, reads the weight and makes no gradient of it."""
    model = biased(tying(chain(2), "layers.1.weight", "layers.0.weight"))
    chunks = list(model.chunks)
    chunks[1] = replace(chunks[1], detached=("layers.1.weight",))
    judged(
        replace(model, chunks=tuple(chunks)),
        place({}, devices=[0]),
        replicate({}, bucket_mb=SMALL),
        stream({"layer": 0, "PASS": "B"}, "other"),
    )


def test_a_batch_counts_as_the_group_sees_it() -> None:
    """A group of four has a quarter of every microbatch."""
    whole = chain(1)
    dag = Strategy([place({}, devices=[0, 1, 2, 3])]).apply(build(whole))
    (plan,) = lower(dag, sizes(whole)).plans
    tokens = whole.values[0].nbytes
    assert [plan.slots[given.slot].nbytes for given in plan.given] == [tokens // 4, tokens // 4]
    assert [given.rows.devices for given in plan.given] == [(0, 1, 2, 3)] * 2


def reduced_bytes(model: Model, devices: int, zero: int) -> int:
    found = lowered(model, place({}, devices=range(devices)), replicate({}, zero=zero))
    (plan,) = found.plans
    (write,) = {x.writes[0] for x in plan.instructions if x.content is Content.GRADIENTS}
    return plan.slots[write].nbytes


def test_a_divided_gradient_is_rounded_up() -> None:
    model = chain(1)
    total = sum(p.nbytes for p in model.parameters.values())
    assert total % 3
    assert reduced_bytes(model, 3, 1) * 3 >= total


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("zero", range(2))
def test_a_bucket_is_frozen_or_trained_and_of_one_dtype(zero: int) -> None:
    """One pass over the parameters in order fills a bucket of each kind."""
    model = mixed(
        biased(chain(2)),
        {
            "layers.0.weight": (BF16, FP32),
            "bias.1": (BF16, BF16),
            "layers.1.weight": (BF16, FP32),
            "bias.2": (BF16, BF16),
        },
    )
    frozen = {name: replace(model.parameters[name], trained=False) for name in ("bias.0", "bias.3")}
    chunks = tuple(
        replace(c, detached=tuple(p for p in c.parameters if p in frozen)) for c in model.chunks
    )
    model = replace(model, chunks=chunks, parameters={**model.parameters, **frozen})
    found = judged(model, place({}, devices=[0, 1]), replicate({}, zero=zero))
    assert [(b.parameters, b.trained, b.dtype, b.gradient) for b in found.dag.buckets] == [
        (("embed.weight", "head.weight"), True, FP32, FP32),
        (("bias.0", "bias.3"), False, FP32, FP32),
        (("layers.0.weight", "layers.1.weight"), True, BF16, FP32),
        (("bias.1", "bias.2"), True, BF16, BF16),
    ]
    updated = [x.op.bucket for x in found.plans[0].instructions if isinstance(x.op, Update)]
    assert sorted(updated) == [0, 2, 3]


def test_a_copy_in_another_precision_counts_as_the_optimizers() -> None:
    """bf16 parameters with fp32 gradients: half the bytes; the fp32 copy is optimizer state."""
    names = chain(2).parameters
    plain = judged(chain(2), place({}, devices=[0])).memory[0]
    half = judged(mixed(chain(2), dict.fromkeys(names, (BF16, FP32))), place({}, devices=[0]))
    assert half.memory[0].parameters == plain.parameters // 2
    assert half.memory[0].optimizer == plain.optimizer + plain.parameters
    gradients = [m.at_peak[MemoryKind.GRADIENTS] for m in (plain, half.memory[0])]
    assert gradients[0] == gradients[1]


def test_frozen_parameters_are_whole_or_in_parts() -> None:
    """256 frozen numbers and 128 trained ones over three devices: only sharded parameters are
    padded, and only zero=3 shards frozen parameters."""
    kept = []
    for zero in range(4):
        found = judged(
            chain(2, trained=False), place({}, devices=[0, 1, 2]), replicate({}, zero=zero)
        )
        kept.append(found.memory[0].parameters)
    regions = 128, 64, 64, 128
    parts = sum(-(-n // 3) for n in regions)
    assert kept == [4 * n for n in (256 + 128, 256 + 129, 256 + 129, parts)]


def test_frozen_parameters_have_no_gradient() -> None:
    model = chain(2, trained=False)
    assert reduced_bytes(model, 2, 0) == model.parameters["head.weight"].nbytes


# changing buffers


def counting(*, streams: bool) -> Lowered:
    """The first layer changes a buffer; with ``streams``, microbatches could overlap."""
    other = [stream({"MB": m}, f"s{m}") for m in range(1, 4)] if streams else []
    return judged(
        changing(chain(2), layer=0),
        split(parts=4),
        place({"layer": 0}, devices=[0]),
        place({"layer": 1}, devices=[1]),
        place({"layer": "-"}, devices=[1]),
        *other,
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_buffer_sees_the_microbatches_in_order(streams: bool) -> None:
    rows = [
        (place_, x)
        for place_, x in enumerate(counting(streams=streams).plans[0].instructions)
        if isinstance(x.op, Compute) and x.op.which is Pass.F
    ]
    assert [x.op.microbatch for _, x in rows if isinstance(x.op, Compute)] == [0, 1, 2, 3]
    if streams:
        assert all(before in x.waits for (before, _), (_, x) in itertools.pairwise(rows))


def following() -> Lowered:
    """The first layer and the head read a buffer that the second layer changes; microbatches and
    the first layer could overlap."""
    return judged(
        FOLLOWING,
        split(parts=4),
        place({}, devices=[0]),
        *(stream({"MB": m}, f"s{m}") for m in range(1, 4)),
        stream({"layer": 0}, "first"),
    )


FOLLOWING = reading(reading(changing(chain(2), layer=1), layer=0), head=0)


def test_a_buffer_that_one_region_reads_and_another_changes() -> None:
    """Every forward that uses it waits for the previous one, microbatch by microbatch."""
    found = following()
    rows = [
        (place_, x)
        for place_, x in enumerate(found.plans[0].instructions)
        if isinstance(x.op, Compute) and x.op.which is Pass.F and x.op.chunk in (1, 2, 3)
    ]
    done = [(x.op.microbatch, x.op.chunk) for _, x in rows if isinstance(x.op, Compute)]
    assert done == [(m, chunk) for m in range(4) for chunk in (1, 2, 3)]
    for (before, b), (_, x) in itertools.pairwise(rows):
        assert before in x.waits or b.stream == x.stream


@pytest.mark.parametrize("reader", ["embed", "layer", "head", "loss"])
def test_a_buffer_that_one_region_reads_and_another_changes_on_two_devices(reader: str) -> None:
    """Also if both of them are on one device and a third region is not."""
    model = reading(changing(chain(2), layer=1), **{reader: 0})
    with pytest.raises(DirectiveError, match="'seen', which changes, on several devices"):
        lowered(model, place({"layer": 1}, devices=[1]), place({"layer": [0]}, devices=[0]), ELSE)


ELSE = place({"layer": "-"}, devices=[0])


def test_a_buffer_that_nobody_changes_may_be_anywhere() -> None:
    judged(reading(chain(2)), split(parts=2), place({}, devices=[0, 1]))


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        (changing(chain(2), layer=1), [place({}, devices=[0, 1])]),
        (
            reading(changing(chain(2), layer=1), head=0),
            [place({"layer": "*"}, devices=[0]), place({"layer": "-"}, devices=[1])],
        ),
        (changing(chain(2), layer=1), [place({}, devices=[0]), stream({"MB": 1}, "other")]),
        (
            reading(changing(chain(2), layer=1), layer=0),
            [
                place({}, devices=[0]),
                order({"layer": 0, "MB": 1, "PASS": "F"}, {"layer": 1, "MB": 0, "PASS": "F"}),
            ],
        ),
    ],
    ids=["one group", "two devices", "two streams", "read too early"],
)
def test_the_checker_sees_who_shares_a_buffer(
    model: Model, steps: list[Directive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these are wrong without the lowering pass that orders buffers."""
    monkeypatch.setattr("piper.lower.lower.keep_buffers", lambda dag, training: dag)
    with pytest.raises(PlanError, match="changing buffer seen"):
        judged(model, split(parts=2), *steps)


def test_what_changes_no_buffer_is_not_held_back() -> None:
    """The buffer orders only its layer: the embedding has the strategy's order."""
    found = judged(
        changing(chain(2), layer=0),
        split(parts=2),
        place({}, devices=[0]),
        order({"embed": 0, "MB": 1, "PASS": "F"}, {"embed": 0, "MB": 0, "PASS": "F"}),
    )
    forwards = [
        (dict(found.dag.model.chunks[x.op.chunk].tags), x.op.microbatch)
        for x in found.plans[0].instructions
        if isinstance(x.op, Compute) and x.op.which is Pass.F
    ]
    assert [m for tags, m in forwards if tags == {"embed": 0}] == [1, 0]
    assert [m for tags, m in forwards if tags == {"layer": 0}] == [0, 1]


# memory


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("devices", [[0], [0, 1]], ids=str)
def test_a_limit_is_kept_to_the_byte(zero: int, devices: list[int]) -> None:
    steps = [split(parts=2), place({}, devices=devices), replicate({}, zero=zero)]
    free = lowered(chain(2), *steps)
    peak = max(memory.peak for memory in free.memory)
    same = lowered(chain(2), *steps, settings=Settings(memory_limit=peak))
    assert same.plans == free.plans
    assert same.memory == free.memory
    with pytest.raises(DirectiveError, match="memory_limit"):
        lowered(chain(2), *steps, settings=Settings(memory_limit=peak - 1))


def test_the_limit_is_for_every_device() -> None:
    """Device 1 needs more than device 0, and the error names it."""
    steps = [place({"embed": 0}, devices=[0]), place({"embed": "-"}, devices=[1])]
    small, large = (memory.peak for memory in lowered(chain(2), *steps).memory)
    assert small < large
    with pytest.raises(DirectiveError, match="device 1 needs"):
        lowered(chain(2), *steps, settings=Settings(memory_limit=small))


def test_the_state_of_the_optimizer_counts() -> None:
    steps = [split(parts=2), place({}, devices=[0])]
    none, adam = (
        lowered(chain(2), *steps, settings=Settings(optimizer=OptimizerCost(n))).memory[0]
        for n in (0, 2)
    )
    assert none.optimizer == 0
    assert adam.optimizer == 2 * adam.parameters
    assert adam.peak - none.peak == adam.optimizer


def test_memory_in_words() -> None:
    model = at(chain(2), 1, whole=4096)
    found = lower(Strategy([place({}, devices=[0])]).apply(build(model)), {1: model})
    assert str(found.memory[0]) == (
        "device 0: peak 46.0 MiB (parameters 1.5 KiB, optimizer 3.0 KiB, saved activations "
        "16.0 MiB, activations 20.0 MiB, batch 2.0 MiB, workspace 8.0 MiB)"
    )


# order of communication


def entered(found: Lowered) -> dict[tuple[int, str, Group], list[int]]:
    """For each device and communicator (a stream and a group), the communications in the order in
    which the device enters them. A transfer's group is its sources and targets."""
    rows: dict[tuple[int, str, Group], list[int]] = {}
    for plan in found.plans:
        for x in plan.instructions:
            if isinstance(x.op, Collective):
                for group in x.op.groups:
                    for device in set(group).intersection(plan.devices):
                        rows.setdefault((device, x.stream, group), []).append(x.node)
            elif isinstance(x.op, Transfer):
                stream_ = x.stream.rsplit("/", 1)[0]
                ends = (*x.op.source, -1, *x.op.target)
                for device in plan.devices:
                    row = rows.setdefault((device, stream_, ends), [])
                    row += [x.node] if x.node not in row else []
    return rows


def crossed() -> Lowered:
    """Two stages on two groups each, in opposite directions, all on two shared streams: every
    device is in many communicators, and the orders of the stages differ."""
    names = ("s", "t")
    halves = [{"PP": s, "MB": [2 * h, 2 * h + 1]} for h in range(2) for s in range(2)]
    groups = [[0, 1], [2, 3], [2, 3], [0, 1]]
    placed = [
        place(where, devices=group, stream=names[i // 2])
        for i, (where, group) in enumerate(zip(halves, groups, strict=True))
    ]
    return judged(
        moe(2, 4),
        partition("layer", into="PP", parts=2),
        split(parts=4),
        *placed,
        replicate({"EP": "-"}, zero=2, bucket_mb=SMALL, reduce_stream="s", gather_stream="t"),
        replicate({"EP": "*"}, zero=1, reduce_stream="t", gather_stream="s"),
        shard({"EP": "*"}, stream="s"),
        order(*({"PP": 0, "MB": m, "PASS": p} for p in "FB" for m in (0, 2, 1, 3))),
        order(*({"PP": 1, "MB": m, "PASS": p} for p in "FB" for m in (2, 3, 0, 1))),
    )


@pytest.mark.parametrize("name", ["published", "uneven", "crossed", "zero=3"])
def test_all_members_of_a_communicator_enter_it_in_one_order(name: str) -> None:
    """No strategy can make two devices enter communications in different orders: all orders come
    from one simulated execution, and a contradiction is refused as a cycle."""
    rows = entered(MADE[name]())
    by_communicator: dict[tuple[str, Group], set[tuple[int, ...]]] = {}
    for (_, stream_, group), row in rows.items():
        by_communicator.setdefault((stream_, group), set()).add(tuple(row))
    assert len(by_communicator) > 1
    for communicator, orders in by_communicator.items():
        assert len(orders) == 1, communicator


def test_the_checker_sees_two_orders_of_communication() -> None:
    """Devices 0 and 2 would sum the losses before they receive an earlier message of 1 and 3."""
    found = published()
    plan, other = found.plans
    rows = list(plan.instructions)
    last = next(i for i, x in enumerate(rows) if x.content is Content.LOSS)
    assert rows[last - 1].verb is Verb.RECV
    moved = {last: last - 1, last - 1: last}
    rows[last - 1], rows[last] = rows[last], rows[last - 1]
    rows = [structs.replace(x, waits=tuple(moved.get(w, w) for w in x.waits)) for x in rows]
    with pytest.raises(PlanError, match="enter node"):
        check(found.dag, (replace(plan, instructions=tuple(rows)), other), models=sizes(moe(2, 4)))


# the checker finds every fault


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """``plan`` with one wait, end, free, allocation or instruction removed; not waits that others
    imply."""
    implied = implied_waits(plan)
    rows = plan.instructions
    for place_, x in enumerate(rows):
        for field in ("waits", "ends", "frees", "allocates"):
            for item in getattr(x, field):
                if field != "waits" or (place_, item) not in implied:
                    row = tuple(o for o in getattr(x, field) if o != item)
                    fewer = structs.replace(x, **{field: row})
                    changed = (*rows[:place_], fewer, *rows[place_ + 1 :])
                    yield f"{field} {item} of {place_}", replace(plan, instructions=changed)
        left = tuple(_without(y, place_) for y in (*rows[:place_], *rows[place_ + 1 :]))
        yield f"{x.verb.value} {place_} {x.name}", replace(plan, instructions=left)


def _without(x: Instruction, gone: int) -> Instruction:
    waits, ends = ([w - (w > gone) for w in row if w != gone] for row in (x.waits, x.ends))
    return structs.replace(x, waits=tuple(waits), ends=tuple(ends))


def uneven() -> Lowered:
    return judged(
        skip(3),
        partition("layer", into="PP", parts=2),
        split(parts=2),
        remat({"layer": 1}, "all"),
        place({"PP": 0}, devices=[0]),
        place({"PP": 1}, devices=[1, 2]),
        stream({"PASS": "F"}, "forward"),
        order(*({"PP": 1, "MB": m, "PASS": p} for p in ("F", "BI", "BW") for m in (1, 0))),
    )


def sharing() -> Lowered:
    """Tied parameters beside others, on two devices, with a stream for each backward."""
    return judged(
        SHARING,
        split(parts=2),
        place({}, devices=[0, 1]),
        replicate({}, zero=2, bucket_mb=SMALL),
        *(stream({"layer": i, "PASS": "B"}, f"s{i}") for i in range(3)),
    )


SHARING = biased(tying(tied(3), "layers.0.weight", "layers.1.weight", "layers.2.weight"))


MADE = {
    "published": published,
    "uneven": uneven,
    "crossed": crossed,
    "clipped": lambda: two_stages(clip=True, counted=True),
    "counting": lambda: counting(streams=True),
    "following": following,
    "sharing": sharing,
    **{f"zero={zero}": lambda zero=zero: two_devices(zero, bucket_mb=SMALL) for zero in range(4)},
}


MODELS: dict[str, Model] = {
    "published": moe(2, 4),
    "uneven": skip(3),
    "crossed": moe(2, 4),
    "clipped": chain(1, counted=True),
    "counting": changing(chain(2), layer=0),
    "following": FOLLOWING,
    "sharing": SHARING,
}


def missed(name: str, make: Callable[[Plan], Iterator[tuple[str, Plan]]]) -> list[str]:
    """The mutants of valid plans that the checker accepts; "too few" if few were tried."""
    found = MADE[name]()
    models = sizes(MODELS.get(name, chain(2)))
    passed, tried = [], 0
    for c, plan in enumerate(found.plans):
        for what, mutant in make(plan):
            tried += 1
            plans = (*found.plans[:c], mutant, *found.plans[c + 1 :])
            try:
                check(found.dag, plans, clip=name == "clipped", models=models)
            except PlanError:
                continue
            passed.append(f"{plan.devices}: {what}")
    return passed if tried > 50 else ["too few"]


LONG = {name: pytest.param(name, marks=pytest.mark.slow) for name in ("crossed", "counting")}
"""The cases with by far the longest plans."""


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize("name", [LONG.get(name, name) for name in MADE])
def test_the_checker_sees_every_fault(name: str) -> None:
    assert not missed(name, mutants)


def slips(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """``plan`` with one wrong entry: a batch tensor, a slot, a seed or an instruction's field."""
    for i, given in enumerate(plan.given):
        for wrong in (
            given._replace(microbatch=given.microbatch + 1),
            given._replace(value=given.value + 1),
            given._replace(rows=given.rows._replace(devices=(*given.rows.devices, 99))),
        ):
            changed = (*plan.given[:i], wrong, *plan.given[i + 1 :])
            yield f"{given} as {wrong}", replace(plan, given=changed)
    for i, x in enumerate(plan.instructions):
        for wrong in _slips(x):
            rows = (*plan.instructions[:i], wrong, *plan.instructions[i + 1 :])
            yield f"{i} {x.name} as {wrong}", replace(plan, instructions=rows)
    for i, seed in enumerate(plan.seeds):
        for wrong in (
            seed._replace(value=seed.value + 1),
            seed._replace(group=seed.group + 1),
            seed._replace(parts=seed.parts + 1),
        ):
            changed = (*plan.seeds[:i], wrong, *plan.seeds[i + 1 :])
            yield f"{seed} as {wrong}", replace(plan, seeds=changed)
    for i, slot in enumerate(plan.slots):
        for wrong in _other_slots(slot):
            changed = (*plan.slots[:i], wrong, *plan.slots[i + 1 :])
            yield f"s{i} as {wrong}", replace(plan, slots=changed)


def _other_slots(slot: Slot) -> Iterator[Slot]:
    yield replace(slot, nbytes=slot.nbytes + 1)
    yield replace(slot, own=slot.own + 1)
    yield replace(slot, holder=MemoryKind.WORKSPACE)
    yield replace(slot, bucket=99 if slot.bucket is None else None)
    if slot.names:
        yield replace(slot, names=slot.names[:-1])
        yield replace(slot, dtypes=(torch.int8, *slot.dtypes[1:]))
    if slot.lies_in:
        yield replace(slot, lies_in=())


def _slips(x: Instruction) -> Iterator[Instruction]:
    if x.buckets or x.verb is Verb.UPDATE:
        yield structs.replace(x, buckets=(*x.buckets, 99))
    for weight in x.weights:
        yield structs.replace(x, weights=(weight + 1, *x.weights[1:]))
    for slot in x.reads:
        yield structs.replace(x, reads=tuple(s for s in x.reads if s != slot))
    yield structs.replace(x, rows=RowShards((99,)))
    yield structs.replace(x, op=Update(99))
    if x.content is not None:
        yield structs.replace(x, of=x.of + 1)
        for content in Content:
            if content is not x.content:
                yield structs.replace(x, content=content)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", [LONG.get(name, name) for name in MADE])
def test_the_checker_sees_every_slip(name: str) -> None:
    assert not missed(name, slips)


def test_the_checker_knows_what_experts_made_from_what_came_back() -> None:
    """The experts' backward reads their output before the combine; other passes, after it."""
    found = published()
    plan = found.plans[0]
    rows = plan.instructions
    back = next(i for i, x in enumerate(rows) if isinstance(x.op, Collective) and x.op.combines)
    (made,), (came,) = rows[back].reads, rows[back].writes
    after = next(i for i, x in enumerate(rows) if came in x.reads and x.verb is Verb.COMPUTE)
    backward = next(i for i, x in enumerate(rows) if made in x.reads and i > after)
    assert "B layer[0] EP[0]" in rows[backward].name

    def renamed(x: Instruction) -> Instruction:
        swapped = {made: came, came: made}
        return structs.replace(x, reads=tuple(swapped.get(s, s) for s in x.reads))

    early = (*rows[:after], renamed(rows[after]), *rows[after + 1 :])
    late = (*rows[: after + 1], *(renamed(x) for x in rows[after + 1 :]))
    for changed, wants in ((early, "plain"), (late, "uncombined")):
        mutant = replace(plan, instructions=changed)
        with pytest.raises(PlanError, match=rf"wants .*form='{wants}'"):
            check(found.dag, (mutant, *found.plans[1:]), models=sizes(moe(2, 4)))


def test_the_checker_counts_memory_itself() -> None:
    found = two_devices(1)
    (memory,) = found.memory
    swapped = {**memory.at_peak}
    swapped[MemoryKind.SAVED] += 8
    swapped[MemoryKind.ACTIVATIONS] -= 8
    for wrong in (
        replace(memory, peak=memory.peak + 8),
        replace(memory, peak_at=memory.peak_at + 1),
        replace(memory, parameters=memory.parameters + 8, optimizer=memory.optimizer - 8),
        replace(memory, at_peak=swapped),
        replace(memory, over_time=(*memory.over_time[:-1], (0, 0))),
    ):
        with pytest.raises(PlanError):
            check(found.dag, found.plans, [wrong], models=sizes(chain(2)))


# the compiler's own checks of its plans


def test_messages_on_one_communicator_arrive_in_the_order_in_which_they_are_sent() -> None:
    """Also those of different groups: device 0 sends to 1 alone, and to 1 and 2."""
    found = lowered(
        chain(3),
        split(parts=2),
        place({"embed": 0}, devices=[0]),
        place({"layer": 0}, devices=[1]),
        place({"layer": 1}, devices=[0]),
        place({"layer": 2}, devices=[1, 2]),
        place({"head": 0}, devices=[0]),
        place({"loss": 0}, devices=[0]),
    )
    verify_plans(found.dag, found.classes, found.plans)
    index = next(i for i, plan in enumerate(found.plans) if plan.devices == (1,))
    rows = found.plans[index].instructions
    receives = [
        i
        for i, x in enumerate(rows)
        if x.verb is Verb.RECV and isinstance(x.op, Transfer) and 0 in x.op.source
    ]
    assert len({rows[i].op for i in receives}) > 1
    for first, second in itertools.combinations(receives, 2):
        turned = list(rows)
        for place_, other in ((first, second), (second, first)):
            turned[place_] = structs.replace(rows[place_], node=rows[other].node, op=rows[other].op)
        plans = list(found.plans)
        plans[index] = replace(plans[index], instructions=tuple(turned))
        with pytest.raises(PiperError, match="several orders"):
            verify_plans(found.dag, found.classes, plans)
