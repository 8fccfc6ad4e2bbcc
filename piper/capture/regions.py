"""Named regions: ``annotate`` in model code, or ``tags`` by module path from outside. Tags that
Piper chose itself give way to a model that uses ``annotate``.

During a capture, each entered region puts its name and index on the operations traced inside it.
Outside a capture, ``annotate`` reads one variable and does nothing. Regions nest and never cross.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from piper.base.errors import CaptureError

LOSS = "loss"
RESERVED = frozenset({"PASS", "MB"})
_META = "piper"


@dataclass(frozen=True, slots=True)
class Region:
    """One entry into a named region; ``index`` counts the entries of that name from 0."""

    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


class ChosenTags(dict[str, str]):
    """Tags that nobody wrote (``chosen_regions.py``)."""

    def __str__(self) -> str:
        shown = [f'"{pattern}": "{name}"' for pattern, name in self.items()]
        most = 6
        return "{" + ", ".join(shown[:most] + ["…"] * (len(shown) > most)) + "}"


class OwnRegions(BaseException):
    """A model that is traced with chosen tags names its regions itself: it is traced without them.
    Not an ``Exception``, so that no handler in the model's code stops this."""


class RegionRecorder:
    """The regions one capture has entered, in order, and those still open."""

    def __init__(self, *, chosen: bool = False) -> None:
        """``chosen``: the tags are ``ChosenTags``."""
        self.chosen = chosen
        self._counts: Counter[str] = Counter()
        self._open: list[tuple[object, Region, AbstractContextManager[None]]] = []
        self.entered: dict[Region, str] = {}

    def enter(self, name: str, where: str, owner: object) -> Region:
        """Open a region; ``owner`` must close it."""
        if not isinstance(name, str) or not name:
            raise CaptureError(
                f"a region's name must be a non-empty string, not {name!r} ({where}): "
                "choose another name"
            )
        if name in RESERVED:
            raise CaptureError(
                f"a region cannot be named {name!r} ({where}): {', '.join(sorted(RESERVED))} name "
                "the microbatch and the pass; choose another name"
            )
        region = Region(name, self._counts[name])
        self._counts[name] += 1
        self.entered[region] = where
        mark = traceback.annotate({_META: (*self.open, region)})
        mark.__enter__()
        self._open.append((owner, region, mark))
        return region

    def exit(self, owner: object, name: str, *, failed: bool = False) -> None:
        """Close the region that ``owner`` opened last. It must be the innermost one, unless an
        exception is propagating (``failed``)."""
        depth = max((i for i, (who, _, _) in enumerate(self._open) if who is owner), default=None)
        if depth is None:
            if not failed:
                raise CaptureError(f"region {name!r} is exited but not entered: use `with`")
            return
        if depth < len(self._open) - 1 and not failed:
            (_, outer, _), (_, inner, _) = self._open[depth], self._open[-1]
            raise CaptureError(
                f"region {inner} ({self.entered[inner]}) is left open: {outer} "
                f"({self.entered[outer]}), around it, is exited first; regions nest and cannot "
                "cross: use `with`"
            )
        while len(self._open) > depth:
            self._open.pop()[2].__exit__(None, None, None)

    @property
    def open(self) -> tuple[Region, ...]:
        """The regions that are open, outermost first."""
        return tuple(region for _, region, _ in self._open)

    def enter_again(
        self, regions: Iterable[Region], where: Callable[[str], str]
    ) -> dict[Region, Region]:
        """Count the entries of ``regions`` once more, in order, as if the code that entered them
        ran again. ``where`` gives their places from the first ones."""
        again: dict[Region, Region] = {}
        for region in regions:
            again[region] = Region(region.name, self._counts[region.name])
            self._counts[region.name] += 1
            self.entered[again[region]] = where(self.entered[region])
        return again

    def unwind(self) -> Region | None:
        """Close every region still open; return the innermost one."""
        innermost = self._open[-1][1] if self._open else None
        while self._open:
            self._open.pop()[2].__exit__(None, None, None)
        return innermost


_recorder: ContextVar[RegionRecorder | None] = ContextVar("piper_recorder", default=None)


