"""Tensor parallelism: parameters sharded along an axis whose devices have the same rows train to
the numbers of one device, and communicate as often as Megatron does.

Sums are in another order than on one device: fp64 within 1e-12, fp32 within 1e-6.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import CaptureError, DirectiveError
from piper.cli.demo.layers import lm_loss
from piper.ir.collectives import Move
from piper.ir.dag.values import Content
from piper.ir.ops import Collective
from piper.models import DenseConfig, DenseTransformer
from piper.strategies import mesh
from piper.strategies.directives import Directive, place, remat, replicate, shard, split
from tests.hugging_face import FAMILIES
from tests.tensor import DENSE, tensor_mesh
from tests.training import (
    Batch,
    Run,
    adamw,
    assert_same,
    compiled,
    plain,
    sgd,
    shared_captures,
    steps,
    train,
)

VOCAB, SEQ, STEPS, CLIP = 32, 8, 3, 0.05
CLOSE = 1e-12


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@functools.cache
def dense(layers: int = 2, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab": VOCAB, "dim": 16, "layers": layers, "heads": 4, "mlp_dim": 24, "max_seq": SEQ}
    model = DenseTransformer(DenseConfig(**{**sizes, **changes}))
    return moved(model.to(dtype))


def moved(model: nn.Module) -> nn.Module:
    """``model`` with noise on its parameters, so that none is all ones or zeros."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return model


@functools.cache
def batches(rows: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(VOCAB, (2, rows, SEQ), generator=generator) for _ in range(STEPS)]
    return [((x,), (y,)) for x, y in found]


@functools.cache
def expected(model: nn.Module, rows: int = 8) -> Run:
    return plain(model, lm_loss, batches(rows), microbatches=1, clip_norm=CLIP)


def program_of(model: nn.Module, strategy: list[Directive], rows: int = 8) -> piper.Program:
    return compiled(model, strategy, lm_loss, batches(rows), clip_norm=CLIP)


def check(model: nn.Module, strategy: list[Directive], rows: int = 8) -> None:
    found = train(program_of(model, strategy, rows), batches(rows))
    assert_same(found, expected(model, rows), CLOSE)


def tensor(
    tp: int = 2, dp: int = 1, microbatches: int = 2, zero: int = 0, **how: Any
) -> list[Directive]:
    """A strategy with one stage."""
    return [
        split(parts=microbatches),
        place({}, devices=piper.Mesh(range(dp * tp), dp=dp, tp=tp), batch="dp"),
        replicate({}, zero=zero),
        shard({}, axis="tp", **{"parameters": DENSE, **how}),
    ]


# strategies


CASES = {
    "tp2": tensor(),
    "tp2-sequence": tensor(sequence=True),
    "tp4": tensor(4),
    "tp4-sequence": tensor(4, sequence=True),
    "dp2-zero1": tensor(dp=2, zero=1),
    "dp2-zero2": tensor(dp=2, zero=2),
    "dp2-zero3": tensor(dp=2, zero=3),
    "dp2-zero3-sequence": tensor(dp=2, zero=3, sequence=True),
    "remat": [remat({}, "all"), *tensor()],
    "remat-sequence": [remat({"layer": 0}, "all"), *tensor(sequence=True)],
}
QUICK = ("dp2-zero1", "dp2-zero3-sequence")


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_it_trains_as_one_device(name: str) -> None:
    check(dense(), CASES[name])


def odd_batches() -> list[Batch]:
    return [((x % 29,), (y % 29,)) for (x,), (y,) in batches()]


@functools.cache
def odd_expected(tied: bool) -> Run:
    model = dense(vocab=29, tie_embeddings=tied)
    return plain(model, lm_loss, odd_batches(), microbatches=1, clip_norm=CLIP)


