"""The one family of exceptions that Piper raises for a person's mistake.

A message says what is wrong, where in the person's own names, and what to change.
"""

from __future__ import annotations


class PiperError(Exception):
    """Base of every error that Piper raises on purpose."""


class CaptureError(PiperError):
    """The model, its loss or its example batch cannot be turned into chunks."""


class DirectiveError(PiperError):
    """A directive cannot be applied, or the strategy as a whole cannot run."""


class PiperWarning(UserWarning):
    """What Piper says of a model that may train otherwise than its author thinks."""
