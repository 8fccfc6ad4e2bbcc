"""Edits a DAG during lowering: nodes are replaced in place or appended, so numbers never change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from piper.ir.dag.dag import Dag, Node, Tags
from piper.ir.dag.values import Extra
from piper.ir.ops import Group, Op


class Rewriter:
    """Collects the nodes and values that one lowering pass changes or adds."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self.nodes = list(dag.nodes)
        self.extra = list(dag.extra)

    def value(self, added: Extra) -> int:
        """Adds a value; returns its number."""
        self.extra.append(added)
        return self._dag.first_extra + len(self.extra) - 1

    def add(
        self,
        op: Op,
        made: int,
        *,
        devices: Group,
        stream: str,
        made_by: int,
        reads: Iterable[int] = (),
        after: tuple[int, ...] = (),
        tags: Tags | None = None,
        replicas: int = 1,
    ) -> int:
        """Adds a node, with the tags of the node that it serves. Returns the value it makes."""
        node = Node(
            op=op,
            tags=tags or {},
            reads=tuple(reads),
            writes=(made,),
            devices=devices,
            replicas=replicas,
            stream=stream,
            after=after,
            after_by=(made_by,) * len(after),
            made_by=made_by,
        )
        self.nodes.append(node)
        return made

    def dag(self, **changes: Any) -> Dag:
        """The DAG, with other fields in ``changes``."""
        return self._dag.rewired(self.nodes, extra=tuple(self.extra), **changes)
