"""Figures with a unit that fits, and numbers of things."""

from __future__ import annotations


def seconds_text(value: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:,.3f} {unit}"
    return f"{value / 1e-6:,.1f} µs"


def unit_for(nbytes: float) -> tuple[str, int]:
    """A unit in which so many bytes are a number of few digits, and its size."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return unit, factor
    return "B", 1


def bytes_text(nbytes: float) -> str:
    """Bytes in GiB, MiB or KiB."""
    unit, factor = unit_for(nbytes)
    return f"{nbytes / factor:,.1f} {unit}" if factor > 1 else f"{nbytes:.0f} B"


def counted(number: int, thing: str) -> str:
    """1 device, 2 devices, 1,000 microbatches."""
    ending = "" if number == 1 else "es" if thing.endswith(("s", "ch")) else "s"
    return f"{number:,} {thing}{ending}"
