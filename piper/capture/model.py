"""``capture``: a model, its loss and one example batch enter; chunks with their programs leave.

The stages in order: export, cut into chunks, differentiate each distinct chunk, split it into
passes. The result is all that the executor and the schedule compiler read of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from piper.base.arguments import choice
from piper.base.codec import picked
from piper.base.errors import CaptureError
from piper.base.modes import Precision, autocast_kinds
from piper.base.units import class_text
from piper.capture.batch import Batch
from piper.capture.chunk.autodiff import differentiate
from piper.capture.chunk.chunks import Chunk, Cut, refuse_empty
from piper.capture.chunk.cut import cut
from piper.capture.chunk.donation import consume_inputs
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.chunk.unfold import unfolded
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import Compiler, compiler_named
from piper.capture.loss.loss_checks import refuse_uncallable
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import Loss, loss_or_own
from piper.capture.repeats.equal_modules import Found
from piper.capture.repeats.folds import NotFolded
from piper.capture.shard.local_chunks import Sharding
from piper.capture.shard.segments import segmented
from piper.capture.shard.weights.derived_styles import derived_styles
from piper.capture.trace.export import TraceRequest, export, exported_of, trace_text
from piper.capture.trace.exported import Exported, TraceNotes
from piper.capture.trace.quiet import quiet_tracing
from piper.ir.dag.facts import LOSS_PREFIX
from piper.ir.passes import Kind, Ref, RematPolicy
from piper.ir.shards import Style
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured(TraceNotes):
    """A model's step as chunks of pure functions. It equals only itself, so that it can be a
    key."""

    cut: Cut
    programs: tuple[ChunkProgram, ...]
    """One for each chunk; equal chunks share one object."""
    joints: tuple[Joint, ...]
    example: Batch
    microbatches: int
    device: torch.device
    compiler: Compiler
    remat: RematPolicy
    """How much of the forward the backward passes recompute."""
    master: torch.dtype | None = None
    """The dtype of the master weights, if the programs take copies in another precision."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """The model's own tensor-parallel plan (``tensor_plan``, or ``_tp_plan`` of transformers
    models)."""
    whole: Mapping[str, TensorSpec] = field(default_factory=dict)
    """The unsharded specs of parameters, where the programs take shards."""
    found: Found = field(default_factory=Found)
    """What the trace has found of the model's equal modules, for later traces."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.cut.chunks

    @property
    def parameters(self) -> dict[str, TensorSpec]:
        """The specs of the unsharded parameters, by name."""
        return {
            name: self.whole.get(name) or program.specs[Ref(Kind.PARAMETER, i)]
            for chunk, program in zip(self.chunks, self.programs, strict=True)
            for i, name in enumerate(chunk.parameters)
        }

    @property
    def outputs(self) -> dict[str, int]:
        """The values reported beside the loss, by name."""
        if self.output_tree.spec is None:
            return {}
        return dict(self.output_tree.put(self.cut.outputs))

    def sharded(self, shardings: Mapping[int, Sequence[Sharding]], passes: Passes) -> Captured:
        """The same model under tensor or context parallelism: each chunk in ``shardings`` becomes
        its segments, as one device runs them. ``passes`` as for ``capture``."""
        ends = [
            (name, program.specs, i)
            for chunk, program in zip(self.chunks, self.programs, strict=True)
            for i, name in enumerate(chunk.parameters)
        ]
        trained = {name for name, specs, i in ends if Ref(Kind.PARAMETER_GRAD, i) in specs}
        whole = {name: specs[Ref(Kind.PARAMETER, i)] for name, specs, i in ends}
        with _tracing(), quiet_tracing():
            pieces = segmented(self.cut, shardings)
            joints = differentiate(pieces, trained.__contains__, self.compiler, {})
            unmarked = [passes.of(joint, self.remat) for joint in joints]
            programs = consume_inputs(pieces, unmarked)
        return replace(self, cut=pieces, joints=joints, programs=programs, whole=whole)

    def derived_styles(self, chunks: Collection[int], ways: int) -> dict[str, Style]:
        """How parameters of ``chunks`` are sharded over ``ways`` devices with the least
        communication."""
        with _tracing(), quiet_tracing():
            return derived_styles(self.cut, chunks, ways)

    @property
    def unique_programs(self) -> tuple[ChunkProgram, ...]:
        """Every distinct program once, in the order of its first chunk."""
        return tuple(dict.fromkeys(self.programs))


