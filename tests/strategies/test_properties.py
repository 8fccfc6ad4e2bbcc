"""Random models under random strategies: each compiles to plans that an independent checker
accepts, or is refused with an error that names a directive. Any other outcome fails.

``pytest tests/strategies/test_properties.py -s --examples 10000`` tries more.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from piper.base.errors import DirectiveError
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import ChunkFacts, Model, ParameterFacts
from piper.ir.passes import Pass
from piper.ir.plan.plan import Plan
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
from tests.facts import (
    at,
    chain,
    changing,
    dropless,
    masked,
    mixed,
    moe,
    reading,
    skip,
    tied,
    tying,
)
from tests.plan_checker import check

SIZES = (1, 2, 3, 4)
EXPERTS = ("moe", "dropless")
DIRECTIVE = re.compile(r"\b(partition|split|place|replicate|shard|order|stream|remat)\b")
Item = tuple[int, int, str]
"""A stage, a microbatch and a pass."""


@dataclass(frozen=True)
class Case:
    model: Model
    strategy: Strategy
    name: str
    clip: bool = False
    whole: bool = False
    tensors: int = 0
    """The optimizer needs every n-th parameter whole; 0 for none."""
    forward_only: bool = False
    first: int = 1
    """The group size whose shapes the strategy is applied to."""

    def __repr__(self) -> str:
        how = f"clip={self.clip}, whole={self.whole}, forward_only={self.forward_only}"
        how += f", first={self.first}, tensors={self.tensors}"
        return f"{self.name}, {how}\n{self.strategy}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # not field by field


def widened(model: Model, rng: random.Random) -> Model:
    """``model`` with odd sizes and workspaces, non-contiguous values and gradients, and several
    dtypes. Some chunks get a second parameter, trained or frozen. Some parameters are shared by
    several chunks, some of which make no gradient."""
    parameters = {}
    for name, p in model.parameters.items():
        shape = (*p.shape[:-1], p.shape[-1] + rng.randrange(7))
        parameters[name] = replace(p, shape=shape, nbytes=4 * math.prod(shape))
    chunks = []
    for chunk in model.chunks:
        names, detached = chunk.parameters, chunk.detached
        if names and "EP" not in chunk.tags and rng.random() < 0.5:
            bias = f"bias.{chunk.index}"
            size = rng.choice([3, 5, 7])
            trained = model.parameters[names[0]].trained and rng.random() < 0.7
            parameters[bias] = ParameterFacts((size,), 4 * size, trained)
            names = (*names, bias)
            detached = detached if trained else (*detached, bias)
        chunks.append(replace(_busy(chunk, rng), parameters=names, detached=detached))
    dense = [c.index for c in chunks if c.parameters and "EP" not in c.tags]
    for i in range(rng.choice([0, 0, 1, 2])):
        users = rng.sample(dense, min(len(dense), rng.choice([2, 3])))
        trained = all(model.parameters[chunks[user].parameters[0]].trained for user in users)
        parameters[f"shared.{i}"] = ParameterFacts((5,), 20, trained)
        without = users[1:] if rng.random() < 0.2 else []
        for user in users:
            chunk = chunks[user]
            detached = (f"shared.{i}",) if not trained or user in without else ()
            chunks[user] = replace(
                chunk,
                parameters=(*chunk.parameters, f"shared.{i}"),
                detached=(*chunk.detached, *detached),
            )
    values = tuple(
        replace(v, **_lying(v.nbytes, rng))
        if rng.random() < 0.3 and not v.name.startswith("counts")  # these are always contiguous
        else v
        for v in model.values
    )
    found = replace(model, chunks=tuple(chunks), values=values, parameters=parameters)
    if rng.random() < 0.5:
        return found
    return mixed(found, {name: rng.choice(DTYPES) for name in parameters})


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def _lying(nbytes: int, rng: random.Random) -> dict[str, int | None]:
    """A storage: expanded, transposed, or contiguous as it is sent."""
    return rng.choice(
        [
            {"nbytes": 4, "copied": nbytes},
            {"nbytes": nbytes, "copied": nbytes},
            {"nbytes": nbytes, "copied": None},
        ]
    )


def _busy(chunk: ChunkFacts, rng: random.Random) -> ChunkFacts:
    """``chunk`` with other workspaces, and passes that are the last readers of some inputs."""
    variants = {}
    for policy, variant in chunk.variants.items():
        passes = {
            which: replace(
                p,
                workspace=(most := rng.choice([0, 1, 1000, 10000])),
                last=tuple(ref for ref in p.reads if rng.random() < 0.7),
                eased=min(most, rng.choice([0, 1, 1000])),
                housed=rng.choice([0, 1, 1000]),
            )
            for which, p in variant.passes.items()
        }
        variants[policy] = replace(variant, passes=passes)
    return replace(chunk, variants=variants)


def legal(stages: int, batches: int, halves: bool, kind: str, rng: random.Random) -> list[Item]:
    """An order of all stages' passes that respects the data flow."""
    backward = "BI" if halves else "B"

    def ready(item: Item, done: set[Item]) -> bool:
        s, m, what = item
        if what == "F":
            return s == 0 or (s - 1, m, "F") in done
        if what == "BW":
            return (s, m, "BI") in done
        return (s, m, "F") in done and (s == stages - 1 or (s + 1, m, backward) in done)

    passes = ["F", "BI", "BW"] if halves else ["F", "B"]
    left = [(s, m, p) for p in passes for m in range(batches) for s in range(stages)]
    key = {item: float(i) for i, item in enumerate(left)}  # as listed: GPipe
    if kind == "random":
        key = {item: rng.random() for item in left}
    elif kind == "1f1b":
        key = {
            (s, m, p): m + (0 if p == "F" else max(0, stages - s - 1) + 0.5 + 3 * (p == "BW"))
            for s, m, p in left
        }
    done: set[Item] = set()
    found = []
    while left:
        item = min((i for i in left if ready(i, done)), key=lambda i: key[i])
        left.remove(item)
        done.add(item)
        found.append(item)
    return found


