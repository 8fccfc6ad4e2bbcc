"""The progress of a training run: a bar on a terminal, else a line every few steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from piper.base.units import bytes_text, waiting_text
from piper.launch.trainer.step_result import StepResult

_LINES = 20
"""About so many lines are written of a run."""


class Display:
    """Shows the progress of a run after step ``before``. This one shows nothing."""

    def __init__(self, before: int = 0) -> None:
        self._pace = Pace(before)

    def show(self, step: int, loss: float, norm: float | None, result: StepResult) -> None:
        """Show a step: its number, loss, gradient norm, and result."""

    def say(self, text: str) -> None:
        """Write a line."""

    def evaluated(self, step: int, loss: float, monitored: float | None) -> None:
        """Show the loss of held-out batches, and the number of them that is monitored."""
        more = "" if monitored is None else f", monitored {monitored:.4f}"
        self.say(f"evaluation after step {step:,}: loss {loss:.4f}{more}")
        self._pace = Pace(step)


@contextmanager
def shown_progress(total: int | None, before: int, every: bool | int) -> Iterator[Display]:
    """Show progress from step ``before`` to ``total``, if that is known. ``every`` is the number of
    steps from line to line; True shows a bar on a terminal, else chooses the number; False shows
    nothing."""
    from rich.console import Console  # imported late: workers import the trainer but show no bar

    console = Console(stderr=True)
    if not every:
        yield Display()
    elif every is True and console.is_terminal:
        with _bar(console, total) as bar:
            yield _Bar(bar, total, before)
    else:
        yield _Lines(total, before, None if every is True else every)


def _bar(console: Any, total: int | None) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    count = "{task.completed}" if total is None else "{task.completed}/{task.total}"
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(count),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
        console=console,
    )


class Pace:
    """Measures the time of a step. A GPU runs behind the host, so the times are those at which
    losses arrive."""

    def __init__(self, before: int) -> None:
        self._time, self._step = time.perf_counter(), before

    def since(self, step: int) -> float:
        """Seconds per step since the last call."""
        now, steps = time.perf_counter(), step - self._step
        seconds = max(now - self._time, 1e-9) / max(steps, 1)
        self._time, self._step = now, step
        return seconds


def _speed(result: StepResult, seconds: float) -> list[str]:
    """Tokens per second, MFU and the imbalance of experts, as far as they are known."""
    said = [f"{result.tokens / seconds:,.0f} tokens/s"]
    if (mfu := result.mfu) is not None:
        said.append(f"MFU {mfu * result.seconds / seconds:.1%}")
    if imbalance := result.expert_imbalance:
        said.append(f"busiest expert {max(imbalance.values()):.2f}x")
    return said


class _Bar(Display):
    """Moves a bar of rich; lines are written above it."""

    def __init__(self, bar: Any, total: int | None, before: int) -> None:
        super().__init__(before)
        self._bar = bar
        self._task = bar.add_task("training", total=total, completed=before, said="")

    def show(self, step: int, loss: float, norm: float | None, result: StepResult) -> None:
        said = [f"loss {loss:.4f}", *_speed(result, self._pace.since(step))]
        self._bar.update(self._task, completed=step, said="  ".join(said))

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class _Lines(Display):
    """Writes a line every few steps."""

    def __init__(self, total: int | None, before: int, every: int | None) -> None:
        super().__init__(before)
        self._total, self._before, self._every = total, before, every

    def show(self, step: int, loss: float, norm: float | None, result: StepResult) -> None:
        """Write a line if it is due."""
        if not self._due(step):
            return
        seconds = self._pace.since(step)
        of = "" if self._total is None else f" of {self._total:,}"
        parts = [f"loss {loss:.4f}"]
        parts += [] if norm is None else [f"norm {norm:.3g}"]
        parts += [f"lr {rate:.3g}" for rate in result.learning_rates[:1]]
        parts += [*_speed(result, seconds), f"{waiting_text(seconds)}/step"]
        parts += [f"process peak {bytes_text(result.memory)}"]
        if self._total is not None and step < self._total:
            parts.append(f"{waiting_text(seconds * (self._total - step))} left")
        self.say(f"step {step:,}{of}: {', '.join(parts)}")

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def _due(self, step: int) -> bool:
        if self._every is not None:
            return step % self._every == 0 or step == self._total
        done = step - self._before
        if self._total is not None:
            every = _round_up((self._total - self._before) / _LINES)
            return done == 1 or step % every == 0 or step == self._total
        return done % max(1, _round_up(done / 10)) == 0


def _round_up(number: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        for first in (1, 2, 5):
            if first * power >= number:
                return first * power
        power *= 10
