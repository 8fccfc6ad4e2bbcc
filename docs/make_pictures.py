"""Draw every picture of the documentation into docs/pictures, from real objects: schedules from
schedules, DAGs from DAGs, screenshots from the pages that Piper writes.

    .venv/bin/python docs/make_pictures.py                 # all of them
    .venv/bin/python docs/make_pictures.py gpipe place     # only some

Drawings are SVG; screenshots are PNG and need Chromium.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from drawing import directives
from drawing.home import home
from drawing.schedules import drawn

from piper import strategies

PICTURES = Path(__file__).parent / "pictures"
SCHEDULES = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "breadth_first": "Breadth-first",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
    "v_half": "V-Half",
    "dualpipev": "DualPipeV",
    "dualpipe": "Two-way DualPipe",
}


def drawings() -> dict[str, Callable[[], str]]:
    """All SVG drawings by name."""
    schedules = {
        name: lambda name=name, title=title: drawn(getattr(strategies, name)(4, 8), title)
        for name, title in SCHEDULES.items()
    }
    return {"home": home, **directives.ALL, **schedules}


def made(wanted: list[str]) -> Iterator[Path]:
    """Draw the wanted pictures, or all if none is named."""
    known = drawings()
    for name, draw in known.items():
        if not wanted or name in wanted:
            path = PICTURES / f"{name}.svg"
            path.write_text(draw(), encoding="utf-8")
            yield path
    if not wanted or set(wanted) - set(known):
        from drawing.screens import take

        yield from take(PICTURES, PICTURES.parent / "tutorial.md", wanted)


def main(wanted: list[str]) -> None:
    for path in made(wanted):
        print(f"{path.name}: {path.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
