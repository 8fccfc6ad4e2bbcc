"""Arguments that a function does not have, refused in the family of errors: by name, with the one
that was probably meant and all that there are."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from piper.base.errors import PiperError

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names what is spelled most like ``name``; empty if nothing is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def named_arguments(kind: type[PiperError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a call that does not fit a function's signature be refused with ``kind``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        names = list(signature.parameters)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = [name for name in kwargs if name not in names]
            if unknown:
                raise kind(
                    f"{function.__name__}() has no argument {unknown[0]!r}"
                    f"{nearest(unknown[0], names) or '.'} Its arguments are {', '.join(names)}"
                )
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise kind(f"{function.__name__}(): {error}") from None
            return function(*args, **kwargs)

        return checked

    return decorate