ODD = {
    "tp2": mesh(tp=2),
    "tp4-dp2-zero1-sequence": mesh(tp=4, dp=2, zero=1, sequence_parallel=True),
    "tp2-dp2-zero3": mesh(tp=2, dp=2, zero=3),
    "tp2-cp2": mesh(tp=2, cp=2),
    "pp2-tp2": mesh(pp=2, tp=2, microbatches=4),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_a_vocabulary_that_does_not_divide_is_padded(name: str, tied: bool) -> None:
    """Rows of the embedding and the head, logits and loss: padding never counts."""
    model = dense(vocab=29, tie_embeddings=tied)
    program = compiled(model, ODD[name].directives, lm_loss, odd_batches(), clip_norm=CLIP)
    assert_same(train(program, odd_batches()), odd_expected(tied), CLOSE)
    if name == "tp2":  # logits are not gathered: only a few numbers per row
        gathers = [f.nbytes for f in program.traffic[0].flows if f.kind == "all_gather"]
        assert sum(gathers) < 8 * SEQ * 29 * 8 / 2


@pytest.mark.slow
def test_padded_vocabularies_are_saved_without_padding(tmp_path: Path) -> None:
    """From padded shards to whole tensors, through files and through a switch in memory."""
    model = dense(vocab=29)
    names = ("tp2-dp2-zero3", "tp4-dp2-zero1-sequence")
    programs = [
        compiled(model, ODD[name].directives, lm_loss, odd_batches(), optimizer=adamw)
        for name in names
    ]
    with piper.launch(programs[0]) as trainer:
        steps(trainer, odd_batches()[:1])
        trainer.save(tmp_path / "saved")
        trainer.switch(programs[1])
        switched = steps(trainer, odd_batches()[1:])
    assert switched.state["embedding.weight"].shape == (29, 16)
    with piper.launch(programs[1]) as trainer:
        trainer.load(tmp_path / "saved")
        assert_same(steps(trainer, odd_batches()[1:]), switched)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


@pytest.mark.slow
def test_the_plan_of_a_wrapped_model() -> None:
    def sharded(model: nn.Module, **how: Any) -> set[str]:
        program = compiled(model, mesh(tp=2, **how).directives, lm_loss, batches())
        return {name for b in program.buckets if b.ways > 1 for name in b.parameters}

    whole = sharded(dense())
    assert sharded(Wrapped(dense())) == {f"inner.{name}" for name in whole}
    left = sharded(
        dense(), parameters={"head": "replicate", "*.1.mlp.*": "replicate", "*": "model"}
    )
    assert left == {n for n in whole if n != "head.weight" and not n.startswith("layers.1.mlp.")}


def wasted(
    model: nn.Module, parameters: Any, x: Tensor, loss: Any, **axes: Any
) -> tuple[piper.Program, list[str]]:
    """The program under ``tp=2`` or other axes, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = mesh(**axes or {"tp": 2, "parameters": parameters})
        program = piper.compile(model, strategy, inputs=(x,), targets=(x,), loss=loss)
    return program, [str(w.message) for w in caught if w.category is piper.PiperWarning]


@pytest.mark.slow
def test_products_computed_more_than_once_are_named() -> None:
    tokens = batches()[0][0][0]
    program, warned = wasted(dense(), None, tokens, lm_loss)
    assert not warned
    assert "waste:" not in program.text()
    mlp = {"*.mlp.w_in": "column", "*.mlp.w_gate": "column", "*.mlp.w_out": "row"}
    program, warned = wasted(dense(), mlp, tokens, lm_loss)
    attention, head = program.waste
    assert attention.operations[0].startswith("linear of layers.0.attention.w_qkv (layers.py:")
    assert attention.regions == ("layer[0]", "layer[1]")
    whole = 3 * 2 * 8 * SEQ * 16 * VOCAB  # forward and backward of the head
    assert (head.copies, head.amount) == (2, whole)
    assert str(head) in program.text()
    assert [str(attention) in warned[0], str(head) in warned[1]] == [True, True]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Unknown(nn.Module):
    """An operation without a sharding rule, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Twice.apply(self.up(x)))


def test_operations_without_a_rule_are_named() -> None:
    plan = {"up": "column", "down": "row"}
    program, warned = wasted(Unknown(), plan, torch.randn(8, 16), F.mse_loss)
    (gather,) = program.waste
    assert gather.operations[0].startswith("Twice")
    assert gather.amount == 2 * 8 * 32 * 4 // 2  # half is remote, forward and backward
    assert "Twice" in warned[0]
    assert "no sharding rule" in warned[0]


def test_operations_without_a_rule_are_named_along_a_sequence() -> None:
    program, warned = wasted(Unknown(), None, torch.randn(4, 8, 16), F.mse_loss, cp=2)
    gather = program.waste[0]
    assert gather.operations[0].startswith("Twice")
    assert gather.amount == 2 * 4 * 8 * 32 * 4 // 2
    assert str(gather) in program.text()
    assert str(gather) in warned[0]


class UnknownExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 16, 32))
        self.down = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (2, -1))
        with piper.annotate("EP"):
            made = Twice.apply(rows @ self.up) @ self.down
        return made.flatten(0, 1)


def test_operations_without_a_rule_are_named_in_experts() -> None:
    plan = {"up": 2, "down": 1}
    program, warned = wasted(UnknownExperts(), plan, torch.randn(8, 16), F.mse_loss)
    gather = program.waste[0]
    assert gather.operations[0].startswith("Twice")
    assert gather.regions == ("EP[0]",)
    assert str(gather) in program.text()
    assert str(gather) in warned[0]


