"""Plans: their text for known strategies, their communication against the textbook, and whether
the checker of plans sees every fault."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

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
from piper.errors import DirectiveError
from piper.ir import Model, ParameterFacts, build
from piper.ir.dag import Collective
from piper.lower.lower import Lowered, lower
from piper.lower.plan import Instruction, Plan, Verb
from piper.strategy import Strategy
from tests.facts import chain, moe, skip, tied
from tests.plan_checker import PlanError, check, implied_waits
from tests.test_strategy import PUBLISHED

SMALL = 0.0001
"""Mebibytes of a bucket that holds one parameter."""


def lowered(model: Model, *directives: Directive, devices: int = 16) -> Lowered:
    dag = Strategy(directives).apply(build(model))
    return lower(dag, dict.fromkeys(range(1, devices + 1), model))


def judged(model: Model, *directives: Directive) -> Lowered:
    found = lowered(model, *directives)
    check(found.dag, found.plans, found.memory)
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


def golden(written: str) -> str:
    return textwrap.dedent(written).strip()


def printed(plan: Plan) -> str:
    """The plan without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in str(plan).splitlines())


GOLDEN: dict[str, str] = {
    "zero=0": """
        plan of devices 0,1
           0 [compute] compute F embed[0] MB[0]: s0 -> s4
           1 [compute] compute F embed[0] MB[1]: s1 -> s5
           2 [compute] compute F layer[0] MB[0]: s4 -> s6 s7
           3 [compute] compute F layer[0] MB[1]: s5 -> s8 s9
           4 [compute] compute F layer[1] MB[0]: s6 -> s10 s11
           5 [compute] compute F layer[1] MB[1]: s8 -> s12 s13
           6 [compute] compute F head[0] MB[0]: s10 -> s14
           7 [compute] compute F head[0] MB[1]: s12 -> s15
           8 [compute] compute F loss[0] MB[0]: s14 s2 -> s16 s17
           9 free s14
          10 [compute] compute F loss[0] MB[1]: s15 s3 -> s18 s19
          11 free s15
          12 [compute] compute B loss[0] MB[0]: s17 s2 -> s20
          13 free s17
          14 free s2
          15 [compute] compute B loss[0] MB[1]: s19 s3 -> s21
          16 free s19
          17 free s3
          18 [compute] compute B head[0] MB[0]: s10 s20 -> s22 s23
          19 free s10
          20 free s20
          21 [compute] compute B head[0] MB[1]: s12 s21 -> s24 +s23
          22 free s12
          23 free s21
          24 [compute] compute B layer[1] MB[0]: s11 s6 s22 -> s25 s26
          25 free s11
          26 free s6
          27 free s22
          28 [compute] compute B layer[1] MB[1]: s13 s8 s24 -> s27 +s26
          29 free s13
          30 free s8
          31 free s24
          32 [compute] compute B layer[0] MB[0]: s7 s4 s25 -> s28 s29
          33 free s7
          34 free s4
          35 free s25
          36 [compute] compute B layer[0] MB[1]: s9 s5 s27 -> s30 +s29
          37 free s9
          38 free s5
          39 free s27
          40 [compute] compute B embed[0] MB[0]: s0 s28 -> s31
          41 free s0
          42 free s28
          43 [compute] compute B embed[0] MB[1]: s1 s30 -> +s31
          44 free s1
          45 free s30
          46 [reduce] collective all_reduce 0,1: s31 s29 s26 s23 -> s32 waits 43
          47 free s31
          48 free s29
          49 free s26
          50 free s23
          51 [compute] update update bucket0: s32 -> s33 waits 46
          52 free s32
          53 free s33
          54 free s16
          55 free s18
    """,
    "zero=1": """
        plan of devices 0,1
           0 [compute] compute F embed[0] MB[0]: s0 -> s4
           1 [compute] compute F embed[0] MB[1]: s1 -> s5
           2 [compute] compute F layer[0] MB[0]: s4 -> s6 s7
           3 [compute] compute F layer[0] MB[1]: s5 -> s8 s9
           4 [compute] compute F layer[1] MB[0]: s6 -> s10 s11
           5 [compute] compute F layer[1] MB[1]: s8 -> s12 s13
           6 [compute] compute F head[0] MB[0]: s10 -> s14
           7 [compute] compute F head[0] MB[1]: s12 -> s15
           8 [compute] compute F loss[0] MB[0]: s14 s2 -> s16 s17
           9 free s14
          10 [compute] compute F loss[0] MB[1]: s15 s3 -> s18 s19
          11 free s15
          12 [compute] compute B loss[0] MB[0]: s17 s2 -> s20
          13 free s17
          14 free s2
          15 [compute] compute B loss[0] MB[1]: s19 s3 -> s21
          16 free s19
          17 free s3
          18 [compute] compute B head[0] MB[0]: s10 s20 -> s22 s23
          19 free s10
          20 free s20
          21 [compute] compute B head[0] MB[1]: s12 s21 -> s24 +s23
          22 free s12
          23 free s21
          24 [compute] compute B layer[1] MB[0]: s11 s6 s22 -> s25 s26
          25 free s11
          26 free s6
          27 free s22
          28 [compute] compute B layer[1] MB[1]: s13 s8 s24 -> s27 +s26
          29 free s13
          30 free s8
          31 free s24
          32 [compute] compute B layer[0] MB[0]: s7 s4 s25 -> s28 s29
          33 free s7
          34 free s4
          35 free s25
          36 [compute] compute B layer[0] MB[1]: s9 s5 s27 -> s30 +s29
          37 free s9
          38 free s5
          39 free s27
          40 [compute] compute B embed[0] MB[0]: s0 s28 -> s31
          41 free s0
          42 free s28
          43 [compute] compute B embed[0] MB[1]: s1 s30 -> +s31
          44 free s1
          45 free s30
          46 [reduce] collective reduce_scatter 0,1: s31 s29 s26 s23 -> s32 waits 43
          47 free s31
          48 free s29
          49 free s26
          50 free s23
          51 [compute] update update bucket0: s32 -> s33 waits 46
          52 free s32
          53 [gather] collective all_gather 0,1: s33 -> s34 waits 51
          54 free s33
          55 free s34
          56 free s16
          57 free s18
    """,
    "zero=2": """
        plan of devices 0,1
           0 [compute] compute F embed[0] MB[0]: s0 -> s4
           1 [compute] compute F embed[0] MB[1]: s1 -> s5
           2 [compute] compute F layer[0] MB[0]: s4 -> s6 s7
           3 [compute] compute F layer[0] MB[1]: s5 -> s8 s9
           4 [compute] compute F layer[1] MB[0]: s6 -> s10 s11
           5 [compute] compute F layer[1] MB[1]: s8 -> s12 s13
           6 [compute] compute F head[0] MB[0]: s10 -> s14
           7 [compute] compute F head[0] MB[1]: s12 -> s15
           8 [compute] compute F loss[0] MB[0]: s14 s2 -> s16 s17
           9 free s14
          10 [compute] compute F loss[0] MB[1]: s15 s3 -> s18 s19
          11 free s15
          12 [compute] compute B loss[0] MB[0]: s17 s2 -> s20
          13 free s17
          14 free s2
          15 [compute] compute B loss[0] MB[1]: s19 s3 -> s21
          16 free s19
          17 free s3
          18 [compute] compute B head[0] MB[0]: s10 s20 -> s22 s23
          19 free s10
          20 free s20
          21 [compute] compute B head[0] MB[1]: s12 s21 -> s24 s25
          22 free s12
          23 free s21
          24 [compute] compute B layer[1] MB[0]: s11 s6 s22 -> s26 s27
          25 free s11
          26 free s6
          27 free s22
          28 [compute] compute B layer[1] MB[1]: s13 s8 s24 -> s28 s29
          29 free s13
          30 free s8
          31 free s24
          32 [compute] compute B layer[0] MB[0]: s7 s4 s26 -> s30 s31
          33 free s7
          34 free s4
          35 free s26
          36 [compute] compute B layer[0] MB[1]: s9 s5 s28 -> s32 s33
          37 free s9
          38 free s5
          39 free s28
          40 [compute] compute B embed[0] MB[0]: s0 s30 -> s34
          41 free s0
          42 free s30
          43 [compute] compute B embed[0] MB[1]: s1 s32 -> s35
          44 free s1
          45 free s32
          46 [reduce] collective reduce_scatter 0,1 embed[0] MB[0]: s34 s31 s27 s23 -> s36 waits 40
          47 free s34
          48 free s31
          49 free s27
          50 free s23
          51 [reduce] collective reduce_scatter 0,1 embed[0] MB[1]: s35 s33 s29 s25 -> +s36 waits 43
          52 free s35
          53 free s33
          54 free s29
          55 free s25
          56 [compute] update update bucket0: s36 -> s37 waits 51
          57 free s36
          58 [gather] collective all_gather 0,1: s37 -> s38 waits 56
          59 free s37
          60 free s38
          61 free s16
          62 free s18
    """,
    "zero=3": """
        plan of devices 0,1
           0 [gather] collective all_gather 0,1 embed[0] MB[0]:  -> s4
           1 [compute] compute F embed[0] MB[0]: s0 s4 -> s5 waits 0
           2 [compute] compute F embed[0] MB[1]: s1 s4 -> s6 waits 0
           3 [compute] compute F layer[0] MB[0]: s5 s4 -> s7 s8 waits 0
           4 [compute] compute F layer[0] MB[1]: s6 s4 -> s9 s10 waits 0
           5 [compute] compute F layer[1] MB[0]: s7 s4 -> s11 s12 waits 0
           6 [compute] compute F layer[1] MB[1]: s9 s4 -> s13 s14 waits 0
           7 [compute] compute F head[0] MB[0]: s11 s4 -> s15 waits 0
           8 [compute] compute F head[0] MB[1]: s13 s4 -> s16 waits 0
           9 free s4
          10 [compute] compute F loss[0] MB[0]: s15 s2 -> s17 s18
          11 free s15
          12 [compute] compute F loss[0] MB[1]: s16 s3 -> s19 s20
          13 free s16
          14 [compute] compute B loss[0] MB[0]: s18 s2 -> s21
          15 free s18
          16 free s2
          17 [gather] collective all_gather 0,1 head[0] MB[0]:  -> s22 waits 14
          18 [compute] compute B loss[0] MB[1]: s20 s3 -> s23
          19 free s20
          20 free s3
          21 [compute] compute B head[0] MB[0]: s11 s21 s22 -> s24 s25 waits 17
          22 free s11
          23 free s21
          24 [compute] compute B head[0] MB[1]: s13 s23 s22 -> s26 s27 waits 17
          25 free s13
          26 free s23
          27 [compute] compute B layer[1] MB[0]: s12 s7 s24 s22 -> s28 s29 waits 17
          28 free s12
          29 free s7
          30 free s24
          31 [compute] compute B layer[1] MB[1]: s14 s9 s26 s22 -> s30 s31 waits 17
          32 free s14
          33 free s9
          34 free s26
          35 [compute] compute B layer[0] MB[0]: s8 s5 s28 s22 -> s32 s33 waits 17
          36 free s8
          37 free s5
          38 free s28
          39 [compute] compute B layer[0] MB[1]: s10 s6 s30 s22 -> s34 s35 waits 17
          40 free s10
          41 free s6
          42 free s30
          43 free s22
          44 [compute] compute B embed[0] MB[0]: s0 s32 -> s36
          45 free s0
          46 free s32
          47 [compute] compute B embed[0] MB[1]: s1 s34 -> s37
          48 free s1
          49 free s34
          50 [reduce] collective reduce_scatter 0,1 embed[0] MB[0]: s36 s33 s29 s25 -> s38 waits 44
          51 free s36
          52 free s33
          53 free s29
          54 free s25
          55 [reduce] collective reduce_scatter 0,1 embed[0] MB[1]: s37 s35 s31 s27 -> +s38 waits 47
          56 free s37
          57 free s35
          58 free s31
          59 free s27
          60 [compute] update update bucket0: s38 -> s39 waits 55
          61 free s38
          62 free s39
          63 free s17
          64 free s19
    """,
    "published 0": """
        plan of devices 0,2
           0 [compute] compute F embed[0] PP[0] MB[0]: s0 -> s2
           1 [compute] compute F layer[0] PP[0] MB[0]: s2 -> s3 s4 s5
           2 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[0]: s4 -> s6 waits 1
           3 free s4
           4 [compute] compute F layer[0] EP[0] PP[0] MB[0]: s6 -> s7 waits 2
           5 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[0]: s7 -> s8 waits 4
           6 free s7
           7 [compute] compute F layer[0] PP[0] MB[0]: s8 s3 -> s9 waits 5
           8 free s3
           9 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[0]: s8 -> s10
          10 free s8
          11 [pp_stream/send] send send 0,2->1,3 layer[0] PP[0] MB[0]: s9 ->  waits 7
          12 free s9
          13 [compute] compute F embed[0] PP[0] MB[1]: s1 -> s11
          14 [compute] compute F layer[0] PP[0] MB[1]: s11 -> s12 s13 s14
          15 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[1]: s13 -> s15 waits 14
          16 free s13
          17 [compute] compute F layer[0] EP[0] PP[0] MB[1]: s15 -> s16 waits 15
          18 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[1]: s16 -> s17 waits 17
          19 free s16
          20 [compute] compute F layer[0] PP[0] MB[1]: s17 s12 -> s18 waits 18
          21 free s12
          22 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[1]: s17 -> s19
          23 free s17
          24 [pp_stream/send] send send 0,2->1,3 layer[0] PP[0] MB[1]: s18 ->  waits 20
          25 free s18
          26 [pp_stream/recv] recv send 1,3->0,2 layer[1] PP[1] MB[0]:  -> s20
          27 [compute] compute B layer[0] PP[0] MB[0]: s20 -> s21 s22 waits 26
          28 free s20
          29 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[0]: s21 -> s23 waits 27
          30 free s21
          31 [compute] compute B layer[0] EP[0] PP[0] MB[0]: s10 s6 s23 -> s24 s25 waits 29
          32 free s10
          33 free s6
          34 free s23
          35 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[0]: s24 -> s26 waits 31
          36 free s24
          37 [compute] compute B layer[0] PP[0] MB[0]: s5 s2 s22 s26 -> s27 s28 waits 35
          38 free s5
          39 free s2
          40 free s22
          41 free s26
          42 [compute] compute B embed[0] PP[0] MB[0]: s0 s27 -> s29
          43 free s0
          44 free s27
          45 [pp_stream/recv] recv send 1,3->0,2 layer[1] PP[1] MB[1]:  -> s30
          46 [compute] compute B layer[0] PP[0] MB[1]: s30 -> s31 s32 waits 45
          47 free s30
          48 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[1]: s31 -> s33 waits 46
          49 free s31
          50 [compute] compute B layer[0] EP[0] PP[0] MB[1]: s19 s15 s33 -> s34 +s25 waits 48
          51 free s19
          52 free s15
          53 free s33
          54 [ep_stream] collective all_to_all 0,2 layer[0] EP[0] PP[0] MB[1]: s34 -> s35 waits 50
          55 free s34
          56 [compute] update update bucket1: s25 -> s36
          57 free s25
          58 free s36
          59 [compute] compute B layer[0] PP[0] MB[1]: s14 s11 s32 s35 -> s37 +s28 waits 54
          60 free s14
          61 free s11
          62 free s32
          63 free s35
          64 [compute] compute B embed[0] PP[0] MB[1]: s1 s37 -> +s29
          65 free s1
          66 free s37
          67 [dp_stream] collective all_reduce 0,2: s29 s28 -> s38 waits 64
          68 free s29
          69 free s28
          70 [compute] update update bucket0: s38 -> s39 waits 67
          71 free s38
          72 free s39
    """,
    "published 1": """
        plan of devices 1,3
           0 [pp_stream/recv] recv send 0,2->1,3 layer[0] PP[0] MB[0]:  -> s2
           1 [compute] compute F layer[1] PP[1] MB[0]: s2 -> s3 s4 s5 waits 0
           2 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[0]: s4 -> s6 waits 1
           3 free s4
           4 [compute] compute F layer[1] EP[1] PP[1] MB[0]: s6 -> s7 waits 2
           5 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[0]: s7 -> s8 waits 4
           6 free s7
           7 [compute] compute F layer[1] PP[1] MB[0]: s8 s3 -> s9 waits 5
           8 free s3
           9 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[0]: s8 -> s10
          10 free s8
          11 [pp_stream/recv] recv send 0,2->1,3 layer[0] PP[0] MB[1]:  -> s11
          12 [compute] compute F head[0] PP[1] MB[0]: s9 -> s12
          13 [compute] compute F loss[0] PP[1] MB[0]: s12 s0 -> s13 s14
          14 free s12
          15 [compute] compute B loss[0] PP[1] MB[0]: s14 s0 -> s15
          16 free s14
          17 free s0
          18 [compute] compute F layer[1] PP[1] MB[1]: s11 -> s16 s17 s18 waits 11
          19 [compute] compute B head[0] PP[1] MB[0]: s9 s15 -> s19 s20
          20 free s9
          21 free s15
          22 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[1]: s17 -> s21 waits 18
          23 free s17
          24 [compute] compute B layer[1] PP[1] MB[0]: s19 -> s22 s23
          25 free s19
          26 [compute] compute F layer[1] EP[1] PP[1] MB[1]: s21 -> s24 waits 22
          27 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[0]: s22 -> s25 waits 24
          28 free s22
          29 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[1]: s24 -> s26 waits 26
          30 free s24
          31 [compute] compute B layer[1] EP[1] PP[1] MB[0]: s10 s6 s25 -> s27 s28 waits 27
          32 free s10
          33 free s6
          34 free s25
          35 [compute] compute F layer[1] PP[1] MB[1]: s26 s16 -> s29 waits 29
          36 free s16
          37 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[0]: s27 -> s30 waits 31
          38 free s27
          39 [compute] compute F head[0] PP[1] MB[1]: s29 -> s31
          40 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[1]: s26 -> s32
          41 free s26
          42 [compute] compute B layer[1] PP[1] MB[0]: s5 s2 s23 s30 -> s33 s34 waits 0 37
          43 free s5
          44 free s2
          45 free s23
          46 free s30
          47 [compute] compute F loss[0] PP[1] MB[1]: s31 s1 -> s35 s36
          48 free s31
          49 [pp_stream/send] send send 1,3->0,2 layer[1] PP[1] MB[0]: s33 ->  waits 42
          50 free s33
          51 [compute] compute B loss[0] PP[1] MB[1]: s36 s1 -> s37
          52 free s36
          53 free s1
          54 [compute] compute B head[0] PP[1] MB[1]: s29 s37 -> s38 +s20
          55 free s29
          56 free s37
          57 [compute] compute B layer[1] PP[1] MB[1]: s38 -> s39 s40
          58 free s38
          59 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[1]: s39 -> s41 waits 57
          60 free s39
          61 [compute] compute B layer[1] EP[1] PP[1] MB[1]: s32 s21 s41 -> s42 +s28 waits 59
          62 free s32
          63 free s21
          64 free s41
          65 [ep_stream] collective all_to_all 1,3 layer[1] EP[1] PP[1] MB[1]: s42 -> s43 waits 61
          66 free s42
          67 [compute] update update bucket3: s28 -> s44
          68 free s28
          69 free s44
          70 [compute] compute B layer[1] PP[1] MB[1]: s18 s11 s40 s43 -> s45 +s34 waits 11 65
          71 free s18
          72 free s11
          73 free s40
          74 free s43
          75 [pp_stream/send] send send 1,3->0,2 layer[1] PP[1] MB[1]: s45 ->  waits 70
          76 free s45
          77 [dp_stream] collective all_reduce 1,3: s34 s20 -> s46 waits 70
          78 free s34
          79 free s20
          80 [compute] update update bucket2: s46 -> s47 waits 77
          81 free s46
          82 free s47
          83 free s13
          84 free s35
    """,
}


