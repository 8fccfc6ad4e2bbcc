"""Looks a program up in the cache, and keeps there what is compiled.

A wrong hit would be a wrong number that nobody notices. So a program is kept only if its key covers
all that compiling it reads; else ``program.tracing`` says why it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from piper.base.errors import PiperError, noting_warnings
from piper.base.units import counted
from piper.program import storage
from piper.program.cache.entries import About, Entries
from piper.program.cache.key import Key, key_of, own_digest
from piper.program.cache.opened import files_opened
from piper.program.program import Program


@dataclass(frozen=True, slots=True)
class Lookup:
    """The place of one program in the cache."""

    given: tuple[object, ...]
    """All that it is compiled from."""
    key: Key
    entries: Entries

    @staticmethod
    def of(entries: Entries, given: tuple[object, ...]) -> Lookup:
        """The place of what is compiled from ``given``."""
        return Lookup(given, key_of(*given), entries)

    def found(self) -> tuple[About, dict[str, bytes]] | None:
        """The files of the program, if it has been compiled before."""
        return None if self.key.unseen else self.entries.find(self.key.text, storage.NAMES)

    def keeping(self, what: str, compiled: Callable[[], Program]) -> Program:
        """The program that ``compiled`` makes, which is kept. ``what`` names its model."""
        with files_opened() as files, noting_warnings() as warnings:
            program = compiled()
        reason = self.key.unseen
        if files:
            reason = f"{files[0]} is read while the model is traced"
        elif reason is None and own_digest(*self.given).text != self.key.own:
            reason = "tracing the model changed it, or imported a module"
        if reason is None:
            try:
                self.entries.add(
                    self.key.text,
                    About(
                        f"{what}, {counted(len(program.devices), 'device')}",
                        time.strftime("%Y-%m-%d %H:%M"),
                        program.tracing,
                        tuple(warnings),
                    ),
                    storage.files_of(program),
                )
            except (OSError, PiperError) as error:
                reason = str(error)
        if reason is None:
            return program
        return replace(program, tracing=f"{program.tracing}\nnot cached: {reason}".lstrip())
