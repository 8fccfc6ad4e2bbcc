"""The communicators that one device needs: those of its own plans, and no others.

Every logical stream and group has a communicator of its own, and each direction of messages between
two devices too, so that streams never wait for each other. Ranks within a communicator follow the
order of the group, whatever the ranks of the processes are. How many a device needs depends on its
streams and neighbours, not on the size of the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from piper.ir.collectives import CollectiveKind
from piper.ir.ops import Collective, Group, Transfer
from piper.ir.overlaps import received_by, sent_by
from piper.ir.plan.instructions import Verb, plain_stream
from piper.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """Who communicates on which stream."""

    stream: str
    """As directives call it."""
    members: Group
    message: bool
    """Whether it carries messages from the first member to the second."""

    @property
    def name(self) -> str:
        """Known to all members without asking, and unique in a job."""
        between = ">" if self.message else ","
        return f"{self.stream} {between.join(map(str, self.members))}"


def channel(stream: str, source: int, to: int) -> Communicator:
    """The communicator of messages from one device to another."""
    return Communicator(plain_stream(stream), (source, to), message=True)


def collective(stream: str, group: Group) -> Communicator:
    """The communicator of a group's collectives."""
    return Communicator(stream, group, message=False)


def communicators_of(
    plans: Iterable[Plan], device: int
) -> dict[Communicator, tuple[CollectiveKind, ...]]:
    """Those that ``device`` is a member of, and what they do besides messages. All is sorted:
    members who make theirs in this order cannot wait for each other in a circle."""
    found: defaultdict[Communicator, set[CollectiveKind]] = defaultdict(set)
    for plan in plans:
        if device not in plan.devices:
            continue
        for x in plan.instructions:
            match x.op:
                case Transfer() as op if x.verb is Verb.SEND:
                    peers = {part.peer for part in sent_by(op, device)} - {device}
                    found |= {channel(x.stream, device, peer): set() for peer in peers}
                case Transfer() as op:
                    peers = {part.peer for part in received_by(op, device)} - {device}
                    found |= {channel(x.stream, peer, device): set() for peer in peers}
                case Collective(kind=kind, groups=groups):
                    group = next(group for group in groups if device in group)
                    if len(group) > 1:
                        found[collective(x.stream, group)].add(kind)
                case _:
                    pass
    return {one: tuple(sorted(found[one], key=lambda kind: kind.value)) for one in sorted(found)}
