"""Every refusal of the strategy language, in one table: the mistake and parts of its message.

A message names the directive as the user wrote it, the place in the user's own names, and the fix.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import piper
from piper import Mesh
from piper.base.errors import DirectiveError, PiperError
from piper.ir.dag.build import build
from piper.ir.dag.facts import Model
from piper.ir.rules import OptimizerCost
from piper.lower.lower import Settings, lower
from piper.strategies import dualpipe, mesh
from piper.strategies.directives import (
    Directive,
    Place,
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
from tests.facts import at, chain, changing, masked, moe, reading, tied, tying

STAGES = partition("layer", into="PP", parts=2)
ALL_ON_0 = place({}, devices=[0])
TWO_STAGES = [STAGES, split(parts=2), place({"PP": 0}, devices=[0]), place({"PP": 1}, devices=[1])]


@dataclass(frozen=True)
class Mistake:
    """A directive that must be refused after some others, and parts of the message."""

    name: str
    wrong: Directive
    says: Sequence[str]
    after: Sequence[Directive] = ()
    model: Callable[[], Model] = lambda: chain(2)


def bare_experts() -> Model:
    """A model whose EP region also has a parameter that all experts share, like a common bias."""
    model = moe(1, 4)
    vector = replace(model.parameters["embed.weight"], shape=())
    return _with(model, {"experts.0": model.parameters["experts.0"], "scale": vector})


def mixed_experts() -> Model:
    """A model whose EP region also has the router."""
    model = moe(1, 4)
    router = replace(model.parameters["embed.weight"], shape=(8, 4))
    return _with(model, {"experts.0": model.parameters["experts.0"], "router": router})


def _bare() -> Model:
    """A model without any tags."""
    model = chain(1)
    return replace(model, chunks=tuple(replace(c, tags={}) for c in model.chunks))


def _with(model: Model, parameters: dict[str, Any]) -> Model:
    chunks = tuple(
        replace(c, parameters=tuple(parameters)) if "EP" in c.tags else c for c in model.chunks
    )
    return replace(model, chunks=chunks, parameters={**model.parameters, **parameters})


def f_and_b(stage: int, passes: str) -> Directive:
    """An order of one stage, from a text such as ``"F0 B0"``."""
    return order(*({"PP": stage, "MB": int(p[-1]), "PASS": p[:-1]} for p in passes.split()))


MISTAKES = [
    # filters
    Mistake(
        "unknown tag",
        place({"PPP": 0}, devices=[0]),
        ["{'PPP': 0}", "unknown tag 'PPP'", "embed 0; PASS F, B; layer 0, 1; head 0; loss 0"],
    ),
    Mistake(
        "no match",
        place({"layer": 7}, devices=[0]),
        ["{'layer': 7} matches nothing", "layer 0..2"],
        model=lambda: chain(3),
    ),
    Mistake("MB before split", place({"MB": 0}, devices=[0]), ["unknown tag 'MB'"]),
    Mistake("absent tag", place({"PASS": "-"}, devices=[0]), ["matches nothing"]),
    Mistake(
        "empty list", place({"layer": []}, devices=[0]), ["'layer'", "one of an empty list", "[]"]
    ),
    Mistake(
        "unknown pass", place({"PASS": "FW"}, devices=[0]), ["PASS is one of F, B, BI, BW", "'FW'"]
    ),
    Mistake("pass as a number", stream({"PASS": 0}, "s"), ["PASS is one of F, B, BI, BW", "not 0"]),
    Mistake(
        "a string for a number",
        remat({"layer": "0"}, "all"),
        ["'layer'", "'0'", "give a number", "'*' (has the tag)", "'-' (does not have it)"],
    ),
    Mistake("a truth value", place({"layer": True}, devices=[0]), ["'layer'", "True"]),
    Mistake("no mapping", Place(["PP"], (0,)), ["a mapping from tag to value", "['PP']"]),  # type: ignore[arg-type]
    # partition
    Mistake(
        "no parts", partition("layer", into="PP", parts=0), ["parts=0", "positive whole number"]
    ),
    Mistake(
        "into exists",
        partition("layer", into="head", parts=2),
        ["'head' already exists", "another name"],
    ),
    Mistake(
        "no region",
        partition("block", into="PP", parts=2),
        ["no region is tagged 'block'", "embed, head, layer, loss"],
    ),
    Mistake(
        "no regions at all",
        partition("layer", into="PP", parts=2),
        ["no region 'layer', nor any other, to make 2 stages of", "piper.annotate", "tags="],
        model=_bare,
    ),
    Mistake(
        "too many parts",
        partition("layer", into="PP", parts=3),
        ["3 parts of 2 regions 'layer'", "at most 2"],
    ),
    *(
        Mistake(
            f"counts {counts}",
            partition("layer", into="PP", parts=2, by=counts),
            [f"by={counts}", "2 positive counts that add up to 3", "'layer'"],
            model=lambda: chain(3),
        )
        for counts in ([1, 1], [3], [3, 0], [1, 1, 1], [1.5, 1.5], ["1", "2"])
    ),
    Mistake(
        "unknown measure",
        partition("layer", into="PP", parts=2, by="time"),
        ["by='time' is unknown", "'flops', 'params'", "mapping"],
    ),
    Mistake(
        "cost that is no number",
        partition("layer", into="PP", parts=2, by={0: "fast", 1: "slow"}),  # type: ignore[dict-item]
        ["'fast'"],
    ),
    Mistake(
        "cost of a region that is not there",
        partition("layer", into="PP", parts=2, by={0: 1.0, 7: 1.0}),
        ["7"],
    ),
    # split
    Mistake("split in no parts", split(parts=0), ["parts=0", "positive whole number"]),
    Mistake("split in half a part", split(parts=0.5), ["parts=0.5"]),  # type: ignore[arg-type]
    Mistake("split in true", split(parts=True), ["parts=True"]),
    Mistake("split twice", split(into="M2", parts=2), ["already split, into 'MB'"], TWO_STAGES),
    Mistake("split into a region", split(into="layer", parts=2), ["'layer' already exists"]),
    Mistake(
        "split after order",
        split(parts=2),
        ["already ordered", "split before order"],
        [ALL_ON_0, order({"layer": 0, "PASS": "F"}, {"layer": 0, "PASS": "B"})],
    ),
    Mistake("split a part", split({"layer": 0}, parts=2), ["a part of the model", "where={}"]),
    Mistake(
        "uneven batch",
        split(parts=3),
        ["a batch of 8 does not divide into 3 microbatches", "1, 2, 4, 8", "microbatches= of mesh"],
    ),
    # place
    Mistake("no device", place({}, devices=[]), ["devices=[]", "at least one"]),
    Mistake("negative device", place({}, devices=[0, -1]), ["devices=[0, -1]", "device numbers"]),
    Mistake("named device", place({}, devices=["cuda:0"]), ["devices=['cuda:0']"]),  # type: ignore[list-item]
    Mistake("device twice", place({}, devices=[1, 1]), ["devices=[1, 1] names a device twice"]),
    Mistake(
        "placed twice",
        place({"layer": 1}, devices=[1]),
        ["F layer[1]", "already placed, on [0] by place({}, devices=[0])", "disjoint"],
        [ALL_ON_0],
    ),
    Mistake(
        "placed twice around a split",
        place({"layer": 1}, devices=[1]),
        ["already placed, on [0] by place({}, devices=[0])"],
        [ALL_ON_0, split(parts=2)],
    ),
    Mistake(
        "passes apart",
        place({"PASS": "B"}, devices=[1]),
        ["B loss[0] is placed on [1]", "other passes", "on [0]", "place all passes"],
        [place({"PASS": "F"}, devices=[0])],
    ),
    # replicate
    Mistake("level 4", replicate({}, zero=4), ["zero=4", "0, 1, 2 or 3"]),
    Mistake("level -1", replicate({}, zero=-1), ["zero=-1", "0, 1, 2 or 3"]),
    Mistake("no bucket", replicate({}, bucket_mb=0), ["bucket_mb=0 must be a positive number"]),
    Mistake("bucket in words", replicate({}, bucket_mb="25"), ["bucket_mb='25'"]),  # type: ignore[arg-type]
    Mistake(
        "ruled twice",
        replicate({"layer": 0}, zero=1),
        ["the state of layer[0] already has a rule: replicate({})", "{'EP': '-'}"],
        [replicate({})],
    ),
    Mistake(
        "elsewhere",
        replicate({"PP": 0}, devices=[0, 1]),
        ["devices=[0, 1]", "placed on [0]"],
        TWO_STAGES,
    ),
    Mistake(
        "two levels",
        replicate({"head": 0}, zero=2),
        ["'embed.weight'", "embed[0] with zero=1", "head[0] with zero=2", "the same level"],
        [replicate({"embed": 0}, zero=1)],
        lambda: tied(2),
    ),
    # shard
    Mistake(
        "shard unplaced",
        shard({"EP": "*"}),
        ["F layer[0] EP[0] is not placed yet", "place it before"],
        model=lambda: moe(1, 4),
    ),
    Mistake(
        "ways",
        shard({"EP": "*"}, ways=2),
        ["ways=2 does not divide the 3 devices of F layer[0] EP[0]"],
        [place({}, devices=[0, 1, 2])],
        lambda: moe(1, 4),
    ),
    *(
        Mistake(
            f"{ways} ways",
            shard({"EP": "*"}, ways=ways),
            [f"ways={ways}"],
            [place({}, devices=[0, 1])],
            lambda: moe(1, 4),
        )
        for ways in (0, -1, -2)
    ),
    Mistake(
        "sharded twice",
        shard({"EP": 0}),
        ["F layer[0] EP[0] is already sharded, 2 ways by shard({'EP': '*'})"],
        [place({}, devices=[0, 1]), shard({"EP": "*"})],
        lambda: moe(1, 4),
    ),
    Mistake(
        "groups of different size",
        shard({"EP": "*"}),
        ["[0, 1]", "[2, 3, 4, 5]"],
        [split(parts=2), place({"MB": 0}, devices=[0, 1]), place({"MB": 1}, devices=[2, 3, 4, 5])],
        lambda: moe(1, 4),
    ),
    Mistake(
        "no such dimension",
        shard({"EP": "*"}),
        ["F layer[0] EP[0] cannot be sharded", "scale has shape []", "no dimension 0"],
        [place({}, devices=[0, 1])],
        bare_experts,
    ),
    Mistake(
        "router inside",
        shard({"EP": "*"}),
        ["mixes experts", "experts.0 has 4, router has 8", "experts alone"],
        [place({}, devices=[0, 1])],
        mixed_experts,
    ),
    Mistake(
        "nothing to shard",
        shard({"loss": 0}),
        ["F loss[0] has no parameters to shard"],
        [place({}, devices=[0, 1])],
    ),
    Mistake(
        "uneven experts",
        shard({"EP": "*"}),
        ["4 experts do not divide over 3 devices", "1, 2, 4"],
        [place({}, devices=[0, 1, 2])],
        lambda: moe(1, 4),
    ),
    Mistake(
        "not expert-major",
        shard({"layer": 0}),
        [
            "F layer[0] mixes experts",
            "layer0 has shape [4, 8, 8]",
            "[8, rows, ...]",
            "outside the region",
        ],
        [place({}, devices=[0, 1])],
        lambda: _square(chain(1)),
    ),
    Mistake(
        "a number for each expert",
        shard({"EP": "*"}),
        ["rows0 has shape [4]", "not expert-major ([4, rows, ...])"],
        [place({}, devices=[0, 1])],
        lambda: _flat(moe(1, 4)),
    ),
    # order
    Mistake(
        "order unplaced",
        order({"layer": 0, "PASS": "F"}),
        ["F layer[0] is not placed yet", "before ordering"],
    ),
    Mistake(
        "ordered twice",
        order({"PP": 0, "PASS": "F"}, {"PP": 0, "MB": 1, "PASS": "F"}),
        [
            "F embed[0] PP[0] MB[1] is ordered twice",
            "{'PP': 0, 'PASS': 'F'}",
            "{'PP': 0, 'MB': 1, 'PASS': 'F'}",
        ],
        TWO_STAGES,
    ),
    Mistake(
        "order of an unknown tag",
        order({"PPP": 0, "PASS": "F"}),
        ["unknown tag 'PPP'", "PP 0, 1"],
        TWO_STAGES,
    ),
    Mistake(
        "order of halves of an unknown tag",
        order({"PPP": 0, "MB": 0, "PASS": "BI"}),
        ["unknown tag 'PPP'", "PP 0, 1"],
        TWO_STAGES,
    ),
    Mistake(
        "order of halves of a microbatch that is not there",
        order({"PP": 0, "MB": 9, "PASS": "BW"}),
        ["matches nothing", "MB 0, 1"],
        TWO_STAGES,
    ),
    Mistake(
        "order of a whole backward that is divided",
        f_and_b(0, "B0 F1"),
        ["matches nothing", "PASS F, B, BI, BW"],
        [*TWO_STAGES, f_and_b(0, "BI0 BW0")],
    ),
    Mistake(
        "order with a bad filter",
        order({"PP": "x"}),
        ["order(", "'PP'", "give a number"],
        TWO_STAGES,
    ),
    Mistake(
        "against the flow of data",
        f_and_b(0, "B0 F0"),
        ["B PP[0] MB[0] @0  before, by 5:order", "F PP[0] MB[0] @0  feeds", "change one"],
        TWO_STAGES,
    ),
    Mistake(
        "BW before its BI",
        f_and_b(0, "BW0 BI0"),
        ["BW PP[0] MB[0] @0  before, by 5:order", "BI PP[0] MB[0] @0  feeds"],
        TWO_STAGES,
    ),
    Mistake(
        "two orders against each other",
        f_and_b(0, "F1 F0"),
        ["F PP[0] MB[0] @0  before, by 5:order", "F PP[0] MB[1] @0  before, by 6:order"],
        [*TWO_STAGES, f_and_b(0, "F0 F1")],
    ),
    # stream and remat
    *(
        Mistake(
            f"no share of a GPU: {sms!r}",
            stream({}, "s", sms=sms),  # type: ignore[arg-type]
            [f"sms={sms!r}", "must be a positive whole number, or 'rest'"],
        )
        for sms in (0, -8, True, 8.0, "all", ["rest"])
    ),
    Mistake("unknown policy", remat({}, "some"), ["policy='some'", "none, min-cut, all"]),
]


@dataclass(frozen=True)
class Refusal:
    """Directives that are valid one by one but cannot be lowered together, and parts of the
    message."""

    name: str
    strategy: Sequence[Directive]
    says: Sequence[str]
    model: Callable[[], Model] = lambda: chain(2)
    settings: Settings = field(default_factory=Settings)


ON_TWO = [split(parts=2), place({"MB": 0}, devices=[0]), place({"MB": 1}, devices=[1])]


def large() -> Model:
    """A chain with activations of 4 MiB, or 2 MiB on each of two devices."""
    return at(chain(2), 1, whole=4096)


REFUSALS = [
    Refusal(
        "not placed",
        [place({"layer": "*"}, devices=[0])],
        ["F embed[0] is not placed on any device", "add a place"],
    ),
    Refusal(
        "a microbatch in two parts on one device",
        [
            place({"layer": 1}, devices=[0, 1]),
            place({"layer": [0, 2]}, devices=[0]),
            place({"layer": "-"}, devices=[0]),
        ],
        ["inputs[1]", "on [0, 1]", "one of [0]", "same devices", "place({'layer': 1}"],
        lambda: masked(3),
    ),
    Refusal(
        "a copy divided over a number that does not divide its holders",
        [place({}, devices=range(4)), replicate({}, zero=1, within=3)],
        ["within=3", "'embed.weight'", "held by 4 devices", "within=1 or 2 or 4"],
    ),
    Refusal(
        "a copy divided over devices that do not compute together",
        [
            split(parts=2),
            place({"MB": 0}, devices=[0, 1]),
            place({"MB": 1}, devices=[2, 3]),
            replicate({}, zero=3, within=4),
        ],
        ["within=4", "'embed.weight'", "held by 2 devices", "use within=1 or 2"],
    ),
    Refusal(
        "experts divided by shard and by ZeRO-3 over the same devices",
        [place({}, devices=[0, 1]), replicate({}, zero=3), shard({"EP": "*"})],
        [
            "replicate({}, zero=3)",
            "shard({'EP': '*'})",
            "EP[0]",
            "over 0,1",
            "replicate({'EP': '-'}, zero=3)",
            "replicate({'EP': '*'}, zero=0)",
        ],
        lambda: moe(1, 4),
    ),
    Refusal(
        "two parts of the experts",
        [
            split(parts=2),
            place({"MB": 0}, devices=[0, 1]),
            place({"MB": 1}, devices=[1, 0]),
            shard({"EP": "*"}),
        ],
        ["device", "two parts of 'experts.0'", "[0, 1]", "[1, 0]", "same order in every place"],
        lambda: moe(1, 4),
    ),
    *(
        Refusal(
            f"parts of the experts with holders {holders}",
            [
                split(parts=2),
                place({"MB": 0}, devices=[0, 1]),
                place({"MB": 1}, devices=other),
                shard({"EP": "*"}),
            ],
            ["parts of 'experts.0'", f"different numbers of devices ({holders})", "(place, shard)"],
            lambda: moe(1, 4),
        )
        for other, holders in [([0, 2], "[0], [1, 2]"), ([2, 1], "[0, 2], [1]")]
    ),
    Refusal(
        "tied experts in different parts",
        [
            partition("layer", into="PP", parts=2),
            place({"PP": 0}, devices=[0, 1]),
            place({"PP": 1}, devices=[2, 3, 4, 5]),
            shard({"EP": "*"}),
        ],
        ["'experts.0'", "2 ways by shard({'EP': '*'})", "4 ways by", "shard all of them alike"],
        lambda: tying(moe(2, 4), "experts.0", "experts.1"),
    ),
    Refusal(
        "a changing buffer on a group",
        [place({}, devices=[0, 1])],
        [
            "F layer[0] uses the buffer 'seen', which changes",
            "several devices ([0, 1]; place({}, devices=[0, 1]))",
            "place all regions that use it on one device",
            "eval()",
        ],
        lambda: changing(chain(2), layer=0),
    ),
    Refusal(
        "a changing buffer on two groups",
        ON_TWO,
        [
            "F layer[0] MB[0] uses the buffer 'seen', which changes",
            "([0, 1]; place({'MB': 0}, devices=[0]), place({'MB': 1}, devices=[1]))",
        ],
        lambda: changing(chain(2), layer=0),
    ),
    *(
        Refusal(
            f"a buffer that changes in {region} and is read elsewhere",
            TWO_STAGES,
            [
                f"F {first} MB[0] uses the buffer 'seen', which changes",
                "([0, 1]; place({'PP': 0}, devices=[0]), place({'PP': 1}, devices=[1]))",
            ],
            model,
        )
        for region, first, model in [
            ("layer 0", "layer[0] PP[0]", lambda: reading(changing(chain(2), layer=0), head=0)),
            ("the head", "embed[0] PP[0]", lambda: reading(changing(chain(2), head=0), embed=0)),
        ]
    ),
    Refusal(
        "microbatches against a changing buffer",
        [split(parts=2), ALL_ON_0, order({"MB": 1, "PASS": "F"}, {"MB": 0, "PASS": "F"})],
        [
            "F MB[1] @0  before, by 3:order",
            "F MB[0] @0  before, by 4:buffers change in the order of microbatches",
            "is buffers change in the order of microbatches (seen)",
        ],
        lambda: changing(chain(2), layer=0),
    ),
    Refusal(
        "activations above the limit",
        [split(parts=2), place({}, devices=[0, 1]), replicate({}, zero=1)],
        [
            "memory_limit=31,457,280 is not enough",
            "devices 0,1 need 39,865,348 bytes (38.0 MiB)",
            "at instruction 12 (B loss[0] MB[0])",
            "the largest holders: saved activations 16.0 MiB, activations 16.0 MiB, "
            "workspace 4.0 MiB, batch 2.0 MiB",
            "remat",
            "more microbatches",
        ],
        large,
        Settings(memory_limit=30 * 2**20),
    ),
    Refusal(
        "parameters above the limit",
        [place({}, devices=[0])],
        [
            "memory_limit=1,000 is not enough",
            "device 0 needs 166,920 bytes (163.0 KiB)",
            "largest holders: optimizer 150.0 KiB, activations 5.0 KiB",
            "zero level",
        ],
        settings=Settings(memory_limit=1000, optimizer=OptimizerCost(100.0)),
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name.replace(" ", "-"))
def test_what_cannot_be_lowered_is_refused_by_name(refusal: Refusal) -> None:
    model = refusal.model()
    dag = Strategy(refusal.strategy).apply(build(model))
    with pytest.raises(DirectiveError) as caught:
        lower(dag, {n: at(model, n) for n in (1, 2, 4)}, refusal.settings)
    for part in refusal.says:
        assert part in str(caught.value), str(caught.value)


def _flat(model: Model) -> Model:
    """The model with one number per expert as the rows of its experts."""
    values = tuple(replace(v, shape=v.shape[:1]) if v.name == "rows0" else v for v in model.values)
    return replace(model, values=values)


def _square(model: Model) -> Model:
    """A first layer whose weight could be eight experts, but whose output is not expert-major."""
    values = list(model.values)
    values[3] = replace(values[3], shape=(4, 8, 8))
    return replace(model, values=tuple(values))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name.replace(" ", "-"))
def test_mistakes_are_refused_by_name(mistake: Mistake) -> None:
    before = Strategy(mistake.after).apply(build(mistake.model()))
    with pytest.raises(DirectiveError) as caught:
        mistake.wrong.apply(before)
    message = str(caught.value)
    assert message.startswith(f"{mistake.wrong.name}("), message
    for part in mistake.says:
        assert part in message, message


def test_the_deadlock_of_two_schedules_is_drawn() -> None:
    """Stage 0 waits for B0 before it sends F1; stage 1 waits for F1 before it returns B0."""
    ours, theirs = f_and_b(0, "F0 B0 F1 B1"), f_and_b(1, "F0 F1 B0 B1")
    with pytest.raises(DirectiveError) as caught:
        Strategy([*TWO_STAGES, ours, theirs]).apply(build(chain(2)))
    first = (
        "order([{'PP': 0, 'MB': 0, 'PASS': 'F'}], [{'PP': 0, 'MB': 0, 'PASS': 'B'}], "
        "[{'PP': 0, 'MB': 1, 'PASS': 'F'}], [{'PP': 0, 'MB': 1, 'PASS': 'B'}])"
    )
    second = (
        "order([{'PP': 1, 'MB': 0, 'PASS': 'F'}], [{'PP': 1, 'MB': 1, 'PASS': 'F'}], "
        "[{'PP': 1, 'MB': 0, 'PASS': 'B'}], [{'PP': 1, 'MB': 1, 'PASS': 'B'}])"
    )
    drawn = """
          B PP[0] MB[0] @0  before, by 5:order,
          F PP[0] MB[1] @0  feeds
          F PP[1] MB[1] @1  before, by 6:order,
          B PP[1] MB[0] @1  feeds
          B PP[0] MB[0] @0
    """
    assert str(caught.value) == "\n".join(
        [
            f"{second}: the orders contradict each other or the flow of data, so that no device "
            "could continue:",
            *textwrap.indent(textwrap.dedent(drawn).strip(), "  ").splitlines(),
            f"  5:order is {first}",
            f"  6:order is {second}",
            "change one of these orders",
        ]
    )


@pytest.mark.parametrize("between", [stream({"PP": 0}, "s"), remat({"PP": 0}, "all")], ids=str)
def test_a_deadlock_names_the_orders_and_not_what_came_between(between: Directive) -> None:
    strategy = [*TWO_STAGES, f_and_b(0, "F0 B0 F1 B1"), between, f_and_b(1, "F0 F1 B0 B1")]
    with pytest.raises(DirectiveError) as caught:
        Strategy(strategy).apply(build(chain(2)))
    assert "before, by 5:order" in str(caught.value)
    assert f"6:{between.name}" not in str(caught.value)


ENDLESS: dict[str, tuple[Callable[[], object], str]] = {
    "dp": (lambda: mesh(dp=10**9), "dp=1000000000 * cp=1 * tp=1 is 1000000000 devices"),
    "tp and cp": (lambda: mesh(tp=10**6, cp=10**6), "is 1000000000000 devices"),
    "pp": (lambda: mesh(pp=10**5), "microbatches=200000 is 20000000000 forwards"),
    "microbatches": (lambda: mesh(pp=2, microbatches=10**9), "is 2000000000 forwards"),
    "dualpipe": (lambda: dualpipe(10**6, 10**9), "is 1000000000000000 forwards"),
    "devices": (lambda: place({}, devices=range(10**12)), "more than 1048576 items"),
    "a mesh": (lambda: Mesh(itertools.count(), dp=2), "more than 1048576 items"),
    "a filter": (lambda: place({"PP": range(10**12)}, devices=[0]), "more than 1048576 items"),
    "a cluster": (lambda: piper.Cluster.of("H100", 10**6, 10**6), "is too large"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_sizes_that_nobody_could_wait_for_are_refused(name: str) -> None:
    call, words = ENDLESS[name]
    with pytest.raises(PiperError, match=words.replace("*", r"\*")):
        call()


WRONG_CALLS: dict[str, Callable[[], object]] = {
    "place-unknown": lambda: place({}, device=[0]),  # type: ignore[call-arg]
    "place-batch": lambda: place({}, devices=[0], batch=3),  # type: ignore[arg-type]
    "place-sequence": lambda: Strategy([place({}, devices=[0], sequence=["cp"])]),  # type: ignore[arg-type]
    "shard-axis": lambda: Strategy([shard({}, axis=["tp"])]),  # type: ignore[arg-type]
    "shard-batch": lambda: shard({}, batch=[["dp"]]),  # type: ignore[list-item]
    "shard-list": lambda: Strategy([shard({}, axis="tp", parameters=["up"])]),  # type: ignore[arg-type]
    "shard-numbers": lambda: Strategy([shard({}, axis="tp", parameters={1: 0})]),  # type: ignore[dict-item]
    "mesh-experts": lambda: mesh(dp=2, ep=2, experts=["EP"]),  # type: ignore[arg-type]
    "place-where": lambda: place("PP", devices=[0]),  # type: ignore[arg-type]
    "place-devices": lambda: place({}, devices=0),  # type: ignore[arg-type]
    "order-group": lambda: order("PP"),  # type: ignore[arg-type]
    "order-number": lambda: order(0),  # type: ignore[arg-type]
    "pass-in-a-list-in-a-list": lambda: place({"PASS": [["F"]]}, devices=[0]).apply(
        build(chain(1))
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_wrong_arguments_are_refused_in_the_family_of_errors(call: Callable[[], object]) -> None:
    with pytest.raises(DirectiveError):
        call()


WRONG_JSON: dict[str, tuple[Any, list[str]]] = {
    "not JSON": ("{", ["not JSON", "line 1"]),
    "no list": ({"op": "place"}, ["a list of objects", "'op'"]),
    "a string in JSON": ('"place"', ["a list of objects"]),
    "no object": (["place"], ["directive 0", "'place'", "partition, split, place"]),
    "no op": ([{"filter": {}}], ["directive 0", "no 'op'"]),
    "unknown op": ([{"op": "split", "parts": 2}, {"op": "fuse"}], ["directive 1", "'fuse'"]),
    "op in a list": ([{"op": ["place"]}], ["directive 0"]),
    "unknown field": (
        [{"op": "place", "filter": {}, "devices": [0], "rank": 1}],
        ["directive 0, place", "'rank'"],
    ),
    "no filter": ([{"op": "place", "devices": [0]}], ["directive 0, place"]),
    "no devices": ([{"op": "place", "filter": {}}], ["directive 0, place", "devices"]),
    "filter as a string": (
        [{"op": "place", "filter": "PP", "devices": [0]}],
        ["directive 0, place", "PP"],
    ),
    "order without filters": ([{"op": "order"}], ["directive 0, order", "filters"]),
    "order with more": (
        [{"op": "order", "filters": [], "stream": "s"}],
        ["directive 0, order", "unknown fields", "stream"],
    ),
    "order of filters, not of groups": (
        [{"op": "order", "filters": [{"PP": 0}, {"PP": 1}]}],
        ["directive 0, order"],
    ),
    "cost of no region": (
        [{"op": "partition", "tag": "layer", "into": "PP", "parts": 2, "by": {"x": 1}}],
        ["directive 0, partition", "x"],
    ),
}


@pytest.mark.parametrize(("data", "says"), WRONG_JSON.values(), ids=WRONG_JSON.keys())
def test_wrong_json_is_refused_with_its_place(data: Any, says: list[str]) -> None:
    with pytest.raises(DirectiveError) as caught:
        Strategy.from_json(data)
    for part in says:
        assert part in str(caught.value)


def test_a_strategy_holds_directives_only() -> None:
    with pytest.raises(DirectiveError, match=r"list of directives; \{\} is a dict"):
        Strategy([{}])  # type: ignore[list-item]
