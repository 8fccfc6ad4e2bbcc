"""A step as a trace in the JSON format of Perfetto and chrome://tracing.

A device is a process, a stream is a thread. A slice has the name of its DAG node and all its
attributes. Memory is a counter. Flow arrows join the sends and receives of one node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from piper.base.paths import write_file
from piper.view.runs import Event, Run

_MICRO = 1e6


class Inner(NamedTuple):
    """A kernel that ran inside an instruction."""

    device: int
    """The index of the device in the first run."""
    row: str
    name: str
    node: str
    """The name of the instruction's node."""
    start: float
    end: float


def trace_events(run: Run, first_process: int = 0) -> list[dict[str, Any]]:
    """The events of ``run``; its devices are processes from ``first_process`` on."""
    events: list[dict[str, Any]] = []
    for number, device in enumerate(run.devices):
        process = first_process + number
        name = f"{run.title}: {device.name}" if run.title else device.name
        events.append(_named("process_name", name, process))
        order = {"sort_index": process}
        events.append({**_named("process_sort_index", "", process), "args": order})
        for moment, nbytes in device.memory:
            held = {"name": "memory", "ph": "C", "pid": process, "ts": moment * _MICRO}
            events.append({**held, "args": {"bytes": nbytes}})
    for thread, row in enumerate(run.rows):
        events.append(_named("thread_name", row.stream, first_process + row.device, thread))
    flows: dict[int, list[Event]] = {}
    for event in run.events:
        events.append(_slice(run, event, first_process))
        if event.kind in ("send", "recv"):
            flows.setdefault(event.node, []).append(event)
    for node, ends in flows.items():
        if {event.kind for event in ends} == {"send", "recv"}:
            events += [_flow(run, event, node, first_process) for event in ends]
    return events


def write_trace(path: Path, *runs: Run, inner: Iterable[Inner] = ()) -> None:
    """Write one file with all ``runs``, one below the other; ``inner`` belongs to the first."""
    events: list[dict[str, Any]] = list(_inner(inner))
    first = 0
    for run in runs:
        events += trace_events(run, first)
        first += len(run.devices)
    facts = {run.title: dict(run.facts) for run in runs}
    data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
    write_file(path, json.dumps(data))


def _inner(inner: Iterable[Inner]) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, str], int] = {}
    for kernel in inner:
        key = kernel.device, kernel.row
        if key not in threads:
            threads[key] = _FIRST_INNER + len(threads)
            yield _named("thread_name", f"kernels, {kernel.row}", kernel.device, threads[key])
        yield {
            "name": f"{kernel.node}: {kernel.name}",
            "cat": "kernel",
            "ph": "X",
            "pid": kernel.device,
            "tid": threads[key],
            "ts": kernel.start * _MICRO,
            "dur": (kernel.end - kernel.start) * _MICRO,
            "args": {"node": kernel.node, "kernel": kernel.name},
        }


_FIRST_INNER = 10**6
"""The first thread number of kernels, above the numbers of streams."""


def _slice(run: Run, event: Event, first: int) -> dict[str, Any]:
    known = {
        "node": event.node,
        "instruction": event.pc,
        "stage": event.stage or None,
        "microbatch": event.microbatch,
        "tags": event.tags or None,
        "directive": event.directive,
        "bytes": event.nbytes or None,
        "flops": event.flops or None,
        "critical": event.critical or None,
    }
    return {
        "name": event.name,
        "cat": event.kind,
        "ph": "X",
        "pid": first + run.rows[event.row].device,
        "tid": event.row,
        "ts": event.start * _MICRO,
        "dur": (event.end - event.start) * _MICRO,
        "args": {key: value for key, value in known.items() if value is not None},
    }


def _flow(run: Run, event: Event, node: int, first: int) -> dict[str, Any]:
    begins = event.kind == "send"
    return {
        "name": "message",
        "cat": "send",
        "ph": "s" if begins else "f",
        **({} if begins else {"bp": "e"}),
        "id": f"{first}.{node}",
        "pid": first + run.rows[event.row].device,
        "tid": event.row,
        "ts": (event.start if begins else event.end) * _MICRO,
    }


def _named(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
