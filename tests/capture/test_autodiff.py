"""Properties of programs: inputs, saved tensors, results and cost of passes; passes are pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper import annotate
from piper.capture.chunk.chunks import Chunk
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.model import Captured, capture
from piper.ir.passes import SAVED, Kind, Pass, Ref
from piper.ir.tensors import TensorSpec
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from tests.one_device import runners_of
from tests.reference import Net, piper_step

POLICIES = ("none", "min-cut", "all")
DENSE = DenseConfig(vocab=19, dim=16, layers=2, heads=4, mlp_dim=12, max_seq=8, dropout=0.2)
MOE = MoEConfig(
    vocab=19, dim=16, layers=2, heads=4, mlp_dim=12, max_seq=8, experts=4, aux_loss_weight=0.1
)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def text(batch: int = 2, seq: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randint(19, (batch, seq)), torch.randint(19, (batch, seq))


def captured_dense(config: DenseConfig, remat: str = "none") -> Captured:
    x, y = text()
    return capture(DenseTransformer(config), inputs=(x,), targets=(y,), loss=lm_loss, remat=remat)


@dataclass(frozen=True)
class Case:
    """A captured model and a batch for it."""

    captured: Captured
    model: nn.Module
    batch: tuple[Tensor, ...]


def residual(self: Net, x: Tensor) -> Tensor:
    with annotate("r"):
        x = self.a(x)
    with annotate("r"):
        x = x.view(-1, 2, 3).flip(2).flatten(1) + self.w
    with annotate("r"):
        x = (x + self.w).relu()
    with annotate("r"):
        x = (x + self.w).relu() * x
        x = x * self.b(self.norm(x)).tanh()
    with annotate("r"):
        return x.softmax(-1) * self.w.exp() + x


def build(name: str, remat: str) -> Case:
    torch.manual_seed(0)
    batch: tuple[Tensor, ...] = text()
    loss = lm_loss
    if name == "dense":
        model: nn.Module = DenseTransformer(DENSE)
    elif name == "moe":
        model = MoETransformer(MOE)
    else:
        a, b = nn.Linear(6, 6), nn.Linear(6, 6)
        w = nn.Parameter(torch.randn(4, 6))
        model = Net(residual, a=a, b=b, w=w, norm=nn.BatchNorm1d(6))
        batch, loss = (torch.randn(4, 6), torch.randn(4, 6)), F.mse_loss
    captured = capture(model, inputs=batch[:1], targets=batch[1:], loss=loss, remat=remat)
    return Case(captured, model, batch)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((n, p), marks=pytest.mark.thorough if n == "dense" else ())
        for n in ("dense", "moe", "net")
        for p in POLICIES
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Case:
    return build(*request.param)


@dataclass
class Trace:
    """One chunk's tensors through all its passes."""

    chunk: Chunk
    program: ChunkProgram
    tensors: dict[Ref, Tensor]
    split: dict[Ref, Tensor]
    """The results of BI and BW."""
    calls: list[tuple[Pass, list[Tensor], list[Tensor], list[Tensor]]]
    """Each pass with its arguments, copies of them from before the call, and its results."""


def run(case: Case) -> list[Trace]:
    """Run every pass of every chunk with the runners alone."""
    captured = case.captured
    parameters = {n: p.detach() for n, p in case.model.named_parameters(remove_duplicate=False)}
    buffers = {n: b.clone() for n, b in case.model.named_buffers()}
    batch = case.batch
    totals = captured.totals.of(batch, len(batch[0])) if captured.totals is not None else ()
    values: dict[int, Tensor] = dict(enumerate((*batch, *totals)))
    traces: list[Trace] = []
    runners = runners_of(captured)

    def call(trace: Trace, which: Pass, tensors: dict[Ref, Tensor]) -> None:
        function = trace.program.functions[which]
        arguments = [tensors[ref] for ref in function.arguments]
        before = [a.clone() for a in arguments]
        given = list(arguments)
        with torch.no_grad():
            results = list(runners[trace.chunk.index][which](given))
        assert given == [], "a runner empties its list of arguments"
        trace.calls.append((which, arguments, before, results))
        tensors.update(zip(function.results, results, strict=True))

    for chunk, program in zip(captured.chunks, captured.programs, strict=True):
        tensors = {Ref(Kind.PARAMETER, i): parameters[n] for i, n in enumerate(chunk.parameters)}
        tensors |= {Ref(Kind.BUFFER, i): buffers[n] for i, n in enumerate(chunk.buffers)}
        tensors |= {Ref(Kind.INPUT, i): values[v] for i, v in enumerate(chunk.inputs)}
        traces.append(Trace(chunk, program, tensors, {}, []))
        call(traces[-1], Pass.F, tensors)
        values.update({v: tensors[Ref(Kind.OUTPUT, i)] for i, v in enumerate(chunk.outputs)})
    gradients = {captured.cut.loss: torch.ones_like(values[captured.cut.loss])}
    for trace in reversed(traces):
        chunk, tensors = trace.chunk, trace.tensors
        for i, value in enumerate(chunk.outputs):
            if value in gradients:
                tensors[Ref(Kind.OUTPUT_GRAD, i)] = gradients.pop(value)
        trace.split.update(tensors)
        for which in (Pass.BI, Pass.BW):
            if which in trace.program.functions:
                call(trace, which, trace.split)
        if Pass.B in trace.program.functions:
            call(trace, Pass.B, tensors)
        for ref, tensor in tensors.items():
            if ref.kind is Kind.INPUT_GRAD:
                value = chunk.inputs[ref.index]
                gradients[value] = gradients[value] + tensor if value in gradients else tensor
    return traces


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.cases(fast=1)
def test_nothing_saved_shares_storage_with_anything_else(case: Case) -> None:
    """Except an output that is a view of a saved tensor, which is then its base."""
    for trace in run(case):
        kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT, *SAVED)
        held = [(ref, x) for ref, x in trace.tensors.items() if ref.kind in kinds]
        for ref, x in held:
            if ref.kind in SAVED:
                bases = {r for r, y in held if r.kind is Kind.OUTPUT and y._is_view()}
                others = [(r, y) for r, y in held if r != ref and r not in bases]
                shared = [str(r) for r, y in others if storage(x) == storage(y)]
                assert not shared, f"{trace.chunk.name}: {ref} shares storage with {shared}"


