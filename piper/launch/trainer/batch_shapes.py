"""Batches of several shapes: each shape has its own program, compiled at the first such batch.

There is one state: it moves from program to program as in ``Trainer.switch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from piper.base.arguments import whole_number
from piper.base.errors import PiperError
from piper.capture.batch import Batch
from piper.program.program import Program


class BatchShapes:
    """The programs of a model by batch shapes: the first, and at most ``most`` others."""

    def __init__(self, first: Program, most: int) -> None:
        self.first = first
        self.most = whole_number("shapes", most, 0)
        self._known = {first.example.shapes: first}

    def rows_of(self, batch: Batch) -> int | None:
        """The rows of a batch of one of the known shapes; None for another shape."""
        known = self._known.get(batch.shapes)
        return None if known is None else known.example.size

    def program_for(self, batch: Sequence[Any]) -> Program:
        """The program for batches like ``batch``."""
        example = self.first.example.built_like(*batch)
        if example.shapes not in self._known:
            self._refuse_more()
            self._known[example.shapes] = self._compiled(example.without_content())
        return self._known[example.shapes]

    def _refuse_more(self) -> None:
        if len(self._known) > self.most:
            raise PiperError(
                f"this batch has another shape again, and shapes={self.most} allows {self.most} "
                "beside that of the example captured: give batches of fewer shapes (pad sequences "
                "to a multiple, pad_to_multiple_of in a collator of transformers), or allow more"
            )

    def _compiled(self, example: Batch) -> Program:
        if self.first.again is None or self.first.arguments is None:
            raise PiperError(
                "a program that was loaded from a folder cannot be compiled for batches of other "
                "shapes: compile it from its model"
            )
        try:
            inputs, targets = example.parts
            return self.first.again(replace(self.first.arguments, inputs=inputs, targets=targets))
        except PiperError as error:
            raise PiperError(
                f"{error}. This is a batch of another shape than the example captured, for which "
                "a program of its own is compiled (shapes=): drop a last, smaller batch "
                "(drop_last=True), or pad it with pad="
            ) from error
