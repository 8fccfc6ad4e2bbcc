"""A DAG being lowered: nodes are replaced in place or appended, so that numbers never move."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag, Group, Node, Op, Tags
from piper.ir.values import Extra, ExtraRole


class Rewriter:
    """Collects what one pass adds to a DAG."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self.nodes = list(dag.nodes)
        self.extra = list(dag.extra)

    def value(self, role: ExtraRole, of: int, parts: int = 1) -> int:
        """The number of a new value."""
        self.extra.append(Extra(role, of, parts))
        return self._dag.first_extra + len(self.extra) - 1

    def add(
        self,
        op: Op,
        *,
        devices: Group,
        stream: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        made_by: int,
        tags: Tags,
        replicas: int = 1,
    ) -> int:
        """The number of a new node; its tags are those of the node it serves."""
        node = Node(
            op=op,
            tags=tags,
            reads=reads,
            writes=writes,
            devices=devices,
            replicas=replicas,
            stream=stream,
            made_by=made_by,
        )
        self.nodes.append(node)
        return len(self.nodes) - 1

    def dag(self) -> Dag:
        return replace(self._dag, nodes=tuple(self.nodes), extra=tuple(self.extra))
