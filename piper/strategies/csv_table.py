"""Read and write schedules as the compute-only CSV tables of ``torch.distributed.pipelining``.

    0F0,0F1,,0B0,(0F2;1B0)OVERLAP_F_B,...        one line per rank, one cell per step
    ,1F0,1I0,1W0,...                             F forward, B backward, I and W its two halves

Empty cells are idle steps. The reader ignores them; the writer uses them so that each column is one
time step. The reader also ignores communication (``0SEND_F3``, ``1UNSHARD``, ``0REDUCE_GRAD``): it
follows from the computations and the other directives.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

from piper.base.errors import DirectiveError
from piper.base.paths import write_file
from piper.base.reading import MalformedError, file_bytes
from piper.ir.passes import Pass
from piper.strategies.action import Action
from piper.strategies.builder import Row, Schedule
from piper.strategies.timing import timed
from piper.view.grid import LETTERS

_PASSES = {letter: which for which, letter in LETTERS.items()}
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_COMMUNICATION = re.compile(r"\d+((SEND|RECV)_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)\s*OVERLAP_F_B")


def from_csv(table: str | Path | Iterable[str], *, name: str | None = None) -> Schedule:
    """The schedule in ``table``: the path of a file, its text, or its lines."""
    if isinstance(table, str) and ("," in table or "\n" in table):
        return from_csv(table.splitlines(), name=name)
    if isinstance(table, str | Path):
        path = Path(table)
        try:
            text = file_bytes(path).decode("utf-8-sig")
        except (OSError, ValueError, MalformedError) as error:
            raise DirectiveError(f"the table {path} cannot be read: {error}") from error
        return from_csv(text.splitlines(), name=name or path.stem)
    try:
        lines = list(csv.reader(table))
    except (csv.Error, TypeError) as error:
        raise DirectiveError(f"this is not a schedule table: {error}") from error
    groups = [
        [
            _group(cell, rank, column)
            for column, cell in enumerate(line)
            if cell.strip() and not _COMMUNICATION.fullmatch(cell.strip())
        ]
        for rank, line in enumerate(lines)
    ]
    while groups and not groups[-1]:  # a spreadsheet may add empty lines
        groups.pop()
    actions = [action for row in groups for group in row for action in group]
    if not actions:
        raise DirectiveError("the table has no actions")
    microbatches = 1 + max(action.microbatch for action in actions)
    rows = [_row(rank, row) for rank, row in enumerate(groups)]
    schedule = Schedule(name or "table", microbatches, rows)
    timed(schedule)  # raises if the schedule deadlocks
    return schedule


def to_csv(schedule: Schedule, path: str | Path | None = None) -> str:
    """The table of a schedule, also written to ``path`` if one is given."""
    timing = timed(schedule, backward=1.0)  # every action takes one step
    width = round(max(cell.end for row in timing.cells for cell in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row, cells in zip(schedule.rows, timing.cells, strict=True):
        steps = [""] * width
        for group, cell in zip(row.groups, cells, strict=True):
            steps[round(cell.start)] = _text(group)
        writer.writerow(steps)
    if path is not None:
        write_file(path, buffer.getvalue())
    return buffer.getvalue()


def _text(group: tuple[Action, ...]) -> str:
    if len(group) == 1:
        return str(group[0])
    return f"({';'.join(map(str, group))})OVERLAP_F_B"


def _group(cell: str, rank: int, column: int) -> tuple[Action, ...]:
    text = cell.strip()
    overlap = _OVERLAP.fullmatch(text)
    parts = overlap[1].split(";") if overlap else [text]
    actions = []
    for part in parts:
        match = _ACTION.fullmatch(part.strip())
        if match is None:
            raise DirectiveError(
                f"line {rank + 1}, column {column + 1} of the table: {text!r} is not an action "
                "such as 0F3, 1B2, 1I2, 1W2 or (0F3;7B1)OVERLAP_F_B"
            )
        actions.append(Action(int(match[1]), _PASSES[match[2]], int(match[3])))
    return tuple(actions)


def _row(rank: int, groups: list[tuple[Action, ...]]) -> Row:
    stages: dict[int, list[int]] = {}
    for action in (action for group in groups for action in group):
        if action.which is Pass.F:
            stages.setdefault(action.stage, []).append(action.microbatch)
    row = Row({stage: sorted(set(stages[stage])) for stage in sorted(stages)})
    for group in groups:
        try:
            row.run(*group)
        except DirectiveError as error:
            raise DirectiveError(f"line {rank + 1} of the table: {error}") from None
    return row
