"""Model, loss and one example batch enter; one flat functional graph of ATen ops leaves.

The model is never run on data and never changed: a copy with fake tensors is exported with its
loss, at the shapes of one microbatch. The graph has no mutation, no module and no control flow.
Each op carries the regions it was traced in. An explicit ``detach`` marks every value that training
must not differentiate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from piper.base.errors import CaptureError, warn
from piper.capture.batch import Batch
from piper.capture.blame import explain, user_name
from piper.capture.graphs import returned
from piper.capture.intercept.autograd_functions import Functions, function_ops, kept_whole
from piper.capture.intercept.checkpointing import plain_checkpoints
from piper.capture.intercept.hf_attention import restore_eager_attention
from piper.capture.intercept.hf_cache import first_updates_without_copies
from piper.capture.intercept.own_operators import use_ours
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import Loss
from piper.capture.loss.whole_batch import of_whole_batch
from piper.capture.regions import (
    Region,
    check_tags_entered,
    recording,
    tag_modules,
    tags_of,
)
from piper.capture.repeats.call_ops import Attempt, once_if_equal
from piper.capture.repeats.equal_modules import Found
from piper.capture.repeats.expansion import Expanded, expanded
from piper.capture.repeats.folds import NotFolded
from piper.capture.repeats.leaf_calls import calls_as_operations, tracing_of
from piper.capture.trace import opaque
from piper.capture.trace.computation import Computation, computation_of
from piper.capture.trace.dtypes import refuse_dtypes
from piper.capture.trace.exported import Exported, Traced, roles
from piper.capture.trace.fingerprint import fingerprint
from piper.capture.trace.quiet import quiet_tracing
from piper.capture.trace.refusals import refuse_held, refuse_unsupported
from piper.capture.trace.skeleton import fake_like, shared_buffers, skeleton_of
from piper.capture.trace.step import TracedModules, TracedStep, rebound
from piper.ir.tensors import TensorSpec, overlaps


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What is traced: a model and its loss at the shapes of one of ``parts`` microbatches."""

    model: nn.Module
    batch: Batch
    loss: Loss
    tags: Mapping[str, str]
    parts: int
    device: torch.device
    outputs: Outputs | None
    dtype: torch.dtype | None = None
    """If given, it replaces the dtype of floating-point parameters and inputs."""
    found: Found = field(default_factory=Found)
    """What earlier traces have found of the model's equal modules; this one adds to it."""
    known: str | None = None
    """The digest of a trace that is not needed again: ``SameTrace`` is raised if it is made."""


class SameTrace(Exception):  # noqa: N818 - not an error: an earlier trace serves
    """The trace is one that the caller has."""


def export(request: TraceRequest) -> Traced:
    """Trace a model and its loss."""

    def functional(attempt: Attempt | None) -> Traced:
        with function_ops() as functions:
            return _functional(_trace(request, functions, attempt), functions, request.known)

    traced = once_if_equal(functional, request.found)
    step = traced.step
    for name in dict.fromkeys(step.seen.frozen):
        warn(
            f"{name!r} changes from one call of the model to the next; the captured step keeps the "
            "value it has now. If it is part of the computation, make it a buffer"
        )
    for name in step.seen.drawn:
        warn(
            f"{type(request.model).__name__} draws from {name} while it is traced; every step "
            "repeats what was drawn now. If it is part of the computation, draw it with "
            "torch.rand, or pass it with the batch"
        )
    tracing = tracing_of(step.repeats, request.found)
    if step.repeats is not None:
        request.found.compared |= step.repeats.compared
    return replace(traced, tracing=tracing)


def exported_of(traced: Traced, request: TraceRequest, *, folded: bool) -> Exported:
    """The graph of a traced step with its roles. If not ``folded``, it has the operations of all
    equal modules. Raises ``NotFolded`` if it must have."""
    whole = traced.whole if folded else expanded(traced.program, traced.step.repeats, folded=False)
    traced.functions.restore(whole.graph)
    opaque.restore(whole.graph)
    restore_eager_attention(whole.graph)
    _free_views(whole.graph)
    exported = roles(traced, whole)
    named = exported.inputs | exported.parameters | exported.buffers
    kinds = {node.meta["val"].dtype for node in exported.parameters}
    refuse_dtypes(exported.graph, named, {kind for kind in kinds if kind.is_floating_point})
    return of_whole_batch(exported, request.batch, request.parts)


def trace_text(request: TraceRequest) -> str:
    """A digest of what ``export`` would trace, to compare with ``Exported.traced``."""

    def text(attempt: Attempt | None) -> str:
        with function_ops() as functions:
            trace = _trace(request, functions, attempt)
            return fingerprint(trace.program, trace.whole)

    return once_if_equal(text, request.found)


