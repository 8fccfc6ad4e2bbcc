"""Operators by their names in files, and checks of their arguments.

A file may name a tensor operator of torch, an operator of Piper, or one that an imported library
has registered. All else in ``torch.ops`` is refused: functions that load a library, read a file, or
talk to other processes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType
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
    """Refuse arguments that do not fit the operator's schema."""
    wanted = _parameters(operator)
    named = {name: (fits, kind) for name, fits, kind, *_ in wanted}
    places = [name for name, *_, keyword, _ in wanted if not keyword]
    if len(args) > len(places):
        raise MalformedError(f"{operator} takes {len(places)} arguments by place, not {len(args)}")
    given = dict(zip(places, args, strict=False))
    for name, item in kwargs.items():
        if name not in named:
            raise MalformedError(f"{operator} has no argument {shown(name)}")
        if name in given:
            raise MalformedError(f"{operator} is given {name} twice")
        given[name] = item
    for name, item in given.items():
        fits, kind = named[name]
        if not fits(item):
            raise MalformedError(
                f"the argument {name} of {operator} is {shown(item)}, not a {kind}"
            )
    for name, *_, required in wanted:
        if required and name not in given:
            raise MalformedError(f"{operator} lacks the argument {name}")


Fits = Callable[[Any], bool]


@cache
def _parameters(operator: OpOverload) -> tuple[tuple[str, Fits, str, bool, bool], ...]:
    """Each argument's name, type check, type, and whether it is keyword-only and required."""
    return tuple(
        (a.name, _fits(a.real_type), str(a.real_type), a.kwarg_only, not a.has_default_value())
        for a in operator._schema.arguments
    )


def _fits(kind: Any) -> Fits:
    name = kind.kind()
    if name == "OptionalType":
        inner = _fits(kind.getElementType())
        return lambda item: item is None or inner(item)
    if name == "ListType":
        inner = _fits(kind.getElementType())
        return lambda item: isinstance(item, list | tuple) and all(map(inner, item))
    types = _TYPES.get(name, ())
    return lambda item: isinstance(item, types)


_TYPES: Mapping[str, tuple[type, ...]] = {
    # Torch turns numbers into tensors, and None into an undefined one: a missing attention bias.
    "TensorType": (fx.Node, bool, int, float, complex, NoneType),
    "IntType": (int, fx.Node),
    "SymIntType": (int, fx.Node),
    "FloatType": (int, float, fx.Node),
    "BoolType": (bool, fx.Node),
    "SymBoolType": (bool, fx.Node),
    "NumberType": (bool, int, float, complex, fx.Node),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
    "ScalarTypeType": (torch.dtype,),
    "LayoutType": (torch.layout,),
    "MemoryFormatType": (torch.memory_format,),
}
"""The Python types that fit each schema type. Generators, storages and class objects fit none: a
program has none."""
