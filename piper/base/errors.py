"""The exceptions that Piper raises for a user's mistake: all derive from ``PiperError``.

A message says what is wrong, where in the user's own names, and what to change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_NOTED: ContextVar[list[str] | None] = ContextVar("noted", default=None)


class PiperError(Exception):
    """Base of every error that Piper raises on purpose."""


class CaptureError(PiperError):
    """The model, its loss or its example batch cannot be turned into chunks."""


class DirectiveError(PiperError):
    """A directive cannot be applied, or the strategy as a whole cannot run."""


class CapacityError(PiperError):
    """More rows are routed to a device's experts than ``shard(..., capacity=)`` has room for."""


class WorkerError(PiperError):
    """A worker failed; ``__cause__`` is the error that it raised, if it could be pickled."""

    outside: bool = False
    """Whether the cause is no part of the program, such as a SIGKILL or a lost machine."""


class InstructionError(PiperError):
    """An instruction failed. Its error is the ``__cause__``."""

    pc: int | None = None
    """The instruction's index in its plan, if known."""


class PiperWarning(UserWarning):
    """Warns that a model may train differently than its author expects."""


def warn(text: str) -> None:
    """Warn at the innermost caller's line outside this package."""
    if (noted := _NOTED.get()) is not None:
        noted.append(text)
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "piper":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PiperWarning, stacklevel=level)


@contextmanager
def noting_warnings() -> Iterator[list[str]]:
    """A list of the texts that ``warn`` gets inside."""
    noted: list[str] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)
