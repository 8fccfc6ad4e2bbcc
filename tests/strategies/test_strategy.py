"""A strategy as data: added, printed as code, written as JSON in two formats and read back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import piper
from piper.ir.dag.build import build
from piper.ir.dag.dag import group_text
from piper.strategies import directives
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
from piper.strategies.directives.partition import balanced
from piper.strategies.strategy import Strategy
from tests.facts import chain, moe

SCOPE = {"Strategy": Strategy, **{name: getattr(directives, name) for name in directives.__all__}}


def read_as_code(written: object) -> Any:
    return eval(str(written), dict(SCOPE))


EVERY = [
    partition("layer", into="PP", parts=2),
    partition("layer", into="VP", parts=2, by=[1, 1]),
    partition("layer", into="CP", parts=2, by={0: 1.5, 1: 2.5}),
    split(parts=2),
    split(parts=1),
    place({"PP": 0}, devices=[0, 2], stream="pp"),
    replicate({"EP": "-"}, zero=1, bucket_mb=0.5, reduce_stream="dp", devices=[0, 2]),
    shard({"EP": "*"}, stream="ep", ways=2),
    order([{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 1}, {"PP": 0, "MB": [2, 3]}]),
    stream({"PASS": "B"}, "back", priority=1, sms=4),
    stream(None, "compute", sms="rest"),
    remat({"layer": [0, 1]}, "all"),
]


def test_strategies_add_up() -> None:
    first, second = Strategy(EVERY[:2]), Strategy(EVERY[2:])
    assert first + second == Strategy(EVERY)
    assert (first + second).directives == tuple(EVERY)
    assert first + Strategy([]) == first
    added = list(second)
    assert first + added == first + second


def test_adding_gives_the_result_of_one_after_the_other() -> None:
    first, second = Strategy([split(parts=2)]), Strategy([place({"MB": 0}, devices=[0])])
    dag = build(chain(1))
    assert str((first + second).apply(dag)) == str(second.apply(first.apply(dag)))
    assert [str(d) for d in (first + second).steps(dag)] == [
        str(first.apply(dag)),
        str(second.apply(first.apply(dag))),
    ]


def test_only_directives_are_added_to_a_strategy() -> None:
    with pytest.raises(TypeError):
        Strategy([]) + 2  # type: ignore[operator]
    with pytest.raises(piper.DirectiveError, match="a strategy is a list of directives"):
        Strategy([]) + "gpipe"  # type: ignore[operator]


def test_a_strategy_reads_like_code() -> None:
    strategy = Strategy(
        [
            partition("layer", into="PP", parts=2),
            split(parts=8),
            place({"PP": 0}, devices=[0, 2], stream="pp"),
            replicate({"EP": "-"}, zero=1),
            shard({"EP": "*"}, stream="ep"),
            order([{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 1}, {"PP": 1, "MB": 0}]),
            remat({"layer": [0, 1]}, "all"),
        ]
    )
    assert (
        str(strategy)
        == textwrap.dedent(
            """
            Strategy([
                partition('layer', into='PP', parts=2),
                split({}, into='MB', parts=8),
                place({'PP': 0}, devices=[0, 2], stream='pp'),
                replicate({'EP': '-'}, zero=1),
                shard({'EP': '*'}, stream='ep'),
                order([{'PP': 0, 'MB': 0, 'PASS': 'F'}], [{'PP': 0, 'MB': 1}, {'PP': 1, 'MB': 0}]),
                remat({'layer': [0, 1]}, 'all'),
            ])
            """
        ).strip()
    )


@pytest.mark.parametrize("directive", EVERY, ids=str)
def test_a_directive_is_its_own_code(directive: Directive) -> None:
    assert read_as_code(directive) == directive


@pytest.mark.parametrize("directive", EVERY, ids=str)
def test_a_directive_is_its_own_json(directive: Directive) -> None:
    written = json.dumps(directive.to_json())
    assert Strategy.from_json(f"[{written}]").directives == (directive,)


RANGES = [
    place({"MB": range(2)}, devices=[0]),
    order([{"MB": range(2)}]),
    remat({"layer": (0, 1)}, "all"),
    partition("layer", into="PP", parts=2, by=(1, 1)),
]


@pytest.mark.parametrize("directive", RANGES, ids=str)
def test_ranges_and_tuples_round_trip(directive: Directive) -> None:
    """A range is read back as a list, which means the same."""
    assert read_as_code(directive) == directive
    written = json.dumps(Strategy([directive]).to_json())
    assert Strategy.from_json(written) == Strategy([directive])


def test_long_directives_are_wrapped_and_long_groups_are_ranges() -> None:
    forwards = order(*({"MB": i, "PASS": "F"} for i in range(4)))
    text = str(Strategy([place({}, devices=range(16)), forwards]))
    assert text == textwrap.dedent(
        """\
        Strategy([
            place({}, devices=range(0, 16)),
            order([{'MB': 0, 'PASS': 'F'}], [{'MB': 1, 'PASS': 'F'}], [{'MB': 2, 'PASS': 'F'}],
                [{'MB': 3, 'PASS': 'F'}]),
        ])"""
    )


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (range(4), "0,1,2,3"),
        ([*range(8), 16], "0-7,16"),
        (range(0, 64, 8), "0,8,...,56"),
        ([0, 4, 1, 5, 2, 6, 3, 7], "0,4,1,5,2,6,3,7"),
        ([0, 1, 3, 4, 6, 7, 9, 10, 12, 13], "0,1,3,4,6,7,9,10,..."),
    ],
)
def test_groups_are_short_and_cut_with_a_mark(group: Sequence[int], text: str) -> None:
    assert group_text(tuple(group)) == text


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(Strategy(EVERY).to_json()))
    assert Strategy.load(path) == Strategy(EVERY)


# any strategy that JSON can hold

names = st.text(min_size=1, max_size=6)
numbers = st.integers(0, 9)
values = numbers | st.lists(numbers, min_size=1, max_size=3) | st.sampled_from(["*", "-"])
passes = st.sampled_from(["F", "B", "BI", "BW"])
filters = st.builds(
    lambda tags, which: tags | ({"PASS": which} if which else {}),
    st.dictionaries(names.filter(lambda name: name != "PASS"), values, max_size=2),
    st.none() | passes | st.lists(passes, min_size=1, max_size=2),
)
devices = st.lists(numbers, min_size=1, max_size=4, unique=True)
costs = st.floats(0, 1e6)
measures = (
    st.sampled_from(["flops", "params"])
    | st.lists(st.integers(1, 4), min_size=1, max_size=4)
    | st.dictionaries(numbers, costs, min_size=1, max_size=4)
)
groups = st.lists(st.lists(filters, min_size=1, max_size=2), min_size=1, max_size=3)
any_directive: st.SearchStrategy[Directive] = st.one_of(
    st.builds(partition, names, into=names, parts=st.integers(1, 9), by=measures),
    st.builds(split, filters, into=names, parts=st.integers(1, 9)),
    st.builds(place, filters, devices=devices, stream=names),
    st.builds(
        replicate,
        filters,
        zero=st.integers(0, 3),
        bucket_mb=st.floats(0.1, 100),
        reduce_stream=names,
        gather_stream=names,
        devices=st.none() | devices,
    ),
    st.builds(
        shard, filters, stream=names, dim=st.integers(0, 2), ways=st.none() | st.integers(1, 9)
    ),
    groups.map(lambda found: order(*found)),
    st.builds(
        stream,
        filters,
        names,
        priority=st.integers(-2, 2),
        sms=st.none() | st.integers(1, 9) | st.just("rest"),
    ),
    st.builds(remat, filters, st.sampled_from(["none", "min-cut", "all"])),
)
# no shrinking: examples are short anyway, and shrinking takes long
quick = settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate])
any_strategy = st.lists(any_directive, max_size=4).map(Strategy)


@quick
@given(any_strategy)
def test_any_strategy_round_trips_through_json(strategy: Strategy) -> None:
    assert Strategy.from_json(json.dumps(strategy.to_json())) == strategy
    assert Strategy.from_json(strategy.to_json()) == strategy


@quick
@given(any_strategy)
def test_any_strategy_is_its_own_code(strategy: Strategy) -> None:
    assert read_as_code(strategy) == strategy


# the JSON format of uw-syfi/piper

PUBLISHED = """
[
  {"op": "place", "filter": {"PP": 0}, "devices": [0, 2], "stream": "pp_stream"},
  {"op": "place", "filter": {"PP": 1}, "devices": [1, 3], "stream": "pp_stream"},
  {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 2], "reduce_stream": "dp_stream",
   "gather_stream": "dp_stream", "bucket_size": 25, "shard_grads": false, "shard_params": false},
  {"op": "replicate", "filter": {"PP": 1}, "devices": [1, 3], "reduce_stream": "dp_stream",
   "gather_stream": "dp_stream", "bucket_size": 25, "shard_grads": false, "shard_params": false},
  {"op": "shard", "filter": {"PP": 0, "EP": "*"}, "devices": [0, 2], "stream": "ep_stream"},
  {"op": "shard", "filter": {"PP": 1, "EP": "*"}, "devices": [1, 3], "stream": "ep_stream"},
  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
  {"op": "order", "filters": [
    [{"PP": 0, "MB": 0, "PASS": "F"}],
    [{"PP": 0, "MB": 1, "PASS": "F"}],
    [{"PP": 0, "MB": 0, "PASS": "B"}],
    [{"PP": 0, "MB": 1, "PASS": "B"}]]},
  {"op": "order", "filters": [
    [{"PP": 1, "MB": 0, "PASS": "F"}],
    [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
    [{"PP": 1, "MB": 1, "PASS": "B"}]]}
]
"""


def golden(written: str) -> str:
    return textwrap.dedent(written).strip("\n")


def test_the_published_form_is_read_as_it_is() -> None:
    state = {"reduce_stream": "dp_stream", "gather_stream": "dp_stream"}
    assert Strategy.from_json(PUBLISHED) == Strategy(
        [
            place({"PP": 0}, devices=[0, 2], stream="pp_stream"),
            place({"PP": 1}, devices=[1, 3], stream="pp_stream"),
            replicate({"PP": 0}, devices=[0, 2], **state),
            replicate({"PP": 1}, devices=[1, 3], **state),
            shard({"PP": 0, "EP": "*"}, stream="ep_stream"),
            shard({"PP": 1, "EP": "*"}, stream="ep_stream"),
            split(parts=2),
            order(*({"PP": 0, "MB": int(p[1]), "PASS": p[0]} for p in ("F0", "F1", "B0", "B1"))),
            order(
                {"PP": 1, "MB": 0, "PASS": "F"},
                [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
                {"PP": 1, "MB": 1, "PASS": "B"},
            ),
        ]
    )


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({}, 0),
        ({"shard_grads": False, "shard_params": False}, 0),
        ({"shard_grads": True}, 2),
        ({"shard_params": True}, 3),
        ({"shard_grads": True, "shard_params": True}, 3),
    ],
)
def test_the_published_flags_are_levels(flags: dict[str, bool], zero: int) -> None:
    data = [{"op": "replicate", "filter": {}, "bucket_size": 10, **flags}]
    assert Strategy.from_json(data) == Strategy([replicate({}, zero=zero, bucket_mb=10)])


def test_null_in_json_asks_for_absence() -> None:
    data = '[{"op": "place", "filter": {"EP": null}, "devices": [0]}]'
    assert Strategy.from_json(data) == Strategy([place({"EP": "-"}, devices=[0])])


def test_the_published_example_as_a_whole() -> None:
    """Pipeline over 0,2 -> 1,3; each pair shares its batch and its experts."""
    stages = Strategy([partition("layer", into="PP", parts=2)])
    after = (stages + Strategy.from_json(PUBLISHED)).apply(build(moe(2, 4)))
    assert {chunk: rule.ways for chunk, rule in after.shards.items()} == {2: 2, 5: 2}
    assert {rule.stream for rule in after.shards.values()} == {"ep_stream"}
    assert {chunk: rule.made_by for chunk, rule in after.state.items()} == {
        **dict.fromkeys(range(4), 4),
        **dict.fromkeys(range(4, 9), 5),
    }
    assert {node.sends.stream for node in after.nodes} == {"pp_stream"}
    assert [after.label(entry) for entry in range(len(after.history))] == [
        "0:build",
        "1:partition",
        "2:place",
        "3:place",
        "4:replicate",
        "5:replicate",
        "6:shard",
        "7:shard",
        "8:split",
        "9:order",
        "10:order",
    ]
    nodes = [line for line in str(after).splitlines() if not line.startswith("#")]
    assert textwrap.dedent("\n".join(nodes)) == golden(
        """
          0 F embed[0] PP[0] MB[0] @0,2: x0.0 -> v2.0  # 8:split
          1 F layer[0] PP[0] MB[0] @0,2: v2.0 -> v3.0 v4.0 saved1.0  # 8:split
          2 F layer[0] EP[0] PP[0] MB[0] @0,2: v4.0 -> v5.0  # 8:split
          3 F layer[0] PP[0] MB[0] @0,2: v5.0 v3.0 -> v6.0  # 8:split
          4 F layer[1] PP[1] MB[0] @1,3: v6.0 -> v7.0 v8.0 saved4.0  # 8:split
          5 F layer[1] EP[1] PP[1] MB[0] @1,3: v8.0 -> v9.0  # 8:split
          6 F layer[1] PP[1] MB[0] @1,3: v9.0 v7.0 -> v10.0  # 8:split
          7 F head[0] PP[1] MB[0] @1,3: v10.0 -> v11.0  # 8:split
          8 F loss[0] PP[1] MB[0] @1,3: v11.0 x1.0 -> v12.0 saved8.0  # 8:split
          9 B loss[0] PP[1] MB[0] @1,3: saved8.0 x1.0 seed.0 -> g11/8.0 after 8  # 10:order
         10 B head[0] PP[1] MB[0] @1,3: v10.0 g11/8.0 -> g10/7.0 dw7.0  # 8:split
         11 B layer[1] PP[1] MB[0] @1,3: g10/7.0 -> g9/6.0 g7/6.0  # 8:split
         12 B layer[1] EP[1] PP[1] MB[0] @1,3: v9.0 v8.0 g9/6.0 -> g8/5.0 dw5.0  # 8:split
         13 B layer[1] PP[1] MB[0] @1,3: saved4.0 v6.0 g7/6.0 g8/5.0 -> g6/4.0 dw4.0  # 8:split
         14 B layer[0] PP[0] MB[0] @0,2: g6/4.0 -> g5/3.0 g3/3.0 after 21  # 9:order
         15 B layer[0] EP[0] PP[0] MB[0] @0,2: v5.0 v4.0 g5/3.0 -> g4/2.0 dw2.0  # 8:split
         16 B layer[0] PP[0] MB[0] @0,2: saved1.0 v2.0 g3/3.0 g4/2.0 -> g2/1.0 dw1.0  # 8:split
         17 B embed[0] PP[0] MB[0] @0,2: x0.0 g2/1.0 -> dw0.0  # 8:split
         18 F embed[0] PP[0] MB[1] @0,2: x0.1 -> v2.1 after 3  # 9:order
         19 F layer[0] PP[0] MB[1] @0,2: v2.1 -> v3.1 v4.1 saved1.1  # 8:split
         20 F layer[0] EP[0] PP[0] MB[1] @0,2: v4.1 -> v5.1  # 8:split
         21 F layer[0] PP[0] MB[1] @0,2: v5.1 v3.1 -> v6.1  # 8:split
         22 F layer[1] PP[1] MB[1] @1,3: v6.1 -> v7.1 v8.1 saved4.1 after 8  # 10:order
         23 F layer[1] EP[1] PP[1] MB[1] @1,3: v8.1 -> v9.1  # 8:split
         24 F layer[1] PP[1] MB[1] @1,3: v9.1 v7.1 -> v10.1  # 8:split
         25 F head[0] PP[1] MB[1] @1,3: v10.1 -> v11.1  # 8:split
         26 F loss[0] PP[1] MB[1] @1,3: v11.1 x1.1 -> v12.1 saved8.1  # 8:split
         27 B loss[0] PP[1] MB[1] @1,3: saved8.1 x1.1 seed.1 -> g11/8.1 after 13 26  # 10:order
         28 B head[0] PP[1] MB[1] @1,3: v10.1 g11/8.1 -> g10/7.1 dw7.1  # 8:split
         29 B layer[1] PP[1] MB[1] @1,3: g10/7.1 -> g9/6.1 g7/6.1  # 8:split
         30 B layer[1] EP[1] PP[1] MB[1] @1,3: v9.1 v8.1 g9/6.1 -> g8/5.1 dw5.1  # 8:split
         31 B layer[1] PP[1] MB[1] @1,3: saved4.1 v6.1 g7/6.1 g8/5.1 -> g6/4.1 dw4.1  # 8:split
         32 B layer[0] PP[0] MB[1] @0,2: g6/4.1 -> g5/3.1 g3/3.1 after 17  # 9:order
         33 B layer[0] EP[0] PP[0] MB[1] @0,2: v5.1 v4.1 g5/3.1 -> g4/2.1 dw2.1  # 8:split
         34 B layer[0] PP[0] MB[1] @0,2: saved1.1 v2.1 g3/3.1 g4/2.1 -> g2/1.1 dw1.1  # 8:split
         35 B embed[0] PP[0] MB[1] @0,2: x0.1 g2/1.1 -> dw0.1  # 8:split
        """
    )


# balanced


def heaviest(weights: Sequence[float], counts: Sequence[int]) -> float:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return max(sum(weights[a:b]) for a, b in pairwise(ends))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_balanced_is_as_good_as_trying_everything(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    counts = balanced(weights, parts)
    assert len(counts) == parts
    assert min(counts) >= 1
    assert sum(counts) == len(weights)
    inner = range(1, len(weights))
    every = [
        [b - a for a, b in pairwise((0, *cuts, len(weights)))]
        for cuts in combinations(inner, parts - 1)
    ]
    assert heaviest(weights, counts) == min(heaviest(weights, tried) for tried in every)
