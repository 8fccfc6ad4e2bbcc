"""Read and write a cluster as a TOML file.

name = "two old boxes and a new one"

[[machines]]
count = 2                   # machines like this one
devices = 8
device = "A100-80"          # a preset, or a table below
inside = "NVLink3"          # a preset, a table below, or { bandwidth = ..., latency = ... }
outside = "InfiniBand-HDR"

[[machines]]
device = ["H100", "H100", "tired"]     # one for each device
inside = { bandwidth = 450e9, latency = 2e-6 }
outside = "slow"

[devices.tired]
like = "H100"               # the defaults of all fields that are not set here
flops = { bfloat16 = 700e12 }
memory = 80e9

[devices.tired.efficiency.bfloat16]    # of products [m, k] x [k, n], by m, n and k
sizes = [256, 4096]
shares = [[[0.1, 0.2], [0.3, 0.5]], [[0.3, 0.5], [0.5, 0.6]]]

[links.slow]
bandwidth = 1.25e9
latency = 3e-5

[[between]]                 # a separate link between two machines
machines = [0, 2]
link = "slow"

[sharing]
links = 0.46
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import tomli_w
import torch

from piper.base.codec import decode
from piper.base.errors import PiperError
from piper.base.reading import DTYPES, MalformedError, file_bytes, parsed_toml, shown, torch_name
from piper.cost import presets
from piper.cost.hardware import Device, Link, Machine, Sharing
from piper.cost.measure.efficiency import Efficiency

_MOST = 10**6
_Item = TypeVar("_Item")
_Number = Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    bandwidth: _Number
    latency: _Number = 0.0
    crowding: _Number = 0.0


class _Machine(msgspec.Struct, forbid_unknown_fields=True):
    device: str | list[str]
    devices: _Count | None = None
    count: _Count = 1
    inside: str | _Link | None = None
    outside: str | _Link = presets.OUTSIDE


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a ``Device``; None: as ``like``."""

    like: str | None = None
    flops: dict[str, _Number] = {}
    memory: _Number | None = None
    bandwidth: _Number | None = None
    efficiency: dict[str, Efficiency] | None = None
    attention: _Number | None = None
    overhead: _Number | None = None
    issue: _Number | None = None
    synchronous: bool | None = None
    host_bandwidth: _Number | None = None
    sms: _Count | None = None


class _Between(msgspec.Struct, forbid_unknown_fields=True):
    machines: tuple[int, int]
    link: str | _Link


class _Sharing(msgspec.Struct, forbid_unknown_fields=True):
    links: _Number | None = None
    compute: _Number | None = None
    communication: _Number | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    machines: Annotated[list[_Machine], msgspec.Meta(min_length=1)]
    name: str | None = None
    devices: dict[str, Any] = {}
    """Each a ``_Device``."""
    links: dict[str, str | _Link] = {}
    between: list[_Between] = []
    sharing: _Sharing = msgspec.field(default_factory=_Sharing)


class Described(NamedTuple):
    """The fields of a ``Cluster``."""

    machines: tuple[Machine, ...]
    between: Mapping[tuple[int, int], Link]
    sharing: Sharing
    name: str


def read(path: str | Path) -> Described:
    """The cluster that a file describes."""
    try:
        text = file_bytes(path).decode()
    except (OSError, ValueError, MalformedError) as error:
        raise PiperError(f"{path} cannot be read: {error}") from error
    with _at(str(path)):
        return parse(text, default_name=Path(path).stem)


