"""A digest of an exported program. Two traces have the same digest if and only if they have the
same operations, regions and constants."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.export import ExportedProgram

from piper.capture.blame import LINE
from piper.ir.tensors import TensorSpec


def fingerprint(program: ExportedProgram) -> str:
    """A digest of the operations with their regions and numbers, and of the constants they read."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    lines = [_line(node) for graph in graphs for node in graph.nodes]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    lines += [str(spec) for spec in program.graph_signature.output_specs]
    constants = program.constants.items()
    lines += [f"{name} {content_of(x)}" for name, x in constants if isinstance(x, Tensor)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(node: fx.Node) -> str:
    marks = (node.meta.get("custom") or {}).items()
    custom = {name: mark for name, mark in marks if name != LINE}  # file paths may differ
    return f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {custom}"


def content_of(x: Tensor) -> str:
    """A tensor's spec and, unless it is fake or meta, a digest of its values."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return str(TensorSpec.of(x))
    with unset_fake_temporarily(), torch.no_grad():
        flat = x.detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{TensorSpec.of(x)} {hashlib.sha256(data).hexdigest()}"
