"""A schedule drawn as in papers: a `Schedule` goes in, an SVG comes out."""

from __future__ import annotations

from piper.ir.passes import Pass
from piper.strategies import Action, Schedule, timed
from piper.view.grid import Cell

from .svg import Picture

ROW, GAP, LEFT, TOP = 34, 6, 74, 52
WIDTH = 940
NAMES = {
    Pass.F: "forward",
    Pass.B: "backward",
    Pass.BI: "backward for inputs",
    Pass.BW: "backward for weights",
}


def drawn(schedule: Schedule, title: str) -> str:
    """The picture of ``schedule``."""
    found = timed(schedule)
    grid = found.grid
    unit = WIDTH / grid.end
    picture = Picture()
    picture.text(16, 28, title, "title")
    facts = (
        f"{schedule.ranks} ranks, {schedule.microbatches} microbatches, {schedule.stages} stages"
    )
    picture.text(LEFT + WIDTH + 62, 28, facts, "quiet small", anchor="end")
    bottom = TOP + schedule.ranks * (ROW + GAP) - GAP
    picture.rect(LEFT, TOP - 4, WIDTH, bottom - TOP + 8, "panel", radius=4)
    for rank, (line, row) in enumerate(zip(grid.lines, schedule.rows, strict=True)):
        top = TOP + rank * (ROW + GAP)
        picture.text(16, top + ROW / 2 + 4, line.name, "quiet")
        stages = sorted(row.stages)
        for cell, group in zip(line.cells, row.groups, strict=True):
            _cell(picture, cell, group, stages, LEFT + cell.start * unit, top, unit)
        idle = f"{grid.idle(line):.0%} idle"
        picture.text(LEFT + WIDTH + 62, top + ROW / 2 + 4, idle, "quiet small", anchor="end")
    _legend(picture, schedule, bottom + 30)
    picture.grow(LEFT + WIDTH + 62, bottom + 36)
    return picture.svg(f"The schedule {schedule.name} of {facts}")


def _cell(
    picture: Picture,
    cell: Cell,
    group: tuple[Action, ...],
    stages: list[int],
    x: float,
    y: float,
    unit: float,
) -> None:
    width = (cell.end - cell.start) * unit - 1.5
    height = ROW / len(group)
    for i, action in enumerate(group):
        second = stages.index(action.stage) > 0
        look = f"{action.which.value}{'2' if second else ''}"
        top = y + i * height
        picture.rect(x + 0.75, top, width, height - (0.75 if i < len(group) - 1 else 0), look, 2.5)
        light = action.which in (Pass.F, Pass.B) and not second
        words = f"{'on' if light else 'ink'} small"
        picture.text(
            x + 0.75 + width / 2, top + height / 2 + 4, str(action.microbatch), words, "middle"
        )


def _legend(picture: Picture, schedule: Schedule, y: float) -> None:
    used = {a.which for row in schedule.rows for group in row.groups for a in group}
    x = float(LEFT)
    for which, name in NAMES.items():
        if which in used:
            picture.rect(x, y - 10, 14, 13, which.value, 2.5)
            picture.text(x + 20, y + 1, name, "quiet small")
            x += 40 + 5.7 * len(name)
    if max(len(row.stages) for row in schedule.rows) > 1:
        picture.rect(x, y - 10, 14, 13, "F2", 2.5)
        picture.text(x + 20, y + 1, "pale: the rank's later stage", "quiet small")
        x += 40 + 5.7 * 28
    if any(len(group) > 1 for row in schedule.rows for group in row.groups):
        picture.rect(x, y - 10, 14, 6, "F", 2)
        picture.rect(x, y - 3, 14, 6, "B2", 2)
        picture.text(x + 20, y + 1, "a pair that overlaps", "quiet small")
        x += 40 + 5.7 * 20
    picture.text(x, y + 1, "numbers are microbatches", "quiet small")
