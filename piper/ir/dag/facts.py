"""What the compiler knows of a model: its chunks, the values between them, its parameters.

No tensor and no graph: sizes, costs and who reads what. ``facts_of`` reads them off a captured
model; a test may write them down by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from piper.capture.blame import operation_text
from piper.capture.chunk.chunks import AxisPlacement, Body, Gathered, Segment
from piper.capture.chunk.expert_regions import SortedRows, sorted_rows
from piper.capture.graphs import base_of, returned, workspace
from piper.capture.chunk.joint import Joint
from piper.capture.model import Captured
from piper.capture.chunk.donation import private_results
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.chunk_program import BUNDLES, ChunkProgram, Function, Kind, Pass, Ref
from piper.capture.chunk.remat_choice import RematPolicy
from piper.ir.tensors import TensorSpec
from piper.base.codec import ADDED

_STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.UPDATE)


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What one pass of a chunk reads, makes and costs.

    Saved, kept and handed-off tensors and gradients of parameters count as one bundle each, with
    index 0; parameters and buffers are state and are not listed.
    """

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    flops: int
    uses_parameters: bool
    workspace: int = 0
    """Bytes it needs for a while beside what it reads and makes."""
    last: tuple[Ref, ...] = ()
    """What it reads that no later pass of the chunk does."""
    eased: int = 0
    """Bytes of the workspace that it does not need where nobody else needs those either, and they
    are let go as soon as they are used."""
    moved: int = 0
    """Bytes that its operations read and write, each by itself."""
    moved_fused: int = 0
    """The same if all but matrix products and the like are fused."""
    housed: int = 0
    """Bytes more that it needs where the memory of its parameters' gradients is there before it
    runs, so that others can be added to them later."""
    private: tuple[Ref, ...] = field(default=(), metadata=ADDED)
    """Results that share memory with no argument and no other result."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk's passes under one policy of recomputing."""

    passes: Mapping[Pass, PassFacts]
    saved_bytes: int
    """For B or BI."""
    saved_for_bw_bytes: int
    """For B or BW."""
    bi_saved_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One chunk: its regions, its parameters, and its inputs and outputs as numbers of values."""

    index: int
    tags: Mapping[str, int]
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variants: Mapping[RematPolicy, Variant]
    """Under each policy that a strategy can choose."""
    changes: tuple[str, ...] = ()
    """Buffers that its forward gives a new content."""
    buffers: tuple[str, ...] = ()
    """Buffers that its forward reads."""
    random: bool = False
    """Whether its forward draws random numbers."""
    detached: tuple[str, ...] = ()
    """Parameters that it reads but makes no gradient of, though other chunks may."""
    gradients: Mapping[Ref, Stored] = field(default_factory=dict)
    """How the gradients of its inputs lie that it makes; those that are not here lie as the value
    does."""
    segments: tuple[Segment, ...] = ()
    """Which part of a region it is under tensor and context parallelism, one for each axis."""
    sorted_rows: SortedRows | None = None
    """Of experts whose rows are sorted by expert, how."""
    products: tuple[str, ...] = field(default=(), metadata=ADDED)
    """Its matrix products and attentions, with their modules and lines."""
    gathered: tuple[Gathered, ...] = field(default=(), metadata=ADDED)
    """Operations that read their inputs gathered, since no rule says how to shard them."""

    @property
    def moving(self) -> Segment | None:
        """The segment that is a redistribution, if it is one."""
        return next((s for s in self.segments if s.redistribution is not None), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor lies in memory."""

    nbytes: int
    """Bytes of its storage: an expanded dimension takes none."""
    copied: int | None = None
    """Bytes of the contiguous copy that is sent in its place; None if it is sent as it is."""

    @staticmethod
    def of(spec: TensorSpec) -> Stored:
        return Stored(spec.nbytes, spec.copied)

    @property
    def sent(self) -> int:
        """Bytes of a message with it."""
        return self.nbytes if self.copied is None else self.copied

    @property
    def dense(self) -> Stored:
        """How a sum lies whose first term lies so: the same if that has neither gaps nor expanded
        dimensions."""
        return self if self.nbytes == self.sent else Stored(self.sent)


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """A tensor between chunks, as one device holds it for one microbatch."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    copied: int | None = None
    """As in ``Stored``."""
    rows: int | None = None
    """The dimension that has the rows of the batch, if any."""
    order: int | None = None
    """The chunk that put its rows into an order of its own; None if they lie one after another, as
    in the batch. Devices that shard rows otherwise than that chunk does can only compute each by
    itself."""
    placements: tuple[AxisPlacement, ...] = ()
    """Along the axes of tensor and context parallelism where it is not replicated."""

    @property
    def stored(self) -> Stored:
        return Stored(self.nbytes, self.copied)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter as the model has it, not divided."""

    shape: tuple[int, ...]
    nbytes: int
    trained: bool
    dtype: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    """What its gradients are summed in, and, where it is not ``dtype``, what is updated: the
    parameter itself is then a copy."""


