"""Context parallelism: the batch's sequence, sharded along an axis, trains to the numbers of one
device, with all-to-alls of heads or with all-gathers of keys and values. With all-gathers, all
devices have the same work.

Sums are in another order than on one device: fp64 within 1e-12, fp32 within 1e-6.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import CaptureError, DirectiveError
from piper.capture.operators.head_tail_attention import head_tail_attention
from piper.cli.demo.layers import lm_loss
from piper.ir.dag.values import Content
from piper.ir.ops import Collective
from piper.models import DenseConfig, DenseTransformer
from piper.strategies import mesh
from piper.strategies.directives import Directive, place, remat, replicate, shard, split
from tests.tensor import DENSE
from tests.training import Batch, Run, assert_same, compiled, plain, shared_captures, steps, train

VOCAB, SEQ = 32, 16
CLOSE = 1e-12


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


def context(
    cp: int = 2,
    dp: int = 1,
    tp: int = 1,
    zero: int = 0,
    microbatches: int = 1,
    attention: str = "all_gather",
    parameters: Mapping[str, int | str] | None = None,
    sequence: bool = False,
) -> list[Directive]:
    """A strategy with one stage."""
    axes = {"dp": dp, "cp": cp, **({"tp": tp} if tp > 1 else {})}
    devices = piper.Mesh(range(dp * cp * tp), **axes)
    tensor = [shard({}, axis="tp", parameters=parameters, sequence=sequence)] if tp > 1 else []
    return [
        split(parts=microbatches),
        place({}, devices=devices, batch="dp", sequence="cp", attention=attention),
        replicate({}, zero=zero),
        *tensor,
    ]


@functools.cache
def batches(rows: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(VOCAB, (2, rows, SEQ), generator=generator) for _ in range(2)]
    return [((x,), (y,)) for x, y in found]


def moved(model: nn.Module) -> nn.Module:
    """``model`` with noise on its parameters, so that none is all ones or zeros."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return model


@functools.cache
def dense(dtype: torch.dtype = torch.float64, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab": VOCAB, "dim": 16, "heads": 4, "mlp_dim": 24, "max_seq": SEQ}
    return moved(DenseTransformer(DenseConfig(layers=layers, **sizes)).to(dtype))


def check(strategy: list[Directive], layers: int = 2, rows: int = 4) -> None:
    model, data = dense(layers=layers), batches(rows)
    found = train(compiled(model, strategy, lm_loss, data), data)
    assert_same(found, plain(model, lm_loss, data, microbatches=1), CLOSE)


CASES = {
    "cp2-dp2-zero1": context(dp=2, zero=1, microbatches=2),
    "cp2": context(),
    "cp4": context(4),
    "cp2-dp2-zero3": context(dp=2, zero=3),
    "cp4-zero3": context(4, zero=3),
    "cp2-tp2": context(tp=2, parameters=DENSE),
    "cp4-tp2": context(4, tp=2, parameters=DENSE),
    "cp2-tp2-sequence": context(tp=2, parameters=DENSE, sequence=True),
    "remat": [remat({}, "all"), *context()],
    "min-cut": [remat({}, "min-cut"), *context()],
    "all_to_all-cp2": context(attention="all_to_all"),
    "all_to_all-cp4": context(4, attention="all_to_all"),
}
QUICK = ("cp2-tp2",)


@pytest.mark.cases(fast=99, slow=4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_it_trains_as_one_device(name: str) -> None:
    check(CASES[name], layers=1 if name in QUICK else 2)


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
@pytest.mark.parametrize(("dp", "cp", "tp", "zero"), [(1, 2, 1, 0), (2, 2, 1, 1), (1, 2, 2, 3)])
def test_pipelines_train_as_one_device(schedule: str, dp: int, cp: int, tp: int, zero: int) -> None:
    strategy = mesh(
        pp=2,
        dp=dp,
        cp=cp,
        tp=tp,
        zero=zero,
        schedule=schedule,
        microbatches=4,
        attention="all_gather",
        parameters=DENSE if tp > 1 else None,
    )
    check(list(strategy.directives), layers=4, rows=8)


@pytest.mark.slow
def test_on_processes() -> None:
    program = compiled(dense(layers=1), context(), lm_loss, batches())
    with piper.launch(program, on="processes", threads=1) as trainer:
        found = steps(trainer, batches())
    assert_same(found, plain(dense(layers=1), lm_loss, batches(), microbatches=1), CLOSE)


@pytest.mark.slow
def test_evaluation_and_checkpoints(tmp_path: Path) -> None:
    """Save with one kind of attention, continue with the other."""
    model, reference = dense(), plain(dense(), lm_loss, batches(), microbatches=1)
    (x,), (y,) = batches()[0]
    with piper.launch(compiled(model, context(4), lm_loss, batches()), on="virtual") as trainer:
        with torch.no_grad():
            whole = float(lm_loss(model(x), y))
        assert float(trainer.evaluate(x, y)) == pytest.approx(whole, rel=CLOSE)
        trainer.step(x, y)
        trainer.save(tmp_path / "checkpoint")
    other = compiled(model, context(attention="all_to_all"), lm_loss, batches())
    with piper.launch(other, on="virtual") as trainer:
        trainer.load(tmp_path / "checkpoint")
        found = steps(trainer, batches()[1:])
    assert_same(found, Run(reference.losses[1:], reference.norms[1:], reference.state), CLOSE)


@pytest.mark.slow
def test_fp32() -> None:
    model = dense(torch.float32)
    found = train(compiled(model, context(4), lm_loss, batches()), batches())
    assert_same(found, plain(model, lm_loss, batches(), microbatches=1), 1e-6)


# unmodified library models


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": SEQ,
    "use_cache": False,
    "pad_token_id": 0,
}
LLAMA: dict[str, int | str] = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}
GPT2: dict[str, int | str] = {
    "*.c_attn": "column",
    "*.attn.c_proj": "row",
    "*.c_fc": "column",
    "*.mlp.c_proj": "row",
}


