"""Logical streams: CUDA streams and events on a GPU; on a CPU the order of calls is enough.

When a plan is loaded, ``Streams`` wraps each instruction so that it runs on its stream after what
it waits for; on a CPU nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.errors import PiperError
from piper.ir.dag import StreamRule
from piper.lower.plan import Plan, Verb
from piper.runtime.pending import Act, Pending

Mark = torch.cuda.Event
"""Says that an instruction is done, to other streams."""
Free = Callable[[int], None]
"""Lets go of a slot."""


class Streams:
    """The logical streams of one device. This is the CPU's: everything runs in order."""

    def begin(self) -> None:
        """All streams start after what the caller has done."""

    def finish(self) -> None:
        """The caller goes on after all streams."""

    def marks(self, places: Iterable[int]) -> Mapping[int, Mark]:
        """For these places of a plan, what is to say that they are done; made once."""
        return {}

    def wrapped(self, act: Act, stream: str, before: Sequence[Mark], mark: Mark | None) -> Act:
        """``act`` on a stream, after other streams' marks ``before``; then ``mark`` is set."""
        return act

    def complete(self, pending: Pending, stream: str, mark: Mark | None) -> None:
        """Take in what a communication on ``stream`` brought, and set ``mark``."""
        pending.complete()

    def freeing(self, slots: list[Any], plan: Plan) -> Free:
        """What lets go of a slot."""

        def free(slot: int) -> None:
            slots[slot] = None

        return free


class CudaStreams(Streams):
    """Logical streams as CUDA streams, waits as events."""

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._rules = rules
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._shares: list[Any] = []
        self._caller = torch.cuda.current_stream(device)

    def begin(self) -> None:
        self._caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(self._caller)

    def finish(self) -> None:
        for stream in self._streams.values():
            self._caller.wait_stream(stream)

    def marks(self, places: Iterable[int]) -> Mapping[int, Mark]:
        return {place: torch.cuda.Event() for place in places}

    def wrapped(self, act: Act, stream: str, before: Sequence[Mark], mark: Mark | None) -> Act:
        on = self._stream(stream)

        def on_stream() -> Pending | None:
            torch.cuda.set_stream(on)  # its context manager takes ten times as long
            try:
                for other in before:
                    on.wait_event(other)
                begun = act()
                if begun is None and mark is not None:
                    mark.record(on)
                return begun
            finally:
                torch.cuda.set_stream(self._caller)

        return on_stream

    def complete(self, pending: Pending, stream: str, mark: Mark | None) -> None:
        on = self._stream(stream)
        torch.cuda.set_stream(on)
        try:
            pending.complete()
            if mark is not None:
                mark.record(on)
        finally:
            torch.cuda.set_stream(self._caller)

    def freeing(self, slots: list[Any], plan: Plan) -> Free:
        users: dict[int, set[str]] = {}
        makers: dict[int, set[tuple[Verb, str]]] = {}
        for x in plan.instructions:
            if x.verb is not Verb.FREE:
                for slot in (*x.reads, *x.writes):
                    users.setdefault(slot, set()).add(x.stream)
                for slot in x.writes:
                    makers.setdefault(slot, set()).add((x.verb, x.stream))
        for slot, found in makers.items():
            verb, stream = next(iter(found))
            if len(found) == 1 and verb is Verb.COMPUTE:
                users[slot].discard(stream)  # it took the memory, and so need not be told
        streams = {slot: [self._stream(n) for n in sorted(names)] for slot, names in users.items()}

        def free(slot: int) -> None:
            """Its memory is not to be reused before all streams are done with it."""
            for stream in streams.get(slot, ()):
                for tensor in _tensors(slots[slot]):
                    if tensor.is_cuda:  # attention keeps the state of its generator on the host
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
