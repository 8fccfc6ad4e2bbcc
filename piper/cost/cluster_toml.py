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

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piper.base.errors import PiperError
from piper.base.reading import MalformedError, file_bytes, parsed_toml, shown
from piper.cost import presets
from piper.cost.hardware import Device, Link, Machine, Sharing

_MOST = 10**6
_TABLES = {"name", "machines", "devices", "links", "between", "sharing"}
_MACHINE = {"count", "devices", "device", "inside", "outside"}
_DEVICE = {field.name for field in fields(Device)} - {"name"} | {"like"}


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
    try:
        return parse(text, default_name=Path(path).stem)
    except PiperError as error:
        raise PiperError(f"{path}: {error}") from None


def parse(text: str, default_name: str = "cluster") -> Described:
    """The cluster that ``text`` describes."""
    data = parsed_toml(text)
    _known(data, _TABLES, "the file")
    links = {**presets.LINKS}
    for name, table in _table(data, "links").items():
        links[name] = _link(table, links, f"links.{name}")
    devices = {**presets.DEVICES}
    for name, table in _table(data, "devices").items():
        devices[name] = _device(name, table, devices)
    rows = data.get("machines")
    if not isinstance(rows, list) or not rows:
        raise PiperError("give at least one [[machines]] table")
    machines = tuple(m for i, row in enumerate(rows) for m in _machines(i, row, devices, links))
    if (devices_in_all := sum(len(m.devices) for m in machines)) > _MOST:
        raise PiperError(f"the machines have {devices_in_all:,} devices; at most {_MOST:,} may be")
    pairs = data.get("between", [])
    if not isinstance(pairs, list):
        raise PiperError("between must be [[between]] tables")
    between = dict(_between(row, links) for row in pairs)
    usual = presets.sharing(device for m in machines for device in m.devices)
    given = _table(data, "sharing")
    _known(given, {field.name for field in fields(Sharing)}, "[sharing]")
    sharing = Sharing(
        **{
            f.name: _number(given, f.name, "sharing", getattr(usual, f.name))
            for f in fields(Sharing)
        }
    )
    return Described(machines, between, sharing, str(data.get("name", default_name)))


def write(cluster: Described) -> str:
    """A cluster as a file that ``parse`` reads."""
    devices = {d.name: d for m in cluster.machines for d in m.devices}
    lines = [f"name = {_quoted(cluster.name)}", ""]
    for machine, count in _runs(cluster.machines):
        kinds = [_quoted(device.name) for device in machine.devices]
        lines += ["[[machines]]", f"count = {count}"]
        if len(set(kinds)) == 1:
            lines += [f"devices = {len(kinds)}", f"device = {kinds[0]}"]
        else:
            lines.append(f"device = [{', '.join(kinds)}]")
        lines += [
            f"inside = {_inline(machine.inside)}",
            f"outside = {_inline(machine.outside)}",
            "",
        ]
    for device in devices.values():
        flops = ", ".join(f"{_dtype_name(d)} = {n!r}" for d, n in device.flops.items())
        points = ", ".join(f"[{n!r}, {share!r}]" for n, share in device.efficiency)
        lines += [
            f"[devices.{_quoted(device.name)}]",
            f"flops = {{ {flops} }}",
            f"memory = {device.memory}",
            f"bandwidth = {device.bandwidth!r}",
            f"efficiency = [{points}]",
            f"overhead = {device.overhead!r}",
            f"issue = {device.issue!r}",
            f"host_bandwidth = {device.host_bandwidth!r}",
            f"synchronous = {str(device.synchronous).lower()}",
            *([f"sms = {device.sms}"] if device.sms else []),
            "",
        ]
    for (a, b), link in cluster.between.items():
        lines += ["[[between]]", f"machines = [{a}, {b}]", f"link = {_inline(link)}", ""]
    lines.append("[sharing]")
    lines += [f"{f.name} = {getattr(cluster.sharing, f.name)!r}" for f in fields(Sharing)]
    return "\n".join(lines) + "\n"


def _machines(
    number: int, row: Any, devices: Mapping[str, Device], links: Mapping[str, Link]
) -> list[Machine]:
    where = f"[[machines]] number {number}"
    if not isinstance(row, dict):
        raise PiperError(f"{where} must be a table")
    _known(row, _MACHINE, where)
    kinds = row.get("device")
    if isinstance(kinds, str):
        kinds = [kinds] * _count(row, "devices", where)
    elif not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise PiperError(f"{where}: device must be the name of a device, or a list of names")
    elif row.get("devices", len(kinds)) != len(kinds):
        raise PiperError(f"{where} has {row['devices']} devices, but names {len(kinds)}")
    own = tuple(_named(devices, kind, "device", where) for kind in kinds)
    if not own:
        raise PiperError(f"{where} has no devices")
    inside = _link(row["inside"], links, where) if "inside" in row else presets.inside(own[0])
    outside = _link(row.get("outside", presets.OUTSIDE), links, where)
    return [Machine(own, inside, outside)] * _count(row, "count", where)


