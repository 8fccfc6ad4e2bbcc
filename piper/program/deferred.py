"""A program that another process has compiled.

Under torchrun rank 0 compiles. The program of another rank knows what its script gave. At launch it
gets an ``Outline`` of what rank 0 compiled: all that a trainer reads. If somebody asks for more (a
plan, the DAG, the memory), it compiles for itself, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from piper.capture.code.executables import Executables
from piper.program.compiled import Compiled
from piper.program.program import Program


@dataclass(frozen=True, slots=True)
class Outline:
    """What a trainer reads of a program. Its size does not depend on the number of
    devices, apart from their list."""

    devices: tuple[int, ...]
    loss_parts: int
    trained: Mapping[str, tuple[int, ...]]
    codes: tuple[Executables, Executables]
    """Without the programs of chunks and the constants."""

    @staticmethod
    def of(program: Compiled) -> Outline:
        training, evaluation = (replace(x, programs={}, constants={}) for x in program.codes)
        given = program.devices, program.loss_parts, program.trained
        return Outline(*given, (training, evaluation))


class Deferred(Program):
    """A program that is compiled here only if somebody asks for more than its outline."""

    _compile: Callable[[], Program] | None = None
    _outline: Outline | None = None

    @staticmethod
    def made(compile_here: Callable[[], Program], **given: Any) -> Deferred:
        """``given`` are the fields that are known without compiling."""
        program = object.__new__(Deferred)
        vars(program).update(given, _compile=compile_here)
        return program

    def outlined(self, outline: Outline) -> None:
        """Take over what rank 0 has compiled from the same script."""
        vars(self)["_outline"] = outline

    def __getattr__(self, name: str) -> Any:
        """A field that is not known yet."""
        if self._compile is None or name not in {field.name for field in fields(Program)}:
            raise AttributeError(f"a program has no attribute {name!r}")
        vars(self).update({**vars(self._compile()), **vars(self)})
        return vars(self)[name]

    @property
    def devices(self) -> tuple[int, ...]:
        return self._outline.devices if self._outline else super().devices

    @property
    def loss_parts(self) -> int:
        return self._outline.loss_parts if self._outline else super().loss_parts

    @property
    def trained(self) -> Mapping[str, tuple[int, ...]]:
        return self._outline.trained if self._outline else super().trained

    @property
    def codes(self) -> tuple[Executables, Executables]:
        """Of a training step and an evaluation; with an outline, without the chunks' programs."""
        return self._outline.codes if self._outline else super().codes
