"""The loss and its gradients are those of the whole batch on one device, however the batch is
split: weighted means and sums; and warnings about losses that cannot be split."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import CaptureError, PiperError, PiperWarning
from piper.capture.model import capture
from piper.program.compile.model_warnings import warn_of_mixing
from piper.strategies import mesh
from piper.strategies.directives import place, split
from tests.reference import Net

CLASSES, ROWS, SEQ = 8, 8, 5
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            with piper.annotate("layer"):
                h = torch.tanh(layer(h))
        return self.head(h)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows with different numbers of targets; the first two rows, a whole microbatch, have none."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(CLASSES, (2, ROWS, SEQ), generator=draw)
    y[torch.rand(ROWS, SEQ, generator=draw) < 0.3] = -100
    y[:2] = -100
    return x, y


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier().double()


def entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), y, label_smoothing=0.1)


def likelihood(output: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(output, -1).flatten(0, 1), y.flatten(), ignore_index=-100)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(weight=WEIGHTS)

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.entropy(output.flatten(0, 1), y.flatten())
        return found


def masked(output: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()
    return (output.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def normalised(output: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()
    return (output.square().sum(-1) * (mask / mask.sum())).sum()


def inverse(output: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()
    return (output.square().sum(-1) * mask).sum() * (1 / mask.sum())


def of_means(output: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).double()
    return (output.square().sum(-1) * mask).mean() / mask.mean()


def several(output: Tensor, y: Tensor) -> Tensor:
    """Two means over different elements, and one over all elements."""
    large = y > 3
    z = output.logsumexp(-1)
    return entropy(output, y) + 0.3 * (z * large).sum() / (large.sum() + 1) + 0.1 * z.mean()


LOSSES: list[Callable[..., Tensor]] = [
    entropy, smoothed, likelihood, Weighted(), masked, normalised, inverse, of_means, several,
]  # fmt: skip


def trained(program: piper.Program, *given: Any) -> tuple[float, float, dict[str, Tensor]]:
    """The losses of an evaluation and a step, and the state after the step."""
    with piper.launch(program) as trainer:
        evaluated = trainer.evaluate(*given).loss
        loss = trainer.step(*given).loss
        return float(evaluated), float(loss), trainer.state_dict()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def assert_whole(program: piper.Program, loss: Callable[..., Tensor], *given: Any) -> None:
    """A step of ``program`` equals a step of plain PyTorch on the whole batch."""
    plain = model()
    expected = loss(plain(given[0]), *given[1:])
    expected.backward()
    expected = expected.detach()
    sgd(list(plain.parameters())).step()
    evaluated, found, state = trained(program, *given)
    assert abs(found - float(expected)) < 1e-12
    assert abs(evaluated - float(expected)) < 1e-12
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(state[name], x, rtol=0, atol=1e-12)


@pytest.mark.cases(fast=3, slow=1)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: getattr(x, "__name__", type(x).__name__))
def test_means_over_what_counts_are_those_of_the_whole_batch(loss: Callable[..., Tensor]) -> None:
    x, y = batch()
    captured = piper.capture(model(), inputs=(x,), targets=(y,), loss=loss, optimizer=sgd)
    for strategy in (mesh(microbatches=4), mesh(pp=2, dp=2, microbatches=2, zero=1)):
        assert_whole(captured.compile(strategy), loss, x, y)


def summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")


def halved(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output.square().mean(-1) * (y > 0)).sum()


def of_two(output: Tensor, y: Tensor) -> Tensor:
    """A sum over rows, a mean over rows, and a constant."""
    return -output.logsumexp(-1).sum() / 3 + output.square().mean() + 1


def by_rows(output: Tensor, y: Tensor) -> Tensor:
    return output.square().sum() / len(output)


def of_columns(output: Tensor, y: Tensor) -> Tensor:
    return output.square().mean(0).sum()


def beside_a_mean(output: Tensor, y: Tensor) -> Tensor:
    return masked(output, y) + 0.1 * output.abs().sum()


def by_a_mean(output: Tensor, y: Tensor) -> Tensor:
    """Sums over rows that stay sums beside what the whole batch determines."""
    mask = (y != -100).double()
    return output.square().sum() * mask.mean() + output.sum() / mask.sum().sqrt()


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    "loss", [summed, halved, of_two, by_rows, of_columns, beside_a_mean, by_a_mean]
)
def test_sums_over_rows_are_those_of_the_whole_batch(loss: Callable[..., Tensor]) -> None:
    x, y = batch()
    captured = piper.capture(model(), inputs=(x,), targets=(y,), loss=loss, optimizer=sgd)
    for strategy in (mesh(microbatches=4), mesh(pp=2, dp=2, microbatches=2, zero=1)):
        assert_whole(captured.compile(strategy), loss, x, y)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "strategy",
    [
        mesh(tp=2, microbatches=4, parameters={"head.weight": 0, "head.bias": 0}),
        mesh(cp=2, microbatches=4),
        mesh(cp=2, dp=2, microbatches=2),
    ],
    ids=["vocabulary", "context", "context and replicas"],
)
def test_where_classes_or_the_sequence_are_sharded(strategy: piper.Strategy) -> None:
    x, y = (torch.cat([part, part[:, :1]], 1) for part in batch())  # length 6, divisible by two
    program = piper.compile(
        model(), strategy, inputs=(x,), targets=(y,), loss=several, optimizer=sgd
    )
    assert_whole(program, several, x, y)


def test_nothing_ignored_changes_no_bit() -> None:
    """Then the mean of the microbatches' means is the mean of the whole, as computed."""
    x, y = batch()
    y = y.clamp(min=0)
    program = piper.compile(
        model().float(), mesh(microbatches=4), inputs=(x,), targets=(y,), loss=entropy,
        optimizer=sgd,
    )  # fmt: skip
    plain = model().float()
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (entropy(plain(part), target) / 4).backward()
    sgd(list(plain.parameters())).step()
    _, _, state = trained(program, x, y)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_smaller_batch_that_is_filled_up() -> None:
    x, y = batch()
    program = piper.compile(
        model(), mesh(dp=2, microbatches=2), inputs=(x,), targets=(y,), loss=entropy, optimizer=sgd
    )
    with piper.launch(program) as trainer:
        found = trainer.step(x[:5], y[:5], pad=(0, -100)).loss
    assert abs(float(found) - float(entropy(model()(x[:5]), y[:5]))) < 1e-12


