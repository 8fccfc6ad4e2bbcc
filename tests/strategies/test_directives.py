"""Every directive on a DAG small enough to draw: the nodes that it makes or moves as text, and its
refusals.

A node's line reads: number, pass, tags, devices, inputs -> outputs, the other nodes it waits for,
and the directive that made it or last moved it. ``v`` is an activation, ``g`` its gradient as
summed by the chunk after the slash, ``x`` the batch, ``dw`` gradients of parameters; ``.1`` is
microbatch 1.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from piper.base.errors import DirectiveError
from piper.capture.captured_facts import facts_of
from piper.capture.graphs import workspace
from piper.capture.model import capture
from piper.capture.regions import annotate
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import ChunkFacts, Model, OpCost, PassCost, Variant
from piper.ir.passes import RematPolicy
from piper.ir.rules import Rest, ShardRule, StateRule, StreamRule
from piper.lower.lower import lower
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
from tests.facts import BATCH, DIM, SEQ, VOCAB, chain, changing, masked, moe, reading, skip, tied

STAGES = partition("layer", into="PP", parts=2)
HALVES = split(parts=2)
TWO_STAGES = [STAGES, HALVES, place({"PP": 0}, devices=[0]), place({"PP": 1}, devices=[1])]


def dag(model: Model, directives: Sequence[Directive]) -> Dag:
    return Strategy(directives).apply(build(model))


def rewritten(directive: Directive, before: Dag) -> Dag:
    """The DAG after ``directive``, which must not change ``before`` and must be deterministic."""
    was = str(before)
    kept = replace(before)
    after = directive.apply(before)
    assert str(before) == was
    assert before == kept
    assert directive.apply(before) == after
    assert after.history == (*before.history, str(directive))
    assert _unmarked(after, len(before.history)) <= _unmarked(before)
    return after


def _unmarked(it: Dag, mark: int = -1) -> Counter[str]:
    """The lines of all nodes that directive ``mark`` did not make or move, without the numbers of
    nodes."""
    rest = (x for x in nodes(it).splitlines() if f"# {mark}:" not in x)
    return Counter(re.sub(r"^ *\d+|after [\d ]+", "", line) for line in rest)


def nodes(after: Dag) -> str:
    """The lines of the nodes, without the history."""
    nodes = [line for line in str(after).splitlines() if not line.startswith("#")]
    return textwrap.dedent("\n".join(nodes))


def changed(after: Dag) -> str:
    """The lines of the nodes that the last directive made or moved."""
    return textwrap.dedent(after.text(f"# {len(after.history) - 1}:")).rstrip("\n")


def golden(written: str) -> str:
    return textwrap.dedent(written).strip("\n")


def stages(after: Dag, tag: str = "PP", of: str = "layer") -> list[object]:
    """The stage of each region, in order."""
    return [n.tags[tag] for n in after.nodes if n.tags["PASS"].name == "F" and of in n.tags]


def test_build_is_forwards_then_backwards_in_reverse() -> None:
    assert str(build(chain(2))) == golden(
        """
        # 0:build
          0 F embed[0]: x0 -> v2  # 0:build
          1 F layer[0]: v2 -> v3 saved1  # 0:build
          2 F layer[1]: v3 -> v4 saved2  # 0:build
          3 F head[0]: v4 -> v5  # 0:build
          4 F loss[0]: v5 x1 -> v6 saved4  # 0:build
          5 B loss[0]: saved4 x1 seed -> g5/4  # 0:build
          6 B head[0]: v4 g5/4 -> g4/3 dw3  # 0:build
          7 B layer[1]: saved2 v3 g4/3 -> g3/2 dw2  # 0:build
          8 B layer[0]: saved1 v2 g3/2 -> g2/1 dw1  # 0:build
          9 B embed[0]: x0 g2/1 -> dw0  # 0:build
        """
    )


def test_text_of_some_words_has_only_lines_that_contain_one_of_them() -> None:
    before = build(chain(2))
    assert before.text("layer[1]", "B embed").splitlines() == [
        "  2 F layer[1]: v3 -> v4 saved2  # 0:build",
        "  7 B layer[1]: saved2 v3 g4/3 -> g3/2 dw2  # 0:build",
        "  9 B embed[0]: x0 g2/1 -> dw0  # 0:build",
    ]
    assert before.text("MB[0]") == ""


def test_build_of_a_skip_has_terms_of_the_gradient_from_both_readers() -> None:
    """g2 has one term from the last layer (chunk 3), and two from the first (chunk 1), which uses
    the value twice."""
    assert str(build(skip(3))) == golden(
        """
        # 0:build
          0 F embed[0]: x0 -> v2  # 0:build
          1 F layer[0]: v2 -> v3 saved1  # 0:build
          2 F layer[1]: v3 -> v4 saved2  # 0:build
          3 F layer[2]: v4 v2 -> v5 saved3  # 0:build
          4 F head[0]: v5 -> v6  # 0:build
          5 F loss[0]: v6 x1 -> v7 saved5  # 0:build
          6 B loss[0]: saved5 x1 seed -> g6/5  # 0:build
          7 B head[0]: v5 g6/5 -> g5/4 dw4  # 0:build
          8 B layer[2]: saved3 v4 g5/4 -> g4/3 g2/3 dw3  # 0:build
          9 B layer[1]: saved2 v3 g4/3 -> g3/2 dw2  # 0:build
         10 B layer[0]: saved1 v2 g3/2 -> g2/1 g2/1+1 dw1  # 0:build
         11 B embed[0]: x0 g2/3 g2/1 g2/1+1 -> dw0  # 0:build
        """
    )


def test_build_of_frozen_chunks_has_no_backward_for_them() -> None:
    assert str(build(chain(2, trained=False))) == golden(
        """
        # 0:build
          0 F embed[0]: x0 -> v2  # 0:build
          1 F layer[0]: v2 -> v3  # 0:build
          2 F layer[1]: v3 -> v4  # 0:build
          3 F head[0]: v4 -> v5  # 0:build
          4 F loss[0]: v5 x1 -> v6 saved4  # 0:build
          5 B loss[0]: saved4 x1 seed -> g5/4  # 0:build
          6 B head[0]: v4 g5/4 -> dw3  # 0:build
        """
    )


# partition


def test_partition_joins_what_has_no_region_to_the_stage_before() -> None:
    after = rewritten(partition("layer", into="PP", parts=2), build(chain(2)))
    assert nodes(after) == golden(
        """
          0 F embed[0] PP[0]: x0 -> v2  # 1:partition
          1 F layer[0] PP[0]: v2 -> v3 saved1  # 1:partition
          2 F layer[1] PP[1]: v3 -> v4 saved2  # 1:partition
          3 F head[0] PP[1]: v4 -> v5  # 1:partition
          4 F loss[0] PP[1]: v5 x1 -> v6 saved4  # 1:partition
          5 B loss[0] PP[1]: saved4 x1 seed -> g5/4  # 1:partition
          6 B head[0] PP[1]: v4 g5/4 -> g4/3 dw3  # 1:partition
          7 B layer[1] PP[1]: saved2 v3 g4/3 -> g3/2 dw2  # 1:partition
          8 B layer[0] PP[0]: saved1 v2 g3/2 -> g2/1 dw1  # 1:partition
          9 B embed[0] PP[0]: x0 g2/1 -> dw0  # 1:partition
        """
    )


def test_partition_by_flops_counts_the_head_to_the_last_stage() -> None:
    """The head costs two layers: 4 layers and head are cut 3 + 1."""
    assert stages(dag(chain(4), [STAGES])) == [0, 0, 0, 1]


def test_partition_by_params() -> None:
    """Embedding and head each have the parameters of two layers: the cut is in the middle."""
    by = partition("layer", into="PP", parts=2, by="params")
    assert stages(dag(chain(4), [by])) == [0, 0, 1, 1]


def test_partition_by_counts() -> None:
    by = partition("layer", into="PP", parts=3, by=[1, 3, 1])
    assert stages(dag(chain(5), [by])) == [0, 1, 1, 1, 2]


def test_partition_by_measured_cost() -> None:
    by = partition("layer", into="PP", parts=2, by={0: 9.0, 1: 1.0, 2: 1.0, 3: 1.0})
    assert stages(dag(chain(4), [by])) == [0, 1, 1, 1]


def test_partition_by_measured_cost_counts_a_region_once() -> None:
    """A layer of three chunks has the measured cost once, not three times."""
    mixed = moe(4, 4)
    last = [c.index for c in mixed.chunks if c.tags.get("layer") == 3]
    chunks = tuple(  # layer 3 becomes a region of one chunk
        replace(c, tags={"tail": 0}) if c.index in last[1:] else c for c in mixed.chunks
    )
    by = partition("layer", into="PP", parts=2, by={0: 1.0, 1: 1.0, 2: 1.0, 3: 3.0})
    assert stages(dag(replace(mixed, chunks=chunks), [by])) == [0] * 9 + [1]


def test_partition_of_a_partition() -> None:
    """A second partition, of other regions, adds its own tag and keeps the first one."""
    after = dag(moe(2, 4), [STAGES, partition("EP", into="XP", parts=2)])
    found = [(n.tags["PP"], n.tags["XP"]) for n in after.nodes[:9]]
    assert found == [(0, 0)] * 4 + [(1, 0)] + [(1, 1)] * 4


# split


def test_split_copies_every_node_for_every_microbatch() -> None:
    after = rewritten(split(parts=2), build(chain(1)))
    assert after.microbatches == ("MB", 2)
    assert nodes(after) == golden(
        """
          0 F embed[0] MB[0]: x0.0 -> v2.0  # 1:split
          1 F layer[0] MB[0]: v2.0 -> v3.0 saved1.0  # 1:split
          2 F head[0] MB[0]: v3.0 -> v4.0  # 1:split
          3 F loss[0] MB[0]: v4.0 x1.0 -> v5.0 saved3.0  # 1:split
          4 B loss[0] MB[0]: saved3.0 x1.0 seed.0 -> g4/3.0  # 1:split
          5 B head[0] MB[0]: v3.0 g4/3.0 -> g3/2.0 dw2.0  # 1:split
          6 B layer[0] MB[0]: saved1.0 v2.0 g3/2.0 -> g2/1.0 dw1.0  # 1:split
          7 B embed[0] MB[0]: x0.0 g2/1.0 -> dw0.0  # 1:split
          8 F embed[0] MB[1]: x0.1 -> v2.1  # 1:split
          9 F layer[0] MB[1]: v2.1 -> v3.1 saved1.1  # 1:split
         10 F head[0] MB[1]: v3.1 -> v4.1  # 1:split
         11 F loss[0] MB[1]: v4.1 x1.1 -> v5.1 saved3.1  # 1:split
         12 B loss[0] MB[1]: saved3.1 x1.1 seed.1 -> g4/3.1  # 1:split
         13 B head[0] MB[1]: v3.1 g4/3.1 -> g3/2.1 dw2.1  # 1:split
         14 B layer[0] MB[1]: saved1.1 v2.1 g3/2.1 -> g2/1.1 dw1.1  # 1:split
         15 B embed[0] MB[1]: x0.1 g2/1.1 -> dw0.1  # 1:split
        """
    )


def test_split_keeps_places_and_rules_that_came_before_it() -> None:
    rules = [place({}, devices=[0, 1]), replicate({}, zero=1), shard({"EP": "*"}), HALVES]
    after = dag(moe(1, 4), rules)
    late = dag(moe(1, 4), [HALVES, *rules[:3]])
    assert [n.devices for n in after.nodes] == [n.devices for n in late.nodes]
    assert after.state.keys() == late.state.keys()
    assert after.shards.keys() == late.shards.keys()


# place


def test_place_puts_nodes_on_groups() -> None:
    after = rewritten(place({"PP": 1}, devices=[1, 3], stream="pp"), dag(chain(2), [STAGES]))
    assert changed(after) == golden(
        """
          2 F layer[1] PP[1] @1,3: v3 -> v4 saved2  # 2:place
          3 F head[0] PP[1] @1,3: v4 -> v5  # 2:place
          4 F loss[0] PP[1] @1,3: v5 x1 -> v6 saved4  # 2:place
          5 B loss[0] PP[1] @1,3: saved4 x1 seed -> g5/4  # 2:place
          6 B head[0] PP[1] @1,3: v4 g5/4 -> g4/3 dw3  # 2:place
          7 B layer[1] PP[1] @1,3: saved2 v3 g4/3 -> g3/2 dw2  # 2:place
        """
    )


def test_place_by_microbatch_lets_a_stage_live_on_two_groups() -> None:
    before = dag(
        chain(2),
        [
            STAGES,
            HALVES,
            place({"PP": 0, "MB": 0}, devices=[0]),
            place({"PP": 1, "MB": 0}, devices=[1]),
            place({"PP": 0, "MB": 1}, devices=[1]),
        ],
    )
    after = rewritten(place({"PP": 1, "MB": 1}, devices=[0]), before)
    assert changed(after) == golden(
        """
         12 F layer[1] PP[1] MB[1] @0: v3.1 -> v4.1 saved2.1  # 6:place
         13 F head[0] PP[1] MB[1] @0: v4.1 -> v5.1  # 6:place
         14 F loss[0] PP[1] MB[1] @0: v5.1 x1.1 -> v6.1 saved4.1  # 6:place
         15 B loss[0] PP[1] MB[1] @0: saved4.1 x1.1 seed.1 -> g5/4.1  # 6:place
         16 B head[0] PP[1] MB[1] @0: v4.1 g5/4.1 -> g4/3.1 dw3.1  # 6:place
         17 B layer[1] PP[1] MB[1] @0: saved2.1 v3.1 g4/3.1 -> g3/2.1 dw2.1  # 6:place
        """
    )


# replicate and shard: rules about state; no node changes


def test_replicate_rules_the_state_of_the_matched_chunks() -> None:
    before = dag(moe(1, 4), [place({}, devices=[0, 1])])
    after = rewritten(replicate({"EP": "-"}, zero=2, bucket_mb=0.5, reduce_stream="dp"), before)
    rule = StateRule(2, 512 * 1024, "dp", "gather", made_by=2)
    assert after.state == dict.fromkeys((0, 1, 3, 4, 5), rule)
    assert nodes(after) == nodes(before)


def test_replicate_allows_one_level_for_a_shared_parameter() -> None:
    after = dag(tied(2), [replicate({"embed": 0}, zero=1), replicate({"head": 0}, zero=1)])
    assert {after.state[0].zero, after.state[3].zero} == {1}


def test_shard_divides_experts_over_their_group() -> None:
    before = dag(moe(2, 4), [place({}, devices=[0, 1, 2, 3])])
    after = rewritten(shard({"EP": "*"}, stream="ep"), before)
    rule = ShardRule(4, 0, "ep", made_by=2)
    assert after.shards == {2: rule, 5: rule}
    assert nodes(after) == nodes(before)


def test_shard_into_fewer_ways_than_devices() -> None:
    before = dag(moe(2, 4), [place({}, devices=[0, 1, 2, 3])])
    assert rewritten(shard({"EP": 1}, ways=2), before).shards[5].ways == 2


# order


def one_f_one_b(stage: int, passes: str) -> Directive:
    """An order of one stage, from a text such as ``"F0 B0"``."""
    groups = [{"PP": stage, "MB": int(p[-1]), "PASS": p[:-1]} for p in passes.split()]
    return order(*groups)


def test_order_runs_groups_one_after_another() -> None:
    after = rewritten(one_f_one_b(0, "F0 F1 B1 B0"), dag(chain(2), TWO_STAGES))
    assert changed(after) == golden(
        """
          8 B layer[0] PP[0] MB[0] @0: saved1.0 v2.0 g3/2.0 -> g2/1.0 dw1.0 after 19  # 5:order
         10 F embed[0] PP[0] MB[1] @0: x0.1 -> v2.1 after 1  # 5:order
         18 B layer[0] PP[0] MB[1] @0: saved1.1 v2.1 g3/2.1 -> g2/1.1 dw1.1 after 11  # 5:order
        """
    )


def test_order_overlaps_the_filters_of_one_group() -> None:
    """F1 and B0 both wait for F0; B1 waits for both; neither waits for the other."""
    groups = order(
        [{"PP": 1, "MB": 0, "PASS": "F"}],
        [{"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "B"}],
        [{"PP": 1, "MB": 1, "PASS": "B"}],
    )
    after = rewritten(groups, dag(chain(2), TWO_STAGES))
    assert changed(after) == golden(
        """
          5 B loss[0] PP[1] MB[0] @1: saved4.0 x1.0 seed.0 -> g5/4.0 after 4  # 5:order
         12 F layer[1] PP[1] MB[1] @1: v3.1 -> v4.1 saved2.1 after 4  # 5:order
         15 B loss[0] PP[1] MB[1] @1: saved4.1 x1.1 seed.1 -> g5/4.1 after 7 14  # 5:order
        """
    )


def test_order_divides_the_backwards_it_wants_in_halves() -> None:
    """Microbatch 0 of stage 0 in halves, BW last; embed has only BW; microbatch 1 stays whole."""
    after = rewritten(one_f_one_b(0, "F0 F1 BI0 B1 BW0"), dag(chain(2), TWO_STAGES))
    assert changed(after) == golden(
        """
          8 BI layer[0] PP[0] MB[0] @0: saved1.0 g3/2.0 -> g2/1.0 bi_saved1.0 after 12  # 5:order
          9 BW layer[0] PP[0] MB[0] @0: bi_saved1.0 v2.0 -> dw1.0 after 20  # 5:order
         10 BW embed[0] PP[0] MB[0] @0: x0.0 g2/1.0 -> dw0.0 after 9  # 5:order
         11 F embed[0] PP[0] MB[1] @0: x0.1 -> v2.1 after 1  # 5:order
         19 B layer[0] PP[0] MB[1] @0: saved1.1 v2.1 g3/2.1 -> g2/1.1 dw1.1 after 8  # 5:order
        """
    )


def test_order_allows_halves_that_have_nothing_to_compute() -> None:
    """The loss has no BW: an order of its BW has no effect."""
    before = dag(chain(1), [split(parts=2), place({}, devices=[0])])
    after = order({"loss": 0, "MB": 0, "PASS": "BI"}, {"loss": 0, "MB": 0, "PASS": "BW"})
    assert [n.op.which.name for n in after.apply(before).nodes[4:6]] == ["BI", "B"]


@pytest.mark.parametrize("mb", [0, [0, 1], "*"])
def test_order_allows_halves_with_nothing_to_compute_however_the_filter_is_written(
    mb: object,
) -> None:
    before = dag(chain(1), [split(parts=2), place({}, devices=[0])])
    order({"embed": 0, "MB": mb, "PASS": "BI"}).apply(before)


def test_order_of_whole_microbatches() -> None:
    """A filter without PASS matches forwards and backwards: whole microbatches, one by one."""
    before = dag(chain(1), [split(parts=2), place({}, devices=[0])])
    after = order({"MB": 0}, {"MB": 1}).apply(before)
    last_of_0 = next(
        i
        for i, n in enumerate(after.nodes)
        if n.tags["MB"] == 0 and "embed" in n.tags and n.op.which.name == "B"
    )
    first_of_1 = next(
        i for i, n in enumerate(after.nodes) if n.tags["MB"] == 1 and "embed" in n.tags
    )
    assert after.nodes[first_of_1].after == (last_of_0,)


def test_order_of_both_passes_in_a_list() -> None:
    before = dag(chain(2), TWO_STAGES)
    order({"PP": 1, "MB": 0, "PASS": ["F", "B"]}, {"PP": 1, "MB": 1, "PASS": ["F", "B"]}).apply(
        before
    )


def test_order_holds_between_groups_that_share_devices() -> None:
    """Stage 0 is on devices 0 and 1, stage 1 only on 1: device 1 must run F1 of stage 0 first."""
    before = dag(
        chain(2), [STAGES, HALVES, place({"PP": 0}, devices=[0, 1]), place({"PP": 1}, devices=[1])]
    )
    after = order({"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}).apply(before)
    [last] = [i for i, n in enumerate(after.nodes) if name(n) == "F layer0 MB1"]
    [first] = [i for i, n in enumerate(after.nodes) if name(n) == "F layer1 MB0"]
    assert last in ancestors(after, first)


def apart() -> Dag:
    """Two stages on two devices, two microbatches."""
    places = [place({"PP": stage}, devices=[stage]) for stage in range(2)]
    return dag(chain(2), [STAGES, HALVES, *places])


def test_an_order_across_devices_that_follows_the_data_is_accepted() -> None:
    forwards = [{"PP": s, "MB": m, "PASS": "F"} for m in range(2) for s in range(2)]
    backwards = [{"PP": s, "MB": m, "PASS": "B"} for m in range(2) for s in (1, 0)]
    order(forwards[0], forwards[1]).apply(apart())
    after = order(*forwards, *backwards).apply(apart())
    loose = [{"PP": 0, "MB": 0}, {"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 1, "PASS": "B"}]
    order(*loose).apply(apart())
    row = {name(node) for node in after.nodes if node.devices == (0,) and node.after}
    assert row == {"F embed0 MB1", "B layer0 MB0", "B layer0 MB1"}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"PP": 1, "MB": 0, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "F"}],
            r"F layer\[1\] PP\[1\] MB\[0\] on devices \[1\] comes before F \w+\[0\] PP\[0\] "
            r"MB\[0\] on devices \[0\] here, but needs the result of the other",
        ),
        (
            [{"PP": 0, "MB": 0, "PASS": "B"}, {"PP": 0, "MB": 1}, {"PP": 1, "MB": 0, "PASS": "B"}],
            r"B layer\[0\] PP\[0\] MB\[0\] on devices \[0\] comes before B .* PP\[1\] MB\[0\] on",
        ),
        (
            [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}],
            r"F \w+\[0\] PP\[0\] MB\[1\] on devices \[0\] shares no device with what is ordered "
            "beside it, and no data flows between them: .* nothing would enforce this order",
        ),
    ],
    ids=["against", "against-backward", "unrelated"],
)
def test_an_order_across_devices_that_nobody_keeps_is_refused(
    groups: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DirectiveError, match=message):
        order(*groups).apply(apart())


def name(node: Node) -> str:
    """A short name of a node in a chain: ``F layer0 MB1``."""
    tags = [f"{t}{v}" for t, v in node.tags.items() if t not in ("PASS", "PP", "MB")]
    return " ".join([node.op.which.value, *tags, f"MB{node.tags['MB']}"])


def ancestors(after: Dag, number: int) -> set[int]:
    """All nodes that must finish before node ``number`` starts."""
    found: set[int] = set()
    queue = [number]
    while queue:
        for before in after.predecessors(queue.pop()):
            if before not in found:
                found.add(before)
                queue.append(before)
    return found


def test_two_orders_add_up() -> None:
    """F0 F1 from the first order, F1 B1 from the second: three in a row."""
    after = dag(chain(2), [*TWO_STAGES, one_f_one_b(0, "F0 F1"), one_f_one_b(0, "F1 B1")])
    waits = {name(n): [name(after.nodes[b]) for b in n.after] for n in after.nodes if n.after}
    assert waits == {"F embed0 MB1": ["F layer0 MB0"], "B layer0 MB1": ["F layer0 MB1"]}


def test_a_backward_ordered_as_a_whole_is_not_divided_later() -> None:
    """B0 before F1: if the next order moved BW away, B0 would no longer be complete before F1."""
    before = dag(chain(2), [*TWO_STAGES, one_f_one_b(1, "F0 B0 F1 B1")])
    halves = order({"head": 0, "MB": 0, "PASS": "BI"}, {"head": 0, "MB": 0, "PASS": "BW"})
    with pytest.raises(DirectiveError, match="already ordered as a whole"):
        halves.apply(before)


def test_dividing_keeps_the_orders_there_were() -> None:
    """Node numbers shift where a backward becomes two; the dependencies shift with them."""
    first = one_f_one_b(1, "F0 F1 B0 B1")
    plain = dag(chain(2), [*TWO_STAGES, first])
    divided = dag(chain(2), [*TWO_STAGES, first, one_f_one_b(0, "F0 F1 BI0 BW0 BI1 BW1")])
    waits = {name(n): {name(plain.nodes[b]) for b in n.after} for n in plain.nodes}
    for node in divided.nodes:
        if node.tags["PP"] == 1:
            assert {name(divided.nodes[b]) for b in node.after} == waits[name(node)]


# stream


def test_stream_moves_nodes_and_says_what_is_asked() -> None:
    after = rewritten(stream({"PASS": "B"}, "back", priority=-1, sms=16), build(chain(1)))
    assert after.streams == {"back": StreamRule(-1, 16)}
    assert changed(after) == golden(
        """
          4 B loss[0] on back: saved3 x1 seed -> g4/3  # 1:stream
          5 B head[0] on back: v3 g4/3 -> g3/2 dw2  # 1:stream
          6 B layer[0] on back: saved1 v2 g3/2 -> g2/1 dw1  # 1:stream
          7 B embed[0] on back: x0 g2/1 -> dw0  # 1:stream
        """
    )


def test_a_second_stream_directive_keeps_what_the_first_asked() -> None:
    after = dag(chain(2), [stream({"layer": 0}, "s", priority=3, sms=8), stream({"layer": 1}, "s")])
    assert after.streams["s"] == StreamRule(3, 8)


def test_a_stream_may_ask_for_the_rest_of_a_gpu() -> None:
    after = dag(chain(1), [stream({"PASS": "B"}, "back", sms=8), stream(None, "back", sms="rest")])
    assert after.streams["back"] == StreamRule(0, Rest.REST)
    assert "back', sms='rest')" in after.history[-1]


# remat


def test_remat_all_saves_nothing_and_reads_the_inputs_again() -> None:
    after = rewritten(remat({"layer": 0}, "all"), build(chain(2)))
    assert after.policy(1) is RematPolicy.ALL
    assert after.policy(2) is RematPolicy.NONE
    assert changed(after) == golden(
        """
          1 F layer[0]: v2 -> v3  # 1:remat
          8 B layer[0]: v2 g3/2 -> g2/1 dw1  # 1:remat
        """
    )


def test_remat_after_order_rewires_the_halves_and_keeps_the_order() -> None:
    ordered = dag(chain(2), [*TWO_STAGES, one_f_one_b(0, "F0 F1 BI0 B1 BW0")])
    after = rewritten(remat({"layer": "*"}, "all"), ordered)
    early = dag(
        chain(2),
        [
            TWO_STAGES[0],
            remat({"layer": "*"}, "all"),
            *TWO_STAGES[1:],
            *[one_f_one_b(0, "F0 F1 BI0 B1 BW0")],
        ],
    )
    same = [(n.op, n.reads, n.writes, n.after, n.devices) for n in after.nodes]
    assert same == [(n.op, n.reads, n.writes, n.after, n.devices) for n in early.nodes]


def test_remat_of_one_microbatch_is_refused() -> None:
    """A remat policy belongs to a chunk: a filter for one microbatch must not change the others."""
    with pytest.raises(DirectiveError, match="MB"):
        remat({"layer": 0, "MB": 0}, "all").apply(dag(chain(1), [HALVES]))


# provenance


def test_every_node_says_which_directive_moved_it_last() -> None:
    after = dag(chain(2), [*TWO_STAGES, one_f_one_b(1, "F0 B0"), stream({"loss": 0}, "s")])
    found = {name(n): after.label(n.made_by) for n in after.nodes}
    assert found["F embed0 MB0"] == "3:place"
    assert found["F layer1 MB0"] == "4:place"
    assert found["B loss0 MB0"] == "6:stream"
    assert found["F loss0 MB1"] == "6:stream"
    assert after.history[3] == "place({'PP': 0}, devices=[0])"


def test_halves_are_made_by_the_order_that_divided_them() -> None:
    after = dag(chain(2), [*TWO_STAGES, one_f_one_b(1, "F0 B0"), one_f_one_b(0, "BI0 BW0")])
    for node in after.nodes:
        divided = node.op.which.name in ("BI", "BW")
        assert (after.label(node.made_by) == "6:order") is divided


def test_two_places_on_one_group_send_on_their_own_streams() -> None:
    """Stages 0 and 2 of a V share device 0, but send on different streams."""
    three = partition("layer", into="PP", parts=3, by=[1, 1, 1])
    both = [
        three,
        place({"PP": 0}, devices=[0], stream="down"),
        place({"PP": 1}, devices=[1]),
        place({"PP": 2}, devices=[0], stream="up"),
    ]
    nodes = dag(chain(3), both).nodes
    assert {n.sends.stream for n in nodes if n.tags["PP"] == 0} == {"down"}
    assert {n.sends.stream for n in nodes if n.tags["PP"] == 2} == {"up"}


def test_shard_is_of_whole_regions() -> None:
    before = dag(moe(1, 4), [HALVES, place({"MB": 0}, devices=[0, 1])])
    with pytest.raises(DirectiveError, match="cannot name 'MB'"):
        shard({"EP": "*", "MB": 0}).apply(before)
    with pytest.raises(DirectiveError, match="not placed yet"):
        shard({"EP": "*"}).apply(before)


def test_a_parameter_is_not_sharded_for_one_region_and_whole_for_another() -> None:
    """Both layers use the same experts; the directive shards only layer 0's."""
    two = moe(2, 4)
    chunks = tuple(
        replace(c, parameters=("experts.0",)) if "EP" in c.tags else c for c in two.chunks
    )
    before = dag(replace(two, chunks=chunks), [place({}, devices=[0, 1])])
    with pytest.raises(DirectiveError, match=r"experts\.0"):
        shard({"EP": 0}).apply(before)