@dataclass(frozen=True, slots=True)
class _Trace:
    """A step as torch exported it, and the user's names for its inputs, tensors and modules."""

    step: TracedStep
    program: ExportedProgram
    paths: list[str]
    names: dict[str, str]
    modules: dict[nn.Module, str]
    regions: dict[Region, str]
    checkpoints: tuple[str, ...]
    whole: Expanded
    """The program with the operations of each module."""


def _trace(request: TraceRequest, functions: Functions, attempt: Attempt | None) -> _Trace:
    model, batch, device, dtype = request.model, request.batch, request.device, request.dtype
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    slices = batch.slices(request.parts)[0]
    paths = [batch.tensor_path(i) for i in range(len(batch.tensors))]
    # targets keep their dtype: the loss computes in fp32
    kinds = [None if path.startswith("targets") else dtype for path in paths]
    example = [
        fake_like(_packed(x), mode, device, kind) for x, kind in zip(slices, kinds, strict=True)
    ]
    whole = TracedModules(model, request.loss)
    skeleton, names = skeleton_of(whole, mode, device, type(model).__name__, dtype)
    assert isinstance(skeleton, TracedModules)
    tag_modules(skeleton.model, request.tags)
    loss = rebound(request.loss, model, skeleton.model)
    step = TracedStep(skeleton, loss, batch, request.outputs, dtype is not None)
    step.seen.shared = shared_buffers(whole)
    modules = {m: path for path, m in skeleton.model.named_modules()}
    try:
        with (
            quiet_tracing(),
            kept_whole(functions),
            plain_checkpoints() as lines,
            first_updates_without_copies(),
            recording(request.tags) as recorder,
            calls_as_operations(step, recorder, attempt) as step.repeats,
        ):
            program = torch.export.export(step, tuple(example), strict=False)
        check_tags_entered(request.tags, recorder.entered.values())
    except Exception as error:
        raise _failure(error, step, modules, _given(batch, slices)) from error
    return _Trace(
        step,
        program,
        paths,
        names,
        modules,
        recorder.entered,
        tuple(dict.fromkeys(lines)),
        expanded(program, step.repeats, folded=True),
    )


def _functional(trace: _Trace, functions: Functions, known: str | None) -> Traced:
    """The traced program without mutation and without no_grad and autocast blocks."""
    program, step = trace.program, trace.step
    text = fingerprint(program, trace.whole)
    if text == known:
        raise SameTrace
    computation = _computation(trace)
    try:
        refuse_held(program, step, trace.names)
        refuse_unsupported(program, trace.paths, trace.names)
        use_ours(program.graph)
        opaque.hide(program.graph_module)
        with quiet_tracing():
            program = program.run_decompositions({})
    except Exception as error:
        raise _failure(error, step, trace.modules) from error
    return Traced(
        step=step,
        program=program,
        whole=expanded(program, step.repeats, folded=True),
        paths=trace.paths,
        names=trace.names,
        regions=trace.regions,
        checkpoints=trace.checkpoints,
        functions=functions,
        text=text,
        computation=computation,
    )


def _computation(trace: _Trace) -> Computation:
    seen, names = trace.step.seen, trace.names
    last = len(returned(trace.whole.graph)) - len(seen.assigned)

    def of(whole: Expanded) -> Computation:
        return computation_of(
            trace.program,
            whole,
            slice(last - seen.tree.tensors, last),
            lambda target: user_name(target, names),
            lambda meta: seen.loss_region in tags_of(meta),
        )

    try:
        return of(trace.whole)
    except NotFolded:
        return of(expanded(trace.program, trace.step.repeats, folded=False))


def _failure(
    error: Exception, step: TracedStep, modules: dict[nn.Module, str], given: str = ""
) -> Exception:
    """The error to raise. If equal modules were not traced, one that makes capture trace them."""
    if step.repeats is not None and step.repeats.tried:
        return step.repeats.failure(error)
    if isinstance(error, CaptureError):
        return error
    return explain(error, step.seen.running, modules, given)


def _given(batch: Batch, slices: Sequence[Tensor]) -> str:
    """The tensors of one microbatch, with their names, for an error."""
    named = enumerate(slices[:8])
    shown = [f"{batch.tensor_path(i)} {TensorSpec.of(x)}" for i, x in named]
    return ", ".join([*shown, *["..."] * (len(slices) > len(shown))])


def _free_views(graph: fx.Graph) -> None:
    """Replace views by reshapes, which copy if they must. When attention is differentiated, its
    result may have another memory layout than at export (another kernel, if the mask needs a
    gradient), and export has dropped a ``contiguous`` that changed nothing."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def _packed(x: Tensor) -> Tensor:
    """``x``, or, if elements of it share memory (``expand``), a contiguous meta tensor like it."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if overlaps(x) else x