def as_filter(item: Item) -> dict[str, Any]:
    return {"PP": item[0], "MB": item[1], "PASS": item[2]}


def orders(
    items: Sequence[Item], stages: int, overlap: float, rng: random.Random
) -> list[Directive]:
    """One order of everything, or one per stage; some neighbours overlap."""
    rows = [list(items)]
    if rng.random() < 0.5:
        rows = [[i for i in items if i[0] == s] for s in range(stages)]
    found: list[Directive] = []
    for row in rows:
        groups: list[list[dict[str, Any]]] = []
        for item in row:
            if groups and rng.random() < overlap:
                groups[-1].append(as_filter(item))
            else:
                groups.append([as_filter(item)])
        found.append(order(*groups))
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(1, 4), label="layers")
    kinds = ["chain", "tied", "skip", "moe", "dropless", "frozen", "masked"]
    kind = draw(st.sampled_from(kinds), label="model")
    counted = draw(st.booleans(), label="counted")
    rng = random.Random(draw(st.integers(0, 2**20), label="seed"))
    experts = draw(st.sampled_from([2, 4, 4, 3]))
    models = {
        "chain": lambda: chain(layers, counted=counted),
        "frozen": lambda: chain(layers, trained=False, counted=counted),
        "tied": lambda: tied(layers, counted=counted),
        "skip": lambda: skip(max(2, layers), counted=counted),
        "masked": lambda: masked(layers, counted=counted),
        "moe": lambda: moe(layers, experts, counted=counted),
        "dropless": lambda: dropless(layers, experts, counted=counted),
    }
    model = models[kind]()
    name = f"{kind}({layers}{f', {experts}' if kind in EXPERTS else ''}, counted={counted})"
    layers = max(2, layers) if kind == "skip" else layers
    if draw(st.integers(0, 3)) == 0:
        alike = [p for p in model.parameters if p[-1].isdigit() or "layers" in p]
        same = rng.sample(alike, min(len(alike), rng.choice([2, 3])))
        model = tying(model, *same)
        name += f" tying {same}"
    if draw(st.booleans()):
        model = widened(model, rng)
        name += " widened"
    if draw(st.integers(0, 7)):
        model = replace(model, batch=60)
    changes = draw(st.sampled_from([False] * 5 + [True]))
    read = changes and draw(st.booleans())
    if changes:
        regions = [{"layer": 0}, {"layer": layers - 1}, {"embed": 0}, {"loss": 0}, {"head": 0}]
        where = draw(st.sampled_from(regions))
        model = changing(model, **where)
        name += f" changing {where}"
        if read:
            where = draw(st.sampled_from(regions))
            model = reading(model, **where)
            name += f" reading {where}"
    stages = draw(st.integers(1, min(4, layers)), label="stages")
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    batches = draw(st.integers(1, 6), label="microbatches")
    steps: list[Directive] = [partition("layer", into="PP", parts=stages, by=counts)]
    if draw(st.integers(0, 3)) == 0:
        policy = draw(st.sampled_from(["none", "min-cut", "all"]))
        steps.append(remat({"layer": rng.randrange(layers)} if rng.random() < 0.5 else {}, policy))
    groups = draw(places(stages, rng))
    if changes and rng.random() < 0.7:  # a larger group is refused
        groups = [group[:1] for group in groups]
    if read and rng.random() < 0.7:  # several groups are refused
        groups = groups[:1] * stages
    two_way = batches > 1 and draw(st.integers(0, 4)) == 0
    if two_way:
        steps.append(split(parts=batches))
        half = batches // 2
        way = draw(st.sampled_from(["mirror", "mirror", "apart", "apart", "back", "both"]))
        first = max(d for g in groups for d in g) + 1
        for s in range(stages):
            other = groups[-1 - s] if way == "mirror" else [d + first for d in groups[s]]
            if way == "back":
                other = groups[s][::-1]
            if way == "both":  # one device is in both groups, with one rank
                other = [groups[s][0], *other[1:]]
            steps.append(place({"PP": s, "MB": range(half)}, devices=groups[s]))
            steps.append(place({"PP": s, "MB": range(half, batches)}, devices=other))
    else:
        placing = [place({"PP": s}, devices=groups[s], stream=f"p{s % 2}") for s in range(stages)]
        if kind in EXPERTS and draw(st.integers(0, 2)) == 0:  # experts on their own devices
            devices = sorted(rng.sample(range(6), draw(st.sampled_from([1, 2, 3, 4]))))
            placing = [
                *(replace(p, where={**p.where, "EP": "-"}) for p in placing),
                place({"EP": "*"}, devices=devices),
            ]
        if draw(st.integers(0, 29)) == 0:
            placing.pop()
        whole = [split(parts=batches)]
        steps += whole + placing if draw(st.booleans()) else placing + whole
    steps += draw(states(kind, stages))
    if kind in EXPERTS and draw(st.integers(0, 3)):
        ways = draw(st.sampled_from([None, None, None, 1, 2, 4]))
        capacity = draw(st.sampled_from([None, 1.0, 1.5, 3])) if kind == "dropless" else None
        stream_of = draw(st.sampled_from(STREAMS))
        steps.append(shard({"EP": "*"}, stream=stream_of, ways=ways, capacity=capacity))
    halves = draw(st.booleans())
    how = draw(st.sampled_from(["gpipe", "1f1b", "random", "random", "shuffled", "none"]))
    streams = draw(st.lists(st.sampled_from(STREAMS), max_size=2))
    assigned: list[Directive] = [
        stream(draw(st.sampled_from([{"PASS": "F"}, {"MB": 0}, {"PP": 0}, {"layer": 0}])), s)
        for s in streams
    ]
    if draw(st.booleans()):
        steps += assigned
        assigned = []
    if halves and draw(st.integers(0, 7)) == 0:
        steps.append(order(*draw(st.permutations([{"head": 0, "PASS": p} for p in ("BI", "BW")]))))
    elif how != "none":
        items = legal(stages, batches, halves, how, rng)
        if how == "shuffled":
            rng.shuffle(items)
        steps += orders(items, stages, draw(st.sampled_from([0.0, 0.0, 0.3])), rng)
    return Case(
        model,
        Strategy(steps + assigned),
        name,
        clip=draw(st.booleans(), label="clip"),
        whole=draw(st.booleans(), label="whole"),
        tensors=draw(st.sampled_from([0, 0, 1, 2]), label="tensors"),
        forward_only=draw(st.sampled_from([False] * 9 + [True])),
        first=draw(st.sampled_from(SIZES)),
    )