# handwritten facts equal those of capture


class Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("embed"):
            x = self.embed(tokens)
        first = x
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                x = self.layer(layer, x, first, i)
        with annotate("head"):
            return self.head(x)

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor, i: int) -> Tensor:
        return x + torch.relu(layer(x))


class Skip(Chain):
    def layer(self, layer: nn.Module, x: Tensor, first: Tensor, i: int) -> Tensor:
        x = x + torch.relu(layer(x))
        return x + first if i == len(self.layers) - 1 else x


class Masked(Chain):
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        with annotate("embed"):
            x = self.embed(tokens)
        for layer in self.layers:
            with annotate("layer"):
                x = x + torch.relu(layer(x)) * mask
        with annotate("head"):
            return self.head(x)


class Tied(Chain):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.head.weight = self.embed.weight


class Frozen(Chain):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.embed.requires_grad_(False)
        self.layers.requires_grad_(False)


class MoE(nn.Module):
    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.n = experts
        self.embed = nn.Embedding(VOCAB, DIM)
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))
        self.experts = nn.ParameterList(torch.randn(experts, DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("embed"):
            x = self.embed(tokens)
        for dense, experts in zip(self.dense, self.experts, strict=True):
            with annotate("layer"):
                x = x + torch.relu(dense(x))
                rows = x.view(self.n, -1, DIM)
                with annotate("EP"):
                    rows = torch.relu(torch.bmm(rows, experts))
                x = x + rows.view_as(x)
        with annotate("head"):
            return self.head(x)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over all targets that uses no value of the whole batch."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.mean()


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


@pytest.mark.parametrize(
    ("written", "model", "loss"),
    [
        (chain(2), Chain(2), mean_loss),
        (chain(2, counted=True), Chain(2), sum_and_count),
        (chain(2, trained=False), Frozen(2), mean_loss),
        (moe(2, 4), MoE(2, 4), mean_loss),
        (skip(3), Skip(3), mean_loss),
        (tied(2), Tied(2), mean_loss),
        (masked(2), Masked(2), mean_loss),
    ],
    ids=["chain", "counted", "frozen", "moe", "skip", "tied", "masked"],
)
def test_the_facts_by_hand_are_those_of_capture(
    written: Model, model: nn.Module, loss: Callable[[Tensor, Tensor], Any]
) -> None:
    batch = torch.zeros(BATCH, SEQ, dtype=torch.long)
    inputs = (batch, torch.zeros(BATCH, SEQ, 1)) if isinstance(model, Masked) else (batch,)
    captured = capture(model, inputs=inputs, targets=(batch,), loss=loss)
    real = facts_of(captured, RematPolicy.NONE)
    assert written.chunks == tuple(map(plain_facts, real.chunks))
    assert [(v.shape, v.nbytes) for v in written.values] == [
        (v.shape, v.nbytes) for v in real.values
    ]
    assert written.parameters == real.parameters
    assert (written.loss, written.count) == (real.loss, real.count)
    assert (written.batch, written.remat) == (real.batch, real.remat)


def plain_facts(chunk: ChunkFacts) -> ChunkFacts:
    """``chunk`` without facts that the handwritten models leave out: bytes moved by operations
    (used only for costs), memory saved by early frees, the storage of results, and the source
    lines of products."""

    def plain(variant: Variant) -> Variant:
        passes = {
            which: replace(
                facts,
                cost=PassCost((OpCost(1, facts.flops),)),
                last=(),
                eased=0,
                housed=0,
                private=(),
            )
            for which, facts in variant.passes.items()
        }
        return replace(variant, passes=passes)

    variants = {policy: plain(v) for policy, v in chunk.variants.items()}
    return replace(chunk, variants=variants, gradients=(), products=())


class Counting(Chain):
    """The first layer counts its calls."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(()))

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor, i: int) -> Tensor:
        if i == 0:
            self.seen += 1
        return super().layer(layer, x, first, i)


def test_a_buffer_that_changes_is_a_fact_of_its_chunk() -> None:
    batch = torch.zeros(BATCH, SEQ, dtype=torch.long)
    captured = capture(Counting(2), inputs=(batch,), targets=(batch,), loss=mean_loss)
    found = facts_of(captured, RematPolicy.NONE)
    assert uses(found) == uses(changing(chain(2), layer=0))


def uses(model: Model) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """For each chunk, the buffers it reads and the buffers it changes."""
    return [(chunk.buffers, chunk.changes) for chunk in model.chunks]


class Following(Chain):
    """The first layer reads a buffer that the second changes."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(()))

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor, i: int) -> Tensor:
        if i == 0:
            x = x + self.seen
        if i == 1:
            self.seen = 0.9 * self.seen + x.detach().mean()
        return super().layer(layer, x, first, i)


@pytest.fixture(scope="module")
def following() -> Model:
    batch = torch.zeros(BATCH, SEQ, dtype=torch.long)
    captured = capture(Following(2), inputs=(batch,), targets=(batch,), loss=mean_loss)
    return facts_of(captured, RematPolicy.NONE)


def test_a_buffer_that_is_read_is_a_fact_of_its_chunk(following: Model) -> None:
    assert uses(following) == uses(reading(changing(chain(2), layer=1), layer=0))


def test_a_buffer_that_changes_is_on_one_device_with_all_who_read_it(following: Model) -> None:
    """Otherwise the first layer, on its own device, would never see the new content."""
    with pytest.raises(DirectiveError, match="'seen', which changes, on several devices"):
        lower(dag(following, TWO_STAGES), {})


def test_a_buffer_is_read_after_the_microbatch_before_has_changed_it(following: Model) -> None:
    apart = [stream({"MB": 1}, "other"), place({}, devices=[0])]
    found = lower(dag(following, [HALVES, *apart]), {}).dag
    assert found.history[-1] == "buffers change in the order of microbatches (seen)"
    last = len(found.history) - 1
    waits = {
        name(n): [name(found.nodes[b]) for b, by in zip(n.after, n.after_by, strict=True)]
        for n in found.nodes
        if last in n.after_by
    }
    assert waits == {
        "F layer1 MB0": ["F layer0 MB0"],
        "F layer0 MB1": ["F layer1 MB0"],
        "F layer1 MB1": ["F layer0 MB1"],
    }


def test_an_argument_that_is_given_for_good_makes_room() -> None:
    def chain(x: Tensor) -> Tensor:
        return torch.cat([(x + 1) * 2, x[:0]])  # x is used until the end

    def early(x: Tensor) -> Tensor:
        return ((x + 1) * 2).exp()

    for function, room in ((chain, 0), (early, 400)):
        graph = make_fx(function)(torch.zeros(100)).graph
        (given,) = graph.find_nodes(op="placeholder")
        assert workspace(graph, [given]) == workspace(graph) - room


def test_what_an_op_makes_and_nobody_takes_needs_memory_too() -> None:
    """sort returns values (fp32) and indices (int64)."""

    def needed(function: Callable[[Tensor], Tensor]) -> int:
        module = make_fx(function)(torch.zeros(100))
        module.graph.eliminate_dead_code()
        return workspace(module.graph)

    assert needed(lambda x: x.sort().values + 1) == (4 + 8) * 100 - 4 * 100  # minus the result
    assert needed(lambda x: torch.add(*x.sort())) == (4 + 8 + 4) * 100 - 4 * 100
