"""Tracing without torch's warnings and logs; those of the user's code are passed on."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from torch.fx import traceback

from piper.capture.blame import is_internal_file


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Preserve each op's metadata while tracing, and hide torch's logs and warnings.

    When tracing fails, torch dumps the graph and logs the error; Piper raises its own error
    instead. Warnings and stderr of the model's code are passed on.
    """
    said = io.StringIO()
    dumps: list[str] = []
    try:
        with (
            hushed_loggers(),
            traceback.preserve_node_meta(),
            _own_warnings_only(),
            redirect_stderr(said),
        ):
            yield
    except Exception as error:
        dumps = [str(graph) for e in (error,) if (graph := getattr(e, "partial_fx_graph", None))]
        raise
    finally:
        text = said.getvalue()
        for dump in dumps:
            text = text.replace(dump + "\n", "")
        sys.stderr.write(text)


@contextmanager
def _own_warnings_only() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if not is_internal_file(warning.filename):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@contextmanager
def hushed_loggers() -> Iterator[None]:
    """Silence torch's loggers, for errors that are expected."""
    known = logging.root.manager.loggerDict
    loggers = [logging.getLogger(name) for name in known if name.split(".")[0] == "torch"]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
