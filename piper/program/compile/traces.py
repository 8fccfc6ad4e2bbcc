"""Traces a model as one device sees it, once for each number of rows and each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import nn

from piper.base.errors import CaptureError
from piper.capture.chosen_regions import chosen_tags
from piper.capture.chunk.split_passes import Passes
from piper.capture.loss.outputs import NamedOutputs
from piper.capture.loss.own_loss import loss_or_own
from piper.capture.model import Captured, capture, trace
from piper.capture.regions import ChosenTags, OwnRegions
from piper.capture.repeats.equal_modules import Found
from piper.capture.trace.export import SameTrace
from piper.program.compile.compile_arguments import CompileArguments

_T = TypeVar("_T")


class Traces:
    """The traces of a model, made on demand and cached."""

    def __init__(self, given: CompileArguments) -> None:
        self._given = given
        self.tags = chosen_tags(given.model) if given.tags is None else given.tags
        self.passes = Passes()
        """Joint graphs, and their split passes. The modes share what they compute alike."""
        self._training: dict[int, Captured] = {}
        self._evaluation: dict[int, Captured] = {}
        self._by_mode: dict[int, bool] = {}
        self._found: Found | None = None
        """Of the first trace."""
        self._began: dict[int, Found | None] = {}
        """What was found before each training trace."""

    def training(self, parts: int) -> Captured:
        """The model traced on one of ``parts`` equal parts of the batch."""
        if parts not in self._training:
            self._began[parts] = self._found
            self._training[parts] = self._capture(parts, rows=False)
        return self._training[parts]

    def evaluation(self, parts: int) -> Captured:
        """The model traced in evaluation mode on one of ``parts`` equal parts of the batch."""
        if parts not in self._evaluation:
            self._evaluation[parts] = self._evaluated(parts)
        return self._evaluation[parts]

    def _evaluated(self, parts: int, known: str | None = None) -> Captured:
        with self._evaluating():
            return self._capture(parts, rows=True, known=known)

    def depends_on_mode(self, parts: int) -> bool:
        """Whether evaluation computes differently than training. Both are traced and compared,
        since any code can read the mode. Refuses a model whose trace differs from run to run."""
        if parts not in self._by_mode:
            self._by_mode[parts] = self._compared(parts)
        return self._by_mode[parts] or self._given.outputs is not None

    def _compared(self, parts: int) -> bool:
        training = self.training(parts).traced
        if self._given.outputs is None:
            try:
                self._evaluation[parts] = self._evaluated(parts, training)
            except SameTrace:
                return False
        else:  # in evaluation, outputs have rows
            with self._evaluating():
                if self._text(parts, self._found) == training:
                    return False
        if self._text(parts, self._began[parts]) != training:
            raise CaptureError(
                f"{type(self._given.model).__name__} computes something else each time it is "
                "traced, and the captured step would repeat the first for ever: a number from "
                "outside torch is in it (Python's or numpy's random generator, the time, a "
                "counter); draw it with torch.rand, keep it in a buffer, or pass it with the batch"
            )
        return True

    def _capture(self, parts: int, *, rows: bool, known: str | None = None) -> Captured:
        it = self._given
        how = self._how(parts, rows) | {"compiler": it.compiler, "remat": it.remat}
        made = self._tagged(capture, **how, passes=self.passes, known=known)
        self._found = self._found or made.found
        return made

    def _text(self, parts: int, found: Found | None) -> str:
        return self._tagged(trace, **{**self._how(parts, rows=False), "found": found})

    def _tagged(self, traced: Callable[..., _T], **how: Any) -> _T:
        """The result of ``traced`` on the model with its tags. Chosen tags are given up if the
        model names regions itself, or cannot be traced with them."""
        try:
            return traced(self._given.model, tags=self.tags, **how)
        except (OwnRegions, CaptureError):
            if not isinstance(self.tags, ChosenTags):
                raise
        self.tags = {}
        return traced(self._given.model, tags=self.tags, **how)

    def _how(self, parts: int, rows: bool) -> dict[str, Any]:
        """The arguments of both tracing functions. With ``rows``, outputs with rows are kept."""
        it = self._given
        size = it.batch.size // parts if rows else None
        return {
            "inputs": it.inputs,
            "targets": it.targets,
            "loss": loss_or_own(it.loss, it.targets),
            "device": it.device,
            "precision": it.precision,
            "microbatches": parts,
            "found": self._found,
            "outputs": None if it.outputs is None else NamedOutputs(it.outputs, size),
        }

    def _evaluating(self) -> AbstractContextManager[None]:
        return _evaluating(self._given.model, self._given.loss_module)


@contextmanager
def _evaluating(model: nn.Module, loss: nn.Module | None) -> Iterator[None]:
    """Puts the model and the loss into evaluation mode inside, and restores the mode after."""
    roots = [model] if loss is None else [model, loss]
    modules = [m for root in roots for m in root.modules()]
    before = [m.training for m in modules]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode
