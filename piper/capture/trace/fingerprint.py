"""A digest of an exported program. Two traces have the same digest if and only if they have the
same operations, regions and constants."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.export import ExportedProgram

from piper.capture.graphs import returned
from piper.capture.regions import tags_of
from piper.capture.repeats.expansion import Expanded
from piper.ir.tensors import TensorSpec


def fingerprint(program: ExportedProgram, whole: Expanded) -> str:
    """A digest of the operations with their regions and numbers, and of the constants they read.
    ``whole`` has the operations of ``program``."""
    lines = [_line(node) for part in graphs_of(program, whole.graph) for node in part.nodes]
    lines += [str(spec) for spec in whole.inputs]
    lines += [str(folded.fold) for folded in whole.folds]
    results = program.graph_signature.output_specs[: len(returned(whole.graph))]
    lines += [f"{spec.kind} {spec.target}" for spec in results]
    constants = program.constants.items()
    lines += [f"{name} {content_of(x)}" for name, x in constants if isinstance(x, Tensor)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def graphs_of(program: ExportedProgram, graph: fx.Graph) -> list[fx.Graph]:
    """``graph``, that of the whole program, and those of its blocks."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    return [graph, *(m.graph for m in modules if m is not program.graph_module)]


def _line(node: fx.Node) -> str:
    tags = ", ".join(map(str, tags_of(node.meta)))
    return f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {tags}"


def content_of(x: Tensor) -> str:
    """A tensor's spec and, unless it is fake or meta, a digest of its values."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return str(TensorSpec.of(x))
    with unset_fake_temporarily(), torch.no_grad():
        flat = x.detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{TensorSpec.of(x)} {hashlib.sha256(data).hexdigest()}"
