"""The base class of simulated and measured steps: their figures, pages and traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from piper.base.paths import write_file
from piper.view.busy import Busy
from piper.view.pages.timeline_page import timeline_page
from piper.view.perfetto import Inner, write_trace
from piper.view.runs import Run


class Shown(ABC):
    """A step that becomes a ``Run``, and so a page and a trace."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """The duration of the step."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """The figures, formatted for people."""

    @abstractmethod
    def run(self, title: str | None = None) -> Run:
        """The step as a ``Run``, for pages and traces."""

    @abstractmethod
    def _spent(self) -> Sequence[tuple[str, int, Busy]]:
        """How devices spend the step: a text that names equal ones, their number, and the time of
        each."""

    def _inner(self) -> Iterable[Inner]:
        """The kernels inside instructions, if they are known."""
        return ()

    @property
    def bubble(self) -> float:
        """The share of the step in which a device does not compute, the mean over all devices."""
        return self._mean([one.idle for _, _, one in self._spent()]) / self.seconds

    @property
    def exposed(self) -> float:
        """The seconds of exposed communication, the mean over all devices."""
        return self._mean([one.exposed for _, _, one in self._spent()])

    def show(self, path: str | Path, *, beside: Shown | None = None) -> None:
        """Write a page with the timeline of the step: one file, no server. ``beside`` is another
        step to compare it with."""
        others = [] if beside is None else [beside.run()]
        write_file(path, timeline_page(self.run(), *others))

    def trace(self, path: str | Path, *, beside: Shown | None = None) -> None:
        """Write a trace for Perfetto or chrome://tracing, with kernels if they were measured. Each
        kernel carries the name of its DAG node. ``beside`` is another step to compare with."""
        others = [] if beside is None else [beside.run()]
        write_trace(Path(path), self.run(), *others, inner=self._inner())

    def __str__(self) -> str:
        head = "  ".join(f"{name} {value}" for name, value in self.facts.items())
        rows = (f"  {devices}: {one.text(self.seconds)}" for devices, _, one in self._spent())
        return "\n".join([head, *rows])

    def _mean(self, figures: Sequence[float]) -> float:
        """The mean over all devices of a figure for each row of ``_spent``."""
        counts = [count for _, count, _ in self._spent()]
        return sum(x * n for x, n in zip(figures, counts, strict=True)) / sum(counts)
