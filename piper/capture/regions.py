"""Named regions: ``annotate`` in model code, or ``tags`` by module path from outside.

While a capture records, each entered region puts its name and index on the operations traced
inside it. Outside a capture, ``annotate`` looks at one variable and does nothing.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from piper.errors import CaptureError

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


class Recorder:
    """The regions one capture has entered, in order, and those still open."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._open: list[tuple[Region, AbstractContextManager[None]]] = []
        self.entered: dict[Region, str] = {}

    def enter(self, name: str, where: str) -> None:
        if not name or name in RESERVED:
            raise CaptureError(
                f"a region cannot be named {name!r} ({where}): "
                f"{', '.join(sorted(RESERVED))} and the empty name are taken; choose another name"
            )
        region = Region(name, self._counts[name])
        self._counts[name] += 1
        self.entered[region] = where
        stack = (*(r for r, _ in self._open), region)
        mark = traceback.annotate({_META: stack})
        mark.__enter__()
        self._open.append((region, mark))

    def exit(self) -> None:
        _, mark = self._open.pop()
        mark.__exit__(None, None, None)

    def unwind(self, depth: int = 0) -> list[Region]:
        """Close every region opened above ``depth``; return them, innermost first."""
        left = []
        while len(self._open) > depth:
            left.append(self._open[-1][0])
            self.exit()
        return left


_recorder: ContextVar[Recorder | None] = ContextVar("piper_recorder", default=None)


class annotate:  # noqa: N801 - reads as a statement, like torch.no_grad
    """Name the operations inside the ``with`` block as one region of the model.

    Regions nest freely; the indices of a name count up in the order in which it is entered.
    """

    __slots__ = ("_name", "_recorder")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        self._recorder = _recorder.get()
        if self._recorder is not None:
            self._recorder.enter(self._name, _line(sys._getframe(1)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if self._recorder is not None:
            self._recorder.exit()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the regions entered inside; a region still open at the end is an error."""
    recorder = Recorder()
    token = _recorder.set(recorder)
    failed = True
    try:
        yield recorder
        failed = False
    finally:
        _recorder.reset(token)
        left = recorder.unwind()
        if left and not failed:
            region = left[0]
            raise CaptureError(
                f"region {region} is left open: entered at {recorder.entered[region]} and never "
                f"exited; write `with piper.annotate({region.name!r}):` around its operations"
            )


def tags_of(meta: Mapping[str, Any]) -> tuple[Region, ...]:
    """The stack of regions, outermost first, that a traced node was recorded in."""
    return tuple((meta.get("custom") or {}).get(_META, ()))


def set_tags(meta: dict[str, Any], tags: tuple[Region, ...]) -> None:
    """Put ``tags`` on a node that a rewrite made or moved."""
    meta["custom"] = {**(meta.get("custom") or {}), _META: tags}


def tag_modules(model: nn.Module, tags: Mapping[str, str]) -> None:
    """Make every module whose path matches a pattern of ``tags`` enter that region when called.

    A ``*`` stands for one step of a path or a part of it, ``**`` for any number of steps. The
    hooks stay on ``model``: give this function a copy.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    for pattern, name in tags.items():
        matched = {id(m): (path, m) for path, m in paths.items() if _matches(pattern, path)}
        if not matched:
            close = _closest(pattern, paths)
            raise CaptureError(
                f"tags: the pattern {pattern!r} matches no module of {type(model).__name__}"
                + (f"; closest: {', '.join(map(repr, close))}" if close else "")
            )
        for path, module in matched.values():
            _enter_when_called(module, name, f"module {path!r}, tagged by {pattern!r}")


def check_tags_entered(tags: Mapping[str, str], entered: Iterable[str]) -> None:
    """Refuse a pattern none of whose modules the model ever called."""
    seen = list(entered)
    for pattern in tags:
        if not any(where.endswith(f"tagged by {pattern!r}") for where in seen):
            raise CaptureError(
                f"tags: the modules that {pattern!r} matches are never called, so they hold no "
                "operation (a ModuleList is not called itself: tag its children, "
                f"{pattern + '.*'!r})"
            )


def _enter_when_called(module: nn.Module, name: str, where: str) -> None:
    def enter(module: nn.Module, args: object) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.enter(name, where)

    def leave(module: nn.Module, args: object, output: object) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.exit()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _matches(pattern: str, path: str) -> bool:
    return _match_steps(pattern.split("."), path.split("."))


def _match_steps(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match_steps(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _match_steps(pattern[1:], path[1:])


def _closest(pattern: str, paths: Iterable[str]) -> list[str]:
    """A few module paths that look like ``pattern``, with indices written as ``*``."""
    shapes = {
        ".".join("*" if step.isdigit() else step for step in path.split(".")) for path in paths
    }
    return difflib.get_close_matches(pattern, sorted(shapes - {""}), n=4, cutoff=0.3)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
