"""Communication between GPUs over NCCL.

A communication is enqueued on the current CUDA stream like a kernel, and later work of the stream
runs after it. The host neither polls nor waits. A message is a broadcast in a communicator of two
members, since torch puts sends and receives on its own streams. Messages on one communicator arrive
in the order in which they are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.ir.collectives import COLLECTIVES, Move
from piper.ir.ops import Group
from piper.ir.plan.plan import Plan
from piper.ir.rules import StreamRule
from piper.runtime.comm.communicators import (
    Communicator,
    Endpoint,
    channel,
    collective,
    communicators_of,
)
from piper.runtime.comm.protocol import Begin

_c10d: Any = torch._C._distributed_c10d


class Nccl:
    """One process's end of all communication."""

    any_order = False

    def __init__(
        self,
        end: Endpoint,
        plans: Iterable[Plan],
        where: torch.device,
        rules: Mapping[str, StreamRule],
    ) -> None:
        """``rules`` are the rules of streams, by name."""
        self._device = end.device
        wanted = communicators_of(plans, end.device)
        self._backends = {one: _backend(one, end, where, rules.get(one.stream)) for one in wanted}
        self._to_self: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._aborting = threading.Lock()
        self.aborted = False
        self._connect(wanted, where)

    def _connect(
        self, wanted: Mapping[Communicator, tuple[Move, ...]], where: torch.device
    ) -> None:
        """Run every kind of communication once on each communicator. NCCL connects members at the
        first use and blocks the host until all have joined. Within a step, hosts reach first uses
        in different orders: two devices that first send to each other would deadlock."""
        for one, kinds in wanted.items():
            if one.message:
                self._message(one)(torch.zeros(1, device=where))
            for kind in kinds:
                sizes = COLLECTIVES[kind].parts(len(one.members))
                tensors = [torch.zeros(size, device=where) for size in sizes]
                self.collective(kind, 0, one.stream, one.members)(*tensors)
        torch.cuda.synchronize(where)

    def close(self) -> None:
        """Shut down the communicators. All members must do so."""
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()

    def abort(self) -> None:
        """End kernels that wait for other processes; their tensors have undefined contents. Aborts
        all communicators at once: one abort may wait until no kernel of another runs. Any thread
        may call it, also while another waits for the kernels.

        This object must be kept until the process ends: torch destroys a communicator that has
        seen an error only after seconds, in which it holds the GIL."""
        with self._aborting:
            backends = () if self.aborted else self._backends.values()
            threads = [threading.Thread(target=x.abort, daemon=True) for x in backends]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.aborted = True

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
        data.record_stream(torch.cuda.current_stream())  # another stream may own the memory

    def collective(self, kind: Move, node: int, stream: str, group: Group) -> Begin:
        definition = COLLECTIVES[kind]
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
"""The dtypes that torch supports with NCCL."""


def _as_known(x: Tensor) -> Tensor:
    """``x``, or its bytes if NCCL does not support its dtype. Sending needs no dtype."""
    return x if x.dtype in _KNOWN else x.view(-1).view(torch.uint8)


def _as_real(x: Any) -> Any:
    """Complex tensors as pairs of real numbers, which NCCL can sum."""
    return torch.view_as_real(x) if isinstance(x, Tensor) and x.is_complex() else x


def _in_order(options: Any) -> Any:
    """Sets ``options`` so that torch puts a collective on the current stream, not on its own."""
    options.asyncOp = False
    return options


def _backend(one: Communicator, end: Endpoint, where: torch.device, rule: StreamRule | None) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = end.timeout
    options.group_name = one.name
    options.global_ranks_in_group = list(one.members)
    if rule is not None and isinstance(rule.sms, int):
        options.config.max_ctas = rule.sms
    backend = dist.ProcessGroupNCCL(*end.joins(one), options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(where)  # else the first step waits for it
    return backend
