"""Refuses uses of tensors that tracing cannot follow; the error names the user's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError
from piper.capture.blame import calling_line, flex_attention, user_frames, user_name
from piper.capture.graphs import base_of
from piper.capture.trace.opaque import BLOCKS


class RefuseStray(TorchFunctionMode):
    """While active, refuses a parameter from outside ``module``, which would silently not be
    trained; a tensor's ``.data``, which would be cut off from its tensor; gradient hooks; changes
    of a parameter's ``requires_grad``; and ``torch.Generator`` arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _DATA:
            self._refuse_data(args[0])
        if func in _HOOKS:
            raise CaptureError(
                f"a gradient hook is registered at {calling_line()}: the backward is computed "
                "ahead of time and would never call it; do it in the forward, or after the step"
            )
        if func in _REQUIRES_GRAD:
            self._refuse_toggle(args)
        for arg in pytree.tree_leaves((args, kwargs)):
            if isinstance(arg, torch.Generator):
                raise CaptureError(
                    f"a torch.Generator is used at {calling_line()}: a step has generators of its "
                    "own, so that what is drawn does not depend on the strategy; leave generator= "
                    "out, and give seed= to compile"
                )
            if isinstance(arg, nn.Parameter) and not isinstance(arg, FakeTensor):
                raise CaptureError(
                    f"a Parameter of shape {list(arg.shape)} is used at {calling_line()} that is "
                    "not registered on the model or the loss, so it would never be trained: "
                    "assign it to an attribute of the module, or use nn.ParameterList"
                )
        return func(*args, **(kwargs or {}))

    def _refuse_toggle(self, args: tuple[Any, ...]) -> None:
        """Refuse to change a parameter's ``requires_grad``: it is fixed before a step is traced."""
        tensor, wanted = args[0], bool(args[1]) if len(args) > 1 else True
        paths = [path for path, mine in self._module.named_parameters() if mine is tensor]
        if paths and tensor.requires_grad != wanted:
            raise CaptureError(
                f"requires_grad of {user_name(paths[0], {})} is set to {wanted} at "
                f"{calling_line()}, but which parameters are trained is decided before the first "
                "step and holds for all: set it before compile, or use its detach() there"
            )

    def _refuse_data(self, tensor: Tensor) -> None:
        state = (*self._module.named_parameters(), *self._module.named_buffers())
        paths = [path.removeprefix("model.") for path, mine in state if mine is tensor]
        raise CaptureError(
            f".data of {paths[0] if paths else 'a tensor'} is used at {calling_line()}: tracing "
            "cannot follow it; use the tensor itself, under torch.no_grad() or through .detach()"
        )


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def refuse_held(program: ExportedProgram, module: nn.Module, names: Mapping[str, str]) -> None:
    """Refuse a tensor of ``module`` that its code holds at another place too and reads from there:
    the trace has it as a constant."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    paths = {x.untyped_storage()._cdata: path for path, x in tensors}
    for spec in program.graph_signature.input_specs:
        constant = program.constants.get(str(spec.target))
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(constant, FakeTensor):
            path = paths.get(constant.untyped_storage()._cdata)
            if path is not None:
                raise CaptureError(
                    f"{user_name(path, dict(names))} is read from a list or an object that holds "
                    "it too, where tracing cannot follow it: read it from its module"
                )


def refuse_unsupported(
    program: ExportedProgram, inputs: Sequence[str], names: Mapping[str, str]
) -> None:
    """Refuse in-place writes to parameters, inputs and tied buffers, and control-flow ops."""
    roles: dict[str, str] = {}
    specs = program.graph_signature.input_specs
    given = [s.arg.name for s in specs if s.kind is InputKind.USER_INPUT]
    for spec in specs:
        if spec.kind is InputKind.USER_INPUT:
            position = given.index(spec.arg.name)
            if position < len(inputs):
                roles[spec.arg.name] = (
                    f"{inputs[position]!r}, and only buffers may be mutated: write to a copy "
                    "(x = x.clone())"
                )
        elif spec.kind is InputKind.PARAMETER:
            path = names.get(str(spec.target), str(spec.target)).removeprefix("model.")
            roles[spec.arg.name] = (
                f"{path!r}, a parameter, and only buffers may be mutated: leave it to the "
                "optimizer, or make it a buffer (register_buffer)"
            )
        elif spec.kind is InputKind.BUFFER:
            first = names.get(str(spec.target))
            same = [path.removeprefix("model.") for path, f in names.items() if f == first]
            if len(same) > 1:
                roles[spec.arg.name] = (
                    f"{' and '.join(map(repr, same))}, which are one buffer: keep one name"
                )
    _visit(program.graph_module, roles)


def _visit(module: fx.GraphModule, roles: Mapping[str, str]) -> None:
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            if node.target not in BLOCKS:
                raise _control_flow(node.target)
            _visit_block(module, node, roles)
        elif isinstance(node.target, OpOverload):
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(value, fx.Node) and _through_detach(value):
                    raise CaptureError(
                        "unsupported mutation: the model writes in place through detach(), which "
                        f"autograd would not see; write to a copy{_recorded_at(node)}"
                    )
                if writes and isinstance(value, fx.Node) and base_of(value).name in roles:
                    raise CaptureError(
                        "unsupported mutation: the model writes in place to "
                        f"{roles[base_of(value).name]}{_recorded_at(node)}"
                    )


def _through_detach(node: fx.Node) -> bool:
    """Whether ``node`` is a view made through ``detach`` of a tensor other than a literal."""
    base = base_of(node)
    while node is not base:
        if node.target is torch.ops.aten.detach.default:
            given = node.args[0]
            return not (isinstance(given, fx.Node) and _is_literal(given))
        node = node.args[0]  # type: ignore[assignment]
    return False


def _is_literal(node: fx.Node) -> bool:
    return node.target in (
        torch.ops.aten.lift_fresh_copy.default,
        torch.ops.aten.lift_fresh.default,
    )


def _recorded_at(node: fx.Node) -> str:
    frames = user_frames(node.meta.get("stack_trace") or "")
    return f"\n{frames}" if frames else ""


def _control_flow(op: HigherOrderOperator) -> CaptureError:
    if op.name().startswith("flex_attention"):
        return flex_attention("the model")
    return CaptureError(
        f"torch's {op.name()} is control flow inside the model, which Piper cannot differentiate: "
        "write it with torch.where or other tensor ops"
    )


def _visit_block(module: fx.GraphModule, node: fx.Node, roles: Mapping[str, str]) -> None:
    nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
    body = module.get_submodule(str(nodes[0].target))
    assert isinstance(body, fx.GraphModule)
    inner: dict[str, str] = {}
    for mine, given in zip(body.graph.find_nodes(op="placeholder"), nodes[1:], strict=True):
        base = base_of(given)
        if base.name in roles:
            inner[mine.name] = roles[base.name]
        elif node.target is BLOCKS[0] and node.args[0] is False and base.op == "call_function":
            inner[mine.name] = (
                "a value computed outside a no_grad block from inside it, which autograd would "
                "not see: write to a copy, or do it outside the block"
            )
    _visit(body, inner)
