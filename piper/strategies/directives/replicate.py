"""``replicate``: keep replicated parameters equal (data parallelism), and shard their state (ZeRO).

zero=0  gradients summed          everything whole on every device
zero=1  … optimizer state sharded
zero=2  … and gradients sharded
zero=3  … and parameters sharded, gathered when they are used

within=2 shards each copy over two adjacent devices, and keeps the copies equal (HSDP):

    [0 1 2 3]: one copy in four parts        within=2: [0 1] [2 3]: two copies in two parts each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, region_of
from piper.ir.dag.filters import Filter, FilterLike
from piper.ir.rules import StateRule
from piper.strategies.directives.directive import (
    Directive,
    check_group,
    check_stream,
    device_group,
    plain_filter,
    positive,
    whole_chunks,
)


@dataclass(frozen=True)
class Replicate(Directive):
    name: ClassVar[str] = "replicate"

    where: FilterLike
    zero: int = 0
    bucket_mb: float = 25.0
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    devices: tuple[int, ...] | None = None
    within: int | None = None

    def check(self) -> None:
        if isinstance(self.zero, bool) or self.zero not in range(4):
            raise DirectiveError(f"zero={self.zero!r}: must be 0, 1, 2 or 3")
        if self.within is not None:
            positive("within", self.within)
            if self.zero == 0:
                raise DirectiveError(
                    f"within={self.within} is the number of devices that shard a copy of the "
                    "state, but zero=0 shards nothing: use zero=1, 2 or 3"
                )
        check_stream("reduce_stream", self.reduce_stream)
        check_stream("gather_stream", self.gather_stream)
        size = self.bucket_mb
        if not isinstance(size, int | float) or not 1 <= size * 1024 * 1024 < float("inf"):
            raise DirectiveError(f"bucket_mb={self.bucket_mb!r} must be a positive number")
        if self.devices is not None:
            check_group(self.devices)

    def rewrite(self, dag: Dag, me: int) -> Dag:
        numbers = whole_chunks(dag, Filter.of(self.where), "the state")
        self._check_devices(dag, numbers)
        bucket = int(self.bucket_mb * 1024 * 1024)
        rule = StateRule(self.zero, bucket, self.reduce_stream, self.gather_stream, me, self.within)
        chunks = sorted({dag.nodes[number].compute.chunk for number in numbers})
        for chunk in chunks:
            if chunk in dag.state:
                raise DirectiveError(
                    f"the state of {region_of(dag, chunk)} already has a rule: "
                    f"{dag.history[dag.state[chunk].made_by]}; make the two filters disjoint, for "
                    "instance with {'EP': '-'}"
                )
        state = {**dag.state, **dict.fromkeys(chunks, rule)}
        _refuse_two_levels(dag, state)
        return replace(dag, state=state)

    def _check_devices(self, dag: Dag, numbers: Sequence[int]) -> None:
        if self.devices is None:
            return
        held = {d for number in numbers for d in dag.nodes[number].devices}
        if held != set(self.devices):
            raise DirectiveError(
                f"devices={list(self.devices)}, but these nodes are placed on {sorted(held)}"
            )


def _refuse_two_levels(dag: Dag, state: dict[int, StateRule]) -> None:
    """Refuse different ZeRO levels for one parameter that several chunks use."""
    levels: dict[str, tuple[StateRule, int]] = {}
    for chunk, rule in state.items():
        for name in dag.model.chunks[chunk].parameters:
            first, other = levels.setdefault(name, (rule, chunk))
            if (first.zero, first.within) != (rule.zero, rule.within):
                one, two = region_of(dag, other), region_of(dag, chunk)
                raise DirectiveError(
                    f"the parameter {name!r} is used by {one} with {_level(first)} and by {two} "
                    f"with {_level(rule)}: give both the same level"
                )


def _level(rule: StateRule) -> str:
    return f"zero={rule.zero}" + (f", within={rule.within}" if rule.within else "")


@named_arguments(DirectiveError)
def replicate(
    where: FilterLike,
    *,
    zero: int = 0,
    bucket_mb: float = 25.0,
    reduce_stream: str = "reduce",
    gather_stream: str = "gather",
    devices: Sequence[int] | None = None,
    within: int | None = None,
) -> Replicate:
    """Sum the gradients of the matched regions' parameters over all devices that hold them.

    ``zero`` sets what is sharded over those devices: 1 the optimizer state, 2 also gradients, 3
    also parameters. ``within`` limits a shard group to that many adjacent devices, each group with
    a full copy (HSDP). ``devices``, if given, must be the devices on which the regions are placed.
    """
    group = None if devices is None else device_group(devices)
    return Replicate(
        plain_filter(where), zero, bucket_mb, reduce_stream, gather_stream, group, within
    )
