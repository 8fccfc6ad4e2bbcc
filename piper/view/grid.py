"""A schedule drawn in a terminal: one line per device, time from left to right.

    rank 0  0F0 0F1         0B0----     0B1----   33% idle
    rank 1      1F0 1B0---- 1F1 1B1----           33% idle

The width of a pass is its duration; blank columns are idle. Two overlapping passes share a cell,
``0F3+1B1====``. On a terminal the passes have colours, and the drawing fits the width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piper.ir.passes import Pass

if TYPE_CHECKING:  # every worker imports this file, but draws nothing
    from rich.text import Text

_COLOURS = {Pass.F: "blue", Pass.B: "green", Pass.BI: "cyan", Pass.BW: "yellow"}
LETTERS = {Pass.F: "F", Pass.B: "B", Pass.BI: "I", Pass.BW: "W"}
_WIDEST = 2000
"""The most columns, if no terminal sets a limit."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass, or several that overlap."""

    start: float
    end: float
    labels: tuple[str, ...]
    passes: tuple[Pass, ...]
    busy: float
    """The time of compute between start and end."""


@dataclass(frozen=True, slots=True)
class GridLine:
    """The passes of one device."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """Lines with a common time axis."""

    title: str
    lines: tuple[GridLine, ...]

    @property
    def end(self) -> float:
        return max((cell.end for line in self.lines for cell in line.cells), default=0.0)

    def idle(self, line: GridLine) -> float:
        """The share of the whole time in which ``line`` is idle."""
        return 1 - sum(cell.busy for cell in line.cells) / self.end if self.end else 0.0

    def text(self, width: int | None = None) -> Text:
        """The drawing, at most ``width`` columns wide."""
        from rich.text import Text

        name = max((len(line.name) for line in self.lines), default=0)
        room = (width or _WIDEST) - name - len("   100% idle")
        scale = min(self._natural(), max(1, room) / self.end) if self.end else 1.0
        total = round(self.end * scale)
        drawing = Text(no_wrap=True)
        if self.title:
            drawing.append(f"{self.title}\n", style="bold")
        for i, line in enumerate(self.lines):
            drawing.append("\n" if i else "")
            drawing.append(f"{line.name:<{name}}  ", style="dim")
            column = 0
            for cell in line.cells:
                start, end = round(cell.start * scale), round(cell.end * scale)
                drawing.append(" " * (start - column))
                for part, style in _drawn(cell, end - start):
                    drawing.append(part, style=style)
                column = end
            drawing.append(" " * (total - column))
            drawing.append(f" {self.idle(line):4.0%} idle", style="dim")
        return drawing

    def _natural(self) -> float:
        """Columns per unit of time at which the labels of nine in ten cells fit."""
        wanted = sorted(
            (len("+".join(cell.labels)) + 1) / (cell.end - cell.start)
            for line in self.lines
            for cell in line.cells
            if cell.end > cell.start
        )
        return wanted[len(wanted) * 9 // 10] if wanted else 1.0

    def __str__(self) -> str:
        from rich.console import Console

        console = Console()
        text = self.text(console.width if console.is_terminal else None)
        with console.capture() as capture:
            console.print(text, soft_wrap=True, end="")
        return capture.get()


def _drawn(cell: Cell, width: int) -> Iterator[tuple[str, str]]:
    """The parts of a cell with their styles; a blank column at the end separates it from the
    next."""
    if width <= 0:
        return
    label = "+".join(cell.labels)
    inner = max(1, width - 1)
    if len(label) > inner:
        label = "".join(LETTERS[which] for which in cell.passes)[:inner]
    full = label.ljust(inner, "=" if len(cell.passes) > 1 else "-")
    for i, which in enumerate(cell.passes):
        part = full[len(full) * i // len(cell.passes) : len(full) * (i + 1) // len(cell.passes)]
        yield part, f"bold black on {_COLOURS[which]}"
    if width > 1:
        yield " ", ""
