"""Operators by their names in files, and checks of their arguments.

A file may name a tensor operator of torch, an operator of Piper, or one that an imported library
has registered. All else in ``torch.ops`` is refused: functions that load a library, read a file, or
talk to other processes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from piper.base.reading import MalformedError, shown
from piper.capture.operators import head_tail_attention as head_tail  # noqa: F401 - registers Piper's own for workers too

_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.\w+", re.ASCII)
_FOR_MODELS = frozenset({"aten", "prims", "rngprims", "inductor_prims", "quantized_decomposed"})
"""Torch's namespaces of pure tensor functions."""
# fmt: off
_NOT_FOR_MODELS = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_caffe2", "_dtensor", "_inductor_test",
    "_native", "_nnapi", "_quantized", "_test", "aoti", "aoti_torch", "c10d", "c10d_functional",
    "caffe2", "cuda", "debug_mode_ops", "debugprims", "dist", "export", "flex_lib", "fsdp",
    "inductor", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic",
    "prepacked", "prim", "profiler", "quantization", "quantized", "rpc", "sparse",
    "static_runtime", "streams", "symm_mem", "torch_c10d", "vulkan_prepack", "xnnpack",
})
# fmt: on
"""Torch's other namespaces, which are refused. A namespace in neither set belongs to another
library."""
_NOT_PURE = frozenset({"aten.from_file.default"})
"""Operators in allowed namespaces that are refused: this one reads a file."""


@cache
def operator_named(name: str) -> OpOverload:
    """The operator of a name such as ``aten.add.Tensor``."""
    if not _NAME.fullmatch(name):
        raise MalformedError(
            f"{shown(name)} is not the name of an operator, such as aten.add.Tensor"
        )
    space, packet, overload = name.split(".")
    if space in _NOT_FOR_MODELS or name in _NOT_PURE:
        raise MalformedError(f"a program must not call the operation {name}")
    qualified = f"{space}::{packet}" + ("" if overload == "default" else f".{overload}")
    if not _registered(qualified) and space in ("prims", "inductor_prims"):
        importlib.import_module("torch._inductor.inductor_prims")  # registers Inductor's own
    if not _registered(qualified):
        raise MalformedError(
            f"the operation {name} is unknown here: import the library that defines it first"
        )
    operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
    if not isinstance(operator, OpOverload) or (
        space in _FOR_MODELS and operator._schema.is_mutable
    ):
        raise MalformedError(f"a program must not call the operation {name}")
    return operator


def _registered(qualified: str) -> bool:
    """Whether torch's dispatcher has the operator; ``torch.ops`` resolves more names than that."""
    return torch._C._dispatch_has_kernel(qualified)


def check_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit the operator's schema. Nodes stand for tensors, into which
    torch also turns numbers."""
    wanted = operator._schema.arguments
    tensors = [isinstance(x.type, torch.TensorType) for x in wanted]
    names = {x.name for x, tensor in zip(wanted, tensors, strict=True) if tensor}
    kinds = [*tensors, *(False for _ in args)]
    given = [_sample(x, tensor) for x, tensor in zip(args, kinds, strict=False)]
    named = {name: _sample(x, name in names) for name, x in kwargs.items()}
    try:
        torch._C._check_schema_allow_fake_script_object(operator._schema, *given, **named)
    except RuntimeError as error:
        raise MalformedError(f"{operator}: {str(error).splitlines()[0]}") from None


def _sample(item: Any, tensor: bool) -> Any:
    """``item`` with a tensor for each node, and for a number where a tensor is wanted."""
    if tensor and isinstance(item, int | float | complex):
        return _TENSOR
    return fx.node.map_arg(item, lambda _: _TENSOR)


_TENSOR = torch.empty((), device="meta")
