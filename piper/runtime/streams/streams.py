"""Logical streams: CUDA streams and events on a GPU. On a CPU, the order of calls is enough.

When a plan is loaded, ``Streams.bind`` returns the object that runs each instruction on its stream,
after the instructions it waits for. On a GPU it also decides when memory may be reused, since the
allocator gives a freed block at once to later work of the block's own stream:

- A communication's inputs are kept until the plan completes the communication. Then the streams
  that made the inputs wait for it, on the device.
- Gathered parameters are freed after their last reader: the gathering stream waits for it.
- Any other tensor that one stream made and another reads is recorded with the allocator.

Nothing waits for a stream that only all-reduces the step's scalars, until they are read. Its
communication overlaps with the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.ir.dag.values import Content
from piper.ir.plan.instructions import COMMUNICATING, Verb, plain_stream
from piper.ir.plan.plan import Plan
from piper.ir.rules import StreamRule
from piper.runtime.pending import BoundInstruction, Pending
from piper.runtime.streams.progress import Progress
from piper.runtime.streams.sm_shares import Shares
from piper.runtime.streams.stream_jitter import StreamJitter

Free = Callable[[int], None]
"""Frees a slot."""


class BoundStreams:
    """Runs one plan's instructions in order. This class is for a CPU and simply calls them."""

    keeps = False
    """Whether a communication holds its inputs until it ends. On a CPU the transport holds them,
    only as long as it needs them."""
    reporting: frozenset[str] = frozenset()
    """The streams that the end of a run does not wait for."""

    def __init__(self, plan: Plan, slots: list[Any]) -> None:
        self._plan = plan
        self._slots = slots

    def begin(self) -> None:
        """Called when a run begins."""

    def unfinished(self) -> int | None:
        """The program counter of the first communication that the device, behind the host, has not
        finished. None if there is none or it is unknown."""
        return None

    def ended(self) -> Callable[[], bool]:
        """A function that tells whether the device, behind the host, has finished the
        communications begun so far. True if unknown."""
        return lambda: True

    def wrapped(self, execute: BoundInstruction, pc: int) -> BoundInstruction:
        """``execute``, the instruction at ``pc``, on its stream and after its waits."""
        return execute

    def complete(self, pending: Pending, pc: int) -> None:
        """Complete the communication at ``pc`` and release the objects it kept alive."""
        pending.complete()
        pending.release()

    def free(self, slot: int) -> None:
        """Free a slot."""
        self._slots[slot] = None


class Streams:
    """The logical streams of one device. This class is for a CPU: everything runs in order."""

    def begin(self) -> None:
        """Make all streams wait for the caller's stream."""

    def finish(self, reporting: Collection[str] = ()) -> torch.cuda.Event | None:
        """Make the caller's stream wait for all streams except ``reporting``. Returns an event at
        the end of these; None if there is nothing to wait for."""
        return None

    def bind(self, plan: Plan, slots: list[Any]) -> BoundStreams:
        """An object that runs ``plan`` over ``slots``."""
        return BoundStreams(plan, slots)


class CudaStreams(Streams):
    """Logical streams as CUDA streams, waits as events."""

    jitter: StreamJitter | None = None
    tracked = False
    """Whether to track how far the device has come."""

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._rules = rules
        self._shares = Shares(device, rules)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.caller = torch.cuda.current_stream(device)

    def begin(self) -> None:
        self.caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(self.caller)

    def finish(self, reporting: Collection[str] = ()) -> torch.cuda.Event | None:
        if torch.cuda.is_current_stream_capturing():  # it must end on the stream where it began
            reporting = ()
        for name, stream in self._streams.items():
            if name not in reporting:
                self.caller.wait_stream(stream)
        if not reporting:
            return None
        first, *others = [self.stream(name) for name in sorted(reporting)]
        for stream in others:
            first.wait_stream(stream)
        return first.record_event()

    def bind(self, plan: Plan, slots: list[Any]) -> BoundStreams:
        return CudaBoundStreams(self, plan, slots)

    def stream(self, name: str) -> torch.cuda.Stream:
        """The CUDA stream for a stream name of the plan."""
        if name not in self._streams:
            rule = self._rules.get(plain_stream(name), StreamRule())
            if rule.sms is not None:
                stream = self._shares.stream(plain_stream(name), rule.priority)
            else:
                stream = torch.cuda.Stream(self._device, priority=rule.priority)
            self._streams[name] = stream
        return self._streams[name]