def capture(
    model: nn.Module,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any] = (),
    loss: Loss | None = None,
    tags: Mapping[str, str] | None = None,
    microbatches: int = 1,
    device: torch.device | str | None = None,
    compiler: str = "eager",
    remat: str | None = None,
    outputs: Outputs | None = None,
    precision: str = Precision.FP32.value,
    passes: Passes | None = None,
    found: Found | None = None,
    known: str | None = None,
) -> Captured:
    """Turn ``model`` and ``loss`` into chunks whose passes are pure functions.

    ``inputs`` (positional, or a mapping for keywords) and ``targets`` are one example of the
    whole batch: real, fake or meta tensors; only shapes and dtypes are read. Without ``loss``, the
    loss in the model's output is trained. ``model`` may be on any device, meta included, and is not
    changed; the programs run on ``device``. ``remat`` is "none", "min-cut" or "all"; the compiler
    has the default. ``outputs`` selects results of the step beside the loss from the model's
    output. ``precision`` "bf16" computes with bf16 parameters and inputs, "fp32" with the model's
    own dtypes. ``passes`` caches joint graphs and their programs; callers can share it.
    ``found`` is that of an earlier capture of the model, with other rows or in the other mode.
    ``known`` is what another capture has ``traced``: one that traces the same raises ``SameTrace``.
    """
    chosen = compiler_named(compiler)
    policy = chosen.remat if remat is None else choice("remat", remat, RematPolicy, CaptureError)
    loss = loss_or_own(loss, targets)
    check_model(model)
    where = device_of(model, device)
    example = Batch.of(inputs, targets)
    _check(model, loss, targets)
    kind = choice("precision", precision, Precision, CaptureError)
    request = TraceRequest(
        model,
        example,
        loss,
        tags or {},
        microbatches,
        where,
        outputs,
        kind.dtype,
        Found() if found is None else found.copied(),
        known,
    )
    with _tracing():
        return _capture(request, chosen, policy, passes or Passes())


def trace(
    model: nn.Module,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any],
    loss: Loss,
    tags: Mapping[str, str] | None,
    microbatches: int,
    device: torch.device | str | None,
    outputs: Outputs | None,
    precision: str,
    found: Found | None,
) -> str:
    """A digest of what ``capture`` would trace, to compare with ``Captured.traced``."""
    with _tracing():
        request = TraceRequest(
            model,
            Batch.of(inputs, targets),
            loss,
            tags or {},
            microbatches,
            device_of(model, device),
            outputs,
            choice("precision", precision, Precision, CaptureError).dtype,
            Found() if found is None else found.copied(),
        )
        return trace_text(request)


# torch's tracing modes, and Python's warnings, are process-wide
_tracing_is_process_wide = threading.RLock()


@contextmanager
def _tracing() -> Iterator[None]:
    """One trace at a time. The modules that tracing makes generate their code when called."""
    with _tracing_is_process_wide, unset_fake_temporarily(), _use_lazy_graph_module(True):
        yield


def _capture(
    request: TraceRequest, compiler: Compiler, policy: RematPolicy, passes: Passes
) -> Captured:
    exported, pieces = _exported(request)
    model, loss = request.model, request.loss
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    if isinstance(loss, nn.Module):
        trained |= {LOSS_PREFIX + n for n, p in loss.named_parameters() if p.requires_grad}
    joints = differentiate(pieces, trained.__contains__, compiler, passes.joints)
    refuse_empty(pieces, exported.regions, exported.loss_region)
    return Captured(
        **picked(exported, (field.name for field in fields(TraceNotes))),
        cut=pieces,
        programs=consume_inputs(pieces, [passes.of(joint, policy) for joint in joints]),
        joints=joints,
        example=request.batch,
        microbatches=request.parts,
        device=request.device,
        compiler=compiler,
        remat=policy,
        master=None if request.dtype is None else torch.float32,
        declared=_declared(model),
        found=request.found,
    )