def _device(name: str, table: Any, devices: Mapping[str, Device]) -> Device:
    where = f"[devices.{name}]"
    if not isinstance(table, dict):
        raise PiperError(f"{where} must be a table")
    _known(table, _DEVICE, where)
    base = _named(devices, table["like"], "device", where) if "like" in table else None
    missing = [key for key in ("flops", "memory", "bandwidth") if key not in table]
    if base is None and missing:
        raise PiperError(f'{where} lacks {", ".join(missing)}; give them, or like = "H100"')
    flops = dict(base.flops) if base else {}
    for key, value in _table(table, "flops").items():
        flops[_dtype(key, where)] = _number({key: value}, key, where)
    points = table.get("efficiency", base.efficiency if base else ((1.0, 1.0),))
    if not isinstance(points, list | tuple) or not all(_pair(point) for point in points):
        raise PiperError(f"{where}: efficiency must be a list of [operations, share]")
    sms = _count(table, "sms", where) if "sms" in table else base and base.sms
    return Device(
        name=name,
        flops=flops,
        memory=int(_number(table, "memory", where, base and base.memory)),
        bandwidth=_number(table, "bandwidth", where, base and base.bandwidth),
        efficiency=tuple((float(n), float(share)) for n, share in points),
        overhead=_number(table, "overhead", where, base.overhead if base else 0.0),
        issue=_number(table, "issue", where, base.issue if base else 0.0),
        host_bandwidth=_number(
            table, "host_bandwidth", where, base.host_bandwidth if base else 24e9
        ),
        synchronous=bool(table.get("synchronous", base.synchronous if base else False)),
        sms=sms,
    )


def _link(given: Any, links: Mapping[str, Link], where: str) -> Link:
    if isinstance(given, str):
        return _named(links, given, "link", where)
    if not isinstance(given, dict):
        raise PiperError(f"{where}: a link is a name, or {{ bandwidth = ..., latency = ... }}")
    _known(given, {"bandwidth", "latency"}, where)
    return Link(_number(given, "bandwidth", where), _number(given, "latency", where, 0.0))


def _between(row: Any, links: Mapping[str, Link]) -> tuple[tuple[int, int], Link]:
    where = "[[between]]"
    if not isinstance(row, dict):
        raise PiperError(f"{where} must be a table")
    _known(row, {"machines", "link"}, where)
    pair = row.get("machines")
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(m, int) for m in pair):
        raise PiperError(f"{where}: machines must be two numbers, not {shown(pair)}")
    return (min(pair), max(pair)), _link(row.get("link"), links, where)


def _named(known: Mapping[str, Any], name: Any, what: str, where: str) -> Any:
    if not isinstance(name, str):
        raise PiperError(f"{where}: a {what} is given by its name, not as {shown(name)}")
    try:
        return presets.named(known, name, what)
    except PiperError as error:
        raise PiperError(f"{where}: {error}") from None


def _known(table: Mapping[str, Any], names: set[str], where: str) -> None:
    unknown = sorted(table.keys() - names)
    if unknown:
        raise PiperError(
            f"{where} has unknown keys: {', '.join(map(shown, unknown))}; "
            f"known: {', '.join(sorted(names))}"
        )


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise PiperError(f"{key} must be a table")
    return table


def _number(
    table: Mapping[str, Any], key: str, where: str, otherwise: float | None = None
) -> float:
    value = table.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PiperError(f"{where}: {key} must be a number, not {shown(value)}")
    return value


def _count(table: Mapping[str, Any], key: str, where: str) -> int:
    value = table.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise PiperError(f"{where}: {key} must be a whole number from 1 on, not {shown(value)}")
    return value


def _pair(point: Any) -> bool:
    numbers = isinstance(point, list | tuple) and len(point) == 2
    return numbers and all(isinstance(n, int | float) for n in point)


def _dtype(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PiperError(f"{where}: {shown(name)} is no dtype; write float32, bfloat16, ...")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _runs(machines: tuple[Machine, ...]) -> list[tuple[Machine, int]]:
    """Runs of equal consecutive machines, each with its length."""
    runs: list[tuple[Machine, int]] = []
    for machine in machines:
        if runs and runs[-1][0] == machine:
            runs[-1] = machine, runs[-1][1] + 1
        else:
            runs.append((machine, 1))
    return runs


def _inline(link: Link) -> str:
    return f"{{ bandwidth = {link.bandwidth!r}, latency = {link.latency!r} }}"


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
