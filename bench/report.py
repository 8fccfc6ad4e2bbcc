"""The results of comparisons: as a table, as JSON, as a picture; and a check that losses agree."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from turns import Found

_FIRST, _ROUNDED = 10, 1e-4
"""For sides that round differently: how many first losses must agree, and how closely."""


@dataclass(slots=True)
class Case:
    """Sides that did the same work."""

    name: str
    against: str
    """The side that the ratios of the others refer to."""
    sides: dict[str, Found]
    ideal: dict[str, float] = field(default_factory=dict)
    """By side: a lower bound of the step time in seconds, where it is known."""

    def time_ratio(self, side: str) -> float:
        """The median ratio over steps; the two times of a ratio come from the same round."""
        return _ratio(self.sides[side].seconds, self.sides[self.against].seconds)

    def running_ratio(self, side: str) -> float | None:
        mine, other = self.sides[side].running, self.sides[self.against].running
        return _ratio(mine, other) if other and all(other) else None

    def memory_ratio(self, side: str) -> float | None:
        mine, other = self.sides[side].memory, self.sides[self.against].memory
        return mine / other if mine and other else None

    def reached(self, side: str) -> float | None:
        """The share of the ideal speed."""
        return self.ideal[side] / self.sides[side].median if side in self.ideal else None

    @property
    def has_losses(self) -> bool:
        """Whether there are losses to compare."""
        return any(one.losses for one in self.sides.values())

    def difference(self, steps: int | None = None, without: str | None = None) -> float:
        """The largest relative difference between the losses of any two sides, in any of the first
        ``steps``; sides whose names begin with ``without`` are left out."""
        sides = [x for n, x in self.sides.items() if not (without and n.startswith(without))]
        losses = torch.tensor([one.losses[:steps] for one in sides], dtype=torch.float64)
        apart, largest = losses.amax(0) - losses.amin(0), losses.abs().amax(0)
        return float(torch.where(apart == 0, 0.0, apart / largest).max())


@dataclass(slots=True)
class Comparison:
    """Several cases of one setting."""

    title: str
    where: str
    cases: list[Case]
    notes: list[str] = field(default_factory=list)
    """Skipped sides with the reason, and other notes for the reader."""
    tolerance: float = 1e-5
    """Allowed relative difference of losses."""
    compared: int | None = None
    """The number of first steps whose losses must agree; None for all."""
    rounding: str | None = None
    """The name prefix of sides whose gradients round differently. AdamW amplifies gradients near
    zero, and differences grow from step to step, so for these sides only the first losses must
    agree."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(file: Path) -> Comparison:
        data = json.loads(file.read_text())
        cases = [
            Case(**{**case, "sides": {n: Found(**one) for n, one in case["sides"].items()}})
            for case in data.pop("cases")
        ]
        return Comparison(**data, cases=cases)

    def conclude(self, file: Path | None) -> None:
        """Print the tables, write the figures, and exit with an error if sides disagree."""
        print_cases(self)
        if file is not None:
            self.write(file)
        self.check()

    def check(self) -> None:
        """Exit with an error if sides disagree: a faster wrong answer does not count."""
        apart = [(c.name, *found) for c in self.cases if c.has_losses for found in self.apart(c)]
        wrong = [
            f"{self.title}, {name}: losses differ by {difference:.1e}{what}, more than "
            f"{tolerance:.0e}"
            for name, difference, what, tolerance in apart
            if not difference <= tolerance
        ]
        if wrong:
            sys.exit("\n".join(wrong))

    def apart(self, case: Case) -> list[tuple[float, str, float]]:
        """The differences of a case's losses, a text for the steps compared, and the limits."""
        steps = f" in the first {self.compared} steps" if self.compared else ""
        found = [(case.difference(self.compared, self.rounding), steps, self.tolerance)]
        if self.rounding and any(side.startswith(self.rounding) for side in case.sides):
            which = f" with {self.rounding} in the first {_FIRST} steps"
            found.append((case.difference(_FIRST), which, _ROUNDED))
        return found


def theirs(sides: Iterable[str]) -> list[str]:
    """The names of the peers' sides."""
    return [side for side in sides if not side.startswith("piper")]


