"""One step, or two side by side, as an interactive page: ``Run``s go in, one HTML file comes out.

Everything is inside the file. Events are columns of numbers, and every string is stored once, so a
hundred thousand events take a few megabytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from piper.base.errors import PiperError
from piper.view.pages.inline import Numbered, page
from piper.view.runs import Run, ShownDevice

_SCRIPTS = (
    "common.js",
    "timeline_data.js",
    "timeline_layout.js",
    "timeline_draw.js",
    "timeline_panel.js",
    "timeline.js",
)
_DIGITS = 12
"""Decimals of times in seconds: finer than any clock, and still short."""


def timeline_page(*runs: Run) -> str:
    """A page with the timeline of one run, or of two to compare."""
    if not 1 <= len(runs) <= 2:
        raise PiperError(f"a timeline shows one run, or two to compare, not {len(runs)}")
    strings = Numbered()
    data = {"runs": [_run(run, strings) for run in runs], "strings": strings.items}
    title = " and ".join(run.title for run in runs)
    return page(title, "timeline.html", ("common.css", "timeline.css"), _SCRIPTS, data)


def _run(run: Run, strings: Numbered) -> dict[str, Any]:
    events = sorted(run.events, key=lambda e: (e.row, e.start))  # for the page's binary search
    rows, text = [event.row for event in events], strings.number
    return {
        "title": run.title,
        "seconds": run.seconds,
        "facts": [[name, figure] for name, figure in run.facts.items()],
        "devices": [_device(device) for device in run.devices],
        "rows": [[row.device, row.stream] for row in run.rows],
        "firsts": [bisect_left(rows, row) for row in range(len(run.rows) + 1)],
        "start": _times(e.start for e in events),
        "end": _times(e.end for e in events),
        "name": [text(e.name) for e in events],
        "node": [e.node for e in events],
        "pc": [e.pc for e in events],
        "kind": [text(e.kind) for e in events],
        "microbatch": [-1 if e.microbatch is None else e.microbatch for e in events],
        "stage": [text(e.stage) for e in events],
        "directive": [text(e.directive) for e in events],
        "tags": [text(e.tags) for e in events],
        "nbytes": [e.nbytes for e in events],
        "flops": [e.flops for e in events],
        "critical": [int(e.critical) for e in events],
    }


def _device(device: ShownDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "limit": device.limit,
        "times": _times(moment for moment, _ in device.memory),
        "bytes": [nbytes for _, nbytes in device.memory],
    }


def _times(moments: Iterable[float]) -> list[float]:
    return [round(moment, _DIGITS) for moment in moments]
