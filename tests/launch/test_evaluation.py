"""Evaluation of a whole data set: the loss, metrics and predictions of PyTorch on all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import piper
from piper import PiperError
from piper.launch.evaluation.pieces import RowPieces
from piper.strategies import mesh
from tests.capture.test_whole_batch import (
    CLASSES,
    SEQ,
    contrastive,
    entropy,
    inverse,
    masked,
    model,
    normalised,
    of_means,
    several,
    smoothed,
)
from tests.hugging_face import FAMILIES, VOCAB
from tests.hugging_face import SEQ as LENGTH

SIZE = 24
"""The rows of a batch of the program: 1,003 rows in batches of 64 leave pieces in several sizes."""


def on_groups(*groups: list[int]) -> piper.Strategy:
    """Two stages on two groups of devices, in two microbatches."""
    places = [piper.place({"PP": i}, devices=group) for i, group in enumerate(groups)]
    first = [piper.partition("layer", into="PP", parts=2), piper.split(parts=2)]
    return piper.Strategy([*first, *places, piper.replicate({})])


STRATEGIES = {
    "one device": mesh(),
    "stages": mesh(pp=2, microbatches=4),
    "replicas": mesh(dp=2, zero=2, microbatches=2),
    "the loss on fewer devices": on_groups([0, 1], [2]),
    "the loss on more devices": on_groups([0], [1, 2]),
}


@functools.cache
def rows(count: int = 1003) -> tuple[Tensor, Tensor]:
    """Rows with different numbers of targets; the last, an odd batch, have few."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randint(CLASSES, (2, count, SEQ), generator=draw)
    y[torch.rand(count, SEQ, generator=draw) < 0.3] = -100
    y[-40:-3] = -100
    return x, y


def plain(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output.sum((1, 2)), y.sum(1).double())


def counting(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")
    return total, (y != -100).sum()


def of_integers(output: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return (output.square().sum(-1) * mask).sum() / mask.sum()


def metrics(output: Tensor, y: Tensor) -> dict[str, Tensor]:
    right = output.argmax(-1) == y
    accuracy = right.sum() / (y != -100).sum()
    return {"right": right, "logits": output, "mean": output.mean(), "accuracy": accuracy}


LOSSES: list[Callable[..., Any]] = [
    plain, entropy, counting, masked, of_integers, several, smoothed, inverse, of_means, normalised,
]  # fmt: skip


def program(loss: Callable[..., Any], strategy: str, **options: Any) -> piper.Program:
    x, y = (x[:SIZE] for x in rows())
    return piper.compile(
        model(), STRATEGIES[strategy], inputs=(x,), targets=(y,), loss=loss, **options
    )


def of_all(loss: Callable[..., Any], count: int = 1003) -> float:
    """The loss of all rows together, in PyTorch."""
    x, y = (x[:count] for x in rows())
    with torch.no_grad():
        found = loss(model()(x), y)
    total, divisor = found if isinstance(found, tuple) else (found, 1)
    return float(total / divisor)


def loader(size: int, count: int = 1003) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*(x[:count] for x in rows())), size)


@pytest.mark.cases(fast=5, slow=5)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.__name__)
def test_the_loss_of_a_data_set_is_that_of_all_its_rows(loss: Callable[..., Any]) -> None:
    with piper.launch(program(loss, "replicas")) as trainer:
        found = trainer.evaluate(loader(64))
        assert float(found) == pytest.approx(of_all(loss), rel=1e-12)
        assert found.tokens == 1003 * SEQ
        assert trainer.steps == 0


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_and_an_evaluation_have_the_same_divisors(strategy: str) -> None:
    """Regions on groups of different sizes divide by their own number of parts."""
    x, y = (x[-SIZE:] for x in rows())
    expected = float(several(model()(x), y))
    with piper.launch(program(several, strategy, optimizer=torch.optim.SGD)) as trainer:
        assert float(trainer.evaluate(x, y)) == pytest.approx(expected, rel=1e-12)
        assert float(trainer.evaluate(loader(64))) == pytest.approx(of_all(several), rel=1e-12)
        assert float(trainer.step(x, y)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_and_predictions_are_of_all_rows(strategy: str) -> None:
    with piper.launch(program(entropy, strategy, outputs=metrics)) as trainer:
        found = trainer.evaluate(loader(64)).outputs
        one = trainer.evaluate(*(x[:7] for x in rows())).outputs
    x, y = rows()
    with torch.no_grad():
        wanted = metrics(model()(x), y)
        first = metrics(model()(x[:7]), y[:7])
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name].to(expected.dtype), expected)
        torch.testing.assert_close(one[name].to(expected.dtype), first[name])