@pytest.mark.cases(fast=2, slow=1)
def test_what_is_consumed_shares_no_storage_with_gradients_that_move_on(case: Case) -> None:
    for trace in run(case):
        moving = {storage(x) for r, x in trace.split.items() if r.kind is Kind.INPUT_GRAD}
        consumed = {ref for f in trace.program.functions.values() for ref in f.consumes}
        for ref, x in trace.split.items():
            if ref in consumed or ref.kind is Kind.PARAMETER_GRAD:
                assert storage(x) not in moving, f"{trace.chunk.name}: {ref}"


@pytest.mark.cases(fast=3, slow=1)
def test_parameter_gradients_can_be_added_to_in_place(case: Case) -> None:
    for trace in run(case):
        for made in (trace.tensors, trace.split):
            grads = {r: x for r, x in made.items() if r.kind is Kind.PARAMETER_GRAD}
            others = {storage(x) for r, x in trace.tensors.items() if r not in grads}
            assert len({storage(x) for x in grads.values()}) == len(grads)
            for ref, x in grads.items():
                assert storage(x) not in others, f"{trace.chunk.name}: {ref}"
                assert 0 not in [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


def test_specs_say_what_the_runners_return(case: Case) -> None:
    for trace in run(case):
        for which, _, _, results in trace.calls:
            for ref, x in zip(trace.program.functions[which].results, results, strict=True):
                expected = trace.program.specs[ref]
                assert TensorSpec.of(x) == expected, f"{trace.chunk.name}, {which}, {ref}"


def test_specs_say_what_the_runners_take(case: Case) -> None:
    for trace in run(case):
        for which, arguments, _, _ in trace.calls:
            for ref, x in zip(trace.program.functions[which].arguments, arguments, strict=True):
                expected = trace.program.specs[ref]
                assert TensorSpec.of(x) == expected, f"{trace.chunk.name}, {which}, {ref}"


def test_passes_leave_their_arguments_alone(case: Case) -> None:
    for trace in run(case):
        for which, arguments, before, _ in trace.calls:
            for x, copy in zip(arguments, before, strict=True):
                assert torch.equal(x, copy), f"{trace.chunk.name}, {which}"


def test_passes_give_the_same_again(case: Case) -> None:
    torch.manual_seed(1)
    first = run(case)
    torch.manual_seed(1)
    for one, two in zip(first, run(case), strict=True):
        for (_, _, _, a), (_, _, _, b) in zip(one.calls, two.calls, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_bi_and_bw_make_what_b_makes(case: Case) -> None:
    for trace in run(case):
        gradients = (Kind.INPUT_GRAD, Kind.PARAMETER_GRAD)
        whole = {r: x for r, x in trace.tensors.items() if r.kind in gradients}
        halves = {r: x for r, x in trace.split.items() if r.kind in gradients}
        assert whole.keys() == halves.keys()
        assert all(torch.equal(whole[ref], halves[ref]) for ref in whole)


def test_bw_takes_what_bi_hands_off(case: Case) -> None:
    for program in case.captured.unique_programs:
        functions = program.functions
        made = (
            [r for r in functions[Pass.BI].results if r.kind is Kind.BI_SAVED]
            if (Pass.BI in functions)
            else []
        )
        taken = (
            [r for r in functions[Pass.BW].arguments if r.kind is Kind.BI_SAVED]
            if (Pass.BW in functions)
            else []
        )
        assert set(made) == set(taken)
        if Pass.BI in functions and Pass.BW in functions and Pass.B in functions:
            parts = functions[Pass.BI].flops + functions[Pass.BW].flops
            assert parts >= functions[Pass.B].flops


def test_only_the_forward_is_random(case: Case) -> None:
    for program in case.captured.unique_programs:
        assert not any(f.random for which, f in program.functions.items() if which is not Pass.F)


def test_dropout_makes_the_forward_random() -> None:
    captured = captured_dense(DENSE, "all")
    assert [p.functions[Pass.F].random for p in captured.programs] == [
        chunk.tags[0].name in ("embed", "layer") for chunk in captured.chunks
    ]


@pytest.mark.slow
def test_recomputing_saves_memory() -> None:
    saved = {}
    for policy in POLICIES:
        captured = captured_dense(replace(DENSE, dropout=0.0), policy)
        saved[policy] = sum(program.saved_bytes for program in captured.programs)
    assert saved["all"] < saved["min-cut"] <= saved["none"]
    assert saved["all"] == 0


@pytest.mark.slow
def test_equal_layers_share_one_program() -> None:
    config = replace(DENSE, dim=8, heads=2, mlp_dim=4, dropout=0.0)
    few = captured_dense(replace(config, layers=2))
    many = captured_dense(replace(config, layers=8))
    assert len(many.chunks) == len(few.chunks) + 6
    assert len(many.unique_programs) == len(few.unique_programs) == 4


def test_layers_that_differ_in_a_number_do_not_share() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        for i, layer in enumerate((self.a, self.b, self.c)):
            with annotate("r"):
                x = layer(x) * (1.0 + 1e-12 * i)
        return x

    model = Net(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6))
    captured = capture(
        model, inputs=(torch.randn(4, 6),), targets=(torch.randn(4, 6),), loss=F.mse_loss
    )
    assert len(captured.unique_programs) == 4


@pytest.mark.parametrize("grouped", [False, True])
def test_flops_of_attention(grouped: bool) -> None:
    """Two products forward and five backward, also on CPUs, which torch's counter ignores."""
    batch, heads, queries, keys, width = 2, 3, 8, 5, 4

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(heads, queries, width))

        def forward(self, x: Tensor) -> Tensor:
            ours = self.queries.expand(batch, -1, -1, -1)
            return F.scaled_dot_product_attention(ours, x, x, enable_gqa=grouped)

    captured = capture(
        Attention(),
        inputs=(torch.randn(batch, 1 if grouped else heads, keys, width),),
        targets=(torch.randn(batch, heads, queries, width),),
        loss=F.mse_loss,
    )
    product = 2 * batch * heads * queries * keys * width
    found = [program.functions for program in captured.programs]
    assert sum(one[Pass.F].flops for one in found) == 2 * product
    assert sum(one[Pass.B].flops for one in found) == 5 * product