def _llama(name: str = "Llama", **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        config = getattr(library, f"{name}Config")(**{**SIZES, **changes})
        made: nn.Module = getattr(library, f"{name}ForCausalLM")(config)
        return made

    return make


def _gpt2(dropout: float = 0.0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        sizes = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 16, "n_layer": 2, "n_head": 4}
        made: nn.Module = library.GPT2LMHeadModel(
            library.GPT2Config(**sizes, **drops, use_cache=False)
        )
        return made

    return make


def _bert() -> nn.Module:
    library = pytest.importorskip("transformers")
    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made: nn.Module = library.BertForMaskedLM(library.BertConfig(**sizes))
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama(),
    "llama-gqa": _llama(num_key_value_heads=2),
    "llama-mqa": _llama(num_key_value_heads=1),
    "gpt2": _gpt2(),
    "gpt2-dropout": _gpt2(0.2),
    "mistral": _llama("Mistral", num_key_value_heads=2, sliding_window=4),
    "bert": _bert,
}


@functools.cache
def library_model(name: str) -> nn.Module:
    pytest.importorskip("transformers").logging.set_verbosity_error()
    torch.manual_seed(0)
    return moved(MODELS[name]().double().train())


def shifted(output: Any, labels: Tensor) -> Tensor:
    """Like the library's own loss, but without the conversion of logits to fp32."""
    following = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(output.logits.flatten(0, 1), following.flatten())


def own_loss(output: Any, _: Tensor) -> Tensor:
    found: Tensor = output.loss
    return found


def library_batches(**more: Any) -> list[Batch]:
    return [({"input_ids": x, **dict.fromkeys(more, y)}, (y,)) for (x,), (y,) in batches()]


LIBRARY = {
    "llama": ("cp2", "cp4", "cp2-tp2", "cp2-dp2-zero1"),
    "llama-gqa": ("cp2", "cp4", "cp2-tp2", "cp2-tp4", "cp2-dp2-zero3", "all_to_all"),
    "llama-mqa": ("cp2-tp2",),
    "gpt2": ("cp2", "cp4", "cp2-tp2", "cp2-dp2-zero1", "all_to_all"),
    "mistral": ("cp2",),
    "bert": ("cp2", "cp4"),
}


def how(name: str, case: str) -> list[Directive]:
    parameters = GPT2 if name == "gpt2" else LLAMA
    return {
        "cp2": context(),
        "cp4": context(4),
        "cp2-tp2": context(tp=2, parameters=parameters),
        "cp2-tp4": context(tp=4, parameters=parameters),
        "cp2-dp2-zero1": context(dp=2, zero=1),
        "cp2-dp2-zero3": context(dp=2, zero=3),
        "all_to_all": context(attention="all_to_all"),
    }[case]


