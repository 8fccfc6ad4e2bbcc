"""``precision="bf16"`` computes in fp32 where autocast does, alike on every device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.capture.intercept.mixed_precision import MixedPrecision
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies.directives import place
from tests.hugging_face import FAMILIES, tokens
from tests.training import sgd

LOW, WIDE = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4)
SQUARE = torch.ones(4, 4, dtype=torch.bfloat16)
CLASSES = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (lambda: LOW.softmax(-1), torch.float32),
        (lambda: F.softmax(LOW, -1, dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.log_softmax(LOW, 1), torch.float32),
        (lambda: LOW.sum(), torch.float32),
        (lambda: LOW.sum(0) + torch.sum(LOW, dim=-1, keepdim=True), torch.bfloat16),
        (lambda: LOW.cumsum(0), torch.float32),
        (lambda: LOW.exp() + LOW**2 + LOW.square() + 1 / LOW, torch.float32),
        (lambda: LOW.mean() + LOW.tanh().sum(dtype=torch.bfloat16), torch.bfloat16),
        (lambda: F.cross_entropy(LOW, CLASSES), torch.float32),
        (lambda: nn.CrossEntropyLoss()(LOW, CLASSES), torch.float32),
        (lambda: F.mse_loss(LOW, WIDE), torch.float32),
        (lambda: LOW.norm() + F.normalize(LOW), torch.float32),
        (lambda: F.layer_norm(LOW, (4,), SQUARE[0]), torch.bfloat16),
        (lambda: F.layer_norm(WIDE, (4,), SQUARE[0]), torch.float32),
        (lambda: F.rms_norm(LOW, (4,), SQUARE[0]), torch.bfloat16),
        (lambda: F.linear(WIDE, SQUARE), torch.bfloat16),
        (lambda: WIDE @ SQUARE, torch.bfloat16),
        (lambda: WIDE @ SQUARE.float(), torch.float32),
        (lambda: torch.einsum("bi,ij->bj", WIDE, SQUARE), torch.bfloat16),
        (lambda: F.scaled_dot_product_attention(*[x[:, None] for x in (WIDE, LOW, LOW)]),
         torch.bfloat16),
        (lambda: LOW.index_add(0, CLASSES, WIDE), torch.float32),
        (lambda: LOW.clone().index_add_(0, CLASSES, WIDE), torch.bfloat16),
        (lambda: WIDE.double() @ SQUARE.double(), torch.float64),
    ],
)  # fmt: skip
def test_the_precision_of_an_operation(operation: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with MixedPrecision():
        assert operation().dtype == dtype


def step_of(model: nn.Module, **given: Any) -> tuple[piper.Program, Tensor]:
    program = piper.compile(
        model,
        piper.Strategy([place({}, devices=[0])]),
        optimizer=sgd,
        precision="bf16",
        **given,
    )
    inputs, targets = given["inputs"], given.get("targets", ())
    batch = (inputs, *targets) if isinstance(inputs, dict) else (*inputs, *targets)
    with piper.launch(program) as trainer:
        return program, trainer.step(*batch).loss


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("family", ["BERT", "Llama"])
def test_the_loss_of_a_model_of_its_own_is_that_of_autocast(family: str) -> None:
    """Between 2 and 4, bf16 losses are multiples of 1/64: coarser than the tolerance here."""
    model, batch = FAMILIES[family].make(dropout=False).float(), tokens()
    _, loss = step_of(copy.deepcopy(model), inputs=batch)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(**batch).loss
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 3e-3
    assert loss.bfloat16().item() != loss.item()


def test_targets_keep_their_precision() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    y = torch.full((8, 4), 1.0 + 2**-12)
    program, loss = step_of(copy.deepcopy(model), inputs=(x,), targets=(y,), loss=F.mse_loss)
    low = F.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    torch.testing.assert_close(loss, F.mse_loss(low.float(), y).detach())
    code = program.training_step.code
    assert [s.dtype for s in code.values[1][:2]] == [
        torch.bfloat16,
        torch.float32,
    ]


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("experts", [False, True])
def test_what_stages_send_is_bf16(experts: bool) -> None:
    """Operations in fp32 do not turn the residual stream into fp32."""
    sizes: dict[str, Any] = {"vocab": 16, "dim": 8, "layers": 2, "heads": 2, "mlp_dim": 8}
    model: nn.Module = DenseTransformer(DenseConfig(**sizes, max_seq=4))
    if experts:
        model = MoETransformer(MoEConfig(**sizes, max_seq=4, experts=2, top_k=1))
    x = torch.zeros(2, 4, dtype=torch.int64)
    program, _ = step_of(model, inputs=(x,), targets=(x,), loss=lm_loss)
    stream = [s for s in program.training_step.code.values[1] if s.shape == (2, 4, 8)]
    assert stream
    assert {s.dtype for s in stream} == {torch.bfloat16}