@pytest.mark.parametrize("zero", range(4))
def test_the_plan_of_two_devices(zero: int) -> None:
    (plan,) = two_devices(zero).plans
    assert printed(plan) == golden(GOLDEN[f"zero={zero}"])


@pytest.mark.parametrize("stage", range(2))
def test_the_plans_of_the_published_example(stage: int) -> None:
    plans = published().plans
    assert [plan.devices for plan in plans] == [(0, 2), (1, 3)]
    assert printed(plans[stage]) == golden(GOLDEN[f"published {stage}"])


# against the textbook


def communication(found: Lowered) -> Counter[str]:
    return Counter(n.op.kind.value for n in found.dag.nodes if isinstance(n.op, Collective))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, SMALL])
def test_communication_of_each_level(microbatches: int, bucket_mb: float) -> None:
    def count(zero: int) -> Counter[str]:
        return communication(two_devices(zero, microbatches=microbatches, bucket_mb=bucket_mb))

    buckets = 1 if bucket_mb == 25 else 4
    assert count(0) == {"all_reduce": buckets}
    assert count(1) == {"reduce_scatter": buckets, "all_gather": buckets}
    assert count(2) == {"reduce_scatter": buckets * microbatches, "all_gather": buckets}
    three = count(3)
    assert three["reduce_scatter"] == buckets * microbatches
    assert set(three) == {"reduce_scatter", "all_gather"}


