"""``stream``: assigns nodes to a logical stream and says what is asked of it.

same stream: one after the other          different streams: may overlap
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from piper.directives.base import Directive, check_stream, plain_filter, positive
from piper.ir.dag import Dag, StreamRule
from piper.ir.filters import Filter, FilterLike, select


@dataclass(frozen=True)
class Stream(Directive):
    name: ClassVar[str] = "stream"
    positional: ClassVar[tuple[str, ...]] = ("where", "stream")

    where: FilterLike | None
    stream: str
    priority: int | None = None
    sms: int | None = None

    def rewrite(self, dag: Dag, me: int) -> Dag:
        check_stream("name", self.stream)
        if self.sms is not None:
            positive("sms", self.sms)
        matched = [] if self.where is None else select(dag, Filter.of(self.where))
        changed = {i: replace(dag.nodes[i], stream=self.stream, made_by=me) for i in matched}
        old = dag.streams.get(self.stream, StreamRule())
        rule = StreamRule(
            old.priority if self.priority is None else self.priority,
            old.sms if self.sms is None else self.sms,
        )
        return replace(dag.with_nodes(changed), streams={**dag.streams, self.stream: rule})


def stream(
    where: FilterLike | None, name: str, *, priority: int | None = None, sms: int | None = None
) -> Stream:
    """Run the matched nodes on the logical stream ``name``; ``sms`` bounds its share of a GPU.

    With None for a filter no node is moved: it says what is asked of a stream that another
    directive sends, reduces or exchanges on.
    """
    return Stream(None if where is None else plain_filter(where), name, priority, sms)