def test_flops_of_a_linear_layer() -> None:
    m, k, n = 4, 6, 10
    model = nn.Sequential(nn.Linear(3, k), nn.Linear(k, n))
    captured = capture(
        model,
        inputs=(torch.randn(m, 3),),
        targets=(torch.randn(m, n),),
        loss=F.mse_loss,
        tags={"*": "r"},
    )
    functions = captured.programs[1].functions
    assert functions[Pass.F].flops == 2 * m * k * n
    assert functions[Pass.B].flops == 2 * functions[Pass.F].flops
    assert functions[Pass.BI].flops == functions[Pass.BW].flops == 2 * m * k * n


@pytest.mark.slow
def test_results_keep_their_strides_when_inductor_pads_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU inductor pads products of odd sizes; chunks that read them must not notice."""
    from torch._inductor.fx_passes import joint_graph

    aten = torch.ops.aten

    def padding(module: fx.GraphModule, **_: object) -> None:
        for node in module.graph.find_nodes(op="call_function", target=aten.mm.default):
            right = node.args[1]
            with module.graph.inserting_before(node):
                wide = module.graph.call_function(aten.constant_pad_nd.default, (right, [0, 1]))
                product = module.graph.call_function(aten.mm.default, (node.args[0], wide))
                end = node.meta["val"].shape[1]
                cut = module.graph.call_function(aten.slice.Tensor, (product, 1, 0, end))
            node.replace_all_uses_with(cut)
            module.graph.erase_node(node)
            padded.append(node.name)

    padded: list[str] = []
    monkeypatch.setattr(joint_graph, "joint_graph_passes", padding)
    model = DenseTransformer(replace(DENSE, dropout=0.0))
    x, y = text()
    found = []
    for compiler in ("eager", "inductor"):
        captured = capture(model, inputs=(x,), targets=(y,), loss=lm_loss, compiler=compiler)
        found.append(piper_step(captured, model, (x,), (y,), split_backward=False))
    assert padded
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].gradients, found[0].gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductor_agrees_with_eager() -> None:
    model = DenseTransformer(replace(DENSE, layers=2, dropout=0.0))
    x, y = text()
    results = []
    for compiler in ("eager", "inductor"):
        captured = capture(
            model, inputs=(x,), targets=(y,), loss=lm_loss, microbatches=2, compiler=compiler
        )
        for split in (False, True):
            results.append(piper_step(captured, model, (x,), (y,), split_backward=split))
    for found in results[1:]:
        torch.testing.assert_close(found.loss, results[0].loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.gradients, results[0].gradients, rtol=1e-5, atol=1e-5)