def runs(found: Lowered) -> int:
    """How often, over one device's passes in order, a bucket is used that the pass before did
    not use."""
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
            held = used
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
    if bucket_mb == SMALL:  # embed, 2 layers, head; head, 2 layers: the embedding's B needs none
        assert gathers == 7 * microbatches


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, SMALL])
def test_zero_3_gathers_nothing_that_is_held(microbatches: int, bucket_mb: float) -> None:
    """No order is given here, so that the scheduler chooses, with and without the gathers."""
    found = two_devices(3, microbatches=microbatches, bucket_mb=bucket_mb)
    held: dict[int, int] = {}
    for x in found.plans[0].instructions:
        if x.verb is Verb.FREE:
            held.pop(x.reads[0], None)
        elif "all_gather" in x.name:
            bucket = found.dag.extra[found.dag.nodes[x.node].writes[0] - found.dag.first_extra].of
            assert bucket not in held.values(), f"{x.name}: bucket {bucket} is gathered already"
            held[x.writes[0]] = bucket


def test_one_device_communicates_nothing() -> None:
    for zero in range(4):
        found = judged(chain(2), split(parts=2), place({}, devices=[0]), replicate({}, zero=zero))
        assert not communication(found)


def test_higher_levels_keep_less() -> None:
    memory = [two_devices(zero).memory[0] for zero in range(4)]
    assert memory[0].optimizer > memory[1].optimizer == memory[2].optimizer == memory[3].optimizer
    assert memory[0].parameters == memory[1].parameters == memory[2].parameters
    assert memory[3].parameters * 2 == memory[0].parameters


