"""Logical streams: CUDA streams and events on a GPU; on a CPU the order of calls is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from piper.errors import PiperError
from piper.ir.dag import StreamRule


class Streams:
    """The logical streams of one device. This is the CPU's: everything runs in order."""

    def on(self, name: str) -> AbstractContextManager[Any]:
        """Work inside goes to the stream ``name``."""
        return nullcontext()

    def mark(self) -> Callable[[], None]:
        """What makes another stream wait for all work so far on the present one."""
        return _nothing

    def keep(self, tensor: Tensor, name: str) -> None:
        """Do not reuse the memory of ``tensor`` before the stream ``name`` is done with it."""

    def begin(self) -> None:
        """All streams start after what the caller has done."""

    def finish(self) -> None:
        """The caller goes on after all streams."""


def _nothing() -> None:
    return


class CudaStreams(Streams):
    """Logical streams as CUDA streams, waits as events."""

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._rules = rules
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._shares: list[Any] = []

    def on(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream(name))

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.wait

    def keep(self, tensor: Tensor, name: str) -> None:
        if tensor.is_cuda:  # attention keeps the state of its generator on the host
            tensor.record_stream(self._stream(name))

    def begin(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    def finish(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            current.wait_stream(stream)

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            rule = self._rules.get(name, StreamRule())
            if rule.sms:
                share = _share(self._device, rule.sms)
                self._shares.append(share)  # its streams end with it
                stream = share.Stream()
            else:
                stream = torch.cuda.Stream(self._device, priority=rule.priority)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._streams[name] = stream
        return self._streams[name]


def _share(device: torch.device, sms: int) -> Any:
    """A green context: a share of the GPU's multiprocessors."""
    green: Any = getattr(torch.cuda, "GreenContext", None)
    if green is None:
        raise PiperError(
            f"stream(..., sms={sms}): this build of torch ({torch.__version__}) has no green "
            "contexts; leave sms out, or use a newer one"
        )
    try:
        return green.create(num_sms=sms, device_id=device.index or 0)
    except RuntimeError as error:
        raise PiperError(f"stream(..., sms={sms}): {error}") from None


def streams_for(device: torch.device, rules: Mapping[str, StreamRule]) -> Streams:
    """The streams of ``device``."""
    if device.type == "cuda":
        return CudaStreams(device, rules)
    limited = [name for name, rule in rules.items() if rule.sms]
    if limited:
        raise PiperError(
            f"stream {limited[0]!r} asks for a share of a GPU (sms={rules[limited[0]].sms}), but "
            f"this device is {device}: leave sms out"
        )
    return Streams()