STREAMS = ["compute", "a", "b", "p0/send", "p2p", "scalars"]


@st.composite
def places(draw: st.DrawFn, stages: int, rng: random.Random) -> list[list[int]]:
    """A group per stage: disjoint, shared or overlapping; of 1, 2 or 4 devices, rarely 3."""
    kind = draw(st.sampled_from(["apart", "apart", "equal", "equal", "same", "overlap"]))
    sizes = [draw(st.sampled_from([1, 1, 1, 2, 2, 2, 4, 4, 3])) for _ in range(stages)]
    if kind in ("equal", "same"):
        sizes = [sizes[0]] * stages
    if kind == "same":  # stages alternate between two groups
        return [[(s % 2) * sizes[0] + i for i in range(sizes[0])] for s in range(stages)]
    if kind == "overlap":
        return [sorted(rng.sample(range(6), n)) for n in sizes]
    devices = list(range(sum(sizes)))
    if draw(st.booleans()):
        rng.shuffle(devices)
    found = []
    for n in sizes:
        found.append(devices[:n])
        devices = devices[n:]
    return found


@st.composite
def states(draw: st.DrawFn, kind: str, stages: int) -> list[Directive]:
    if draw(st.integers(0, 5)) == 0:
        return []
    wheres: list[dict[str, Any]] = [{}]
    if draw(st.integers(0, 3)) == 0:
        wheres = [{"PP": s} for s in range(stages)]
        if draw(st.booleans()):
            wheres.pop()
    elif draw(st.integers(0, 5)) == 0:
        wheres = [draw(st.sampled_from([{"embed": 0}, {"head": 0}, {"layer": 0}]))]
    elif kind in EXPERTS and draw(st.booleans()):
        wheres = [{"EP": "*"}, {"EP": "-"}]
    found: list[Directive] = []
    for where in wheres:
        zero = draw(st.integers(0, 3))
        within = draw(st.sampled_from([None] * 7 + [1, 2])) if zero else None
        found.append(
            replicate(
                where,
                zero=zero,
                bucket_mb=draw(st.sampled_from([25, 0.0001, 0.0005])),
                reduce_stream=draw(st.sampled_from(STREAMS)),
                gather_stream=draw(st.sampled_from(STREAMS)),
                within=within,
            )
        )
    return found