# plans as data


@pytest.mark.parametrize("make", [published, lambda: two_devices(3)], ids=["published", "zero=3"])
def test_a_plan_round_trips_through_json(make: Callable[[], Lowered]) -> None:
    for plan in make().plans:
        again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again == plan
        assert str(again) == str(plan)


@pytest.mark.parametrize("zero", range(4))
def test_devices_that_differ_in_rank_share_a_plan(zero: int) -> None:
    def plans(n: int) -> tuple[Plan, ...]:
        found = lowered(
            chain(4),
            partition("layer", into="PP", parts=2),
            split(parts=4),
            place({"PP": 0}, devices=range(n)),
            place({"PP": 1}, devices=range(n, 2 * n)),
            replicate({}, zero=zero),
            devices=128,
        )
        check(found.dag, found.plans, found.memory)
        return found.plans

    few, many = plans(2), plans(64)
    assert [len(plan.devices) for plan in few] == [2, 2]
    assert [len(plan.devices) for plan in many] == [64, 64]
    for a, b in zip(few, many, strict=True):
        assert [replace(x, name="") for x in a.instructions] == [
            replace(x, name="") for x in b.instructions
        ]
        assert a.given == b.given


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


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (3, 4)])
def test_groups_that_cannot_be_matched_are_refused(first: int, second: int) -> None:
    with pytest.raises(DirectiveError, match=r"one size must divide the other") as caught:
        lowered(
            chain(2),
            partition("layer", into="PP", parts=2),
            place({"PP": 0}, devices=range(first)),
            place({"PP": 1}, devices=range(first, first + second)),
        )
    assert "place(" in str(caught.value)