def _exported(request: TraceRequest) -> tuple[Exported, Cut]:
    """The exported step, and its chunks."""
    traced = export(request)
    try:
        exported = exported_of(traced, request, folded=True)
        return exported, unfolded(cut(exported), exported.folds)
    except NotFolded:
        exported = exported_of(traced, request, folded=False)
        said = f"{exported.tracing}; their graphs differ, so that of each is made"
        return replace(exported, tracing=said), cut(exported)


def _declared(model: nn.Module, path: str = "") -> dict[str, str]:
    """The attribute ``tensor_plan``, or ``_tp_plan`` of transformers models. If the model has
    neither itself, the plans of its submodules, with their paths in the model. Plans do not name
    the layers inside adapters of PEFT (``base_layer``): a model with these declares none."""
    if not path and any("base_layer" in module._modules for module in model.modules()):
        return {}
    own = {**vars(type(model)), **vars(model)}  # a wrapper may pass on those of what it wraps
    names = [n for n in ("tensor_plan", "_tp_plan") if n in own or hasattr(type(model), n)]
    plan: Mapping[str, Any] = next((p for p in (getattr(model, n) for n in names) if p), {})
    if plan:
        return {f"{path}{pattern}": str(how) for pattern, how in dict(plan).items()}
    inner: dict[str, str] = {}
    for name, child in model.named_children():
        inner |= _declared(child, f"{path}{name}.")
    return inner


_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp")
"""The modules of torch's classes that distribute a model."""


def check_model(model: object) -> None:
    """Refuse anything but an ``nn.Module``, and a module that is wrapped to be distributed."""
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", "")
        kind = "the class" if isinstance(model, type) else class_text(model)
        cure = f": give an instance, {name}(...)" if isinstance(model, type) else ""
        if isinstance(model, str):
            cure = ": load it, AutoModelForCausalLM.from_pretrained(name)"
        raise CaptureError(f"the model must be an nn.Module, not {f'{kind} {name}'.strip()}{cure}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "the model is a torch.jit.ScriptModule, which cannot be captured: give the module that "
            "was traced or scripted"
        )
    for base in type(model).__mro__:
        if base.__module__.startswith(_WRAPPERS):
            raise CaptureError(
                f"the model is a {base.__name__}, which distributes it already: give the module "
                "itself (model.module, or the model before fully_shard); the strategy says how it "
                "is replicated and sharded, mesh(dp=2, zero=3)"
            )


def _check(model: nn.Module, loss: object, targets: Sequence[Any]) -> None:
    refuse_uncallable(loss, targets)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(
                f"{name or type(module).__name__} is an embedding with sparse=True: its gradient "
                "cannot be summed over devices; leave sparse out"
            )
    if torch.is_inference_mode_enabled():
        raise CaptureError("capture cannot run under torch.inference_mode(): leave it first")
    if autocast_kinds():
        raise CaptureError(
            "capture cannot run under torch.autocast(), because steps run outside it: leave it and "
            'give precision="bf16", or enter it in the forward of the model, which is captured'
        )


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device the programs run on: ``device``, else the model's, else (meta) the CPU."""
    if device is not None:
        return _available(device)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise CaptureError(
            f"the model lives on several devices ({', '.join(sorted(map(str, devices)))}): "
            "move it to one, or say device="
        )
    return devices.pop() if devices else torch.device("cpu")


def _available(device: torch.device | str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise CaptureError(
            f"device={device!r} is not a device; on this machine there is {' and '.join(here)}"
        ) from None
    if wanted.type not in here:
        raise CaptureError(
            f"device={str(wanted)!r} is not available on this machine; programs can run on: "
            f"{', '.join(here)}"
        )
    return wanted
