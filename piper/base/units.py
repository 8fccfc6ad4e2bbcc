"""Formats times, sizes, counts, numbers, code and the classes of values, and parses times and
sizes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from piper.base.errors import PiperError

_SIZES = {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((letter, 1024), (f"{letter}IB", 1024), (f"{letter}B", 1000))
} | {"": 1, "B": 1}
_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_TIMES = {"": 1.0, "MS": 1e-3, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}


def seconds_text(value: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:,.3f} {unit}"
    return f"{value / 1e-6:,.1f} µs"


def waiting_text(seconds: float) -> str:
    """A time to wait, as a person says it: two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def unit_for(nbytes: float) -> tuple[str, int]:
    """The largest binary unit not above ``nbytes``, and its size in bytes."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return unit, factor
    return "B", 1


def bytes_text(nbytes: float) -> str:
    """Bytes in GiB, MiB or KiB."""
    unit, factor = unit_for(nbytes)
    return f"{nbytes / factor:,.1f} {unit}" if factor > 1 else f"{nbytes:.0f} B"


def nbytes_of(what: str, given: object) -> int:
    """Bytes from a number or from text with a unit such as "80GB". ``what`` is the argument's
    name, for messages."""
    size = _number_of(given, _SIZES)
    if not 1 <= size < 2**63:
        raise PiperError(
            f"{what}={given!r} is not a valid size: give bytes, or a number with a unit, such as "
            "'80GiB', '512MiB' or '24GB'"
        )
    return int(size)


def seconds_of(what: str, given: object) -> float:
    """Seconds from a number or from text with a unit such as "5min". ``what`` is the argument's
    name, for messages."""
    seconds = _number_of(given, _TIMES)
    if not seconds > 0:
        raise PiperError(
            f"{what}={given!r} is not a valid time: give seconds, or a number with a unit, such as "
            "'30s', '5min' or '2h'"
        )
    return seconds


def _number_of(given: object, units: Mapping[str, float]) -> float:
    """A number, or text with one of ``units`` in capitals, as a number; -1 if it is neither."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if isinstance(given, str):
        written = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", given)
        if written is not None and written[2].upper() in units:
            return float(written[1]) * units[written[2].upper()]
    return -1.0


def counted(number: int, thing: str) -> str:
    """A count with its noun: 1 device, 2 devices, 1,000 microbatches."""
    ending = "" if number == 1 else "es" if thing.endswith(("s", "tch")) else "s"
    return f"{number:,} {thing}{ending}"


def listed(shown: Iterable[object], number: int, between: str = ", ") -> str:
    """The ``shown`` ones of a ``number`` of things, and how many are not shown."""
    texts = list(map(str, shown))
    more = f" and {number - len(texts)} more" if number > len(texts) else ""
    return between.join(texts) + more


def class_text(item: object) -> str:
    """The class of ``item`` with its article: "a list", "an AdamW"."""
    name = type(item).__name__
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def wrapped(code: str, indent: str, width: int = 100) -> str:
    """A line of Python code in lines of at most ``width``, where it can be broken outside strings
    and dicts. Lines after the first begin with ``indent``."""
    whole = re.sub(_STRING, _unbroken, code)
    whole = re.sub(r"\{[^{}]*\}", _unbroken, whole)
    lines = textwrap.wrap(
        whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def _unbroken(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\0")


def numbers_code(numbers: Sequence[int]) -> str:
    """Numbers as Python code: more than four in equal steps upwards as a range."""
    if len(numbers) > 4 and all(type(number) is int for number in numbers):
        step = max(numbers[1] - numbers[0], 1)
        row = range(numbers[0], numbers[-1] + step, step)
        if list(row) == list(numbers):
            return repr(row)
    return repr(list(numbers))
