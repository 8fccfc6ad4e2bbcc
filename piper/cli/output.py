"""The output of commands: results on standard output, as text or JSON; progress and errors on
standard error. A user's mistake ends the command with a message and an exit code, never with a
traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from piper.base.errors import CapacityError, InstructionError, PiperError, WorkerError

REFUSED, FAILED = 1, 3


@dataclass(frozen=True)
class Output:
    """The output of one command, as text or JSON."""

    as_json: bool
    out: Console = field(default_factory=lambda: Console(highlight=False))
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    @property
    def speaks(self) -> bool:
        """Whether this process prints. Under torchrun, only rank 0 does."""
        return os.environ.get("RANK", "0") == "0"

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show a status line during a long operation."""
        if not self.err.is_terminal or not self.speaks:
            yield
            return
        with self.err.status(what):
            yield

    def say(self, *items: Any) -> None:
        """Print as text; nothing in JSON mode. Only a terminal wraps long lines."""
        if not self.as_json and self.speaks:
            for item in items:
                shown = item if isinstance(item, str | Table) else Text.from_ansi(str(item))
                whole = not self.out.is_terminal and not isinstance(item, Table)
                self.out.print(shown, markup=False, soft_wrap=whole)  # names may have brackets

    def give(self, data: Any) -> None:
        """Print as one line of JSON; nothing in text mode."""
        if self.as_json and self.speaks:
            typer.echo(json.dumps(data))

    def wrote(self, what: str, path: object) -> None:
        """Report a written file on standard error."""
        self.note(f"{what}: {path}")

    def note(self, text: str) -> None:
        """Print a line on standard error, also in JSON mode."""
        if self.speaks:
            self.err.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn errors into messages and exit codes."""
        try:
            yield
        except PiperError as error:
            failed = isinstance(error, WorkerError | InstructionError | CapacityError)
            kind = type(error).__name__
            self.give({"error": {"kind": kind, "message": str(error)}})
            if not self.as_json and self.speaks:
                self.err.print("error: ", style="red", end="")
                self.err.print(str(error), markup=False, soft_wrap=True)
            raise typer.Exit(FAILED if failed else REFUSED) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