@dataclass(frozen=True, slots=True)
class Model:
    """Chunks in an order that respects every edge; values by number; parameters by name."""

    chunks: tuple[ChunkFacts, ...]
    values: tuple[ValueFacts, ...]
    parameters: Mapping[str, ParameterFacts]
    loss: int
    batch: int
    """The size of the whole batch."""
    remat: RematPolicy
    """The policy of chunks that no directive speaks of."""
    count: int | None = None
    """The value that the sum of losses is divided by, if the loss gives one."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Bytes of buffers and constants, by name."""
    outputs: tuple[int, ...] = ()
    """The values that are reported beside the loss: the mean of single numbers, and the rows of
    others."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """How the model itself says that its modules can be sharded, by pattern of their names."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of a model in one mode, training or evaluation."""

    whole: Model
    """What a strategy is applied to: no region is divided yet."""
    models: Mapping[int, Model]
    """Under the strategy, at the shapes of each size of group: of a region whose experts it
    divides, the costs are those of a share."""


class Known:
    """What was found out about joint graphs, for other models that have them too."""

    def __init__(self, passes: Passes | None = None) -> None:
        self.passes = passes or Passes()
        self._variants: dict[tuple[int, RematPolicy], Variant] = {}

    def variant(self, captured: Captured, joint: Joint, policy: RematPolicy) -> Variant:
        """The facts of ``joint`` under ``policy``."""
        key = id(joint), policy  # ``passes`` keeps the graph
        if key not in self._variants:
            self._variants[key] = _variant(captured, self.passes.of(joint, policy))
        return self._variants[key]


def facts_of(
    captured: Captured,
    remat: RematPolicy,
    joints: Sequence[Joint] | None = None,
    known: Known | None = None,
    policies: Iterable[RematPolicy] = RematPolicy,
) -> Model:
    """The facts of a captured model; ``joints`` stand for the chunks' own, if given; ``known``
    keeps what was found out for the next call. A strategy can choose among ``policies``."""
    joints = captured.joints if joints is None else joints
    known = known or Known()
    chosen = tuple(policies)
    values = tuple(
        ValueFacts(
            value.name,
            value.spec.shape,
            value.spec.nbytes,
            value.spec.copied,
            placements=value.placements,
        )
        for value in captured.cut.values
    )
    chunks = tuple(
        ChunkFacts(
            index=chunk.index,
            tags={region.name: region.index for region in chunk.tags},
            parameters=chunk.parameters,
            inputs=chunk.inputs,
            outputs=chunk.outputs,
            variants={policy: known.variant(captured, joint, policy) for policy in chosen},
            changes=chunk.updates,
            buffers=chunk.buffers,
            random=program.functions[Pass.F].random,
            detached=tuple(
                name
                for i, name in enumerate(chunk.parameters)
                if Ref(Kind.PARAMETER_GRAD, i) not in program.specs
            ),
            gradients={
                ref: stored
                for ref, spec in program.specs.items()
                if ref.kind is Kind.INPUT_GRAD
                and spec.shape == values[chunk.inputs[ref.index]].shape  # else it cannot run here
                and (stored := Stored.of(spec)) != values[chunk.inputs[ref.index]].stored
            },
            segments=chunk.segments,
            sorted_rows=sorted_rows(chunk.body),
            products=_products(chunk.body),
            gathered=chunk.gathered,
        )
        for chunk, joint, program in zip(captured.chunks, joints, captured.programs, strict=True)
    )
    parameters: dict[str, ParameterFacts] = {}
    buffers: dict[str, int] = {}
    for chunk, program in zip(captured.chunks, captured.programs, strict=True):
        for i, name in enumerate(chunk.parameters):
            spec = captured.whole.get(name) or program.specs[Ref(Kind.PARAMETER, i)]
            trained = Ref(Kind.PARAMETER_GRAD, i) in program.specs
            trained |= name in parameters and parameters[name].trained
            kept = captured.master or spec.dtype
            parameters[name] = ParameterFacts(spec.shape, spec.nbytes, trained, spec.dtype, kept)
        for i, name in enumerate(chunk.buffers):
            buffers[name] = program.specs[Ref(Kind.BUFFER, i)].nbytes
    size = captured.example.size
    cut = captured.cut
    return Model(
        chunks=chunks,
        values=values,
        parameters=parameters,
        loss=cut.loss,
        batch=size,
        remat=remat,
        count=cut.count,
        buffers=buffers,
        outputs=cut.outputs,
        declared=captured.declared,
    )


