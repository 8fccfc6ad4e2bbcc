"""A ``Compiler`` turns pure graphs into callables.

Every callable takes its arguments in one list, empties the list, so that each argument can be freed
after its last use, and returns its results in order. It can write some results into tensors of the
caller. A compiler also chooses the decompositions with which chunks are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import CodeGen
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper.base.arguments import CompilerName, choice
from piper.base.errors import CaptureError
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.code.gpu_index import make_fakes, move_values, name_gpu
from piper.capture.code.peephole import leave_out, products_of, write_into
from piper.capture.code.strides import keep_strides, strides_of
from piper.capture.graphs import copied, module_of
from piper.capture.intercept.generators import default_exchanged, draw_privately, take_seeds
from piper.capture.operators.grouped_mm import EAGER
from piper.ir.passes import Kind, Pass, RematPolicy

Runner = Callable[[list[Any]], Sequence[Tensor]]
Decompositions = Mapping[OpOverload, Callable[..., Any]]


class Compiler(Protocol):
    """A way to trace and to run graphs."""

    remat: RematPolicy
    """The default policy of activation checkpointing."""

    def decompositions(self) -> Decompositions: ...

    def rewrite(self, joint: fx.GraphModule) -> None:
        """Simplify a joint graph in place before it is cut into passes."""

    def into(self, function: Function) -> tuple[int, ...]:
        """Results that the callable can write into contiguous tensors of the caller. These tensors
        may follow the arguments: one for each such result, or None."""

    def compile(self, function: Function, which: Pass, where: torch.device) -> Runner:
        """A callable for tensors on ``where``."""
        ...


class Eager:
    """Runs the ops one by one, as PyTorch would: results are the same bit for bit."""

    remat = RematPolicy.NONE

    def decompositions(self) -> Decompositions:
        return {}

    def rewrite(self, joint: fx.GraphModule) -> None:
        return

    def into(self, function: Function) -> tuple[int, ...]:
        products = products_of(function.module.graph)
        return tuple(i for i in products if function.results[i].kind is Kind.PARAMETER_GRAD)

    def compile(self, function: Function, which: Pass, where: torch.device) -> Runner:
        graph = copied(function.module.graph)
        name_gpu(graph, where)
        into = self.into(function)
        write_into(graph, into)
        leave_out(graph)
        draw_privately(graph)
        for node in graph.nodes:
            node.target = _DIRECT.get(node.target, node.target)
        graph.set_codegen(_Boxed(len(into)))
        return fx.GraphModule(torch.nn.Module(), graph).forward


_ATEN = torch.ops.aten
_SAME_NAME = (
    "add.Scalar add.Tensor addmm.default bmm.default cat.default clone.default cumsum.default "
    "div.Scalar div.Tensor embedding.default eq.Tensor exp.default gather.default "
    "index_add.default index_select.default mean.dim mm.default mul.Scalar mul.Tensor "
    "native_layer_norm.default neg.default permute.default pow.Tensor_Scalar relu.default "
    "rsqrt.default scatter.src select.int sigmoid.default split_with_sizes.default squeeze.dim "
    "sub.Tensor sum.dim_IntList t.default tanh.default transpose.int unsqueeze.default where.self"
)
_DIRECT: Mapping[object, Callable[..., Any]] = {
    **{
        getattr(getattr(_ATEN, name), overload): getattr(torch, name)
        for name, overload in (op.split(".") for op in _SAME_NAME.split())
    },
    # Real tensors may have other strides than the traced fake tensors (gradients of batch norm and
    # of attention do): reshape copies where a view is not possible.
    _ATEN._unsafe_view.default: torch.reshape,
    _ATEN.view.default: torch.reshape,
    **EAGER,
}
"""Torch functions for the most common ops, and the Python functions of Piper's own ops: the same
kernels at half the call overhead."""


class Inductor:
    """Compiles each graph with TorchInductor and the passes that ``torch.compile`` runs."""

    remat = RematPolicy.MIN_CUT

    def decompositions(self) -> Decompositions:
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()

    def rewrite(self, joint: fx.GraphModule) -> None:
        from torch._inductor import config as inductor_config
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        fakes = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        before = strides_of(joint.graph)
        values = (node.meta.get("val") for node in joint.graph.nodes)
        first = next(value for value in values if isinstance(value, FakeTensor))
        mode = first.fake_mode
        # Inductor decides by timing whether to pad products: processes could decide differently
        with V.set_fake_mode(mode), inductor_config.patch(shape_padding=False):
            joint_graph_passes(joint, input_device=first.device)
        # some of these passes trace replacements under their own fake mode
        FakeTensorProp(joint, mode).propagate_dont_convert_inputs(*fakes)
        keep_strides(joint.graph, before)

    def into(self, function: Function) -> tuple[int, ...]:
        return ()

    def compile(self, function: Function, which: Pass, where: torch.device) -> Runner:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Inductor keeps nothing in its cache without a shape environment
        mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=ShapeEnv())
        compiler_config: Any = torch.compiler.config
        graph = copied(function.module.graph)
        results = graph.output_node()
        # the other passes were traced with the present strides of these results
        results.meta["user_visible_output_idxs"] = list(range(len(function.results)))
        name_gpu(graph, where)
        make_fakes(graph, where, mode)
        module = module_of(graph)
        move_values(module, where)
        seeds = take_seeds(graph)
        fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        consumed = [i for i, ref in enumerate(function.arguments) if ref in function.consumes]
        values = [node.meta.get("val") for node in graph.nodes]
        context = TracingContext(next(x.fake_mode for x in values if isinstance(x, FakeTensor)))
        context.fw_metadata = _Donation(consumed)  # type: ignore[assignment]
        # the key of Inductor's cache does not include donations
        tag = compiler_config.patch(cache_key_tag=f"piper consumes {consumed}")
        with tracing(context), tag:
            # no input is declared static: Inductor does not check the alignment of static inputs,
            # and parameters may begin anywhere in a flat buffer
            runner: Runner = compile_fx_inner(module, fakes, is_backward=which is not Pass.F)
        return runner if not function.random else _drawing(runner, seeds)


def _drawing(run: Runner, seeds: Sequence[Callable[[], Tensor]]) -> Runner:
    """``run`` with ``seeds`` as its last arguments. Without seeds the code draws by itself, always
    from the default generator, which is exchanged for the call."""

    def given(arguments: list[Any]) -> Sequence[Tensor]:
        arguments += [draw() for draw in seeds]
        return run(arguments)

    def exchanged(arguments: list[Any]) -> Sequence[Tensor]:
        with default_exchanged():
            return run(arguments)

    return given if seeds else exchanged


@dataclass(frozen=True, slots=True)
class _Donation:
    """The part of AOTAutograd's metadata that Inductor reads: arguments whose memory it may
    reuse."""

    bw_donated_idxs: list[int]


def compiler_named(name: str) -> Compiler:
    """The compiler that ``compiler=name`` selects."""
    kind = choice("compiler", name, CompilerName, CaptureError)
    return Inductor() if kind is CompilerName.INDUCTOR else Eager()


class Runners:
    """Callables for programs' passes on one device, each compiled once, at its first use."""

    def __init__(self, compiler: Compiler, where: torch.device) -> None:
        self.compiler = compiler
        self._where = where
        self._made: dict[tuple[ChunkProgram, Pass], Runner] = {}

    def get(self, program: ChunkProgram, which: Pass) -> Runner:
        key = program, which
        if key not in self._made:
            function = program.functions[which]
            self._made[key] = self.compiler.compile(function, which, self._where)
        return self._made[key]


class _Boxed(CodeGen):
    """Generates ``def forward(self, args)``, which unpacks and clears the list ``args``. The last
    ``optional`` arguments may be left out."""

    def __init__(self, optional: int) -> None:
        super().__init__()
        self._optional = optional

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        count = len(names) - self._optional
        unpack = "".join(f"{name}, " for name in names[:count]) + "*into"
        more = f"\n    {', '.join(names[count:])}, = into or {(None,) * self._optional}"
        return (
            f"def {self._func_name}(self, args):\n    {unpack} = args{more * (count < len(names))}"
            "\n    args.clear()"
        )
