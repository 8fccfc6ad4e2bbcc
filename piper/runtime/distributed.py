"""Communication over ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Every logical stream and group has a communicator of its own, and each direction of a stream of
messages too, so that streams never wait for each other. Messages carry the number of their node as
tag. Sums on gloo are added in the order of the group, as on virtual devices: parts are exchanged
and added here, on one thread for each stream; gloo's own sums depend on its algorithm.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.errors import PiperError
from piper.ir.dag import Collective, StreamRule, Transfer
from piper.lower.plan import Plan
from piper.runtime.comm import Group, Handle, One, Two
from piper.runtime.gloo import one_loop

_IN_FLIGHT = 8
"""Messages of one stream that may be under way: more would only hold memory."""
_SMALL = 4096
"""Elements up to which a sum is cheaper by sending everything to everybody."""


class _Sent:
    """A message under way."""

    __slots__ = ("_over", "_work")

    def __init__(self, work: Any) -> None:
        self._work = work
        self._over = False

    def done(self) -> bool:
        return self._over or self._work.is_completed()

    def wait(self) -> None:
        if not self._over:
            self._work.wait()
            self._over = True
            self._work = None

    @property
    def span(self) -> None:
        return None


class _Begun:
    """Something that a stream's thread does."""

    __slots__ = ("_act", "_future", "span")

    def __init__(self, thread: ThreadPoolExecutor, act: Callable[[], Any]) -> None:
        self._act = act
        self.span: tuple[float, float] | None = None
        self._future: Future[None] = thread.submit(self._run)

    def _run(self) -> None:
        start = time.monotonic()
        self._act()
        self.span = start, time.monotonic()

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class _Done:
    """Nothing to wait for."""

    span = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Distributed:
    """One process's end of all communication."""

    def __init__(
        self,
        device: int,
        devices: Sequence[int],
        plans: Iterable[Plan],
        timeout: timedelta,
        rules: Mapping[str, StreamRule] | None = None,
    ) -> None:
        """Every process must call this at the same time with the same ``plans``; ``rules`` say
        what is asked of streams, where the backend can do it."""
        self._device = device
        self._rank = {number: rank for rank, number in enumerate(devices)}
        self._nccl = dist.get_backend() == "nccl"
        self.any_order = not self._nccl
        self._groups: dict[tuple[str, Group], Any] = {}
        self._orders: dict[Group, list[int]] = {}
        """For groups that are not listed in the order of ranks, as torch keeps them: which member
        each rank of the communicator is."""
        for stream, group in _communicators(plans):
            order = sorted(range(len(group)), key=lambda i: self._rank[group[i]])
            if order != list(range(len(group))):
                self._orders[group] = order
            ranks = [self._rank[number] for number in group]
            options = _options((rules or {}).get(stream.split(" ")[0]))
            self._groups[stream, group] = dist.new_group(
                ranks, timeout, None if self._nccl else one_loop(), options
            )
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._sent: dict[str, deque[_Sent]] = {}
        self._to_self: dict[int, Tensor] = {}

    def close(self) -> None:
        """End the streams' threads."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def send(self, node: int, stream: str, to: int) -> One:
        if to == self._device:
            return lambda data: self._keep(node, data)
        group = self._groups[_pair(stream, self._device, to)]
        rank = dist.get_group_rank(group, self._rank[to])
        sent = self._sent.setdefault(stream, deque())
        begin = group.send  # what dist.isend calls, and half as long

        def act(data: Tensor) -> Handle:
            work = _Sent(begin([data], rank, node))
            sent.append(work)
            if len(sent) > _IN_FLIGHT:
                sent.popleft().wait()
            return work

        return act

    def receive(self, node: int, stream: str, source: int) -> One:
        if source == self._device:
            return lambda out: self._take(node, out)
        group = self._groups[_pair(stream, source, self._device)]
        rank = dist.get_group_rank(group, self._rank[source])
        begin = group.recv
        return lambda out: _Sent(begin([out], rank, node))

    def _keep(self, node: int, data: Tensor) -> Handle:
        self._to_self[node] = data
        return _Done()

    def _take(self, node: int, out: Tensor) -> Handle:
        out.copy_(self._to_self.pop(node))
        return _Done()

    def all_reduce(self, node: int, stream: str, group: Group) -> One:
        if len(group) == 1:
            return lambda data: _Done()
        members = self._members(stream, group)
        if self._nccl:
            begin = partial(dist.all_reduce, group=members.communicator, async_op=True)
            return lambda data: _Sent(begin(data))
        thread = self._thread(stream)
        return lambda data: _Begun(thread, lambda: _sum_everywhere(data, members))

    def reduce_scatter(self, node: int, stream: str, group: Group) -> Two:
        members = self._members(stream, group)
        if self._nccl:
            begin = partial(_reduce_scatter, group=members.communicator, async_op=True)
            return lambda data, out: _Sent(begin(out, data))
        thread = self._thread(stream)
        return lambda data, out: _Begun(thread, lambda: _sum_of_parts(data, out, members))

    def all_gather(self, node: int, stream: str, group: Group) -> Two:
        members = self._members(stream, group)
        if self._nccl:
            begin = partial(_all_gather, group=members.communicator, async_op=True)
            return lambda part, out: _Sent(begin(out, part))
        thread = self._thread(stream)
        return lambda part, out: _Begun(thread, lambda: members.all_gather(out, part))

    def all_to_all(self, node: int, stream: str, group: Group) -> Two:
        members = self._members(stream, group)
        if self._nccl:
            begin = partial(dist.all_to_all_single, group=members.communicator, async_op=True)
            return lambda data, out: _Sent(begin(out, data))
        thread = self._thread(stream)
        return lambda data, out: _Begun(thread, lambda: members.all_to_all(out, data))

    def _members(self, stream: str, group: Group) -> _Members:
        order = self._orders.get(group)
        if order is not None and self._nccl:
            raise PiperError(
                f"devices {list(group)} must be listed in ascending order for NCCL: change place"
            )
        return _Members(self._groups[stream, group], len(group), order)

    def _thread(self, stream: str) -> ThreadPoolExecutor:
        if stream not in self._threads:
            self._threads[stream] = ThreadPoolExecutor(1, thread_name_prefix=f"piper {stream}")
        return self._threads[stream]


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def _options(rule: StreamRule | None) -> Any:
    """NCCL's form of a stream's rule: a limit on its thread blocks, and high priority."""
    if rule is None or rule == StreamRule() or dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=rule.priority < 0)
    if rule.sms is not None:
        options.config.max_ctas = rule.sms
    return options


@dataclass(frozen=True, slots=True)
class _Members:
    """A group's communicator, and which member each of its ranks is, if that is another order."""

    communicator: Any
    count: int
    order: list[int] | None

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """``out`` becomes the members' parts in the group's order."""
        if self.order is None:
            _all_gather(out, part, group=self.communicator)
            return
        found = torch.empty_like(out)
        _all_gather(found, part, group=self.communicator)
        out.view(self.count, -1)[self.order] = found.view(self.count, -1)

    def all_to_all(self, out: Tensor, data: Tensor) -> None:
        """Part i goes to member i and comes from member i."""
        if self.order is None:
            dist.all_to_all_single(out, data, group=self.communicator)
            return
        sent = data.view(self.count, -1)[self.order].contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=self.communicator)
        out.view(self.count, -1)[self.order] = found


