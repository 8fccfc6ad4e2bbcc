"""Communication on CPUs over gloo.

Messages have their DAG node's number as tag. Sums are added in the order of the group, as on
virtual devices: members exchange parts and add them here, on one thread for each stream. The order
of gloo's own sums depends on its algorithm.

All communicators of a process share one thread for their sockets. A communicator made by torch has
its own thread, which wakes a hundred times a second even when idle. With more workers than cores,
these wakeups take time from computations.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.base.handles import Handle
from piper.ir.collectives import COLLECTIVES, Move
from piper.ir.ops import Group
from piper.ir.plan.plan import Plan
from piper.runtime.comm.communicators import (
    Communicator,
    Endpoint,
    channel,
    collective,
    communicators_of,
)
from piper.runtime.comm.protocol import Begin, tensors_of

_IN_FLIGHT = 8
"""Sends of one stream that may be under way. More would only hold memory: a further send waits for
the oldest one."""
_SMALL = 4096
"""Elements up to which an all-reduce is cheaper as an all-to-all of whole tensors."""


class _Sent(Handle):
    """The handle of a message, sent or received. gloo reports a failed one only to ``wait``."""

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


class _Begun(Handle):
    """The handle of a call on a stream's thread. ``wait`` raises the call's error."""

    def __init__(self, thread: ThreadPoolExecutor, call: Callable[[], Any]) -> None:
        self._call = call
        self._future: Future[None] = thread.submit(self._run)

    def _run(self) -> None:
        start = time.monotonic()
        self._call()
        self.span = start, time.monotonic()

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class Gloo:
    """One process's end of all communication."""

    any_order = True

    def __init__(self, end: Endpoint, plans: Iterable[Plan]) -> None:
        self._device = end.device
        sockets = _sockets(end.address)
        wanted = communicators_of(plans, end.device)
        self._backends = {one: _backend(one, end, sockets) for one in wanted}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._sent: dict[str, deque[_Sent]] = {}
        self._to_self: dict[int, Tensor] = {}

    def close(self) -> None:
        """End the streams' threads, and release the communicators: a connection ends with the last
        reference to its communicator."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._backends.clear()

    def send(self, node: int, stream: str, to: int) -> Begin:
        if to == self._device:
            return lambda data: self._to_self.update({node: data})
        begin = self._backends[channel(stream, self._device, to)].send
        sent = self._sent.setdefault(stream, deque())

        def post(data: Tensor) -> Handle:
            work = _Sent(begin([data], 1, node))
            sent.append(work)
            if len(sent) > _IN_FLIGHT:
                sent.popleft().wait()
            return work

        return post

    def receive(self, node: int, stream: str, source: int) -> Begin:
        if source == self._device:
            return lambda out: self._take(node, out)
        begin = self._backends[channel(stream, source, self._device)].recv
        return lambda out: _Sent(begin([out], 0, node))

    def _take(self, node: int, out: Tensor) -> None:
        out.copy_(self._to_self.pop(node))

    def collective(self, kind: Move, node: int, stream: str, group: Group) -> Begin:
        if len(group) == 1:
            return lambda *given: COLLECTIVES[kind].act([tensors_of(given)])
        members = _Members(self._backends[collective(stream, group)], len(group))
        act = partial(_SUMS[kind], members) if kind in _SUMS else partial(members.do, kind)
        thread = self._thread(stream)
        return lambda *given: _Begun(thread, lambda: act(*tensors_of(given)))

    def _thread(self, stream: str) -> ThreadPoolExecutor:
        if stream not in self._threads:
            self._threads[stream] = ThreadPoolExecutor(1, thread_name_prefix=f"piper {stream}")
        return self._threads[stream]


class Peers:
    """Messages between any two of ``members``, outside of plans."""

    def __init__(self, end: Endpoint, members: Group) -> None:
        self._members = members
        one = Communicator("peers", members, message=False)
        self._backend = _backend(one, end, _sockets(end.address))

    def send(self, data: Tensor, to: int, tag: int) -> Handle:
        return _Sent(self._backend.send([data], self._members.index(to), tag))

    def receive(self, out: Tensor, source: int, tag: int) -> Handle:
        return _Sent(self._backend.recv([out], self._members.index(source), tag))

    def barrier(self) -> None:
        """Wait for all members, so that none closes a connection that another still reads from."""
        self._backend.barrier().wait()


def _sockets(address: str | None) -> Any:
    """The network interface this process listens on: torch's ``GLOO_SOCKET_IFNAME`` if it is set,
    else that of ``address``, else gloo's default."""
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
    if address is not None:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_default_device()


def _backend(one: Communicator, end: Endpoint, sockets: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
    options._devices = [sockets]
    options._threads = 1  # a stream runs one collective after the other
    options._timeout = end.timeout
    return dist.ProcessGroupGloo(*end.joins(one), options)


@dataclass(frozen=True, slots=True)
class _Members:
    """A group's communicator. Its ranks follow the order of the members."""

    backend: Any
    count: int

    def do(self, kind: Move, *tensors: Tensor) -> None:
        """Run gloo's own collective and wait for it."""
        definition = COLLECTIVES[kind]
        definition.begin(self.backend, definition.options(), *tensors).wait()


def _sum_everywhere(members: _Members, data: Tensor) -> None:
    """All-reduces ``data``, adding in the order of the members."""
    flat, count = data.view(-1), members.count
    if count == 2:  # a sum of two terms has no order, and gloo's own all-reduce copies less
        members.do(Move.ALL_REDUCE, flat)
        return
    if flat.numel() <= _SMALL:
        every = flat.new_empty(count * flat.numel())
        # not an all-gather: gloo's is a ring
        members.do(Move.ALL_TO_ALL, flat.repeat(count), every)
        _sum_of_rows(every.view(count, -1), flat)
        return
    share = -(-flat.numel() // count)
    padded = flat
    if share * count != flat.numel():
        padded = flat.new_zeros(share * count)
        padded[: flat.numel()] = flat
    part = flat.new_empty(share)
    _sum_of_parts(members, padded, part)
    members.do(Move.ALL_GATHER, part, padded)
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def _sum_of_parts(members: _Members, data: Tensor, out: Tensor) -> None:
    """Reduce-scatters ``data`` to ``out``, adding in the order of the members."""
    parts = torch.empty_like(data)
    members.do(Move.ALL_TO_ALL, data, parts)
    _sum_of_rows(parts.view(members.count, -1), out)


def _sum_of_rows(rows: Tensor, out: Tensor) -> None:
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out += row


_SUMS: Mapping[Move, Callable[..., None]] = {
    Move.ALL_REDUCE: _sum_everywhere,
    Move.REDUCE_SCATTER: _sum_of_parts,
}
"""Collectives that sum. They replace gloo's own, whose order depends on its algorithm."""
