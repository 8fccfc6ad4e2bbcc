"""Communication between virtual devices in one process: the last participant to arrive does it for
all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from piper.base.handles import Handle
from piper.ir.collectives import COLLECTIVES, MemberTensors, Move
from piper.ir.ops import Group
from piper.runtime.comm.protocol import Begin, tensors_of


@dataclass
class Rendezvous(Handle):
    """A communication that may still wait for participants."""

    name: str
    participants: Sequence[str]
    """Their names in errors."""
    arrived: dict[str, MemberTensors] = field(default_factory=dict)
    ready: list[torch.Event] = field(default_factory=list)
    """On an accelerator: events after the participants' tensors were ready."""
    over: torch.Event | bool = False
    """Whether it is done; on an accelerator, the event after it."""

    def done(self) -> bool:
        return self.over is not False

    def wait(self) -> None:
        raise AssertionError(f"{self.name} is waited for by the process that must do it")

    def join(self) -> None:
        assert self.over, f"{self.name} is not over"
        if isinstance(self.over, torch.Event):
            self.over.wait()

    def __str__(self) -> str:
        missing = [name for name in self.participants if name not in self.arrived]
        return f"{self.name}: {', '.join(self.arrived)} waits for {', '.join(missing)}"


class Hub:
    """The communications of all devices of one process."""

    def __init__(self, accelerator: bool) -> None:
        self._accelerator = accelerator
        self._open: dict[tuple[int, Group], Rendezvous] = {}

    def arrive(
        self,
        key: tuple[int, Group],
        name: str,
        participants: Sequence[str],
        me: str,
        tensors: MemberTensors,
        move: Callable[[Sequence[MemberTensors]], None],
    ) -> Rendezvous:
        """Join the communication ``key``. The last participant runs ``move`` for all."""
        rendezvous = self._open.get(key)
        if rendezvous is None:
            rendezvous = self._open[key] = Rendezvous(name, participants)
        rendezvous.arrived[me] = tensors
        if self._accelerator:
            rendezvous.ready.append(_event())
        if len(rendezvous.arrived) == len(participants):
            everything = [rendezvous.arrived[participant] for participant in participants]
            for event in rendezvous.ready:
                event.wait()
            move(everything)
            rendezvous.over = _event() if self._accelerator else True
            del self._open[key]
            rendezvous.arrived.clear()  # the participants keep their own tensors alive
        return rendezvous

    def waiting(self) -> list[str]:
        """One text for each incomplete communication: who waits for whom."""
        return [str(rendezvous) for rendezvous in self._open.values()]

    def clear(self) -> None:
        """Forget communications that will never be completed."""
        self._open.clear()


def _event() -> torch.Event:
    event = torch.Event()
    event.record()
    return event


class Loopback:
    """One virtual device's end of a hub."""

    any_order = False

    def __init__(self, hub: Hub, device: int) -> None:
        self._hub = hub
        self._device = device

    def send(self, node: int, stream: str, to: int) -> Begin:
        return self._message(node, self._device, to, "sender")

    def receive(self, node: int, stream: str, source: int) -> Begin:
        return self._message(node, source, self._device, "receiver")

    def _message(self, node: int, source: int, to: int, me: str) -> Begin:
        name = f"transfer from device {source} to device {to} (node {node})"
        arrive, key = self._hub.arrive, (node, (source, to))

        def move(tensors: Sequence[MemberTensors]) -> None:
            (sent,), (out,) = tensors
            out.copy_(sent)

        return lambda data: arrive(key, name, ("sender", "receiver"), me, (data,), move)

    def close(self) -> None:
        return

    def collective(self, kind: Move, node: int, stream: str, group: Group) -> Begin:
        participants = [f"device {device}" for device in group]
        name, me = f"{kind.value} (node {node})", f"device {self._device}"
        arrive, key, act = self._hub.arrive, (node, group), COLLECTIVES[kind].act

        def move(given: Sequence[MemberTensors]) -> None:
            act([tensors_of(one) for one in given])

        return lambda *given: arrive(key, name, participants, me, given, move)