def best(sides: dict[str, Found], among: Iterable[str]) -> str:
    """The fastest of the named sides."""
    return min(among, key=lambda name: sides[name].median)


def print_cases(comparison: Comparison, console: Console | None = None) -> None:
    """One table, a section for each case."""
    console = console or Console(width=120)
    cases = comparison.cases
    table = Table(title=f"{comparison.title} ({comparison.where})")
    table.add_column("side")
    columns: list[tuple[str, bool]] = [
        ("step (ms)", True),
        ("10-90%", True),
        ("ratio", True),
        ("running (ms)", any(any(f.running) for c in cases for f in c.sides.values())),
        ("ratio", any(any(f.running) for c in cases for f in c.sides.values())),
        ("host (ms)", any(f.host for c in cases for f in c.sides.values())),
        ("MiB", any(f.memory for c in cases for f in c.sides.values())),
        ("ratio", any(f.memory for c in cases for f in c.sides.values())),
        ("predicted", any(f.predicted for c in cases for f in c.sides.values())),
        ("of ideal", any(c.ideal for c in cases)),
    ]
    for name, shown in columns:
        if shown:
            table.add_column(name, justify="right")
    for case in cases:
        table.add_row(f"[bold]{case.name}[/]; ratios to {case.against}")
        for side in case.sides:
            cells = _cells(case, side)
            table.add_row(side, *(c for c, (_, shown) in zip(cells, columns, strict=True) if shown))
        table.add_section()
    console.print(table)
    for case in (case for case in cases if case.has_losses):
        for apart, which, tolerance in comparison.apart(case):
            mark = "" if apart <= tolerance else "[bold red]WRONG[/] "
            console.print(f"{mark}{case.name}: losses differ by {apart:.1e} at most{which}")
    for note in comparison.notes:
        console.print(note)


def _cells(case: Case, side: str) -> list[str]:
    one = case.sides[side]
    low, high = one.spread
    running = statistics.median(one.running) if one.running else 0.0
    return [
        f"{1e3 * one.median:,.1f}",
        f"{1e3 * low:,.1f} to {1e3 * high:,.1f}",
        f"{case.time_ratio(side):.3f}",
        f"{1e3 * running:,.1f}" if running else "",
        _number(case.running_ratio(side)),
        f"{1e3 * statistics.median(one.host):,.1f}" if one.host else "",
        _mebibytes(one.by_rank or [one.memory]) if one.memory else "",
        _number(case.memory_ratio(side)),
        _mebibytes(one.predicted),
        _number(case.reached(side)),
    ]


def _mebibytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:,.0f}" for size in sizes)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def plot(comparisons: Sequence[Comparison], file: Path) -> None:
    """A bar for each side of each case, as long as its ratio; the thin line is its spread."""
    from matplotlib.figure import Figure

    rows = [(c, case, side) for c in comparisons for case in c.cases for side in case.sides]
    figure = Figure(
        figsize=(9, 1 + 0.22 * (len(rows) + 2 * sum(len(c.cases) for c in comparisons)))
    )
    axes = figure.add_subplot()
    place, ticks, labels = 0.0, [], []
    for comparison in comparisons:
        for case in comparison.cases:
            place += 1
            axes.text(0, place, f"{comparison.title}: {case.name}", weight="bold", size=8)
            base = case.sides[case.against].median
            for side, one in case.sides.items():
                place += 1
                low, high = one.spread
                ratio = case.time_ratio(side)
                ours = side.startswith("piper")
                axes.barh(place, ratio, color="#2b6cb0" if ours else "#b0b7c3", height=0.8)
                axes.plot([low / base, high / base], [place, place], color="black", linewidth=0.8)
                axes.text(
                    max(ratio, high / base) + 0.01, place, f"{ratio:.2f}", size=7, va="center"
                )
                ticks.append(place)
                labels.append(side)
    axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(ticks, labels, size=7)
    axes.set_ylim(place + 1, 0)
    axes.set_xlabel("time of a step, as a ratio")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, bbox_inches="tight")
