"""The communicators that one device needs for its plans.

Every pair of logical stream and group has its own communicator, and so does each direction of
messages between two devices on a stream. Therefore streams never wait for each other. Ranks within
a communicator follow the order of the group, not the ranks of the processes. The number of
communicators depends on a device's streams and neighbours, not on the size of the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from piper.ir.collectives import Move
from piper.ir.ops import Collective, Group, Transfer
from piper.ir.overlaps import received_by, sent_by
from piper.ir.plan.instructions import Verb, plain_stream
from piper.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """A stream and the devices that communicate on it."""

    stream: str
    """The stream's name in directives."""
    members: Group
    message: bool
    """Whether it carries messages from the first member to the second, instead of collectives."""

    @property
    def name(self) -> str:
        """A name that all members compute alike, unique in a job."""
        between = ">" if self.message else ","
        return f"{self.stream} {between.join(map(str, self.members))}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One process, as a member of communicators."""

    device: int
    store: dist.Store
    """Shared by all processes of the job and by no other job."""
    timeout: timedelta
    address: str | None = None
    """That at which it listens on a CPU; None for gloo's choice."""

    def joins(self, one: Communicator) -> tuple[dist.Store, int, int]:
        """The part of the store for a communicator, its rank in it and the number of members."""
        keys = dist.PrefixStore(one.name, self.store)
        return keys, one.members.index(self.device), len(one.members)


def channel(stream: str, source: int, to: int) -> Communicator:
    """The communicator of messages from one device to another."""
    return Communicator(plain_stream(stream), (source, to), message=True)


def collective(stream: str, group: Group) -> Communicator:
    """The communicator of a group's collectives."""
    return Communicator(stream, group, message=False)


def communicators_of(plans: Iterable[Plan], device: int) -> dict[Communicator, tuple[Move, ...]]:
    """The communicators of ``device``, each with the kinds of its collectives. They are sorted:
    members that create them in this order cannot deadlock."""
    kinds: defaultdict[Communicator, set[Move]] = defaultdict(set)
    for plan in plans:
        if device not in plan.devices:
            continue
        for x in plan.instructions:
            match x.op:
                case Transfer() as op if x.verb is Verb.SEND:
                    peers = {part.peer for part in sent_by(op, device)} - {device}
                    kinds |= {channel(x.stream, device, peer): set() for peer in peers}
                case Transfer() as op:
                    peers = {part.peer for part in received_by(op, device)} - {device}
                    kinds |= {channel(x.stream, peer, device): set() for peer in peers}
                case Collective(kind=kind, groups=groups):
                    group = next(group for group in groups if device in group)
                    if len(group) > 1:
                        kinds[collective(x.stream, group)].add(kind)
                case _:
                    pass
    return {one: tuple(sorted(kinds[one], key=lambda kind: kind.value)) for one in sorted(kinds)}