PIPELINES = [
    (schedule, pp, dp, tp, zero, sequence)
    for schedule in ("1f1b", "interleaved", "zb-v", "dualpipev")
    for pp, dp, tp, zero, sequence in (
        (2, 1, 2, 0, False),
        (2, 2, 2, 1, True),
        (2, 2, 2, 3, False),
        (2, 1, 4, 0, True),
    )
]


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("case", PIPELINES, ids=lambda c: "-".join(map(str, c)))
def test_pipelines_train_as_one_device(case: tuple[str, int, int, int, int, bool]) -> None:
    schedule, pp, dp, tp, zero, sequence = case
    strategy = tensor_mesh(
        schedule=schedule,
        pp=pp,
        dp=dp,
        tp=tp,
        zero=zero,
        sequence=sequence,
        microbatches=4,
        parameters=DENSE,
    )
    check(dense(4), strategy, rows=16)


@pytest.mark.slow
def test_a_pipeline_whose_stages_have_axes_of_different_sizes() -> None:
    strategy = [
        piper.partition("layer", into="PP", parts=2, by=[1, 1]),
        split(parts=2),
        place({"PP": 0}, devices=piper.Mesh(range(4), dp=2, tp=2), batch="dp"),
        place({"PP": 1}, devices=piper.Mesh([4, 5], dp=2, tp=1), batch="dp"),
        shard({}, axis="tp", parameters=DENSE, sequence=True),
    ]
    check(dense(), strategy)


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("only", ["*.w_qkv", "*.attention.w_out", "*.mlp.w_in", "*.mlp.*"])
def test_a_part_of_the_parameters(only: str, sequence: bool) -> None:
    how = {
        pattern: how
        for pattern, how in DENSE.items()
        if pattern == only or (only == "*.mlp.*" and ".mlp." in pattern)
    }
    check(dense(), tensor(parameters=how, sequence=sequence))


