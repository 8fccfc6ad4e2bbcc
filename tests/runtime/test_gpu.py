"""The captured programs on a CUDA device, against plain PyTorch there. Run by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper.capture.intercept.generators import draw_privately, drawing_from
from piper.capture.model import capture
from piper.capture.operators.grouped_mm import expert_rows, grouped_mm
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.runtime.draw_seeds import fold
from tests.one_device import SingleDevice
from tests.reference import assert_equal, eager, piper_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = DenseConfig(vocab=257, dim=64, layers=3, heads=4, kv_heads=2, mlp_dim=96)
MOE = MoEConfig(vocab=257, dim=64, layers=2, heads=4, mlp_dim=96, experts=4)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embedding and index gradients use atomics on CUDA by default."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def model_and_batch(
    config: DenseConfig, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        kind = MoETransformer if isinstance(config, MoEConfig) else DenseTransformer
        x, y = torch.randint(257, (4, 33)), torch.randint(257, (4, 33))
        return kind(config).to(dtype), x, y


@pytest.mark.parametrize("remat", ["none", "min-cut", "all"])
@pytest.mark.parametrize("config", [DENSE, replace(DENSE, tie_embeddings=True), MOE], ids=str)
def test_eager_programs_equal_plain_pytorch(config: DenseConfig, remat: str) -> None:
    model, x, y = model_and_batch(config)
    expected = eager(model, (x,), (y,), lm_loss, 2)
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=lm_loss,
        microbatches=2,
        remat=remat,
        outputs=lambda output, *_: output,
    )
    for split in (False, True):
        assert_equal(piper_step(captured, model, (x,), (y,), split_backward=split), expected)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_inductor_programs_agree_with_eager_ones(config: DenseConfig, split: bool) -> None:
    model, x, y = model_and_batch(config)
    results = []
    for compiler in ("eager", "inductor"):
        captured = capture(
            model, inputs=(x,), targets=(y,), loss=lm_loss, microbatches=2, compiler=compiler
        )
        single = SingleDevice(captured, model, split_backward=split)
        results.append(single.differentiate(x, y))
    (loss, gradients, _), (other_loss, other, _) = results
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_a_model_on_the_cpu_trains_on_the_gpu() -> None:
    model, x, y = model_and_batch(DENSE)
    model, x, y = model.cpu(), x.cpu(), y.cpu()
    captured = capture(model, inputs=(x,), targets=(y,), loss=lm_loss, device="cuda")
    single = SingleDevice(captured, model, lambda p: torch.optim.AdamW(p, lr=1e-2))
    losses = [single.step(x, y).loss.item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(p.is_cuda for p in single.parameters.values())


def test_dropout_draws_do_not_depend_on_the_order() -> None:
    model, x, y = model_and_batch(replace(DENSE, dropout=0.2))
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=lm_loss,
        microbatches=4,
        outputs=lambda output, *_: output,
    )
    single = SingleDevice(captured, model)
    state = torch.cuda.get_rng_state()
    _, _, forward = single.differentiate(x, y)
    _, _, backward = single.differentiate(x, y, order=[3, 2, 1, 0])
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("counts", [[16, 0, 40, 8], [0, 0, 0, 64], [5, 3, 1, 7], [0, 0, 0, 0]])
def test_grouped_products_are_those_of_a_loop(counts: list[int]) -> None:
    """Also where an expert has no rows, and where rows follow those of the last expert."""
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(72, 64, **where, requires_grad=True)
    weight = torch.randn(4, 64, 32, **where, requires_grad=True)
    bias = torch.randn(4, 32, **where, requires_grad=True)
    offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    made = grouped_mm(x, weight, offsets) + expert_rows(bias, offsets, 72)
    seed = torch.randn_like(made)
    found = torch.autograd.grad(made, (x, weight, bias), seed)
    wide = [p.detach().double().requires_grad_() for p in (x, weight, bias)]
    start, rows = 0, []
    for i, count in enumerate(counts):
        rows.append(wide[0][start : start + count] @ wide[1][i] + wide[2][i])
        start += count
    rows.append(torch.zeros(72 - start, 32, device="cuda", dtype=torch.float64))
    should = torch.cat(rows)
    assert torch.allclose(made.double(), should, atol=0.2, rtol=0.02)
    assert torch.equal(made[start:], torch.zeros_like(made[start:]))
    wanted = torch.autograd.grad(should, wide, seed.double(), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        assert torch.allclose(one.double(), other.double(), atol=0.3, rtol=0.02)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.2)
        q = h.reshape(4, 8, 2, 32).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        h = attended.transpose(1, 2).reshape(4, 8, 64)
        return F.dropout(h, 0.1) + torch.rand_like(h) + torch.randn(64, device=h.device)


def test_random_operations_have_a_generator_of_their_own() -> None:
    """They draw the numbers of the default generator with the same seed, and leave that generator
    unchanged. This includes attention with dropout, which takes no generator."""
    torch.manual_seed(0)
    model, x = Noisy().cuda(), torch.randn(4, 8, 64, device="cuda")
    captured = capture(model, inputs=(x,), targets=(x,), loss=F.mse_loss)
    before = torch.cuda.get_rng_state()
    loss, gradients, _ = SingleDevice(captured, model).differentiate(x, x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(fold(0, step=0, chunk=0, microbatch=0))
    should = F.mse_loss(model(x), x)
    should.backward()
    assert torch.equal(loss, should)
    assert torch.equal(gradients["a.weight"], model.a.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (33, 129), (1024, 256)])
def test_dropout_with_a_generator_has_the_bits_of_that_without(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype)
    for p in (0.1, 0.5, 0.9):
        torch.cuda.manual_seed(7)
        should = [y for _ in range(2) for y in torch.native_dropout(x, p, True)]
        graph = fx.Graph()
        given = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.aten.native_dropout.default, (given, p, True)))
        draw_privately(graph)
        drop = fx.GraphModule(nn.Module(), graph)
        before = torch.cuda.get_rng_state()
        with drawing_from(torch.Generator("cuda").manual_seed(7)):
            mine = [y for _ in range(2) for y in drop(x)]
        assert torch.equal(torch.cuda.get_rng_state(), before)
        assert all(map(torch.equal, mine, should))
