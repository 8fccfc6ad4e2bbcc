"""``stream``: assign nodes to a logical stream, and set its priority and SM share.

same stream: one after the other          different streams: may overlap
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from msgspec import structs

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag
from piper.ir.dag.filters import Filter, FilterLike, select
from piper.ir.rules import Rest, Sms, StreamRule
from piper.strategies.directives.directive import Directive, check_stream, plain_filter


@dataclass(frozen=True)
class Stream(Directive):
    name: ClassVar[str] = "stream"
    orders: ClassVar[bool] = True
    positional: ClassVar[tuple[str, ...]] = ("where", "stream")

    where: FilterLike | None
    stream: str
    priority: int | None = None
    sms: int | Literal["rest"] | None = None

    def check(self) -> None:
        check_stream("name", self.stream)
        if self.sms is not None:
            _share(self.sms)

    def rewrite(self, dag: Dag, me: int) -> Dag:
        sms = None if self.sms is None else _share(self.sms)
        matched = [] if self.where is None else select(dag, Filter.of(self.where))
        changed = {
            i: structs.replace(node, stream=self.stream, made_by=node.changed_by(me))
            for i in matched
            for node in [dag.nodes[i]]
        }
        old = dag.streams.get(self.stream, StreamRule())
        rule = StreamRule(
            old.priority if self.priority is None else self.priority,
            old.sms if sms is None else sms,
        )
        return replace(dag.with_nodes(changed), streams={**dag.streams, self.stream: rule})


def _share(sms: object) -> Sms:
    """The user's ``sms`` as an SM share."""
    if sms == Rest.REST.value:
        return Rest.REST
    if not isinstance(sms, int) or isinstance(sms, bool) or sms < 1:
        raise DirectiveError(f"sms={sms!r} must be a positive whole number, or 'rest'")
    return sms


@named_arguments(DirectiveError)
def stream(
    where: FilterLike | None,
    name: str,
    *,
    priority: int | None = None,
    sms: int | Literal["rest"] | None = None,
) -> Stream:
    """Run the matched nodes on the logical stream ``name``.

    ``sms`` is its share of each GPU's multiprocessors (SMs): a number, or "rest" for all SMs that
    the numbered shares leave. Shares of different streams do not overlap, but all "rest" streams
    have one share.

    With ``where=None`` no node moves: only the settings of the stream change, for example of one on
    which another directive sends, reduces, dispatches or combines.
    """
    return Stream(None if where is None else plain_filter(where), name, priority, sms)