@pytest.mark.cases(fast=99, slow=3)
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(n, c, marks=pytest.mark.slow) for n, cases in LIBRARY.items() for c in cases],
)
def test_library_models(name: str, case: str) -> None:
    model, data = library_model(name), library_batches()
    found = train(compiled(model, how(name, case), shifted, data), data)
    assert_same(found, plain(model, shifted, data, microbatches=1), CLOSE)


@pytest.mark.slow
def test_labels_that_the_model_shifts() -> None:
    """The library's loss computes in fp32, whatever the model's dtype."""
    model, data = library_model("llama-gqa"), library_batches(labels=True)
    found = train(compiled(model, context(), own_loss, data), data)
    assert_same(found, plain(model, own_loss, data, microbatches=1), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["all_gather", "all_to_all"])
def test_dropout_draws_as_on_one_device(attention: str) -> None:
    model, data = library_model("gpt2-dropout"), library_batches()
    one = train(compiled(model, [split(parts=1), place({}, devices=[0])], shifted, data), data)
    strategy = context(attention=attention)
    found = train(compiled(model, strategy, shifted, data), data)
    assert_same(found, one, CLOSE)


# operations along the sequence


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x * torch.arange(SEQ, dtype=x.dtype)[None, :, None],
    "rows and sequence flattened": lambda x: x.reshape(4 * SEQ, 8).tanh().reshape(4, SEQ, 8),
    "and in another way": lambda x: x.reshape(2, 2 * SEQ, 8).tanh().reshape(4, SEQ, 8),
    "a row of the flattened": lambda x: x + x.reshape(4 * SEQ, 8)[SEQ : 2 * SEQ],
    "parts of two rows": lambda x: x + x.reshape(4 * SEQ, 8)[SEQ // 2 : 3 * SEQ // 2],
    "softmax in two blocks": lambda x: x.view(4, 2, SEQ // 2, 8).softmax(2).view(4, SEQ, 8),
    "softmax in eight blocks": lambda x: x.view(4, 8, SEQ // 8, 8).softmax(2).view(4, SEQ, 8),
    "halves swapped": lambda x: torch.cat([x[:, SEQ // 2 :], x[:, : SEQ // 2]], 1),
    "the last position": lambda x: x * x[:, -1:],
    "shifted": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(8, 8, 3, dtype=x.dtype), padding=1).mT,
    "cumulative sum": lambda x: x.cumsum(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "largest": lambda x: x * x.argmax(1, keepdim=True),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], 2 * x[:, None], x[:, None], is_causal=True
    )[:, 0],
    "attention to itself": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], is_causal=True
    )[:, 0],
    "attention with a mask": lambda x: F.scaled_dot_product_attention(
        x[:, None], 2 * x[:, None], x[:, None], torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    )[:, 0],
    "attention of three dimensions": lambda x: F.scaled_dot_product_attention(
        x, 2 * x, x, is_causal=True
    ),
}
QUICK_ALONG = ("parts of two rows", "attention with a mask")


class Along(nn.Module):
    """An operation along the sequence, between two layers that treat each position by itself."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(8, 8), nn.Linear(8, 8)
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.behind(ALONG[self._name](self.before(x)))
        return found


def by_position(output: Tensor, y: Tensor) -> Tensor:
    """A loss with a different weight for every position."""
    weights = torch.arange(1, SEQ + 1, dtype=y.dtype)[None, :, None]
    return ((output - y) ** 2 * weights).mean()


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_ALONG else pytest.mark.slow) for n in ALONG]
)
def test_what_models_do_along_the_sequence(name: str) -> None:
    torch.manual_seed(0)
    model = Along(name).double()
    data: list[Batch] = [((torch.randn(4, SEQ, 8).double(),), (torch.randn(4, SEQ, 8).double(),))]
    found = train(compiled(model, context(4), by_position, data), data)
    assert_same(found, plain(model, by_position, data, microbatches=1), CLOSE)


# the work of a device


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "shared", "scale"), [(2, 2, 0.5), (4, 2, 0.3), (3, 1, 1.0)])
def test_head_and_tail_are_parts_of_the_attention(
    ways: int, heads: int, shared: int, scale: float, adjacent: bool
) -> None:
    """Unless ``adjacent``, the numbers of a row are not side by side in memory."""
    part, generator = 3, torch.Generator().manual_seed(ways)
    shapes = [(2, n, 2 * ways * part, 4) for n in (heads, shared, shared, heads)]
    query, key, value, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    expected = attend(*whole, scale=scale)
    expected.backward(gradient)
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for rank in range(ways):
        at = torch.cat([torch.arange(part) + i * part for i in (rank, 2 * ways - 1 - rank)])
        own = [x.clone().requires_grad_() for x in (query[:, :, at], key, value)]
        given = own if adjacent else [x.mT.contiguous().mT for x in own]
        found, _ = head_tail_attention(*given, torch.tensor(rank), scale)
        found.backward(gradient[:, :, at])
        torch.testing.assert_close(found, expected[:, :, at], rtol=0, atol=CLOSE)
        torch.testing.assert_close(own[0].grad, whole[0].grad[:, :, at], rtol=0, atol=CLOSE)
        for total, x in zip(sums, own[1:], strict=True):
            total += x.grad
    for total, x in zip(sums, whole[1:], strict=True):
        torch.testing.assert_close(total, x.grad, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("ways", [2, 4])
def test_all_devices_have_the_same_work(ways: int) -> None:
    """The sizes given to the kernels, forward and backward: 2n + 1 of 4n parts."""
    part = 8
    query = torch.randn(1, 2, 2 * part, 4, requires_grad=True)
    key = torch.randn(1, 2, 2 * ways * part, 4, requires_grad=True)
    work = []
    for rank in range(ways):
        with torch.profiler.profile(record_shapes=True) as profile:
            head_tail_attention(query, key, key, torch.tensor(rank), 0.5)[0].sum().backward()
        forward, backward = (
            [e.input_shapes for e in profile.events() if e.name == f"aten::{KERNEL}{which}"]
            for which in ("", "_backward")
        )
        sizes = [[s[i][2] * s[i + 1][2] for s in row] for i, row in ((0, forward), (1, backward))]
        work.append([sum(row) for row in sizes])
    half = (2 * ways + 1) * part**2
    assert work == [[half, half]] * ways
    full = 2 * part * 2 * ways * part
    assert half / full == (2 * ways + 1) / (4 * ways)


KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.slow
def test_a_layer_gathers_keys_and_values_and_nothing_else() -> None:
    """Their gradients are reduce-scattered; the loss is one number."""
    program = compiled(dense(layers=1), CASES["cp2-dp2-zero1"], lm_loss, batches())
    kinds: Counter[str] = Counter()
    for x in program.plans[0].instructions:
        if x.content is Content.VALUE and "MB[0]" in x.name:
            assert isinstance(x.op, Collective)
            kinds[x.op.kind.value] += 1
    assert kinds == Counter(all_gather=2, reduce_scatter=2, all_reduce=1)
    flows = {f.kind: f for f in program.traffic[0].flows if f.stream == "cp"}
    keys = 1 * SEQ * 16 * 8  # 1 row in fp64; a device lacks half of it
    assert flows["all_gather"].nbytes == 2 * 2 * keys // 2
    assert flows["reduce_scatter"].nbytes == 2 * 2 * keys // 2


def flops(strategy: list[Directive]) -> int:
    """FLOPs of one microbatch on a device, as the cost model counts them."""
    dag = compiled(dense(layers=1), strategy, lm_loss, batches()).dag
    passes = [c.variants[dag.policy(c.index)].passes for c in dag.model.chunks]
    return sum(f.flops for row in passes for which, f in row.items() if which.value in "FB")


@pytest.mark.slow
def test_a_cost_model_sees_the_work_of_head_and_tail() -> None:
    """With 2 devices, 5 of 8 parts of the attention and half of everything else. Attention has two
    products forward and five backward."""
    rows, heads, width = 4, 4, 4
    attention = 2 * rows * heads * SEQ * SEQ * width * (2 + 5)
    rest = flops([split(parts=1), place({}, devices=[0])]) - attention
    assert flops(context(2)) == rest // 2 + attention // 2 * 5 // 8


# mistakes


def test_mistakes_are_refused() -> None:
    with pytest.raises(DirectiveError, match="attention='ring' is unknown: one of all_to_all"):
        compiled(dense(layers=1), context(attention="ring"), lm_loss, batches())
    alone = [split(parts=1), place({}, devices=[0], attention="all_gather")]
    with pytest.raises(DirectiveError, match="is for a sequence that is sharded: name its axis"):
        compiled(dense(layers=1), alone, lm_loss, batches())
    with pytest.raises(CaptureError, match="pad it to a multiple of 6"):
        compiled(dense(layers=1), context(3), lm_loss, batches())
