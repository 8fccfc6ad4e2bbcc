"""Random models under random strategies: each compiles to plans that an independent checker finds
right, or is refused in words that name a directive. Nothing else happens.

``pytest tests/test_properties.py -s --examples 10000`` tries more.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piper.directives import (
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
from piper.errors import PiperError
from piper.ir import Model, ParameterFacts, build
from piper.lower.lower import lower
from piper.strategy import Strategy
from tests.facts import chain, moe, skip, tied
from tests.plan_checker import check

SIZES = range(1, 17)
DIRECTIVE = re.compile(r"\b(partition|split|place|replicate|shard|order|stream|remat)\b")
Item = tuple[int, int, str]
"""A stage, a microbatch and a pass."""


@dataclass(frozen=True)
class Case:
    model: Model
    strategy: Strategy
    name: str

    def __repr__(self) -> str:
        return f"{self.name}\n{self.strategy}"


def widened(model: Model, rng: random.Random) -> Model:
    """``model`` with odd sizes, and with a second parameter in some chunks."""
    parameters = {
        name: replace(p, nbytes=p.nbytes + 4 * rng.randrange(7))
        for name, p in model.parameters.items()
    }
    chunks = []
    for chunk in model.chunks:
        names = chunk.parameters
        if names and "EP" not in chunk.tags and rng.random() < 0.5:
            bias = f"bias.{chunk.index}"
            size = rng.choice([3, 5, 7])
            trained = model.parameters[names[0]].trained
            parameters[bias] = ParameterFacts((size,), 4 * size, trained)
            names = (*names, bias)
        chunks.append(replace(chunk, parameters=names))
    return replace(model, chunks=tuple(chunks), parameters=parameters)


def legal(stages: int, batches: int, halves: bool, kind: str, rng: random.Random) -> list[Item]:
    """An order of all stages' work that respects the flow of data."""
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
    """One order of everything, or one for each stage; some neighbours overlap."""
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
    kind = draw(st.sampled_from(["chain", "tied", "skip", "moe", "frozen"]), label="model")
    rng = random.Random(draw(st.integers(0, 2**20), label="seed"))
    experts = draw(st.sampled_from([2, 4, 3]))
    models = {
        "chain": lambda: chain(layers),
        "frozen": lambda: chain(layers, trained=False),
        "tied": lambda: tied(layers),
        "skip": lambda: skip(max(2, layers)),
        "moe": lambda: moe(layers, experts),
    }
    model = models[kind]()
    name = f"{kind}({layers}{f', {experts}' if kind == 'moe' else ''})"
    layers = max(2, layers) if kind == "skip" else layers
    if draw(st.booleans()):
        model = widened(model, rng)
        name += " widened"
    if draw(st.integers(0, 7)):
        model = replace(model, batch=60)
    stages = draw(st.integers(1, min(4, layers)), label="stages")
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    batches = draw(st.integers(1, 6), label="microbatches")
    steps: list[Directive] = [partition("layer", into="PP", parts=stages, by=counts)]
    if draw(st.integers(0, 3)) == 0:
        policy = draw(st.sampled_from(["none", "min-cut", "all"]))
        steps.append(remat({"layer": rng.randrange(layers)} if rng.random() < 0.5 else {}, policy))
    groups = draw(places(stages, rng))
    two_way = batches > 1 and draw(st.integers(0, 4)) == 0
    if two_way:
        steps.append(split(parts=batches))
        half = batches // 2
        way = draw(st.sampled_from(["mirror", "mirror", "apart", "apart", "back"]))
        first = max(d for g in groups for d in g) + 1
        for s in range(stages):
            other = groups[-1 - s] if way == "mirror" else [d + first for d in groups[s]]
            if way == "back":
                other = groups[s][::-1]
            steps.append(place({"PP": s, "MB": range(half)}, devices=groups[s]))
            steps.append(place({"PP": s, "MB": range(half, batches)}, devices=other))
    else:
        placing = [place({"PP": s}, devices=groups[s], stream=f"p{s % 2}") for s in range(stages)]
        if draw(st.integers(0, 29)) == 0:
            placing.pop()
        whole = [split(parts=batches)]
        steps += whole + placing if draw(st.booleans()) else placing + whole
    steps += draw(states(kind, stages))
    if kind == "moe" and draw(st.booleans()):
        ways = draw(st.sampled_from([None, 1, 2, 4]))
        steps.append(shard({"EP": "*"}, stream=draw(st.sampled_from(STREAMS)), ways=ways))
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
    return Case(model, Strategy(steps + assigned), name)


STREAMS = ["compute", "a", "b", "p0/send", "p2p"]


@st.composite
def places(draw: st.DrawFn, stages: int, rng: random.Random) -> list[list[int]]:
    """A group for each stage: apart, shared or overlapping; of 1, 2, 4, rarely 3."""
    kind = draw(st.sampled_from(["apart", "apart", "equal", "equal", "same", "overlap"]))
    sizes = [draw(st.sampled_from([1, 1, 1, 2, 2, 2, 4, 4, 3])) for _ in range(stages)]
    if kind in ("equal", "same"):
        sizes = [sizes[0]] * stages
    if kind == "same":  # stages in turn on two groups
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
    elif kind == "moe" and draw(st.booleans()):
        wheres = [{"EP": "*"}, {"EP": "-"}]
    return [
        replicate(
            where,
            zero=draw(st.integers(0, 3)),
            bucket_mb=draw(st.sampled_from([25, 0.0001, 0.0005])),
            reduce_stream=draw(st.sampled_from(STREAMS)),
            gather_stream=draw(st.sampled_from(STREAMS)),
        )
        for where in wheres
    ]


def outcome(case: Case) -> str:
    """ "compiled" or "refused"; everything else is an error."""
    try:
        dag = case.strategy.apply(build(case.model))
        lowered = lower(dag, dict.fromkeys(SIZES, case.model))
    except PiperError as error:
        if DIRECTIVE.search(str(error)):
            return "refused"
        raise AssertionError(f"names no directive: {error}") from error
    check(lowered.dag, lowered.plans, lowered.memory)
    return "compiled"


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
