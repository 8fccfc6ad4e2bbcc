"""A sharded region computes experts and rows independently: proved, or refused by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.strategies.directives import place, shard
from tests.training import ULPS, assert_same, compiled, plain, train

EXPERTS, DIM = 4, 8
Body = Callable[["Region", Tensor], Tensor]


class Region(nn.Module):
    """A layer, and experts whose region computes ``body``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.pre = nn.Linear(DIM, DIM)
        self.w = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) * 0.3)
        self.b = nn.Parameter(torch.randn(EXPERTS, 1, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("pre"):
            rows = self.pre(x).unflatten(0, (EXPERTS, -1)) * 1
        with piper.annotate("EP"):
            rows = self.body(self, rows)
        with piper.annotate("post"):
            return rows.flatten(0, 1) * 1


def compile_sharded(body: Body, rows: int) -> tuple[Region, piper.Program, list]:
    model = Region(body)
    batch = rows * EXPERTS * 2
    batches = [((torch.randn(batch, DIM),), (torch.randn(batch, DIM),)) for _ in range(2)]
    strategy = [place({}, devices=[0, 1]), shard({"EP": "*"})]
    return model, compiled(model, strategy, F.mse_loss, batches), batches


SEPARATE: dict[str, Body] = {
    "bmm": lambda m, x: F.gelu(torch.bmm(x, m.w) + m.b),
    "einsum": lambda m, x: torch.einsum("erd,edf->erf", x, m.w) + m.b,
    "flatten": lambda m, x: F.silu((x @ m.w).flatten(0, 1)).unflatten(0, (EXPERTS, -1)) + m.b,
    "reshape": lambda m, x: F.silu((x @ m.w).reshape(-1)).view(x.shape) + m.b,
    "heads": lambda m, x: (
        (x @ m.w).unflatten(-1, (2, 4)).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(-2)
        + m.b
    ),
    "norms": lambda m, x: F.rms_norm(F.layer_norm(x @ m.w, (DIM,)), (DIM,)) + m.b,
    "matvec": lambda m, x: (x.unsqueeze(2) @ m.w.unsqueeze(1)).squeeze(2) + m.b,
    "powers": lambda m, x: x @ torch.linalg.matrix_exp(m.w) + m.b,
    "columns": lambda m, x: F.glu(torch.cat([x @ m.w, x.cumsum(-1)], -1)) + m.b,
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(pytest.param(n, 3, marks=() if n == "flatten" else pytest.mark.slow) for n in SEPARATE),
        ("einsum", 1),
        pytest.param("heads", 1, marks=pytest.mark.slow),
    ],
)
def test_what_treats_experts_and_rows_separately_equals_one_device(name: str, rows: int) -> None:
    model, program, batches = compile_sharded(SEPARATE[name], rows)
    expected = plain(model, F.mse_loss, batches, microbatches=2)
    assert_same(train(program, batches), expected, ULPS)


MIXED: dict[str, tuple[Body, str, str]] = {
    "softmax over experts": (lambda m, x: (x @ m.w).softmax(0) + m.b, "experts", "softmax"),
    "mean of rows": (lambda m, x: x @ m.w - x.mean(1, keepdim=True) + m.b, "rows", "mean"),
    "mean of all": (lambda m, x: x @ m.w - x.mean() + m.b, "experts", "mean"),
    "cumsum of rows": (lambda m, x: x.cumsum(1) @ m.w + m.b, "rows", "cumsum"),
    "cumsum of both": (
        lambda m, x: (x @ m.w).flatten(0, 1).cumsum(0).unflatten(0, (EXPERTS, -1)) + m.b,
        "experts",
        "cumsum",
    ),
    "attention": (lambda m, x: (x @ x.mT).softmax(-1) @ (x @ m.w) + m.b, "rows", "matmul"),
    "flip": (lambda m, x: (x @ m.w).flip(0) + m.b, "experts", "flip"),
    "first expert": (lambda m, x: x @ m.w + x[:1] + m.b, "experts", "slice"),
    "row numbers": (
        lambda m, x: x @ m.w + torch.arange(x.shape[1]).view(1, -1, 1) + m.b,
        "rows",
        "add",
    ),
    "mean of weights": (lambda m, x: x @ m.w.mean(0, keepdim=True) + m.b, "experts", "mean"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if i < 3 else pytest.mark.slow) for i, n in enumerate(MIXED)],
)
def test_what_mixes_them_is_refused_with_operation_and_line(name: str) -> None:
    body, axis, op = MIXED[name]
    with pytest.raises(piper.PiperError, match=f"region EP.0. mixes {axis}: aten.{op}") as caught:
        compile_sharded(body, rows=3)
    assert "rows = self.body(self, rows)" in str(caught.value)
    assert "outside the region" in str(caught.value)


def test_rows_and_experts_that_change_places_are_refused() -> None:
    with pytest.raises(piper.PiperError, match="mixes"):
        compile_sharded(lambda m, x: (x @ m.w + m.b).transpose(0, 1).reshape(x.shape), rows=EXPERTS)


def test_an_operation_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(piper.PiperError, match=r"nothing is known of how aten.cdist"):
        compile_sharded(lambda m, x: torch.cdist(x, m.w) + m.b, rows=3)


def test_a_share_that_torch_computes_otherwise_is_refused() -> None:
    with pytest.raises(piper.PiperError, match=r"differently on a share of its experts: .* size 1"):
        compile_sharded(SEPARATE["matvec"], rows=1)


def test_sizes_of_the_whole_are_refused() -> None:
    with pytest.raises(piper.PiperError, match="cannot run on a share of its experts"):
        compile_sharded(lambda m, x: x @ m.w + m.b.expand(-1, 3, -1), rows=3)
