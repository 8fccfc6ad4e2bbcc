"""The base class of simulated and measured steps: it writes pages and traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from piper.base.paths import write_file
from piper.view.pages.timeline_page import timeline_page
from piper.view.perfetto import write_trace
from piper.view.runs import Run


class Shown(ABC):
    """A step that becomes a ``Run``, and so a page and a trace."""

    @abstractmethod
    def run(self, title: str | None = None) -> Run:
        """The step as a ``Run``, for pages and traces."""

    def show(self, path: str | Path, *, beside: Shown | None = None) -> None:
        """Write a page with the timeline of the step: one file, no server. ``beside`` is another
        step to compare it with."""
        others = [] if beside is None else [beside.run()]
        write_file(path, timeline_page(self.run(), *others))

    def trace(self, path: str | Path, *, beside: Shown | None = None) -> None:
        """Write a trace for Perfetto or chrome://tracing."""
        others = [] if beside is None else [beside.run()]
        write_trace(Path(path), self.run(), *others)