class annotate:  # noqa: N801 - reads as a statement, like torch.no_grad
    """Name the operations inside the ``with`` block as one region of the model.

    Regions nest freely. Each name counts its entries from 0, in order.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Region | None:
        if torch.compiler.is_dynamo_compiling():
            return None
        recorder = _recorder.get()
        if recorder is None:
            return None
        if recorder.chosen and self._name != LOSS:
            raise OwnRegions
        return recorder.enter(self._name, _line(sys._getframe(1)), self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        recorder = _recorder.get()
        if recorder is not None:
            recorder.exit(self, self._name, failed=error is not None)


@contextmanager
def recording(tags: Mapping[str, str] | None = None) -> Iterator[RegionRecorder]:
    """Record the regions entered inside; a region still open at the end is an error. ``tags`` are
    those of the model."""
    recorder = RegionRecorder(chosen=isinstance(tags, ChosenTags))
    token = _recorder.set(recorder)
    failed = True
    try:
        yield recorder
        failed = False
    finally:
        _recorder.reset(token)
        region = recorder.unwind()
        if region is not None and not failed:
            raise CaptureError(
                f"region {region} is left open: entered at {recorder.entered[region]} and never "
                f"exited; write `with piper.annotate({region.name!r}):` around its operations"
            )


def tags_of(meta: Mapping[str, Any]) -> tuple[Region, ...]:
    """The regions that a node was traced in, outermost first."""
    return tuple((meta.get("custom") or {}).get(_META, ()))


def with_tags(meta: Mapping[str, Any], stack: tuple[Region, ...]) -> dict[str, Any]:
    """A copy of ``meta`` for a node in the regions of ``stack``."""
    return {**meta, "custom": {**(meta.get("custom") or {}), _META: stack}}


def tag_modules(model: nn.Module, tags: Mapping[str, str]) -> None:
    """Make every module whose path matches a pattern of ``tags`` enter that region when called.

    ``*`` matches one component of a path or a part of it, ``**`` any number of components. The
    hooks stay on ``model``: pass a copy.
    """
    if not isinstance(tags, Mapping):
        raise CaptureError(
            f"tags must be a mapping from module path to region name, not {type(tags).__name__}"
        )
    paths = dict(model.named_modules(remove_duplicate=False))
    for pattern, name in tags.items():
        matched = {id(paths[path]): (path, paths[path]) for path in paths_like(pattern, paths)}
        if not matched:
            close = _closest(pattern, paths)
            hint = "closest" if close else "it has"
            raise CaptureError(
                f"tags: the pattern {pattern!r} matches no module of {type(model).__name__}; "
                f"{hint}: {', '.join(map(repr, close or _top(paths)))}"
            )
        for path, module in matched.values():
            hooks = Tagged(name, path, pattern)
            module.register_forward_pre_hook(hooks.enter)
            module.register_forward_hook(hooks.leave, always_call=True)


def check_tags_entered(tags: Mapping[str, str], entered: Iterable[str]) -> None:
    """Refuse a pattern if the model called none of its modules."""
    if isinstance(tags, ChosenTags):
        return
    seen = list(entered)
    for pattern in tags:
        if not any(where.endswith(f"tagged by {pattern!r}") for where in seen):
            raise CaptureError(
                f"tags: the modules that {pattern!r} matches are never called, so they hold no "
                "operation (a ModuleList is not called itself: tag its children, "
                f"{pattern + '.*'!r})"
            )


@dataclass(frozen=True, slots=True)
class Tagged:
    """The hooks of a module that ``tags`` makes a region."""

    name: str
    path: str
    pattern: str

    def enter(self, module: nn.Module, args: object) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.enter(self.name, tagged_at(self.path, self.pattern), module)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.exit(module, self.name, failed=output is None)


def tagged_at(path: str, pattern: str) -> str:
    """The place of a region that ``tags`` made, as errors say it."""
    return f"module {path!r}, tagged by {pattern!r}"


def paths_like(pattern: str, paths: Iterable[str]) -> list[str]:
    """The module paths that match a pattern of ``tags``."""
    steps = pattern.split(".")
    return [path for path in paths if _match_steps(steps, path.split(".") if path else [])]


def _match_steps(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match_steps(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match_steps(pattern[1:], path[1:])


def _closest(pattern: str, paths: Iterable[str]) -> list[str]:
    """A few module paths that look like ``pattern``, with indices written as ``*``."""
    return difflib.get_close_matches(pattern, _shapes(paths), n=4, cutoff=0.3)


def _top(paths: Iterable[str]) -> list[str]:
    """Module paths of at most two components: the hint when none is close."""
    return [shape for shape in _shapes(paths) if shape.count(".") < 2][:8]


def _shapes(paths: Iterable[str]) -> list[str]:
    shapes = {".".join("*" if s.isdigit() else s for s in path.split(".")) for path in paths}
    return sorted(shapes - {""})


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
