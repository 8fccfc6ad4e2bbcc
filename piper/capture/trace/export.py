"""Model, loss and one example batch enter; one flat functional graph of ATen ops leaves.

The model is never run on data and never changed: a copy with fake tensors is exported with its
loss, at the shapes of one microbatch. The graph has no mutation, no module and no control flow.
Each op carries the regions it was traced in. An explicit ``detach`` marks every value that training
must not differentiate.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError, warn
from piper.capture.batch import Batch, OutputTree
from piper.capture.blame import RecordLines, explain, user_frames, user_name
from piper.capture.code.totals import Totals
from piper.capture.experts.part_rules import part_rules
from piper.capture.graphs import returned
from piper.capture.intercept.autograd_functions import Functions, function_ops, kept_whole
from piper.capture.intercept.bincount import FixedCounts
from piper.capture.intercept.checkpointing import plain_checkpoints
from piper.capture.intercept.grouped_tracing import OurProducts, use_ours
from piper.capture.intercept.hf_attention import restore_eager_attention
from piper.capture.intercept.hf_cache import first_updates_without_copies
from piper.capture.intercept.mixed_precision import MixedPrecision
from piper.capture.intercept.outside_effects import assigned, attributes_of, generators_now
from piper.capture.intercept.random_control_flow import DecideDraws
from piper.capture.loss.loss_checks import check_loss, refuse_metric
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import Loss
from piper.capture.loss.row_mixing import RowMixing, row_mixing
from piper.capture.loss.whole_means import MeanEnds, take_whole_means
from piper.capture.loss.whole_sums import take_whole_sums
from piper.capture.regions import (
    LOSS,
    Region,
    annotate,
    check_tags_entered,
    recording,
    tag_modules,
    tags_of,
)
from piper.capture.repeats.call_ops import Attempt, once_if_equal
from piper.capture.repeats.equal_modules import NotEqual
from piper.capture.repeats.expansion import Expanded, expanded
from piper.capture.repeats.leaf_calls import Repeats, calls_as_operations, tracing_of
from piper.capture.trace import opaque
from piper.capture.trace.computation import Computation, computation_of
from piper.capture.trace.dtypes import refuse_dtypes
from piper.capture.trace.fingerprint import fingerprint
from piper.capture.trace.quiet import quiet_tracing
from piper.capture.trace.refusals import RefuseStray, refuse_held, refuse_unsupported
from piper.capture.trace.skeleton import fake_like, shared_buffers, skeleton_of
from piper.ir.tensors import overlaps


@dataclass(frozen=True, slots=True)
class Exported:
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
    constants: dict[str, Tensor]
    regions: dict[Region, str]
    loss_region: Region
    output_tree: OutputTree
    traced: str
    """A digest of the trace, to compare with another trace."""
    computation: Computation
    """The traced operations, to compare with another program's."""
    checkpoints: tuple[str, ...]
    """The lines that call ``torch.utils.checkpoint``."""
    totals: Totals | None = None
    """How the last inputs are computed from the whole batch; None if there are no such inputs."""
    mixing: RowMixing | None = None
    """The first operation that needs the whole batch, so that microbatches do not add up to it;
    None if none is known."""
    tracing: str = ""
    """Which modules were traced once for all their equals, or why they were not."""
    repeated: int = 0
    """How many calls of modules were not traced, but are copies of an equal module's operations."""


class _Parts(nn.Module):
    """All modules with parameters: the model, and the loss if it is a module."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss_fn = loss


@dataclass(slots=True)
class _Seen:
    """Notes of the traced step, kept apart because torch restores a module's attributes."""

    running: str
    """The code that is running, as errors name it: the model, the loss, or ``outputs=``."""
    loss_region: Region | None = None
    shared: dict[str, str] = field(default_factory=dict)
    """For each buffer that shares storage with another tensor, that tensor's path."""
    frozen: list[str] = field(default_factory=list)
    """Plain numbers that the step changed; the captured step keeps their current values."""
    drawn: list[str] = field(default_factory=list)
    """Random generators outside the graph that the step drew from."""
    assigned: list[str] = field(default_factory=list)
    """Buffers that were assigned a new tensor; their values are the last results of the step."""
    tree: OutputTree = field(default_factory=OutputTree)