@pytest.mark.cases(fast=0, slow=5)
@pytest.mark.parametrize(
    "how",
    [
        {"*norm.weight": 0},
        {"*.attention_norm.weight": 0, "*.w_qkv": "row"},
        {"embedding.weight": 1, "head": "row"},
        {"head": "column"},
        {"embedding.weight": 0},
        {"*.w_in.weight": 1, "*.mlp.w_out.weight": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence", [False, True])
def test_layouts_that_nobody_would_choose(how: dict[str, int | str], sequence: bool) -> None:
    """Operations that cannot compute on shards gather their inputs."""
    check(dense(), tensor(parameters=how, sequence=sequence))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_tied_weights(sequence: bool) -> None:
    """The head's gradient is a partial sum along the sequence; the embedding's is not."""
    check(dense(tie_embeddings=True), tensor(sequence=sequence))
    check(dense(tie_embeddings=True), tensor(dp=2, zero=3, sequence=sequence))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_heads_of_keys_than_devices(kv_heads: int, sequence: bool) -> None:
    check(dense(kv_heads=kv_heads), tensor(4, sequence=sequence))


@pytest.mark.slow
def test_adamw_and_fp32() -> None:
    model = dense(dtype=torch.float32)
    program = compiled(model, tensor(dp=2, zero=1), lm_loss, batches(), optimizer=adamw)
    reference = plain(model, lm_loss, batches(), microbatches=1, optimizer=adamw)
    found = train(program, batches())
    for mine, theirs in zip(found.losses, reference.losses, strict=True):
        assert float(mine) == pytest.approx(float(theirs), rel=1e-5)
    program = compiled(model, tensor(dp=2, zero=1, sequence=True), lm_loss, batches())
    reference = plain(model, lm_loss, batches(), microbatches=1)
    assert_same(train(program, batches()), reference, 3e-6)


@pytest.mark.slow
def test_bf16() -> None:
    """Partial sums are rounded once more than on one device."""
    model = dense(dtype=torch.float32)
    reference = plain(model, lm_loss, batches(), microbatches=2, bf16=True)
    for sequence in (False, True):
        strategy = tensor(sequence=sequence)
        program = compiled(model, strategy, lm_loss, batches(), precision="bf16")
        assert_same(train(program, batches()), reference, 0.03)


@pytest.mark.slow
def test_evaluation_and_checkpoints(tmp_path: Path) -> None:
    """A checkpoint of one layout loads in another, and evaluation computes on shards."""
    model, reference = dense(), expected(dense())
    (x,), (y,) = batches()[0]
    with piper.launch(program_of(model, CASES["dp2-zero3-sequence"]), on="virtual") as trainer:
        with torch.no_grad():
            whole = float(lm_loss(model(x), y))
        assert float(trainer.evaluate(x, y)) == pytest.approx(whole, rel=CLOSE)
        trainer.step(x, y)
        trainer.save(tmp_path / "checkpoint")
    with piper.launch(program_of(model, tensor(tp=1, dp=2)), on="virtual") as trainer:
        trainer.load(tmp_path / "checkpoint")
        found = steps(trainer, batches()[1:])
    assert_same(found, Run(reference.losses[1:], reference.norms[1:], reference.state), CLOSE)


@pytest.mark.slow
def test_on_processes() -> None:
    program = program_of(dense(), tensor(sequence=True))
    with piper.launch(program, on="processes", threads=1) as trainer:
        assert_same(steps(trainer, batches()), expected(dense()), CLOSE)


# communication


def redistributions(program: piper.Program, region: str) -> Counter[str]:
    """How often device 0 redistributes activations and their gradients, for a region and one
    microbatch, by kind of collective."""
    found: Counter[str] = Counter()
    for x in program.plans[0].instructions:
        if not isinstance(x.op, Collective) or x.op.dispatches or x.op.combines:
            continue
        if x.content is Content.VALUE and f"{region} MB[0]" in x.name:
            found[x.op.kind.value] += 1
    return found


def test_a_layer_communicates_as_often_as_megatrons() -> None:
    """Two all-reduces forward and two backward, each as large as the activations."""
    program = program_of(dense(), CASES["dp2-zero1"])
    assert redistributions(program, "layer[1]") == Counter(all_reduce=4)
    (flow,) = [f for f in program.traffic[0].flows if f.stream == "tp"]
    activations = 2 * SEQ * 16 * 8  # 2 rows in fp64
    assert (flow.count, flow.nbytes) == (2 * 2 * 4, 2 * 2 * 4 * activations)


def test_all_reduces_copy_nothing() -> None:
    """A partial sum without other readers is reduced in place."""
    program = program_of(dense(), CASES["dp2-zero1"])
    summed = [x for x in program.plans[0].instructions if x.stream == "tp"]
    assert summed
    assert all(x.reads == x.writes and not x.frees for x in summed)


class TwoViews(nn.Module):
    """Two views of one partial sum leave the product: neither may be reduced in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return y.transpose(0, 1).tanh().sum(0) * y.flatten(1).tanh().sum(1, keepdim=True)


@pytest.mark.slow
def test_views_of_a_partial_sum_are_summed_once_or_apart() -> None:
    model = TwoViews().double()
    x, y = torch.randn(2, 4, 3, 8).double(), torch.randn(2, 4, 8).double()
    batches = [((x[i],), (y[i],)) for i in range(2)]
    strategy = mesh(tp=2, parameters={"up.weight": 0, "up.bias": 0, "down.weight": 1})
    program = compiled(model, strategy.directives, F.mse_loss, batches)
    assert_same(train(program, batches), plain(model, F.mse_loss, batches, microbatches=1), 1e-12)


def test_with_sequence_parallelism_too() -> None:
    """An all-gather before each of the two products and a reduce-scatter after it, and the reverse
    in the backward: as many bytes as the all-reduces. The weights' backward keeps the gathered
    tensors that it needs."""
    program = program_of(dense(), CASES["dp2-zero3-sequence"])
    assert redistributions(program, "layer[1]") == Counter(all_gather=4, reduce_scatter=4)


@pytest.mark.slow
def test_with_sequence_parallelism_a_whole_head_keeps_logits_where_they_are() -> None:
    """Head and loss compute on their shard of the sequence: only the sum of the loss is
    communicated, no logits."""
    program = program_of(dense(), CASES["tp2-sequence"])
    assert redistributions(program, "loss[0]") == Counter(all_reduce=1)
    assert_same(train(program, batches()), expected(dense()), CLOSE)


class ParallelResidual(nn.Module):
    """As in Phi and GPT-J: attention and MLP read one norm, and both are added to the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.0)
        self.q, self.k, self.v, self.dense = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attention = self.drop(self.dense(attended.transpose(1, 2).flatten(2)))
        made: Tensor = attention + self.drop(self.fc2(F.gelu(self.fc1(y)))) + x
        return made


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.ModuleList(ParallelResidual() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("sequence", [False, True])
def test_partial_sums_of_parallel_residuals_are_reduced_once(sequence: bool) -> None:
    torch.manual_seed(0)
    model = moved(Parallel().double())
    columns = dict.fromkeys(("*.q", "*.k", "*.v", "*.fc1"), "column")
    how = {**columns, "*.dense": "row", "*.fc2": "row"}
    tags = {"embed": "embed", "layers.*": "layer", "head": "head"}
    strategy = tensor(microbatches=1, parameters=how, sequence=sequence)
    program = compiled(model, strategy, lm_loss, batches(), clip_norm=CLIP, tags=tags)
    tp = {f.kind: f.count for f in program.traffic[0].flows if f.stream == "tp"}
    if sequence:
        assert (
            tp["reduce_scatter"] == 3
        )  # one per layer, and the gradient of the second layer's gather
    else:
        assert tp == {"all_reduce": 2 * 2}
    reference = plain(model, lm_loss, batches(), microbatches=1, clip_norm=CLIP)
    assert_same(train(program, batches()), reference, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_remat_gathers_again(axis: str) -> None:
    """When the backward begins, no gathered tensor (activations, or keys and values) is left. The
    backward repeats the gathers of the forward."""
    how = tensor(4, sequence=True, microbatches=1)
    if axis == "cp":
        cp = piper.Mesh(range(4), cp=4)
        how = [
            split(parts=1),
            place({}, devices=cp, batch=(), sequence="cp", attention="all_gather"),
        ]
    program = program_of(dense(), [remat({}, "all"), *how])
    plan = program.plans[0]
    gathered: set[int] = set()
    left = None
    for x in plan.instructions:
        if left is None and x.name.startswith("B head"):
            left = sum(plan.slots[slot].nbytes for slot in gathered)
        if isinstance(x.op, Collective) and x.op.kind is Move.ALL_GATHER:
            gathered.update(x.writes)
        gathered.difference_update(x.frees)
    assert left == 0
    again = program.traffic[0].count("all_gather") - program_of(dense(), how).traffic[0].count(
        "all_gather"
    )
    assert again == {"tp": 3, "cp": 4}[axis]
    assert_same(train(program, batches()), expected(dense()), CLOSE)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("dp", "only"), [(1, "attention"), (2, "*")])
def test_equal_gradients_are_not_summed_along_tp(dp: int, only: str) -> None:
    """Norms and other replicated computations: their gradients are reduced only along dp, as those
    of sharded parameters are."""
    how = {pattern: way for pattern, way in DENSE.items() if only == "*" or only in pattern}
    how |= {"*.w_qkv": "column"}
    program = program_of(dense(), tensor(dp=dp, parameters=how))
    sent = sum(f.nbytes for f in program.traffic[0].flows if f.stream == "reduce")
    buckets = [b for b in program.buckets if 0 in {d for group in b.groups for d in group}]
    held = 8 * sum(b.elements for b in buckets)
    assert sent == 2 * (dp - 1) / dp * held
    assert_same(train(program, batches()), expected(dense()), CLOSE)


def test_layouts_say_what_is_sharded_and_what_is_a_partial_sum() -> None:
    """Attention of the last layer: norms on shards of the sequence, products on shards of the
    heads, whose partial sums are reduce-scattered along the sequence."""
    text = program_of(dense(), CASES["dp2-zero3-sequence"]).layouts
    lines = [" ".join(line.split()) for line in text.splitlines()]
    found = [line.partition(" ")[2] for line in lines if line.startswith(("v17 ", "v18 ", "v19 "))]
    assert found == [
        "rms_norm_default [2, 4, 16] @0,1,2,3 dp S(0), tp S(1)",
        "rms_norm_default' [2, 2, 4, 16] @0,1,2,3 dp S(1), tp R",
        "clone_default_1 [2, 2, 4, 16] @0,1,2,3 dp S(1), tp P(sum)",
    ]
    weights = [line for line in lines if line.startswith("dw")]
    assert any(line.endswith("dp P(sum), tp S(1)") for line in weights)
    assert any(line.endswith("dp P(sum), tp P(sum)") for line in weights)
    assert any("tp S(0), shard S(0)" in line for line in lines if "at rest" in line)


# models of transformers


PLAN: dict[str, int | str] = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}
FUSED: dict[str, int | str] = {
    "*.query_key_value": "column",
    "*.dense": "row",
    "*.dense_h_to_4h": "column",
    "*.dense_4h_to_h": "row",
}


def _made(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return functools.partial(FAMILIES[name].make, dropout=False, **changes)


MODELS: dict[str, tuple[Callable[[], nn.Module], Mapping[str, int | str]]] = {
    "llama": (_made("Llama", num_key_value_heads=4), PLAN),
    "llama-gqa": (_made("Llama"), PLAN),
    "llama-tied": (_made("Llama, tied"), PLAN),
    "mistral": (_made("Mistral"), PLAN),
    "qwen2": (_made("Qwen 2"), PLAN),
    "qwen3": (_made("Qwen 3"), PLAN),
    "gemma": (_made("Gemma"), PLAN),
    "gemma2": (_made("Gemma 2"), PLAN),
    "gemma3": (_made("Gemma 3"), PLAN),
    "olmo": (_made("OLMo"), PLAN),
    "olmo2": (_made("OLMo 2"), PLAN),
    "phi3": (
        _made("Phi 3"),
        {
            "*.qkv_proj": "column",
            "*.o_proj": "row",
            "*.gate_up_proj": "column",
            "*.down_proj": "row",
        },
    ),
    "gpt2": (
        _made("GPT-2"),
        {
            "*.c_attn": "column",
            "*.attn.c_proj": "row",
            "*.c_fc": "column",
            "*.mlp.c_proj": "row",
        },
    ),
    "gpt-neox": (_made("GPT-NeoX"), FUSED),
    "opt": (
        _made("OPT"),
        {
            "*.q_proj": "column",
            "*.k_proj": "column",
            "*.v_proj": "column",
            "*.out_proj": "row",
            "*.fc1": "column",
            "*.fc2": "row",
        },
    ),
    "falcon": (_made("Falcon", new_decoder_architecture=False, multi_query=False), FUSED),
    "falcon-multi-query": (_made("Falcon", new_decoder_architecture=False), FUSED),
    "bloom": (_made("Bloom"), FUSED),
    "bert": (
        _made("BERT"),
        {
            "*.query": "column",
            "*.key": "column",
            "*.value": "column",
            "*.attention.output.dense": "row",
            "*.intermediate.dense": "column",
            "bert.encoder.layer.?.output.dense": "row",
        },
    ),
}
DECLARE_NOTHING = ("gpt2", "opt", "falcon", "falcon-multi-query", "bloom", "bert")
SINGLE_SUMS = ("gemma", "gemma2", "gemma3", "olmo2")
"""Models that sum over rows or shards in fp32, whatever their dtype."""


@functools.cache
def library_model(name: str) -> nn.Module:
    pytest.importorskip("transformers").logging.set_verbosity_error()
    torch.manual_seed(0)
    return moved(MODELS[name][0]().double())


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


@functools.cache
def tokens() -> list[Batch]:
    return [({"input_ids": x}, y) for (x,), y in batches(4)]


@functools.cache
def library_run(name: str) -> Run:
    return plain(library_model(name), logits_loss, tokens(), microbatches=1)


def check_library(name: str, strategy: list[Directive]) -> None:
    program = compiled(library_model(name), strategy, logits_loss, tokens())
    close = 1e-5 if name in SINGLE_SUMS else CLOSE
    assert_same(train(program, tokens()), library_run(name), close)


HOW = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp2-sequence": {"tp": 2, "sequence": True},
    "tp4-sequence": {"tp": 4, "sequence": True},
    "dp2-zero3": {"tp": 2, "dp": 2, "zero": 3, "microbatches": 1},
}


COMMON = ("llama", "qwen3", "phi3", "gpt2", "bloom")


def chosen(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The common models, each with one of the ways in turn."""
    return zip((n for n in names if n in COMMON), itertools.cycle(HOW), strict=False)


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(name, how, marks=pytest.mark.slow) for name, how in chosen(MODELS)],
)
def test_models_by_patterns(name: str, how: str) -> None:
    check_library(name, tensor(**HOW[how], parameters=MODELS[name][1]))


QUICK_PLANS = (("llama-gqa", "tp2"),)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in QUICK_PLANS else pytest.mark.slow)
        for name, how in (*QUICK_PLANS, *chosen(n for n in MODELS if n not in DECLARE_NOTHING))
    ],
)
def test_models_by_their_own_plan(name: str, how: str) -> None:
    check_library(name, tensor(**HOW[how], parameters=None))


LAYERS = {"gpt2": "transformer.h.*"}
COMPOSED = {
    "pp2-zero1": {"pp": 2, "tp": 2, "zero": 1, "microbatches": 2},
    "pp2-tp4-sequence": {"pp": 2, "tp": 4, "microbatches": 2, "sequence_parallel": True},
    "pp2-dp2-zero3": {"pp": 2, "dp": 2, "tp": 2, "zero": 3, "microbatches": 2},
    "dp2-zero1-sequence": {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True},
    "cp2": {"cp": 2, "tp": 2, "microbatches": 2},
    "pp2-cp2": {"pp": 2, "cp": 2, "tp": 2, "zero": 1, "microbatches": 2},
}


@functools.cache
def longer_run() -> tuple[list[Batch], Run]:
    """Batches with more tokens than a weight has columns, and the reference run."""
    more = [({"input_ids": x}, y) for (x,), y in batches(16)]
    return more, plain(library_model("llama-gqa"), logits_loss, more, microbatches=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "moves"),
    [
        ("column", Counter(all_reduce=8, all_gather=4, reduce_scatter=4)),
        ("replicate", Counter(all_reduce=8)),
    ],
)
def test_few_heads_of_keys_are_computed_by_several_devices(
    weights: str, moves: Counter[str]
) -> None:
    """Two key heads for four devices: sharded weights are gathered, and no keys or values are
    communicated."""
    how = {**PLAN, "*.k_proj": weights, "*.v_proj": weights}
    more, run = longer_run()
    strategy = tensor(4, parameters=how, microbatches=1)
    program = compiled(library_model("llama-gqa"), strategy, logits_loss, more)
    assert redistributions(program, "") == moves
    assert_same(train(program, more), run, CLOSE)


@functools.cache
def captured_library(name: str) -> piper.Capture:
    inputs, targets = tokens()[0]
    return piper.capture(
        library_model(name),
        inputs=inputs,
        targets=targets,
        loss=logits_loss,
        optimizer=sgd,
        tags={LAYERS.get(name, "model.layers.*"): "layer"},
    )


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("how", COMPOSED)
@pytest.mark.parametrize(
    "name", ["llama", "llama-gqa", "mistral", "qwen3", "gemma", "phi3", "gpt2"]
)
def test_library_models_composed(name: str, how: str) -> None:
    check_composed(name, how)


@pytest.mark.slow
def test_parts_that_one_axis_sends_are_not_sharded_by_another() -> None:
    """Tensor parallelism shards the heads; context parallelism sends the same heads as parts."""
    check_composed("mistral", "cp2")


def check_composed(name: str, how: str) -> None:
    strategy = mesh(**COMPOSED[how], parameters=MODELS[name][1])
    program = captured_library(name).compile(strategy)
    close = 1e-5 if name in SINGLE_SUMS else CLOSE
    assert_same(train(program, tokens()), library_run(name), close)


# random numbers


class Dropping(nn.Module):
    """Attention with dropout and a mask; two key heads for four query heads."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.embedding, self.mask = nn.Embedding(VOCAB, 16), mask
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (16, 8, 8))
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = torch.ones(SEQ, SEQ, dtype=torch.bool).tril(2)
        masks = {
            "causal": {"is_causal": True},
            "bool": {"attn_mask": seen},
            "float": {"attn_mask": torch.where(seen, 0.5, -1e9).to(x.dtype)},
            "none": {"scale": 0.3},
        }
        dropped = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.3, enable_gqa=True, **masks[self.mask]
        )
        x = x + self.out(dropped.transpose(1, 2).flatten(2))
        return self.head(x)


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("mask", ["causal", "bool", "float", "none"])
def test_attention_draws_its_dropout_as_the_whole_does(mask: str, tp: int, sequence: bool) -> None:
    torch.manual_seed(0)
    model = Dropping(mask).double()
    how = {"q": "column", "k": "column", "v": "column", "out": "row"}
    one = program_of(model, [split(parts=2), place({}, devices=[0])])
    several = program_of(model, tensor(tp, parameters=how, sequence=sequence))
    assert_same(train(several, batches()), train(one, batches()), CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp2", "tp4-sequence"])
def test_gpt2_as_it_is_with_dropout(how: str) -> None:
    torch.manual_seed(0)
    model = moved(FAMILIES["GPT-2"].make().double())
    one, several = (
        compiled(model, strategy, logits_loss, tokens())
        for strategy in (
            [split(parts=2), place({}, devices=[0])],
            tensor(**HOW[how], parameters=MODELS["gpt2"][1]),
        )
    )
    assert_same(train(several, tokens()), train(one, tokens()), CLOSE)


class Noisy(nn.Module):
    """Dropout of a fused result before it is split, and noise that torch has no sharding rule
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.fused, self.down = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        gate, up = F.dropout(self.fused(x), 0.3).chunk(2, -1)
        both = F.silu(gate) * up
        return self.head(x + self.down(both * (1 + torch.rand_like(both))))


def test_other_draws_are_those_of_the_whole() -> None:
    """Other random operations draw on gathered values, and are named."""
    torch.manual_seed(0)
    model = Noisy().double()
    one = program_of(model, [split(parts=2), place({}, devices=[0])])
    several = program_of(model, tensor(parameters={"fused": "column", "down": "row"}))
    assert any(name.startswith("rand_like") for x in several.waste for name in x.operations)
    assert_same(train(several, batches()), train(one, batches()), CLOSE)


# refusals


class Odd(nn.Module):
    """A product that 2 devices cannot share, a fused one of 5 and 3, and a weight of no product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 15)
        self.down = nn.Linear(15, 4)
        self.fused = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fused(x).split([5, 3], -1)
        x = self.down(self.up(x)) + a.sum(-1, keepdim=True) * b.sum(-1, keepdim=True)
        return x * self.scale


@functools.cache
def odd() -> nn.Module:
    return Odd()


def mean(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"parameters": {"up": "column"}},
        CaptureError,
        r"'up.weight' in region model has 15 along dimension 0, which 2 devices cannot share "
        r"evenly; numbers that work: 1, 3, 5, 15",
    ),
    (
        {"parameters": {"fused": "column"}},
        CaptureError,
        r"'fused.weight' in region model has 5 along dimension 0 \(\[5, 3\], fused\), which 2",
    ),
    (
        {"parameters": {"scale": "column"}},
        CaptureError,
        r"'scale' in region model is to be sharded by column, but it is not the weight of a linear",
    ),
    (
        {"parameters": {"up.weight": 2}},
        CaptureError,
        r"'up.weight' in region model has shape \[15, 4\] and no dimension 2 to shard",
    ),
    (
        {"parameters": {"gate": "column"}},
        DirectiveError,
        r"the pattern 'gate' matches no parameter of the regions; there are fused.weight, ",
    ),
    (
        {"parameters": {"up": "columns"}},
        DirectiveError,
        r"'up' maps to 'columns': give the number of a dimension, 'column', 'row', 'rep",
    ),
    ({"parameters": {}}, DirectiveError, r"parameters=\{\} shards nothing: name parameters, or"),
    (
        {"axis": None, "parameters": {"up": "column"}},
        DirectiveError,
        r"parameters= and sequence= are for tensor parallelism: name the axis",
    ),
    (
        {"axis": "dp", "parameters": {"fused": "row"}},
        DirectiveError,
        r"axis='dp' shards the batch in .*leave it out of place\(batch=\)",
    ),
]