def _sum_everywhere(data: Tensor, members: _Members) -> None:
    """``data`` summed over all members, in their order, for each of them."""
    flat, count = data.view(-1), members.count
    if count == 2:  # a sum of two has no order, and gloo's own copies less
        dist.all_reduce(flat, group=members.communicator)
        return
    if flat.numel() <= _SMALL:
        every = flat.new_empty(count * flat.numel())
        members.all_to_all(every, flat.repeat(count))  # gloo's gather goes around in a ring
        _sum_of_rows(every.view(count, -1), flat)
        return
    share = -(-flat.numel() // count)
    padded = flat
    if share * count != flat.numel():
        padded = flat.new_zeros(share * count)
        padded[: flat.numel()] = flat
    part = flat.new_empty(share)
    _sum_of_parts(padded, part, members)
    members.all_gather(padded, part)
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def _sum_of_parts(data: Tensor, out: Tensor, members: _Members) -> None:
    """This member's part of the sum of ``data``, added in the order of the members."""
    parts = torch.empty_like(data)
    members.all_to_all(parts, data)
    _sum_of_rows(parts.view(members.count, -1), out)


def _sum_of_rows(rows: Tensor, out: Tensor) -> None:
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out += row


def _pair(stream: str, source: int, to: int) -> tuple[str, Group]:
    """The communicator of messages from one device to another."""
    return f"{stream.removesuffix('/send').removesuffix('/recv')} {source}>{to}", _ends(source, to)


def _ends(source: int, to: int) -> Group:
    return (min(source, to), max(source, to))


def _communicators(plans: Iterable[Plan]) -> list[tuple[str, Group]]:
    """All streams and groups that communicate, in an order that all processes find."""
    found: set[tuple[str, Group]] = set()
    for plan in plans:
        for x in plan.instructions:
            match x.op:
                case Transfer(source=source, target=target):
                    found |= set(_pairs(x.stream, source, target))
                case Collective(groups=groups):
                    found |= {(x.stream, group) for group in groups if len(group) > 1}
                case _:
                    pass
    return sorted(found)


def _pairs(stream: str, source: Group, target: Group) -> Iterable[tuple[str, Group]]:
    n = max(len(source), len(target))
    for i in range(n):
        a, b = source[i * len(source) // n], target[i * len(target) // n]
        if a != b:
            yield _pair(stream, a, b)