def parse(text: str, default_name: str = "cluster") -> Described:
    """The cluster that ``text`` describes."""
    file: _File = decode(_File, parsed_toml(text))
    links, devices = {**presets.LINKS}, {**presets.DEVICES}
    for name, link in file.links.items():
        with _at(f"[links.{name}]"):
            links[name] = _link(link, links)
    for name, device in file.devices.items():
        with _at(f"[devices.{name}]"):
            devices[name] = _device(name, decode(_Device, device), devices)
    machines: list[Machine] = []
    in_all = 0
    for number, machine in enumerate(file.machines):
        with _at(f"[[machines]] number {number}"):
            made = _machine(machine, devices, links)
        if (in_all := in_all + machine.count * len(made.devices)) > _MOST:
            raise PiperError(f"the machines have {in_all:,} devices; at most {_MOST:,} may be")
        machines += [made] * machine.count
    with _at("[[between]]"):
        between = {
            (min(one.machines), max(one.machines)): _link(one.link, links) for one in file.between
        }
    usual = presets.sharing(device for machine in machines for device in machine.devices)
    sharing = replace(usual, **_given(file.sharing))
    return Described(tuple(machines), between, sharing, file.name or default_name)


def write(cluster: Described) -> str:
    """A cluster as a file that ``parse`` reads."""
    devices = {d.name: d for machine in cluster.machines for d in machine.devices}
    data = {
        "name": cluster.name,
        "machines": [
            {
                "count": len(list(run)),
                **_kinds([device.name for device in machine.devices]),
                "inside": asdict(machine.inside),
                "outside": asdict(machine.outside),
            }
            for machine, run in groupby(cluster.machines)
        ],
        "devices": {name: _written(device) for name, device in devices.items()},
        "between": [
            {"machines": list(pair), "link": asdict(link)} for pair, link in cluster.between.items()
        ],
        "sharing": asdict(cluster.sharing),
    }
    return tomli_w.dumps(data)


def _kinds(names: list[str]) -> dict[str, object]:
    if len(set(names)) == 1:
        return {"devices": len(names), "device": names[0]}
    return {"device": names}


def _written(device: Device) -> dict[str, object]:
    data = asdict(device)
    for by_dtype in ("flops", "efficiency"):
        data[by_dtype] = {torch_name(dtype): item for dtype, item in data[by_dtype].items()}
    return {key: item for key, item in data.items() if key != "name" and item is not None}


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Adds ``where`` to errors."""
    try:
        yield
    except PiperError as error:
        raise PiperError(f"{where}: {error}") from None


def _machine(file: _Machine, devices: Mapping[str, Device], links: Mapping[str, Link]) -> Machine:
    kinds = [file.device] * (file.devices or 1) if isinstance(file.device, str) else file.device
    if file.devices not in (None, len(kinds)):
        raise PiperError(f"it has {file.devices} devices, but names {len(kinds)}")
    own = tuple(presets.named(devices, kind, "device") for kind in kinds)
    if not own:
        raise PiperError("it has no devices")
    inside = presets.inside(own[0]) if file.inside is None else _link(file.inside, links)
    return Machine(own, inside, _link(file.outside, links))


def _device(name: str, file: _Device, devices: Mapping[str, Device]) -> Device:
    given = _given(file)
    like = given.pop("like", None)
    missing = [key for key in ("flops", "memory", "bandwidth") if not given.get(key)]
    if like is None and missing:
        raise PiperError(f'it lacks {", ".join(missing)}; give them, or like = "H100"')
    own: dict[str, Any] = {
        "flops": _by_dtype(file.flops), "efficiency": _by_dtype(file.efficiency or {})
    }  # fmt: skip
    if like is not None:
        base = presets.named(devices, like, "device")
        given = {field: getattr(base, field) for field in Device.__slots__} | given
        own = {field: {**getattr(base, field), **items} for field, items in own.items()}
    return Device(**{**given, **own, "name": name, "memory": int(given["memory"])})


def _by_dtype(items: Mapping[str, _Item]) -> dict[torch.dtype, _Item]:
    for name in items:
        if name not in DTYPES:
            raise PiperError(f"{shown(name)} is no dtype; write float32, bfloat16, ...")
    return {DTYPES[name]: item for name, item in items.items()}


def _given(file: _Device | _Sharing) -> dict[str, Any]:
    return {key: item for key, item in msgspec.structs.asdict(file).items() if item is not None}


def _link(given: str | _Link, links: Mapping[str, Link]) -> Link:
    if isinstance(given, str):
        return presets.named(links, given, "link")
    return Link(given.bandwidth, given.latency, given.crowding)