class CudaBoundStreams(BoundStreams):
    """Runs one plan's instructions on CUDA streams."""

    keeps = True

    def __init__(self, streams: CudaStreams, plan: Plan, slots: list[Any]) -> None:
        super().__init__(plan, slots)
        self._streams = streams
        self.reporting = _reporting(plan)
        self._before = _before(plan)
        self._owners = _owners(plan)
        self._behind = _behind(plan)
        pcs = {pc for waits in self._before for pc in waits}
        self._marks = {
            pc: torch.cuda.Event() for pc in sorted(pcs | self._owners.keys() | self._behind.keys())
        }
        """Events after instructions that another stream waits for, by program counter."""
        self._foreign = {
            slot: [streams.stream(name) for name in sorted(names)]
            for slot, names in _foreign(plan).items()
        }
        self._progress = Progress(plan) if streams.tracked else None
        self._noting: Progress | None = None
        """``_progress`` during this run; None while a step is captured."""

    def begin(self) -> None:
        self._noting = None if torch.cuda.is_current_stream_capturing() else self._progress
        if self._noting is not None:
            self._noting.begin()

    def unfinished(self) -> int | None:
        return None if self._progress is None else self._progress.unfinished()

    def ended(self) -> Callable[[], bool]:
        return super().ended() if self._progress is None else self._progress.ended()

    def wrapped(self, execute: BoundInstruction, pc: int) -> BoundInstruction:
        x = self._plan.instructions[pc]
        streams, slots = self._streams, self._slots
        on = streams.stream(x.stream)
        before = [self._marks[other] for other in self._before[pc]]
        mark = self._marks.get(pc)
        behind = [streams.stream(name) for name in self._behind.get(pc, ())]
        reads = x.reads if x.verb in COMMUNICATING else ()

        def on_stream() -> Pending | None:
            torch.cuda.set_stream(on)  # its context manager takes ten times as long
            try:
                for other in before:
                    on.wait_event(other)
                if streams.jitter is not None:
                    streams.jitter.delay()
                kept = [slots[slot] for slot in reads]
                begun = execute()
                if begun is not None:
                    begun.keep(kept)
                    if not begun.in_order:
                        return begun
                    begun.complete()
                    if self._noting is not None and x.verb in COMMUNICATING:
                        self._noting.note(pc, on)
                if mark is not None:
                    mark.record(on)
                    for stream in behind:
                        stream.wait_event(mark)
                return begun
            finally:
                torch.cuda.set_stream(streams.caller)

        return on_stream

    def complete(self, pending: Pending, pc: int) -> None:
        mark = self._marks.get(pc)
        if not pending.in_order:  # else ``wrapped`` has completed it
            on = self._streams.stream(self._plan.instructions[pc].stream)
            torch.cuda.set_stream(on)
            try:
                pending.complete()
                if mark is not None:
                    mark.record(on)
            finally:
                torch.cuda.set_stream(self._streams.caller)
        for name in self._owners.get(pc, ()):
            self._streams.stream(name).wait_event(self._marks[pc])
        pending.release()

    def free(self, slot: int) -> None:
        for stream in self._foreign.get(slot, ()):
            for tensor in _tensors(self._slots[slot]):
                if tensor.is_cuda:  # attention keeps the state of its generator on the host
                    tensor.record_stream(stream)
        self._slots[slot] = None


def _before(plan: Plan) -> list[tuple[int, ...]]:
    """For each instruction, the instructions of other streams that it waits for. Within a stream,
    order is enough."""
    rows = plan.instructions
    return [tuple(w for w in x.waits if rows[w].stream != x.stream) for x in rows]


def _makers(plan: Plan) -> dict[int, set[tuple[Verb, str]]]:
    """For each slot, the verbs and streams of the instructions that allocate or write it."""
    makers: defaultdict[int, set[tuple[Verb, str]]] = defaultdict(set)
    for x in plan.instructions:
        for slot in (*x.allocates, *x.writes):
            makers[slot].add((x.verb, x.stream))
    return dict(makers)