def outcome(case: Case) -> str:
    """ "compiled" or "refused"; anything else is an error."""
    models = {n: at(case.model, n, whole=12) for n in SIZES}
    try:
        dag = case.strategy.apply(build(models[case.first]))
        if case.forward_only:
            dag = forwards(dag)
        tensors = tuple(sorted(case.model.parameters)[:: case.tensors]) if case.tensors else ()
        cost = OptimizerCost(1.5, whole=case.whole, tensors=tensors)
        lowered = lower(dag, models, Settings(clip=case.clip, optimizer=cost))
    except DirectiveError as error:
        if DIRECTIVE.search(str(error)):
            return "refused"
        raise AssertionError(f"names no directive: {error}") from error
    check(
        lowered.dag,
        lowered.plans,
        lowered.memory,
        clip=case.clip,
        models=models,
        optimizer_bytes=1.5,
        whole=case.whole,
    )
    for plan in lowered.plans:
        assert Plan.parse(str(plan)) == plan
    return "compiled"


def forwards(dag: Dag) -> Dag:
    """``dag`` without its backwards."""
    kept = [i for i, node in enumerate(dag.nodes) if node.compute.which is Pass.F]
    nodes = []
    for i in kept:
        node = dag.nodes[i]
        after = [
            (kept.index(b), by)
            for b, by in zip(node.after, node.after_by, strict=True)
            if b in kept
        ]
        nodes.append(
            structs.replace(
                node, after=tuple(b for b, _ in after), after_by=tuple(by for _, by in after)
            )
        )
    return replace(dag, nodes=tuple(nodes))


def test_random_strategies(request: pytest.FixtureRequest) -> None:
    examples = request.config.getoption("--examples")
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def try_one(case: Case) -> None:
        outcomes["failed"] += 1
        found = outcome(case)
        outcomes["failed"] -= 1
        outcomes[found] += 1

    try:
        try_one()
    finally:
        print(f"\n{dict(outcomes)}")
    assert outcomes["compiled"] >= examples * 0.3
    assert outcomes["refused"] >= examples * 0.1