@pytest.mark.parametrize(("how", "kind", "words"), REFUSED)
def test_mistakes_are_refused(how: dict[str, Any], kind: type[Exception], words: str) -> None:
    x = torch.ones(4, 4, 4)
    strategy = [
        place({}, devices=piper.Mesh(range(4), dp=2, tp=2), batch="dp"),
        shard({}, **{"axis": "tp", **how}),
    ]
    with pytest.raises(kind, match=words):
        compiled(odd(), strategy, mean, [((x,), (x,))])


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("pattern", ["head.weight", "head", "*head*"])
def test_a_tied_head_is_told_its_first_name(pattern: str) -> None:
    model = nn.Sequential(OrderedDict(emb=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False)))
    model.head.weight = model.emb.weight
    x = torch.zeros(4, 2, dtype=torch.long)
    captured = piper.capture(model, inputs=(x,), loss=lambda out: out.mean())
    with pytest.raises(DirectiveError, match=r"names 'head.weight', which is tied: .*'emb.weight'"):
        captured.compile(mesh(tp=2, parameters={pattern: 0}))


def test_two_rules_for_a_region_are_refused() -> None:
    with pytest.raises(
        DirectiveError, match=r"is already sharded by shard.*sharded along one axis"
    ):
        program_of(dense(), [*CASES["dp2-zero1"], tensor()[-1]])


class Tied(nn.Module):
    """One weight shared by two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("first"):
            x = F.linear(x, self.weight)
        with piper.annotate("second"):
            return F.linear(x, self.weight)


def test_a_parameter_that_another_region_has_whole_is_refused() -> None:
    x = torch.ones(4, 4)
    rule = shard({"second": 0}, axis="tp", parameters={"weight": 0})
    words = r"'weight' is sharded 2 ways along tp in second\[0\] and otherwise in first\[0\], which"
    with pytest.raises(DirectiveError, match=words):
        compiled(Tied(), [*tensor()[:-1], rule], mean, [((x,), (x,))])


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("sequence", [False, True], ids=["rows", "sequence"])
def test_plans_do_not_grow_with_the_axis(sequence: bool) -> None:
    """Ranks along tp share a plan; only the loss is counted once."""
    counts = set()
    for ways in (2, 4):
        strategy = mesh(pp=2, tp=ways, microbatches=4, parameters=DENSE, sequence_parallel=sequence)
        program = compiled(dense(), strategy.directives, lm_loss, batches())
        counts.add((len(program.plans), sum(len(plan.instructions) for plan in program.plans)))
        assert len(program.devices) == 2 * ways
    assert len(counts) == 1
    assert counts.pop()[0] <= 3