class _Step(nn.Module):
    """The exported module: the model, then the loss as a region of its own."""

    def __init__(
        self, parts: _Parts, loss: Loss, batch: Batch, outputs: Outputs | None, mixed: bool
    ) -> None:
        super().__init__()
        self.model = parts.model
        self.loss_fn = getattr(parts, "loss_fn", loss)
        self.seen = _Seen(type(parts.model).__name__)
        self._batch = batch
        self._outputs = outputs
        self._mixed = mixed
        self.repeats: Repeats | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        source = iter(tensors)
        leaves = [next(source) if isinstance(x, Tensor) else x for x in self._batch.leaves]
        args, kwargs, targets = self._batch.spec.unflatten(leaves)
        precision = MixedPrecision() if self._mixed else nullcontext()
        with DecideDraws(), RefuseStray(self), OurProducts(), FixedCounts(), precision:
            return self._run(args, kwargs, targets)

    def _run(self, args: Any, kwargs: Any, targets: Any) -> tuple[Tensor, ...]:
        before = attributes_of(self)
        generators = generators_now()
        with nullcontext() if self.repeats is None else self.repeats.running():
            output = self.model(*args, **kwargs)
            self.seen.running = "the loss"
            with annotate(LOSS) as self.seen.loss_region:
                with RecordLines():
                    loss = check_loss(self.loss_fn(output, *targets))
                kept = []
                if self._outputs is not None:
                    self.seen.running = "outputs="
                    kept = self.seen.tree.take(self._outputs(output, *targets))
        self.seen.running = type(self.model).__name__
        after = generators_now()
        self.seen.drawn = [name for name, state in generators.items() if state != after[name]]
        written = assigned(self, before, self.seen.frozen)
        self.seen.assigned = list(written)
        results = (*loss, *kept, *(value.detach() for value in written.values()))
        if self.repeats is None:
            return results
        self.repeats.refuse_standing(results)
        return (*results, *self.repeats.results)


def export(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    tags: Mapping[str, str],
    *,
    parts: int,
    device: torch.device,
    outputs: Outputs | None,
    dtype: torch.dtype | None = None,
    repeats: bool = True,
) -> Exported:
    """Export ``model`` and ``loss`` at the shapes of one of ``parts`` microbatches. ``dtype``, if
    given, replaces the dtype of floating-point parameters and inputs. Without ``repeats``, equal
    modules are traced one by one."""

    def functional(attempt: Attempt | None) -> _Functional:
        with function_ops() as functions:
            traced = _trace(
                model, batch, loss, tags, parts, device, outputs, dtype, functions, attempt
            )
            text, computation = fingerprint(traced.program, traced.whole), _computation(traced)
            program, whole = _functional(traced)
            functions.restore(whole.graph)
            return _Functional(traced, program, whole, text, computation)

    made, unequal = once_if_equal(functional, repeats)
    step, graph = made.traced.step, made.whole.graph
    for name in dict.fromkeys(step.seen.frozen):
        warn(
            f"{name!r} changes from one call of the model to the next; the captured step keeps the "
            "value it has now. If it is part of the computation, make it a buffer"
        )
    for name in step.seen.drawn:
        warn(
            f"{type(model).__name__} draws from {name} while it is traced; every step repeats what "
            "was drawn now. If it is part of the computation, draw it with torch.rand, or pass it "
            "with the batch"
        )
    opaque.restore(graph)
    restore_eager_attention(graph)
    _free_views(graph)
    exported = replace(_roles(made), tracing=tracing_of(step.repeats, unequal))
    named = exported.inputs | exported.parameters | exported.buffers
    kinds = {node.meta["val"].dtype for node in exported.parameters}
    refuse_dtypes(exported.graph, named, {kind for kind in kinds if kind.is_floating_point})
    return _of_whole_batch(exported, batch, parts)


def _of_whole_batch(exported: Exported, batch: Batch, parts: int) -> Exported:
    """The step with weighted means (over targets that are not ignored) taken over the whole batch,
    and a note of the first operation that mixes rows."""
    graph = exported.graph
    given = zip(exported.inputs, batch.tensors, strict=True)
    rows = {node for node, x in given if batch.has_rows(x)}
    rules = part_rules(max((node.meta["val"].shape[0] for node in rows), default=1))
    before = returned(graph)
    if exported.count is None:
        take_whole_sums(graph, exported.inputs, rows, exported.loss, parts, rules)
    now = dict(zip(before, returned(graph), strict=True))
    loss, outputs = now[exported.loss], tuple(now[node] for node in exported.outputs)
    ends = MeanEnds(
        inputs=exported.inputs,
        rows=rows,
        loss=loss,
        results=outputs if exported.count else (loss, *outputs),
        kept=(loss, exported.count) if exported.count else (),
    )
    inputs, totals = take_whole_means(graph, ends, parts, rules)
    now = dict(zip(before, returned(graph), strict=True))
    loss = now[exported.loss]
    return replace(
        exported,
        inputs=exported.inputs | inputs,
        loss=loss,
        count=exported.count and now[exported.count],
        outputs=tuple(now[node] for node in exported.outputs),
        updates={name: now[node] for name, node in exported.updates.items()},
        totals=totals,
        mixing=row_mixing(graph, exported.inputs, rows, loss, rules),
    )


def _functional(traced: _Trace) -> tuple[ExportedProgram, Expanded]:
    """The traced program without mutation and without no_grad and autocast blocks, and with the
    operations of each module."""
    program = traced.program
    try:
        refuse_held(program, traced.step, traced.names)
        refuse_unsupported(program, traced.paths, traced.names)
        use_ours(program.graph)
        opaque.hide(program.graph_module)
        with quiet_tracing():
            program = program.run_decompositions({})
    except Exception as error:
        raise _failure(error, traced.step, traced.modules) from error
    return program, expanded(program, traced.step.repeats)


