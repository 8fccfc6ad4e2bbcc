"""``split``: split the batch into microbatches (gradient accumulation).

F ─▶ B          split(into="MB", parts=2)        F MB[0] ─▶ B MB[0]
                                                 F MB[1] ─▶ B MB[1]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.filters import Filter, FilterLike, select
from piper.ir.dag.values import picked
from piper.ir.ops import Compute
from piper.strategies.directives.directive import Directive, check_tag, plain_filter, positive


@dataclass(frozen=True)
class Split(Directive):
    name: ClassVar[str] = "split"

    where: FilterLike
    into: str
    parts: int

    def check(self) -> None:
        positive("parts", self.parts)
        check_tag("into", self.into)

    def rewrite(self, dag: Dag, me: int) -> Dag:
        if dag.microbatches is not None:
            raise DirectiveError(f"the batch is already split, into {dag.microbatches[0]!r}")
        if self.into in dag.tag_values:
            raise DirectiveError(f"the tag {self.into!r} already exists; choose another name")
        if any(node.after for node in dag.nodes):
            raise DirectiveError("the nodes are already ordered: split before order")
        if len(select(dag, Filter.of(self.where))) < len(dag.nodes):
            raise DirectiveError(
                "a part of the model cannot be split alone: all of it sees the same microbatches; "
                "use where={}"
            )
        if dag.model.batch % self.parts:
            sizes = [n for n in range(1, dag.model.batch + 1) if dag.model.batch % n == 0]
            raise DirectiveError(
                f"a batch of {dag.model.batch} does not divide into {self.parts} microbatches. "
                f"Numbers that divide it: {', '.join(map(str, sizes))}. Set parts= of split, or "
                "microbatches= of mesh, to one of them, or change the batch"
            )
        nodes: list[Node] = []
        wired = [
            (node, node.compute, picked(node.reads), picked(node.writes)) for node in dag.nodes
        ]
        for microbatch in range(self.parts):
            numbers = dag.table.numbers(microbatch)
            nodes += [
                structs.replace(
                    node,
                    op=Compute(op.chunk, op.which, microbatch),
                    tags={**node.tags, self.into: microbatch},
                    reads=reads(numbers),
                    writes=writes(numbers),
                    made_by=me,
                )
                for node, op, reads, writes in wired
            ]
        return replace(dag, nodes=tuple(nodes), microbatches=(self.into, self.parts))


@named_arguments(DirectiveError)
def split(where: FilterLike | None = None, *, into: str = "MB", parts: int) -> Split:
    """Split the batch into ``parts`` microbatches, numbered by the tag ``into``."""
    return Split(plain_filter(where or {}), into, parts)
