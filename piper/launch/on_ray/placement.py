"""On which machines of a cluster the devices of a program go.

Every machine gets equally many devices, and its devices follow each other: the inner axes of a mesh
stay within a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper.base.errors import PiperError
from piper.base.units import counted


@dataclass(frozen=True, slots=True)
class Room:
    """What a machine of the cluster offers."""

    address: str
    devices: int
    """The number of devices that it can have."""
    resources: str
    """Its resources, for messages."""


def rooms_of(
    nodes: Sequence[Mapping[str, Any]], labels: Mapping[str, str], cpus: float, *, gpus: bool
) -> list[Room]:
    """The machines with these labels, of those that Ray lists."""
    rooms = []
    for node in nodes:
        if not node["Alive"] or not labels.items() <= (node.get("Labels") or {}).items():
            continue
        cores, cards = (node["Resources"].get(name, 0.0) for name in ("CPU", "GPU"))
        most = int(cores / cpus) if cpus else int(cards)
        most = min(most, int(cards)) if gpus else most
        resources = f"{cores:g} CPUs" + (f" and {cards:g} GPUs" if gpus else "")
        rooms.append(Room(node["NodeManagerAddress"], most, resources))
    return rooms


def equal_share(devices: int, rooms: Sequence[Room], machines: int | None) -> int:
    """The number of devices on each machine: on as few machines as possible, or on ``machines``."""
    wanted = range(1, devices + 1) if machines is None else [machines]
    for count in wanted:
        each, rest = divmod(devices, count)
        if not rest and sum(room.devices >= each for room in rooms) >= count:
            return each
    asked = "" if machines is None else f" on {counted(machines, 'machine')}"
    offers = "; ".join(f"{room.address} has {room.resources}" for room in rooms)
    raise PiperError(
        f"the cluster has no room for {counted(devices, 'device')}{asked}, equally many on each "
        f"machine: {offers or 'no machine has these labels'}. Give machines=, cpus= (of a device) "
        "or labels= that it can satisfy, or start more machines"
    )
