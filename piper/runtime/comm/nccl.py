"""Communication between GPUs over NCCL.

A communication is put on the current CUDA stream like any kernel, and what the stream runs next
comes after it: the host neither polls nor waits. Messages are broadcasts from one member of a
communicator of two to the other, since torch puts sends and receives on streams of its own.
Messages on one communicator arrive in the order in which they are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.ir.collectives import CollectiveKind
from piper.ir.ops import Group
from piper.ir.plan.plan import Plan
from piper.ir.rules import StreamRule
from piper.runtime.comm.collective_ops import DEFINITIONS
from piper.runtime.comm.communicators import Communicator, channel, collective, communicators_of
from piper.runtime.comm.protocol import Begin

_c10d: Any = torch._C._distributed_c10d


class Nccl:
    """One process's end of all communication."""

    any_order = False

    def __init__(
        self,
        device: int,
        plans: Iterable[Plan],
        store: dist.Store,
        timeout: timedelta,
        where: torch.device,
        rules: Mapping[str, StreamRule],
    ) -> None:
        """``store`` is the job's alone, and shared by all its processes; ``rules`` say what is
        asked of streams."""
        self._device = device
        wanted = communicators_of(plans, device)
        self._backends = {
            one: _backend(one, device, store, timeout, where, rules.get(one.stream))
            for one in wanted
        }
        self._to_self: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._connect(wanted, where)

    def _connect(
        self, wanted: Mapping[Communicator, tuple[CollectiveKind, ...]], where: torch.device
    ) -> None:
        """Let every communicator do once what it is for. NCCL connects its members then, and holds
        the host until all are there: within a step, whose hosts come to it in different orders,
        two that first send to each other would wait forever."""
        for one, kinds in wanted.items():
            if one.message:
                self._message(one)(torch.zeros(1, device=where))
            for kind in kinds:
                sizes = DEFINITIONS[kind].parts(len(one.members))
                tensors = [torch.zeros(size, device=where) for size in sizes]
                self.collective(kind, 0, one.stream, one.members)(*tensors)
        torch.cuda.synchronize(where)

    def close(self) -> None:
        """Give back what the communicators hold; all members must do so."""
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()

    def abort(self) -> None:
        """Let kernels that wait for other processes end, with whatever is in their tensors. All
        communicators at once: the end of one may wait until no kernel of another runs."""
        threads = [threading.Thread(target=x.abort, daemon=True) for x in self._backends.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._backends.clear()

    def send(self, node: int, stream: str, to: int) -> Begin:
        if to == self._device:
            return lambda data: self._keep(node, data)
        return self._message(channel(stream, self._device, to))

    def receive(self, node: int, stream: str, source: int) -> Begin:
        if source == self._device:
            return lambda out: self._take(node, out)
        return self._message(channel(stream, source, self._device))

    def _message(self, communicator: Communicator) -> Begin:
        broadcast = self._backends[communicator].broadcast
        options = _in_order(_c10d.BroadcastOptions())
        options.rootRank = 0

        def begin(data: Tensor) -> None:
            broadcast([_as_known(data)], options)

        return begin

    def _keep(self, node: int, data: Tensor) -> None:
        event = torch.cuda.Event()
        event.record()
        self._to_self[node] = data, event

    def _take(self, node: int, out: Tensor) -> None:
        data, event = self._to_self.pop(node)
        event.wait()
        out.copy_(data)
        data.record_stream(torch.cuda.current_stream())  # it may be another stream's memory

    def collective(self, kind: CollectiveKind, node: int, stream: str, group: Group) -> Begin:
        definition = DEFINITIONS[kind]
        if len(group) == 1:
            return lambda *tensors: definition.act([tensors])
        begin, backend = definition.begin, self._backends[collective(stream, group)]
        options = _in_order(definition.options())

        def on_stream(*tensors: Any) -> None:
            begin(backend, options, *(_as_real(x) for x in tensors))

        return on_stream


_KNOWN = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8,
        torch.int8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""The dtypes that NCCL knows, by torch."""


def _as_known(x: Tensor) -> Tensor:
    """``x``, or its bytes if NCCL does not know what they are: to send them, it need not."""
    return x if x.dtype in _KNOWN else x.view(-1).view(torch.uint8)


def _as_real(x: Any) -> Any:
    """Complex numbers as two real ones each, which can be summed up."""
    return torch.view_as_real(x) if isinstance(x, Tensor) and x.is_complex() else x


def _in_order(options: Any) -> Any:
    """Options by which torch puts a collective on the current stream, not on one of its own."""
    options.asyncOp = False
    return options


def _backend(
    one: Communicator,
    device: int,
    store: dist.Store,
    timeout: timedelta,
    where: torch.device,
    rule: StreamRule | None,
) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = one.name
    options.global_ranks_in_group = list(one.members)
    if rule is not None and isinstance(rule.sms, int):
        options.config.max_ctas = rule.sms
    rank = one.members.index(device)
    keys = dist.PrefixStore(one.name, store)
    backend = dist.ProcessGroupNCCL(keys, rank, len(one.members), options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(where)  # else in the first step, which would wait for it
    return backend