def test_rows_that_would_count_are_not_filled_up() -> None:
    x, y = batch()
    program = piper.compile(
        model(), mesh(dp=2), inputs=(x,), targets=(y,), loss=several, optimizer=sgd
    )
    with piper.launch(program) as trainer, pytest.raises(PiperError, match="a mean over all rows"):
        trainer.step(x[:5], y[:5], pad=(0, -100))


def test_a_count_that_the_caller_gives() -> None:
    """As in the transformers Trainer: a sum, divided by the label count of the whole batch."""
    x, y = batch()

    def forward(self: Any, x: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        total = F.cross_entropy(self.inner(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch.to(total.device)

    given = {"x": x, "labels": y, "num_items_in_batch": (y != -100).sum()}
    program = piper.compile(Net(forward, inner=model()), mesh(dp=2, microbatches=2), inputs=given)
    with piper.launch(program) as trainer:
        found = trainer.step(given).loss
    assert abs(float(found) - float(entropy(model()(x), y))) < 1e-12


@pytest.mark.slow
def test_metrics_that_are_means_over_what_counts() -> None:
    x, y = batch()

    def accuracy(output: Tensor, y: Tensor) -> dict[str, Tensor]:
        hit = (output.argmax(-1) == y).double()
        return {"accuracy": hit.sum() / (y != -100).sum()}

    program = piper.compile(
        model(), mesh(dp=2, microbatches=2), inputs=(x,), targets=(y,), loss=entropy,
        outputs=accuracy,
    )  # fmt: skip
    with piper.launch(program) as trainer:
        found = trainer.step(x, y).outputs["accuracy"]
        evaluated = trainer.evaluate(x, y).outputs["accuracy"]
    expected = accuracy(model()(x), y)["accuracy"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(evaluated, expected, rtol=0, atol=1e-12)


def test_a_loss_that_counts_by_itself_stays_as_it_is() -> None:
    x, y = batch()

    def pair(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        count = (y != -100).sum()
        total = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")
        return total, count

    program = piper.compile(
        model(), mesh(microbatches=4), inputs=(x,), targets=(y,), loss=pair, optimizer=sgd
    )
    assert program.training_step.code.totals is None
    assert abs(trained(program, x, y)[1] - float(entropy(model()(x), y))) < 1e-12


def test_a_program_that_was_saved_counts_too(tmp_path: Path) -> None:
    x, y = batch()
    program = piper.compile(
        model(), mesh(dp=2, microbatches=2), inputs=(x,), targets=(y,), loss=Weighted(),
        optimizer=sgd,
    )  # fmt: skip
    program.save(tmp_path / "program")
    source = piper.Source(model(), Weighted())
    again = piper.Program.load(tmp_path / "program", source=source, optimizer=sgd)
    assert_whole(again, Weighted(), x, y)


@pytest.mark.slow
def test_other_processes_count_too() -> None:
    x, y = batch()
    program = piper.compile(
        model(), mesh(pp=2, microbatches=4), inputs=(x,), targets=(y,), loss=several, optimizer=sgd
    )
    with piper.launch(program, on="processes") as trainer:
        found = trainer.step(x, y).loss
    assert abs(float(found) - float(several(model()(x), y))) < 1e-12


# losses that cannot be split


def rooted(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output.sum(-1), y.double()).sqrt()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(output[:, 0], dim=-1)
    z = torch.cat([z, z.flip(1)])
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def centred(output: Tensor, y: Tensor) -> Tensor:
    return (output - output.mean(0)).square().mean()


def distances(output: Tensor, y: Tensor) -> Tensor:
    z = output[:, 0]
    return (z.unsqueeze(0) - z.unsqueeze(1)).square().mean()


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (rooted, "not linear in its sum or mean over rows: sqrt is computed from 4 of 8 rows"),
        (contrastive, "matmul computes rows of the batch from one another, and sees 4 of 8 rows"),
        (centred, "sub computes rows of the batch from one another"),
        (distances, "sub computes rows of the batch from one another"),
    ],
)
def test_a_loss_that_needs_the_whole_batch_is_named(loss: Any, says: str) -> None:
    x, y = batch()
    found = capture(model(), inputs=(x,), targets=(y,), loss=loss, microbatches=2)
    with pytest.warns(PiperWarning, match=says) as caught:
        warn_of_mixing([found])
    line = loss.__code__.co_firstlineno
    assert any(f"{Path(__file__).name}:{line + i}" in str(caught[0].message) for i in range(4))


@pytest.mark.slow
def test_batch_normalization_is_named_where_the_batch_is_split() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    captured = piper.capture(net, inputs=(x,), targets=(x,), loss=F.mse_loss)
    with pytest.warns(PiperWarning, match="batch normalization takes its statistics from 4 of"):
        captured.compile(piper.Strategy([split(parts=2), place({}, devices=[0])]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        captured.compile(piper.Strategy([place({}, devices=[0])]))  # the whole batch at once


def test_offsets_are_not_cut_like_rows() -> None:
    def forward(self: Any, ids: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets[1:] - offsets[:-1]
        return (self.embed(ids).sum() / lengths).mean()

    given = torch.randint(9, (1, 8)), torch.tensor([0, 3, 5, 8])
    net = Net(forward, embed=nn.Embedding(9, 4))
    with pytest.raises(CaptureError, match=r"holds offsets \(slice of it\) and would be cut") as at:
        piper.compile(net, mesh(microbatches=2), inputs=given)
    assert "offsets[1:] - offsets[:-1]" in str(at.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: entropy(output, y) + 1e-3 * output.logsumexp(-1).square().mean(),
        lambda output, y: output.square().sum() / output.shape[0],
        lambda output, y: F.binary_cross_entropy_with_logits(output.sum(-1), (y > 3).double()),
        lambda output, y: F.kl_div(
            output.log_softmax(-1), torch.softmax(output.detach(), -1), reduction="batchmean"
        ),
        lambda output, y: ((1 - output.softmax(-1)) ** 2 * output.log_softmax(-1)).mean(),
        lambda output, y: torch.bmm(output, WEIGHTS.diag().repeat(len(output), 1, 1)).mean(),
    ],
)
def test_nothing_is_said_of_means_over_rows(loss: Any) -> None:
    x, y = batch()
    found = capture(model(), inputs=(x,), targets=(y,), loss=loss, microbatches=2)
    assert found.mixing is None


def test_weights_that_are_trained_cannot_count() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.weigh(x))
        return (weight * self.inner(x).square().sum(-1, keepdim=True)).sum() / weight.sum()

    x = torch.randn(8, 4)
    net = Net(forward, weigh=nn.Linear(4, 1), inner=nn.Linear(4, 4))
    found = capture(net, inputs=(x,), microbatches=2).mixing
    assert found is not None
    assert found.op == "div"
    assert "weight.sum()" in found.at
