"""Batches that are dicts, as from data loaders for transformers models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import piper
from piper import PiperError, annotate
from tests.training import Run, assert_same, compiled, data_parallel, pipeline, plain, train

ROWS, WIDTH, IGNORED = 8, 6, -100


class Classifier(nn.Module):
    """Computes its own loss from labels: a sum, and the number of labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            with annotate("layer"):
                x = layer(x).tanh()
        total = F.cross_entropy(x, labels, reduction="sum", ignore_index=IGNORED)
        return {"total": total, "count": (labels != IGNORED).sum()}


def loss(output: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output["total"], output["count"]


def dataset(rows: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "labels": torch.randint(WIDTH, (), generator=draw),
            "x": torch.randn(WIDTH, generator=draw, dtype=torch.float64),
        }
        for _ in range(rows)
    ]


def example() -> dict[str, Tensor]:
    """Its keys are in another order than a loader's."""
    return {
        "x": torch.zeros(ROWS, WIDTH, dtype=torch.float64),
        "labels": torch.zeros(ROWS, dtype=torch.long),
    }


def program(model: nn.Module, **options: Any) -> piper.Program:
    return compiled(model, pipeline([[0], [1]], 2), loss, [(example(), ())], **options)


def test_a_loader_of_dicts_whose_last_batch_is_smaller() -> None:
    model = Classifier().double()
    loader = DataLoader(dataset(2 * ROWS + 3), batch_size=ROWS)
    expected = plain(model, loss, [(batch, ()) for batch in loader], microbatches=1)
    with piper.launch(program(model)) as trainer:
        results = list(trainer.iterate(loader, pad={"x": 0, "labels": IGNORED}))
        norms = tuple(result.grad_norm for result in results)
        found = Run(tuple(result.loss for result in results), norms, trainer.state_dict())
    assert_same(found, expected, 1e-12)
    assert results[-1].tokens == 3


@pytest.mark.parametrize(
    ("batch", "pad", "says"),
    [
        ({"x": example()["x"]}, None, "it lacks inputs['labels']"),
        ({**example(), "id": torch.arange(8)}, None, "it also has inputs['id']"),
        ({k: x[:5] for k, x in example().items()}, None, "A batch has 8 rows here, and this one 5"),
        (example(), {"x": 0}, "each of the 2 tensors of the batch, by name for a dict"),
        (example(), (0, -100), "each of the 2 tensors of the batch, by name for a dict"),
        (list(example().values()), None, "1 mapping of x, labels"),
    ],
)
def test_dicts_that_are_refused(batch: Any, pad: Any, says: str) -> None:
    with (
        piper.launch(program(Classifier().double())) as trainer,
        pytest.raises(PiperError, match=re.escape(says)),
    ):
        list(trainer.iterate([batch], pad=pad))


def test_values_without_dimensions() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x

    batches = [((torch.tensor(3.0),), (torch.tensor(1.0),))] * 2
    program = compiled(Line(), data_parallel(1, 1), F.mse_loss, batches)
    assert_same(train(program, batches), plain(Line(), F.mse_loss, batches, microbatches=1))
    with pytest.raises(PiperError, match=r"a batch of 1 .* does not divide"):
        compiled(Line(), data_parallel(2, 1), F.mse_loss, batches)


class Positioned(nn.Module):
    """Adds a position embedding, and takes one scalar for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor, scale: Tensor) -> Tensor:
        x = x + self.positions(position_ids)
        for layer in self.layers:
            with annotate("layer"):
                x = layer(x).tanh() * scale
        return x


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("strategy", [data_parallel(2, 2), pipeline([[0], [1, 2]], 2)])
@pytest.mark.parametrize("rows", [4, 8])
def test_one_row_that_is_for_all(strategy: Any, rows: int) -> None:
    """Also if a device has one row of a microbatch."""
    torch.manual_seed(0)
    model = Positioned().double()
    given = {
        "x": torch.randn(rows, 4, WIDTH, dtype=torch.float64),
        "position_ids": torch.tensor([[3, 1, 2, 0]]),
        "scale": torch.tensor(0.5, dtype=torch.float64),
    }
    batches = [(given, (torch.randn(rows, 4, WIDTH, dtype=torch.float64),)) for _ in range(2)]
    expected = plain(model, F.mse_loss, batches, microbatches=1)
    assert_same(train(compiled(model, strategy, F.mse_loss, batches), batches), expected, 1e-12)


def test_one_row_that_is_for_all_is_not_filled_up() -> None:
    def counted(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (output.sum((1, 2)) * y).sum(), y.sum()

    model = Positioned().double()
    given = {
        "x": torch.randn(ROWS, 4, WIDTH, dtype=torch.float64),
        "position_ids": torch.tensor([[3, 1, 2, 0]]),
        "scale": torch.tensor(0.5, dtype=torch.float64),
    }
    y = torch.ones(ROWS, dtype=torch.float64)
    made = compiled(model, data_parallel(2, 2), counted, [(given, (y,))])
    with piper.launch(made) as trainer:
        for rows in (5, 1):
            pad = ({"x": 0, "position_ids": 0, "scale": 0}, 0)
            found = trainer.evaluate({**given, "x": given["x"][:rows]}, y[:rows], pad=pad)
            total, count = counted(model(**{**given, "x": given["x"][:rows]}), y[:rows])
            torch.testing.assert_close(found.loss, (total / count).detach())


def test_a_count_that_is_a_number_of_the_example_is_refused() -> None:
    given = {"x": example()["x"], "num_items_in_batch": 8}
    with pytest.raises(piper.CaptureError, match="is 8, which every batch would be divided by"):
        piper.capture(Classifier(), inputs=given, loss=loss)