# what the checker found


def biased(model: Model) -> Model:
    """``model`` with a second parameter in every chunk that has one."""
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
    """One chunk's gradients enter a reduction each microbatch and another at the end."""
    state = replicate({region: 0}, zero=zero, bucket_mb=SMALL)
    judged(biased(tied(2)), split(parts=2), place({}, devices=[0, 1]), state)


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
    """The head's gradients enter a reduction, for the tied weight, and an update, for its bias."""
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


@pytest.mark.parametrize("other", [[1, 0], [1, 2]], ids=str)
def test_experts_on_two_groups_that_disagree_on_who_holds_which(other: list[int]) -> None:
    """Device 1 holds the second half of the experts for one microbatch, the first for the other."""
    try:
        found = lowered(
            moe(1, 4),
            split(parts=2),
            place({"MB": 0}, devices=[0, 1]),
            place({"MB": 1}, devices=other),
            shard({"EP": "*"}),
        )
    except DirectiveError:
        return
    check(found.dag, found.plans, found.memory)


def test_a_stream_without_a_name() -> None:
    try:
        found = lowered(chain(1), place({}, devices=[0]), stream({"PASS": "F"}, ""))
    except DirectiveError:
        return
    check(found.dag, found.plans, found.memory)


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
    """The head's gradient may be had before its BI, which reads the weight, is done."""
    judged(
        chain(1),
        place({}, devices=devices),
        replicate({}, zero=zero, bucket_mb=SMALL),
        stream({"head": 0, "PASS": "B"}, "head"),
        order({"head": 0, "PASS": "BW"}, {"head": 0, "PASS": "BI"}),
    )


