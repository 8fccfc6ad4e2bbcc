"""Logical streams: CUDA streams and events on a GPU; on a CPU the order of calls is enough.

When a plan is loaded, ``Streams`` wraps each instruction so that it runs on its stream after what
it waits for; on a CPU nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.errors import PiperError
from piper.ir.dag import StreamRule
from piper.lower.plan import Instruction, Plan, Verb
from piper.runtime.pending import Act, Pending


class Streams:
    """The logical streams of one device. This is the CPU's: everything runs in order."""

    def begin(self) -> None:
        """All streams start after what the caller has done."""

    def finish(self) -> None:
        """The caller goes on after all streams."""

    def wrapped(self, act: Act, place: int, x: Instruction, waits: Sequence[int]) -> Act:
        """``act`` on the stream of ``x``, after the instructions in the places ``waits``."""
        return act

    def complete(self, pending: Pending, place: int, stream: str) -> None:
        """Take in what a communication brought."""
        pending.complete()

    def freeing(self, slots: list[Any], plan: Plan) -> Callable[[int], None] | None:
        """What lets go of a slot, if there is more to it than dropping its content."""
        return None


class CudaStreams(Streams):
    """Logical streams as CUDA streams, waits as events."""

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._rules = rules
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._shares: list[Any] = []
        self._marks: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        self._marks.clear()
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    def finish(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            current.wait_stream(stream)

    def wrapped(self, act: Act, place: int, x: Instruction, waits: Sequence[int]) -> Act:
        stream, marks = self._stream(x.stream), self._marks

        def on_stream() -> Pending | None:
            with torch.cuda.stream(stream):
                for other in waits:
                    if other in marks:
                        marks[other].wait()
                begun = act()
                if begun is None:
                    marks[place] = _mark()
                return begun

        return on_stream

    def complete(self, pending: Pending, place: int, stream: str) -> None:
        with torch.cuda.stream(self._stream(stream)):
            pending.complete()
            self._marks[place] = _mark()

    def freeing(self, slots: list[Any], plan: Plan) -> Callable[[int], None]:
        users: dict[int, dict[str, None]] = {}
        for x in plan.instructions:
            if x.verb is not Verb.FREE:
                for slot in (*x.reads, *x.writes):
                    users.setdefault(slot, {})[x.stream] = None
        streams = {slot: [self._stream(n) for n in names] for slot, names in users.items()}

        def free(slot: int) -> None:
            """Its memory is not to be reused before all streams are done with it."""
            for tensor in _tensors(slots[slot]):
                if tensor.is_cuda:  # attention keeps the state of its generator on the host
                    for stream in streams.get(slot, ()):
                        tensor.record_stream(stream)
            slots[slot] = None

        return free

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            rule = self._rules.get(_plain(name), StreamRule())
            if rule.sms:
                share = _share(self._device, rule.sms)
                self._shares.append(share)  # its streams end with it
                stream = share.Stream()
            else:
                stream = torch.cuda.Stream(self._device, priority=rule.priority)
            self._streams[name] = stream
        return self._streams[name]


def _plain(name: str) -> str:
    """A stream as directives call it: sending and receiving are two of the runtime's."""
    return name.removesuffix("/send").removesuffix("/recv")


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


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


def _tensors(content: Any) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    items = content.values() if isinstance(content, dict) else content
    return [x for x in items or () if isinstance(x, Tensor)]


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