def _failure(error: Exception, step: _Step, modules: dict[nn.Module, str]) -> Exception:
    """The error to raise. If equal modules were not traced, one that makes capture trace them."""
    if step.repeats is not None and step.repeats.tried:
        return step.repeats.stopped or NotEqual(str(error))
    return error if isinstance(error, CaptureError) else explain(error, step.seen.running, modules)


def _free_views(graph: fx.Graph) -> None:
    """Replace views by reshapes, which copy if they must. When attention is differentiated, its
    result may have another memory layout than at export (another kernel, if the mask needs a
    gradient), and export has dropped a ``contiguous`` that changed nothing."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def trace_text(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    tags: Mapping[str, str],
    *,
    parts: int,
    device: torch.device,
    outputs: Outputs | None,
    dtype: torch.dtype | None,
) -> str:
    """A digest of what ``export`` would trace, to compare with ``Exported.traced``."""

    def text(attempt: Attempt | None) -> str:
        with function_ops() as functions:
            traced = _trace(
                model, batch, loss, tags, parts, device, outputs, dtype, functions, attempt
            )
            return fingerprint(traced.program, traced.whole)

    return once_if_equal(text, True)[0]


@dataclass(frozen=True, slots=True)
class _Trace:
    """A step as torch exported it, and the user's names for its inputs, tensors and modules."""

    step: _Step
    program: ExportedProgram
    paths: list[str]
    names: dict[str, str]
    modules: dict[nn.Module, str]
    regions: dict[Region, str]
    checkpoints: tuple[str, ...]
    whole: Expanded
    """The program with the operations of each module."""


@dataclass(frozen=True, slots=True)
class _Functional:
    """A traced step as a functional program; ``whole`` has the operations of each module."""

    traced: _Trace
    program: ExportedProgram
    whole: Expanded
    text: str
    computation: Computation


def _trace(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    tags: Mapping[str, str],
    parts: int,
    device: torch.device,
    outputs: Outputs | None,
    dtype: torch.dtype | None,
    functions: Functions,
    attempt: Attempt | None,
) -> _Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    slices = batch.slices(parts)[0]
    paths = [batch.tensor_path(i) for i in range(len(batch.tensors))]
    # targets keep their dtype: the loss computes in fp32
    kinds = [None if path.startswith("targets") else dtype for path in paths]
    example = [
        fake_like(_packed(x), mode, device, kind) for x, kind in zip(slices, kinds, strict=True)
    ]
    parts_of = _Parts(model, loss)
    skeleton, names = skeleton_of(parts_of, mode, device, type(model).__name__, dtype)
    assert isinstance(skeleton, _Parts)
    tag_modules(skeleton.model, tags)
    step = _Step(skeleton, _rebound(loss, model, skeleton.model), batch, outputs, dtype is not None)
    step.seen.shared = shared_buffers(parts_of)
    modules = {m: path for path, m in skeleton.model.named_modules()}
    try:
        with (
            quiet_tracing(),
            kept_whole(functions),
            plain_checkpoints() as lines,
            first_updates_without_copies(),
            recording(tags) as recorder,
            calls_as_operations(step, recorder, attempt) as step.repeats,
        ):
            program = torch.export.export(step, tuple(example), strict=False)
        check_tags_entered(tags, recorder.entered.values())
    except Exception as error:
        raise _failure(error, step, modules) from error
    checkpoints = tuple(dict.fromkeys(lines))
    whole = expanded(program, step.repeats)
    return _Trace(step, program, paths, names, modules, recorder.entered, checkpoints, whole)


def _packed(x: Tensor) -> Tensor:
    """``x``, or, if elements of it share memory (``expand``), a contiguous meta tensor like it."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if overlaps(x) else x


def _rebound(loss: Loss, model: nn.Module, skeleton: nn.Module) -> Loss:
    """If the loss is a method of the model, the same method of the copy."""
    if inspect.ismethod(loss) and loss.__self__ is model:
        return types.MethodType(loss.__func__, skeleton)
    return loss


def _computation(traced: _Trace) -> Computation:
    seen, names = traced.step.seen, traced.names
    last = len(returned(traced.whole.graph)) - len(seen.assigned)
    return computation_of(
        traced.program,
        traced.whole,
        slice(last - seen.tree.tensors, last),
        lambda target: user_name(target, names),
        lambda meta: seen.loss_region in tags_of(meta),
    )


def _roles(made: _Functional) -> Exported:
    """Assign a role and the user's name to each input and result of the graph."""
    traced, program, graph = made.traced, made.program, made.whole.graph
    step, paths, names = traced.step, traced.paths, traced.names
    _drop_asserts(graph)
    _refuse_dynamic(graph, type(step.model).__name__)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    inputs: dict[fx.Node, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in made.whole.inputs:
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
        traced=made.text,
        computation=made.computation,
        checkpoints=traced.checkpoints,
        repeated=step.repeats.copies if step.repeats is not None else 0,
    )


def _refuse_shared_updates(
    step: _Step, updates: Mapping[str, fx.Node], names: Mapping[str, str]
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


def _drop_asserts(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


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
