"""Tracing without torch's warnings and logs; those of the user's code are passed on."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.export import _trace
from torch.fx import traceback

from piper.capture.blame import is_internal_file

_TORCH = re.compile(r"torch(\.|$)")


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Preserve each op's metadata while tracing, and hide torch's logs and warnings.

    When tracing fails, torch dumps the graph and logs the error; Piper raises its own error
    instead. Warnings of the model's code are passed on.
    """
    with hushed_loggers(), traceback.preserve_node_meta(), _own_warnings_only(), _no_dumps():
        yield


@contextmanager
def _no_dumps() -> Iterator[None]:
    """``torch.export`` prints the graph of a failed trace to stderr (2.11 to 2.13). Nothing that it
    prints in this thread is shown; stderr itself is the process's, so it stays as it is."""
    thread, module = threading.get_ident(), vars(_trace)
    before = module.get("print", print)

    def shown_elsewhere(*args: Any, **options: Any) -> None:
        if threading.get_ident() != thread:
            before(*args, **options)

    module["print"] = shown_elsewhere
    try:
        yield
    finally:
        module["print"] = before


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
    known = list(logging.root.manager.loggerDict.values())  # getLogger(name) takes a lock each time
    loggers = [x for x in known if isinstance(x, logging.Logger) and _TORCH.match(x.name)]
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
