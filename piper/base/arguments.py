"""Arguments of public functions: the names to choose from, and errors for unknown arguments, which
name the argument, the closest match and all valid names. Nothing here needs torch."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import wraps
from typing import ParamSpec, TypeVar

from piper.base.errors import PiperError

P = ParamSpec("P")
R = TypeVar("R")
Choice = TypeVar("Choice", bound=Enum)


def nearest(name: str, known: Iterable[str]) -> str:
    """The question "did you mean ...?" with the closest match to ``name``; empty if none."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def choice(
    argument: str, name: object, kind: type[Choice], error: type[PiperError] = PiperError
) -> Choice:
    """The member of ``kind`` that ``argument=name`` selects."""
    try:
        return kind(name)
    except ValueError:
        names = ", ".join(one.value for one in kind)
        raise error(f"{argument}={name!r} is unknown: one of {names}") from None


def whole_number(name: str, given: object, least: int = 1, *, otherwise: str = "") -> int:
    """``given``, if it is a whole number from ``least`` on. ``otherwise`` says what else may be."""
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise PiperError(f"{name}={given!r} must be a whole number, at least {least}{otherwise}")
    return given


def named_arguments(
    kind: type[PiperError], elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a call that does not match the function's signature raises ``kind``. It names
    the closest argument, or the one that has a name of ``elsewhere`` in other libraries."""
    usual = elsewhere or {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = {name: x for name, x in signature.parameters.items() if name != "self"}
        names = list(own)
        placed = [name for name, x in own.items() if x.kind is not x.KEYWORD_ONLY]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in (name for name in kwargs if name not in names):
                meant = f": did you mean {usual[name]}?" if name in usual else nearest(name, names)
                raise kind(
                    f"{function.__name__}() has no argument {name!r}{meant or '.'} "
                    f"Its arguments are {', '.join(names)}"
                )
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise kind(
                    f"{function.__name__}(): {error}. By position it takes "
                    f"{', '.join(placed) or 'nothing'}, and the rest by name"
                ) from None
            return function(*args, **kwargs)

        return checked

    return decorate


class Recover(Enum):
    """The values of ``recover=``."""

    REPLACE = "replace"
    """Lost workers get new processes."""
    RESTART = "restart"
    """All workers get new processes."""
    REROUTE = "reroute"
    """The rows of a lost replica go to the others."""


class CompilerName(Enum):
    """The values of ``compiler=``."""

    EAGER = "eager"
    INDUCTOR = "inductor"
