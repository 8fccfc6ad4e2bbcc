"""The result of a search: the best strategy, and all others with their figures or the reason why
they are not it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.base.errors import PiperError
from piper.base.paths import write_file
from piper.base.units import bytes_text, seconds_text
from piper.cost.cluster import Cluster
from piper.cost.simulate.estimate import Estimate
from piper.program.tune.candidate import Candidate
from piper.strategies.strategy import Strategy
from piper.view.pages.tuning_page import tuning_page

if TYPE_CHECKING:  # workers import this file, and print nothing
    from rich.table import Table

_PARTS = {
    "compute": "compute",
    "waiting": "bubble",
    "exposed": "exposed communication",
    "update": "update",
}


_MOST_SHOWN = 2000
"""Candidates in a page or in JSON; those that were not tried are only counted."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and what is known of it."""

    candidate: Candidate
    estimate: Estimate | None = None
    refused: str | None = None
    """Why it cannot run, or does not fit."""
    reason: str = ""
    """Why it was not tried."""
    measured: float | None = None
    """Seconds of a measured step."""

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    @property
    def seconds(self) -> float:
        """The measured or estimated seconds of a step; infinite if unknown."""
        if self.measured is not None:
            return self.measured
        return float("inf") if self.estimate is None else self.estimate.seconds

    @property
    def peak(self) -> int | None:
        """The estimated peak memory, in bytes."""
        return None if self.estimate is None else self.estimate.peak

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        it = self.estimate
        return {
            "name": str(self.candidate),
            "code": self.candidate.code,
            "seconds": None if it is None else it.seconds,
            "measured_seconds": self.measured,
            "peak_bytes": self.peak,
            "mfu": None if it is None else it.mfu,
            "parts": {} if it is None else {name: getattr(it, name) for name in _PARTS},
            "refused": self.refused or self.reason or None,
        }


@dataclass(frozen=True)
class Tuned:
    """What a search found, the fastest first."""

    cluster: Cluster
    candidates: tuple[Tried, ...]
    """All candidates: those that fit, by time; then those that were refused; then those that were
    not tried."""
    within: float | None
    """How much slower the best may be than any candidate that was not tried, as a share."""
    again: Callable[[Candidate, Cluster], Estimate] = field(repr=False)
    """Estimates a candidate on another cluster."""

    @cached_property
    def fitting(self) -> tuple[Tried, ...]:
        """Those that run and fit, the fastest first."""
        return tuple(x for x in self.candidates if x.estimate and not x.refused)

    @cached_property
    def ways(self) -> tuple[Tried, ...]:
        """The best of each way to use the devices."""
        first: dict[object, Tried] = {}
        for one in self.fitting:
            first.setdefault(one.candidate.way, one)
        return tuple(first.values())

    @property
    def best(self) -> Tried:
        """The fastest that fits."""
        if not self.fitting:
            refused = [x.refused for x in self.candidates if x.refused]
            cause = f"; for example: {refused[0]}" if refused else ""
            raise PiperError(
                f"no strategy of {len(self.candidates)} fits {self.cluster}{cause}. Use more "
                "devices, or search longer (seconds=)"
            )
        return self.fitting[0]

    @property
    def strategy(self) -> Strategy:
        """The fastest strategy."""
        return self.best.strategy

    @cached_property
    def why(self) -> str:
        """Why the best is faster than the next one."""
        if len(self.ways) < 2:
            return "no other way that was tried fits"
        a, b = (x.estimate for x in self.ways[:2])
        assert a is not None
        assert b is not None
        more = {text: getattr(b, name) - getattr(a, name) for name, text in _PARTS.items()}
        parts = sorted(more.items(), key=lambda part: -abs(part[1]))
        said = [
            f"{seconds_text(abs(x))} {'more' if x > 0 else 'less'} {text}"
            for text, x in parts
            if abs(x) > 0.001 * a.seconds
        ]
        gap = self.ways[1].seconds / self.ways[0].seconds - 1
        return (
            f"the next, {self.ways[1].candidate}, is {gap:.1%} slower: "
            f"{', '.join(said) or 'no part differs by 0.1%'}"
        )

    def sensitivity(self, most: int = 2) -> Mapping[str, tuple[float | None, ...]]:
        """Seconds of the best ``most`` ways if the hardware were 20% better or worse."""
        changes = {
            "bandwidth −20%": (1.0, 0.8), "bandwidth +20%": (1.0, 1.2),
            "compute −20%": (0.8, 1.0), "compute +20%": (1.2, 1.0),
        }  # fmt: skip
        found = {}
        for name, (compute, bandwidth) in changes.items():
            other = self.cluster.scaled(compute=compute, bandwidth=bandwidth)
            rows = [self.again(x.candidate, other).seconds for x in self.ways[:most]]
            found[name] = tuple(rows)
        return found

    @property
    def proven(self) -> str:
        """What is known of the candidates that were not tried."""
        seen = sum(not x.reason for x in self.candidates)
        head = f"{len(self.candidates):,} candidates, {seen:,} tried or refused, "
        head += f"{sum(x.estimate is not None for x in self.candidates):,} simulated"
        if self.within is None:
            return f"{head}; none fits"
        if self.within == 0:
            return f"{head}; no other can be faster"
        return f"{head}; one that was not tried could be up to {self.within:.0%} faster"

    def table(self, most: int = 10) -> Table:
        """The best of ``most`` ways, or all that fit if some were measured, with their parts."""
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(
            box=SIMPLE, title=str(self.cluster), title_justify="left", padding=(0, 1, 0, 0)
        )
        table.add_column("strategy", overflow="fold")
        measured = any(x.measured is not None for x in self.fitting)
        heads = ["step", *(["measured"] if measured else []), "memory", "MFU", *_PARTS.values()]
        for head in heads:
            table.add_column(head.replace("communication", "comm."), justify="right", no_wrap=True)
        for x in self.fitting if measured else self.ways[:most]:
            it = x.estimate
            assert it is not None
            took = "" if x.measured is None else seconds_text(x.measured)
            table.add_row(
                str(x.candidate),
                seconds_text(it.seconds),
                *([took] if measured else []),
                bytes_text(it.peak),
                f"{it.mfu:.1%}",
                *(f"{getattr(it, name) / it.seconds:.1%}" for name in _PARTS),
            )
        return table

    def show(self, path: str | Path) -> None:
        """Write a page with all candidates: one HTML file, no server."""
        write_file(path, tuning_page(f"tuned for {self.cluster.name}", self.to_json(detailed=True)))

    def to_json(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures as plain data; with ``detailed``, also the sensitivity."""
        return {
            "kind": "tuning",
            "cluster": str(self.cluster),
            "memory_bytes": self.cluster.device(0).memory,
            "proven": self.proven,
            "within": self.within,
            "why": self.why if self.fitting else None,
            "compared": [str(x.candidate) for x in self.ways[:2]],
            "strategy": self.strategy.to_json() if self.fitting else None,
            "candidates": [x.to_json() for x in self.candidates if not x.reason][:_MOST_SHOWN],
            "sensitivity": self.sensitivity() if detailed and self.fitting else None,
        }

    def __str__(self) -> str:
        rows = [f"{x.candidate}: {x.estimate}" for x in self.fitting[:5]]
        said = [self.why] if self.fitting else []
        return "\n".join([*rows, *said, self.proven])