def _owners(plan: Plan) -> dict[int, tuple[str, ...]]:
    """For each communication, the other streams that computed its inputs: they wait for it. The
    stream of the instruction that completes it is left out if that instruction waits anyway."""
    makers, reporting = _makers(plan), _reporting(plan)
    ends = {c: pc for pc, x in enumerate(plan.instructions) for c in x.ends}
    waits = _before(plan)
    owners = {}
    for pc, x in enumerate(plan.instructions):
        if x.verb not in COMMUNICATING or x.stream in reporting:
            continue
        streams = {
            name
            for slot in x.reads
            for verb, name in makers.get(slot, ())
            if verb not in COMMUNICATING
        } - {x.stream}
        end = ends.get(pc)
        if end is not None and pc in waits[end]:
            streams.discard(plan.instructions[end].stream)
        if streams:
            owners[pc] = tuple(sorted(streams))
    return owners


def _behind(plan: Plan) -> dict[int, tuple[str, ...]]:
    """For each instruction that is the last reader of gathered parameters on its stream, the other
    streams that gathered them."""
    gathered = _gathered(plan)
    last: dict[tuple[int, str], int] = {}
    for pc, x in enumerate(plan.instructions):
        last |= {(slot, x.stream): pc for slot in x.reads if slot in gathered}
    behind: defaultdict[int, set[str]] = defaultdict(set)
    for (slot, stream), pc in last.items():
        if gathered[slot] != stream:
            behind[pc].add(gathered[slot])
    return {pc: tuple(sorted(names)) for pc, names in behind.items()}


def _gathered(plan: Plan) -> dict[int, str]:
    """The slots with gathered parameters, each with the stream that gathered them."""
    return {
        slot: x.stream
        for x in plan.instructions
        if x.content is Content.PARAMETERS
        for slot in x.writes
    }


def _reporting(plan: Plan) -> frozenset[str]:
    """The streams that only all-reduce the step's scalars."""
    others = {x.stream for x in plan.instructions if not x.reported}
    return frozenset(x.stream for x in plan.instructions) - others


def _foreign(plan: Plan) -> dict[int, set[str]]:
    """For each slot, the streams to record with the allocator when the slot is freed."""
    makers, gathered, reporting = _makers(plan), _gathered(plan), _reporting(plan)
    foreign: defaultdict[int, set[str]] = defaultdict(set)
    for x in plan.instructions:
        for slot in (*x.reads, *x.allocates, *x.writes):
            computed = all(verb not in COMMUNICATING for verb, _ in makers.get(slot, ()))
            kept = x.verb in COMMUNICATING and x.stream not in reporting
            if slot in makers and computed and kept:
                continue
            foreign[slot].add(x.stream)
    for slot, made in makers.items():
        verb, stream = next(iter(made))
        if len(made) == 1 and verb not in COMMUNICATING:
            foreign[slot].discard(stream)  # it allocated the memory: no need to record it
    return {slot: names for slot, names in foreign.items() if names and slot not in gathered}


def _tensors(content: Any) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    items = content.values() if isinstance(content, dict) else content
    return [x for x in items or () if isinstance(x, Tensor)]


def streams_for(
    device: torch.device,
    rules: Mapping[str, StreamRule],
    jitter: StreamJitter | None,
    *,
    tracked: bool,
) -> Streams:
    """The logical streams of ``device``. ``tracked`` says that others read its program counter."""
    if device.type == "cuda":
        streams = CudaStreams(device, rules)
        streams.jitter, streams.tracked = jitter, tracked
        return streams
    limited = [name for name, rule in rules.items() if rule.sms is not None]
    if limited:
        raise PiperError(
            f"stream {limited[0]!r} asks for a share of a GPU (sms={rules[limited[0]].sms}), but "
            f"this device is {device}: leave sms out"
        )
    if jitter is not None:
        raise PiperError(f"shake= delays CUDA streams, but this device is {device}: leave it out")
    return Streams()
