"""The progress bar of a training run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shown_progress(last: int | None, first: int, *, shown: bool) -> Iterator[Callable[[Any], None]]:
    """Show a progress bar from step ``first`` to ``last``. Yields a function to call with each
    step's result. It reads the result only if the bar is visible: reading waits for the device."""
    from rich.console import Console  # imported late: workers import the trainer but show no bar
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda result: None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("training", total=last, completed=first, loss=float("nan"), rate=0.0)

        def show(result: Any) -> None:
            rate = result.tokens_per_second
            bar.update(task, advance=1, loss=float(result.loss), rate=rate)

        yield show