_PRODUCTS = {
    "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "convolution", "conv1d",
    "conv2d", "conv3d", "scaled_dot_product_attention", "head_tail_attention", "grouped_mm",
}  # fmt: skip


def _products(body: Body) -> tuple[str, ...]:
    nodes = [node for node in body.module.graph.nodes if node.op == "call_function"]
    names = [str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2] for node in nodes]
    kept = (node for node, name in zip(nodes, names, strict=True) if name in _PRODUCTS)
    return tuple(dict.fromkeys(map(operation_text, kept)))


def _variant(captured: Captured, program: ChunkProgram) -> Variant:
    return Variant(
        passes={which: _pass(captured, program, which) for which in program.functions},
        saved_bytes=program.saved_bytes - program.saved_for_bw_bytes,
        saved_for_bw_bytes=program.saved_for_bw_bytes,
        bi_saved_bytes=sum(spec.nbytes for spec in program.bi_saved),
    )


_LATER: Mapping[Pass, tuple[Pass, ...]] = {
    Pass.F: (Pass.B, Pass.BI, Pass.BW),
    Pass.B: (),
    Pass.BI: (Pass.BW,),
    Pass.BW: (),
}


def _pass(captured: Captured, program: ChunkProgram, which: Pass) -> PassFacts:
    function = program.functions[which]
    reads, writes, uses_parameters, last = ends_of(program, which)
    freeing = max(0, _freeing(function, last))
    return PassFacts(
        reads=reads,
        writes=writes,
        flops=function.flops,
        uses_parameters=uses_parameters,
        workspace=function.workspace,
        last=last,
        eased=function.workspace - freeing,
        moved=function.moved,
        moved_fused=function.moved_fused,
        housed=max(
            0,
            _housed(captured, program, function, ()) - function.workspace,
            _housed(captured, program, function, last) - freeing,
        ),
        private=private_results(function),
    )


def ends_of(
    program: ChunkProgram, which: Pass
) -> tuple[tuple[Ref, ...], tuple[Ref, ...], bool, tuple[Ref, ...]]:
    """What a pass reads and makes, whether it uses parameters, and what it is the last to read."""
    function = program.functions[which]
    after = [program.functions[later] for later in _LATER[which] if later in program.functions]
    needed = {ref for later in after for ref in bundled(later.arguments)}
    reads = bundled(function.arguments)
    return (
        reads,
        bundled(function.results),
        any(ref.kind is Kind.PARAMETER for ref in function.arguments),
        tuple(ref for ref in reads if ref not in needed),
    )


def _housed(
    captured: Captured, program: ChunkProgram, function: Function, last: tuple[Ref, ...]
) -> int:
    """The workspace of a function that finds the memory of parameters' gradients there: some it
    writes into it, the others are copied there in the end."""
    graph = function.module.graph
    grads = [i for i, r in enumerate(function.results) if r.kind is Kind.PARAMETER_GRAD]
    specs = {i: program.specs[function.results[i]] for i in grads}
    fitting = [
        i
        for i in captured.compiler.into(function)
        if specs[i].copied is None and captured.master in (None, specs[i].dtype)
    ]
    ends = returned(graph)
    into = [base_of(ends[i]) for i in fitting]
    copied = sum(specs[i].nbytes for i in grads if i not in fitting)
    return workspace(graph, _given(function, last), into) + copied


def _freeing(function: Function, last: tuple[Ref, ...]) -> int:
    """The workspace of a function to which the arguments in ``last`` are given for good."""
    return workspace(function.module.graph, _given(function, last))


def _given(function: Function, last: tuple[Ref, ...]) -> list[fx.Node]:
    placeholders = function.module.graph.find_nodes(op="placeholder")
    arguments = zip(placeholders, function.arguments, strict=True)
    return [node for node, ref in arguments if set(bundled((ref,))) & set(last)]


def bundled(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """``refs`` without state, and with one reference for each bundle: what slots hold."""
    kept = (Ref(r.kind, 0) if r.kind in BUNDLES else r for r in refs if r.kind not in _STATE)
    return tuple(dict.fromkeys(kept))