def test_a_batch_counts_as_the_group_sees_it() -> None:
    """A group of four has a quarter of every microbatch."""
    whole = chain(1)

    def part(n: int) -> Model:
        return replace(whole, values=tuple(replace(v, nbytes=v.nbytes // n) for v in whole.values))

    dag = Strategy([place({}, devices=[0, 1, 2, 3])]).apply(build(whole))
    (plan,) = lower(dag, {n: part(n) for n in (1, 4)}).plans
    tokens = whole.values[0].nbytes
    assert [plan.slot_bytes[slot] for slot in plan.given] == [tokens // 4, tokens // 4]


def reduced_bytes(model: Model, devices: int, zero: int) -> int:
    found = lowered(model, place({}, devices=range(devices)), replicate({}, zero=zero))
    (plan,) = found.plans
    (write,) = {x.writes[0] for x in plan.instructions if "reduce" in x.name}
    return plan.slot_bytes[write]


def test_a_divided_gradient_is_rounded_up() -> None:
    model = chain(1)
    total = sum(p.nbytes for p in model.parameters.values())
    assert total % 3
    assert reduced_bytes(model, 3, 1) * 3 >= total


def test_frozen_parameters_have_no_gradient() -> None:
    model = chain(2, trained=False)
    assert reduced_bytes(model, 2, 0) == model.parameters["head.weight"].nbytes


# the checker sees every fault


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """``plan`` with one wait, free or instruction less; not the waits that others imply."""
    implied = implied_waits(plan)
    rows = plan.instructions
    for place_, x in enumerate(rows):
        for w in x.waits:
            if (place_, w) not in implied:
                fewer = replace(x, waits=tuple(o for o in x.waits if o != w))
                changed = (*rows[:place_], fewer, *rows[place_ + 1 :])
                yield f"wait {w} of {place_}", replace(plan, instructions=changed)
        left = tuple(_without(y, place_) for y in (*rows[:place_], *rows[place_ + 1 :]))
        yield f"{x.verb.value} {place_} {x.name}", replace(plan, instructions=left)


def _without(x: Instruction, gone: int) -> Instruction:
    return replace(x, waits=tuple(w - (w > gone) for w in x.waits if w != gone))


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


MADE: dict[str, Callable[[], Lowered]] = {
    "published": published,
    "uneven": uneven,
    **{f"zero={zero}": lambda zero=zero: two_devices(zero, bucket_mb=SMALL) for zero in range(4)},
}


@pytest.mark.parametrize("name", MADE)
def test_the_checker_sees_every_fault(name: str) -> None:
    found = MADE[name]()
    missed, tried = [], 0
    for c, plan in enumerate(found.plans):
        for what, mutant in mutants(plan):
            tried += 1
            plans = (*found.plans[:c], mutant, *found.plans[c + 1 :])
            try:
                check(found.dag, plans)
            except PlanError:
                continue
            missed.append(f"{plan.devices}: {what}")
    assert tried > 50
    assert not missed