@pytest.mark.parametrize("count", [1, 7, 23, 25, 48, 61])
def test_a_batch_may_have_any_number_of_rows(count: int) -> None:
    with piper.launch(program(several, "stages")) as trainer:
        whole = trainer.evaluate(*(x[:count] for x in rows()))
        assert float(whole) == pytest.approx(of_all(several, count), rel=1e-12)
        for size in (5, SIZE):
            assert float(trainer.evaluate(loader(size, count))) == pytest.approx(float(whole))


def test_rows_wait_for_those_of_the_next_batch(counted: piper.Trainer) -> None:
    """The fewest forwards: whole batches, and few pieces at the end."""
    pieces = RowPieces(counted._session.shapes, None, None, rows=False)
    x, y = rows()
    found = [pieces.of((x[i : i + 10], y[i : i + 10])) for i in range(0, 50, 10)]
    assert [[p.copies for p in row] for row in (*found, pieces.rest())] == [
        [], [], [1], [], [1], [12]
    ]  # fmt: skip
    pieces.of((x[:23], y[:23]))
    assert [(p.weight, p.copies) for p in pieces.rest()] == [(12, 2), (8, 3), (3, 8)]


@pytest.fixture
def counted() -> Iterator[piper.Trainer]:
    with piper.launch(program(entropy, "one device")) as trainer:
        yield trainer


def test_one_batch_of_the_programs_size_is_what_it_was(counted: piper.Trainer) -> None:
    x, y = (x[:SIZE] for x in rows())
    assert torch.equal(counted.evaluate(x, y).loss, counted.evaluate([(x, y)]).loss)
    assert torch.equal(counted.evaluate((x, y)).loss, counted.evaluate(iter([[x, y]])).loss)


def test_what_cannot_be_evaluated(counted: piper.Trainer) -> None:
    x, y = rows()
    with pytest.raises(PiperError, match="there is nothing to evaluate: the loader gives no batch"):
        counted.evaluate([])
    with pytest.raises(PiperError, match="a batch to evaluate has no rows"):
        counted.evaluate(x[:0], y[:0])
    with pytest.raises(PiperError, match="disagree on the batch size"):
        counted.evaluate([(x[:3], y[:4])])


def test_rows_that_depend_on_one_another() -> None:
    """Whole batches can be evaluated, and not their parts: a row has other rows beside it."""
    from_others = piper.compile(
        model(), mesh(), inputs=(rows()[0][:SIZE],), targets=(rows()[1][:SIZE],), loss=contrastive
    )
    x, y = (x[: 2 * SIZE] for x in rows())
    parts = [contrastive(model()(part), y[:SIZE]) for part in x.split(SIZE)]
    with piper.launch(from_others) as trainer:
        found = trainer.evaluate(loader(SIZE, 2 * SIZE))
        torch.testing.assert_close(found.loss, torch.stack(parts).mean().detach())
        with pytest.raises(
            PiperError, match="the rows of a batch depend on each other in this model"
        ):
            trainer.evaluate(x[:7], y[:7])


def test_lengths_that_differ() -> None:
    """Each length has its own program; the mean is over all targets of all lengths."""
    x, y = rows()
    made = program(entropy, "stages")
    batches = [(x[:30], y[:30]), (x[30:45, :3], y[30:45, :3]), (x[45:52], y[45:52])]
    net = model()
    parts = [counting(net(x).detach(), y) for x, y in batches]
    expected = sum(total for total, _ in parts) / sum(count for _, count in parts)
    with piper.launch(made, shapes=1) as trainer:
        assert float(trainer.evaluate(batches)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.slow
def test_a_model_that_computes_its_own_loss() -> None:
    """The labels of a Hugging Face model are shifted and counted inside it."""
    net = FAMILIES["Llama"].make(dropout=False)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (11, LENGTH), generator=draw)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=draw) < 0.4, -100)
    data = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
    made = piper.compile(net, mesh(dp=2), inputs={"input_ids": tokens[:4], "labels": labels[:4]})
    with torch.no_grad():
        expected = net(input_ids=tokens, labels=labels).loss
    with piper.launch(made) as trainer:
        found = trainer.evaluate(DataLoader(data, 3))  # type: ignore[arg-type, var-annotated]
        torch.testing.assert_close(found.loss, expected)
        count = torch.tensor(3)
    given = {"input_ids": tokens[:4], "labels": labels[:4], "num_items_in_batch": count}
    with (
        piper.launch(piper.compile(net, mesh(dp=2), inputs=given)) as trainer,
        pytest.raises(PiperError, match="num_items_in_batch is the number of labels of one batch"),
    ):
        trainer.evaluate([given, given])
