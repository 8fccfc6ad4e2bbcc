"""An exported step: a functional graph, and the role and the user's name of each of its ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError
from piper.capture.batch import OutputTree
from piper.capture.blame import user_frames, user_name
from piper.capture.code.totals import Totals
from piper.capture.intercept.autograd_functions import Functions
from piper.capture.loss.loss_checks import refuse_metric
from piper.capture.loss.row_mixing import RowMixing
from piper.capture.regions import Region
from piper.capture.repeats.expansion import Expanded
from piper.capture.repeats.folds import Fold
from piper.capture.trace.computation import Computation
from piper.capture.trace.step import TracedStep


@dataclass(frozen=True, slots=True)
class Traced:
    """A step as torch exported it, without mutation and without no_grad and autocast blocks, and
    the user's names for its inputs and tensors."""

    step: TracedStep
    program: ExportedProgram
    whole: Expanded
    """The program with the operations of each module, folded."""
    paths: list[str]
    names: dict[str, str]
    regions: dict[Region, str]
    checkpoints: tuple[str, ...]
    functions: Functions
    text: str
    """A digest, to compare with another trace."""
    computation: Computation
    tracing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceNotes:
    """What is known of a traced step beside its graph."""

    constants: Mapping[str, Tensor]
    """Tensors that the model's code holds outside parameters and buffers, by name."""
    output_tree: OutputTree
    traced: str
    """A digest of the trace, to compare with another trace of the model."""
    computation: Computation
    """The traced operations, to compare with another program's."""
    checkpoints: tuple[str, ...] = ()
    """The lines of the model that call ``torch.utils.checkpoint``; ``remat`` decides instead."""
    totals: Totals | None = None
    """Sums over the whole batch that are inputs of the step, after the batch's tensors; None if
    there are no such inputs."""
    mixing: RowMixing | None = None
    """The first operation that needs the whole batch, so that microbatches and replicas do not
    add up to it; None if none is known."""
    tracing: str = ""
    """Which modules were traced once for all their equals, or why they were not."""
    repeated: int = 0
    """How many calls of modules were not traced, but are copies of an equal module's operations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported(TraceNotes):
    """The forward of one microbatch as a functional graph, and the roles of its ends."""

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    inputs: dict[fx.Node, str]
    """The tensors of the batch, named as the caller writes them."""
    loss: fx.Node
    count: fx.Node | None
    outputs: tuple[fx.Node, ...]
    updates: dict[str, fx.Node]
    regions: dict[Region, str]
    loss_region: Region
    folds: tuple[Fold, ...] = ()
    """The equal parts of which the graph has only the first two."""


def roles(traced: Traced, whole: Expanded) -> Exported:
    """Assign a role and the user's name to each input and result of the graph of ``whole``."""
    program, graph = traced.program, whole.graph
    step, paths, names = traced.step, traced.paths, traced.names
    _refuse_dynamic(graph, type(step.model).__name__)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    inputs: dict[fx.Node, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in whole.inputs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.PARAMETER:
            parameters[node] = user_name(str(spec.target), names)
        elif spec.kind is InputKind.BUFFER:
            buffers[node] = user_name(str(spec.target), names)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            buffers[node] = str(spec.target)
            constants[str(spec.target)] = program.constants[str(spec.target)]
        elif spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument):
            inputs[node] = paths[len(inputs)]
    results = _computed_results(graph)
    given_back: list[fx.Node] = []
    updates: dict[str, fx.Node] = {}
    specs = program.graph_signature.output_specs[: len(results)]  # the rest are those of trials
    for spec, node in zip(specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            given_back.append(node)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            updates[user_name(str(spec.target), names)] = node
        else:
            raise CaptureError(
                f"unsupported mutation of {user_name(str(spec.target), names)!r}: only buffers "
                "may be written to"
            )
    assert step.seen.loss_region is not None
    for target in reversed(step.seen.assigned):
        updates[user_name(target, names)] = given_back.pop()
    n_loss = len(given_back) - step.seen.tree.tensors
    _refuse_shared_updates(step, updates, names)
    if n_loss == 2:
        refuse_metric(given_back[1], step, parameters)
    return Exported(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        loss=given_back[0],
        count=given_back[1] if n_loss == 2 else None,
        outputs=tuple(given_back[n_loss:]),
        updates=updates,
        constants=constants,
        regions=traced.regions,
        loss_region=step.seen.loss_region,
        output_tree=step.seen.tree,
        traced=traced.text,
        computation=traced.computation,
        checkpoints=traced.checkpoints,
        tracing=traced.tracing,
        repeated=step.repeats.copies if step.repeats is not None else 0,
        folds=tuple(x.fold.named(lambda path: user_name(path, names)) for x in whole.folds),
    )


def _refuse_shared_updates(
    step: TracedStep, updates: Mapping[str, fx.Node], names: Mapping[str, str]
) -> None:
    """Refuse an update of a buffer that shares storage: it cannot be replaced alone."""
    for path, other in step.seen.shared.items():
        if user_name(path, dict(names)) in updates:
            raise CaptureError(
                f"unsupported mutation: the buffer {user_name(path, dict(names))!r} shares memory "
                f"with {user_name(other, dict(names))!r}; give it memory of its own (clone)"
            )


def _computed_results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The graph's results. A result that is itself a parameter, buffer or input becomes a copy."""
    output = graph.output_node()
    for node in graph.find_nodes(op="placeholder"):
        if output in node.users:
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta["val"] = node.meta["val"]
            output.replace_input_with(node, copied)
    results = output.args[0]
    assert isinstance(results, tuple)
    return results  # type: ignore[return-value]


def _refuse_dynamic(graph: fx.Graph, model: str) -> None:
    """Refuse shapes and numbers that depend on data: they cannot be planned."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            dynamic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(value, Tensor)
                and any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
            )
            if dynamic:
                where = user_frames(node.meta.get("stack_trace") or "")
                raise CaptureError(
                    f"{model} has data-dependent control flow: the op {node.target} yields a shape "
                    f"or number known only at run time\n{where}\n"
                    "use an op of fixed shape (a mask, a capacity, torch.where)"
                )
