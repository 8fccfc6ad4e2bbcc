"""An exception from inside torch's tracing becomes an error that names the user's own line."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from piper.errors import CaptureError

_DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UserError,
)
_OURS = tuple(str(Path(p).resolve().parent) for p in (torch.__file__, __file__))


def explain(error: BaseException, model: str) -> CaptureError:
    """What ``error`` means for whoever wrote ``model``, with the line that caused it."""
    where = _user_line(error)
    at = f" at {where}" if where else ""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_data_dependent(error):
        return CaptureError(
            f"{model} decides by the data{at}\n"
            "a step is planned before any data is seen, so control flow and shapes cannot depend "
            "on tensor values: use torch.where, a mask or a fixed capacity, or compute the "
            f"decision outside the model\n({first})"
        )
    return CaptureError(f"{model} cannot be captured{at}\n{type(error).__name__}: {first}")


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because a shape or a branch depends on tensor values."""
    return any(isinstance(e, _DATA_DEPENDENT) for e in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _user_line(error: BaseException) -> str | None:
    """The innermost line outside torch and Piper, over the whole chain of causes."""
    for link in _chain(error):
        frames = [(f, line) for f, line in _frames(link.__traceback__) if not _internal(f)]
        if frames:
            frame, line = frames[-1]
            name = frame.f_code.co_filename
            code = linecache.getline(name, line).strip()
            return f"{name}:{line} in {frame.f_code.co_name}\n    {code}"
    return None


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _internal(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(("<", *_OURS)) or "contextlib" in name
