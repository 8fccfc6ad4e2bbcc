"""``remat``: recompute activations instead of saving them (activation checkpointing).

F ─saved─▶ B        remat({"layer": "*"}, "all")        F ─▶ B, which runs F again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from piper.base.arguments import choice, named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag
from piper.ir.dag.filters import Filter, FilterLike
from piper.ir.passes import RematPolicy
from piper.strategies.directives.directive import Directive, plain_filter, whole_chunks


@dataclass(frozen=True)
class Remat(Directive):
    name: ClassVar[str] = "remat"
    positional: ClassVar[tuple[str, ...]] = ("where", "policy")

    where: FilterLike
    policy: str

    @property
    def policies(self) -> tuple[RematPolicy, ...]:
        return tuple(policy for policy in RematPolicy if policy.value == self.policy)

    def check(self) -> None:
        choice("policy", self.policy, RematPolicy, DirectiveError)

    def rewrite(self, dag: Dag, me: int) -> Dag:
        policy = RematPolicy(self.policy)
        matched = whole_chunks(dag, Filter.of(self.where), "recomputing")
        chunks = {dag.nodes[number].compute.chunk for number in matched}
        changed = {}
        for number, node in enumerate(dag.nodes):
            op = node.compute
            if op.chunk in chunks:
                reads, writes = dag.table.wire(op.chunk, op.which, policy, op.microbatch)
                changed[number] = structs.replace(node, reads=reads, writes=writes, made_by=me)
        remat = {**dag.remat, **dict.fromkeys(chunks, policy)}
        return replace(dag.with_nodes(changed), remat=remat)


@named_arguments(DirectiveError)
def remat(where: FilterLike, policy: str) -> Remat:
    """Set how much the backward of the matched regions recomputes: with ``policy`` "none" nothing,
    "min-cut" cheap operations, "all" everything."""
    return Remat(plain_filter(where), policy)
