"""Errors and operations in the user's terms: the line, module or parameter path they come from.

An exception from torch's tracing enters; a ``CaptureError`` that names the user's line leaves.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException, UserError
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from piper.base.errors import CaptureError
from piper.ir.dag.facts import LOSS_PREFIX

_DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UserError,
)
_HOMES = [Path(p).parent for p in (torch.__file__, __file__)]
# as imported, and with symbolic links resolved
_OURS = tuple(f"{home}/" for p in _HOMES for home in (p, p.resolve()))
_STDLIB = sysconfig.get_path("stdlib") + "/"
_FLEX = str(Path(torch.__file__).parent / "nn" / "attention" / "flex_attention.py")
LINE = "piper.line"
"""The metadata key of the user's line that called an operation."""


def explain(
    error: BaseException,
    what: str,
    modules: Mapping[nn.Module, str] | None = None,
    given: str = "",
) -> CaptureError:
    """A ``CaptureError`` for ``error``, raised in ``what``, that names the user's line.

    ``modules`` maps the model's modules to their paths: if no frame is the user's, the error names
    the module instead. ``given`` lists the tensors of the batch.
    """
    for link in _chain(error):
        if isinstance(link, CaptureError):  # Piper's own, wrapped by torch
            return link
    where = _user_line(error) or _module(error, modules or {})
    at = f" {where}" if where else ""
    text = str(error).strip()
    if any(
        f.f_code.co_filename == _FLEX for e in _chain(error) for f, _ in _frames(e.__traceback__)
    ):
        return flex_attention(what, at)
    if is_data_dependent(error):
        first = text.splitlines()[0] if text else type(error).__name__
        return CaptureError(
            f"{what} has data-dependent control flow{at}\n"
            "a step is planned before any data is seen, so control flow and shapes cannot depend "
            "on tensor values: use torch.where, a mask or a fixed capacity, or compute the "
            f"decision outside the model\n({first})"
        )
    if any(isinstance(link, TorchDynamoException) for link in _chain(error)):
        return CaptureError(
            f"{what} uses an op that takes functions (control flow such as torch.cond){at}\n"
            "Piper cannot differentiate these: write it with torch.where or other tensor ops"
        )
    batch = f"\nit is given {given}, one microbatch on one device" if given else ""
    if batch and re.search(r"int64|types: Long", text):
        batch += "; class labels and token ids must be integers, .to(torch.int64)"
    return CaptureError(f"{what} cannot be captured{at}\n{type(error).__name__}: {text}{batch}")


def flex_attention(what: str, at: str = "") -> CaptureError:
    return CaptureError(
        f"{what} uses FlexAttention{at}\n"
        "Piper cannot differentiate it, since it takes functions (score_mod, mask_mod): use "
        'scaled_dot_product_attention, in a model of transformers attn_implementation="sdpa"'
    )


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because a shape or a branch depends on tensor values."""
    return any(isinstance(e, _DATA_DEPENDENT) for e in _chain(error))


def is_internal_file(name: str) -> bool:
    """Whether a source file belongs to torch, Piper or Python, not to the user."""
    library = name.startswith(_STDLIB) and "site-packages" not in name
    return library or name.startswith(("<", *_OURS))


def user_frames(stack: str) -> str:
    """The user's frames of a recorded stack trace."""
    frames = re.split(r"(?m)^(?=\s*File )", stack)
    names = [(re.search(r'File "([^"]+)"', frame), frame.strip()) for frame in frames]
    own = [frame for name, frame in names if name and not is_internal_file(name[1])]
    return "\n".join(own)


def operation_text(node: fx.Node) -> str:
    """The operation's name, with the module and the user's line that call it."""
    function = getattr(node.target, "function", None)  # an autograd function
    operator = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
    name = getattr(function, "__name__", None) or operator
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
    module = f" of {user_name(modules[-1], {})}" if modules and modules[-1] != "model" else ""
    places = re.findall(
        r'File "([^"]+)", line (\d+)', user_frames(node.meta.get("stack_trace") or "")
    )
    line = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return name + module + line


def calling_line() -> str:
    """The innermost running line of the user's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_internal_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class RecordLines(TorchFunctionMode):
    """While active, records on each operation the user's line that calls it. Torch records only
    the lines of ``forward``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with traceback.annotate({LINE: calling_line()}):
            return func(*args, **(kwargs or {}))


def lines_of(node: fx.Node) -> str:
    """The user's lines that an operation comes from, or ""."""
    frames = user_frames(node.meta.get("stack_trace") or "")
    line = (node.meta.get("custom") or {}).get(LINE)
    return frames or (f"at {line}" if line else "")


def user_name(target: str, names: dict[str, str]) -> str:
    """The path of an exported tensor in the user's model; a tied tensor has its first path. A
    tensor of the loss gets ``LOSS_PREFIX``."""
    path = names.get(target, target)
    if path.startswith("loss_fn."):
        return LOSS_PREFIX + path.removeprefix("loss_fn.")
    return path.removeprefix("model.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _user_line(error: BaseException) -> str | None:
    """The user's innermost line, over the whole chain of causes."""
    for link in _chain(error):
        frames = [
            (frame, line)
            for frame, line in _frames(link.__traceback__)
            if not is_internal_file(frame.f_code.co_filename)
        ]
        if frames and _inside_capture(link):
            frame, line = frames[-1]
            name = frame.f_code.co_filename
            code = linecache.getline(name, line).strip()
            return f"at {name}:{line} in {frame.f_code.co_name}\n    {code}"
    return None


def _inside_capture(error: BaseException) -> bool:
    """Whether Piper or torch calls a user's frame; otherwise the user's frames only call Piper."""
    internal = [is_internal_file(f.f_code.co_filename) for f, _ in _frames(error.__traceback__)]
    return False in internal[internal.index(True) :] if True in internal else False


def _module(error: BaseException, modules: Mapping[nn.Module, str]) -> str | None:
    """The innermost module of the model whose forward raised ``error``."""
    for link in _chain(error):
        for frame, _ in reversed(list(_frames(link.__traceback__))):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in modules:
                return f"in module {modules[owner]!r} ({type(owner).__name__})"
    return None


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
