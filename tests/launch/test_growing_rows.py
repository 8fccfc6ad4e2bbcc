"""Rows of another length in every batch, as collators make them: filled up to the example's length,
with the numbers of plain PyTorch on the batches as they are, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError
from piper.capture.loss.own_loss import own_loss
from piper.strategies import mesh
from tests.hugging_face import FAMILIES, VOCAB
from tests.training import Run, assert_same, plain, sgd, steps

LONGEST, ROWS, WIDTH = 8, 8, 6
PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of up to ``length`` tokens, of which the first has all."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=draw)
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=draw)
    mask[0] = True
    labels = ids.where(mask, torch.tensor(-100))
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}


BATCHES = [batch(ROWS, 5, 1), batch(ROWS, 8, 2), batch(5, 3, 3), batch(ROWS, 6, 4)]


class Encoder(nn.Module):
    """Every position reads the mean of all of its row, or of those in the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Any = None) -> Any:
        x = self.embed(input_ids)
        ones = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = (ones / ones.sum(1, keepdim=True).clamp(min=1))[..., None].to(x)
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + layer((x * weight).sum(1, keepdim=True) + x).tanh()
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


class Normalised(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(nn.BatchNorm1d(LONGEST), nn.Linear(WIDTH, WIDTH))


def without(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in given.items() if key != name}


def program(model: nn.Module, strategy: piper.Strategy, **example: Any) -> piper.Program:
    given = example or batch(ROWS, LONGEST)
    return piper.compile(model, strategy, inputs=given, optimizer=sgd)


def check(model: nn.Module, strategy: piper.Strategy, on: str = "virtual", atol: float = 0) -> None:
    """Training and evaluation equal plain PyTorch on the batches without what fills them up."""
    expected = plain(model, own_loss, [(x, ()) for x in BATCHES], microbatches=1)
    with piper.launch(program(model, strategy), on=on) as trainer:
        results = list(trainer.iterate(BATCHES, pad=PAD, progress=False))
        norms = tuple(x.grad_norm for x in results if x.grad_norm is not None)
        found = Run(tuple(x.loss for x in results), norms, trainer.state_dict())
        assert [x.tokens for x in results] == [x["input_ids"].numel() for x in BATCHES]
    if not atol:
        assert_same(found, expected, 1e-12)
        return
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=atol)
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "strategy", [mesh(pp=2, dp=2, zero=2, microbatches=2), mesh(dp=2, zero=3)], ids=["pp", "zero3"]
)
def test_rows_of_every_length(strategy: piper.Strategy) -> None:
    check(Encoder().double(), strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "on"),
    [
        ("Llama", mesh(pp=2, dp=2, zero=2), "processes"),
        ("BERT", mesh(pp=2), "virtual"),
        ("T5", mesh(dp=2, zero=3), "virtual"),
        ("Gemma 3", mesh(tp=2), "virtual"),
    ],
    ids=["Llama", "BERT", "T5", "Gemma 3"],
)
def test_transformers(name: str, strategy: piper.Strategy, on: str) -> None:
    """Their losses are fp32, and some biases have gradients of nothing but rounding."""
    check(FAMILIES[name].make(dropout=False).double(), strategy, on, atol=1e-6)


def test_an_evaluation_of_rows_of_every_length() -> None:
    """The last rows are repeated, not padded, so that single numbers and rows are those given."""
    model = Encoder().double()
    with torch.no_grad():
        sums = [
            (F.cross_entropy(model(**x)["logits"].mT, x["labels"], reduction="sum"), x["labels"])
            for x in BATCHES
        ]
    wanted = sum(x for x, _ in sums) / sum((y != -100).sum() for _, y in sums)
    made = piper.compile(
        model, mesh(dp=2), inputs=batch(ROWS, LONGEST), optimizer=sgd,
        outputs=lambda x: {"said": x["logits"].argmax(-1), "size": x["logits"].mean()},
    )  # fmt: skip
    with piper.launch(made) as trainer:
        found = trainer.evaluate(BATCHES, pad=PAD)
        assert set(found.outputs) == {"said"}  # a mean would have the padding in it
        assert found.outputs["said"].shape == (sum(len(x["labels"]) for x in BATCHES), LONGEST)
        torch.testing.assert_close(found.loss, wanted)
        summary = trainer.fit([BATCHES[1]], evaluate=BATCHES, pad=PAD, progress=False)
        assert len(summary.evaluations) == 1


def test_a_model_that_reads_the_padding_is_refused() -> None:
    given = [without("attention_mask", x) for x in BATCHES]
    made = program(Encoder(), mesh(dp=2), **without("attention_mask", batch(ROWS, LONGEST)))
    pad = without("attention_mask", PAD)
    says = r"positions that this model reads: .*Give the model a mask .*launch\(program, shapes=\)"
    with piper.launch(made) as trainer:
        before = trainer.state_dict()
        for refused in (trainer.fit, trainer.evaluate):
            with pytest.raises(PiperError, match=says):
                refused(given, pad=pad)
        assert trainer.steps == 0
        assert all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())
        trainer.step(given[1], pad=pad)  # no row is shorter


def test_padding_in_buffers_and_means_is_refused() -> None:
    with (
        piper.launch(program(Normalised(), mesh(dp=1))) as trainer,
        pytest.raises(PiperError, match="forward changes the buffer layers"),
    ):
        trainer.step(batch(ROWS, 5), pad=PAD)
    x = torch.randn(4, 4)
    made = piper.compile(
        nn.Linear(4, 4), mesh(), inputs=(x,), targets=(x,), loss=F.mse_loss, optimizer=sgd
    )
    with (
        piper.launch(made) as trainer,
        pytest.raises(PiperError, match="this loss has a mean over all positions"),
    ):
        trainer.step(x, x[:, :3], pad=(0, 0))


def test_other_lengths_without_padding_name_the_cure() -> None:
    proposed = r"pad=\{'input_ids': 0, 'attention_mask': 0, 'labels': -100\}"
    with piper.launch(program(Encoder(), mesh(dp=2))) as trainer:
        with pytest.raises(PiperError, match=rf"Rows are shorter here.*: fill them up, {proposed}"):
            trainer.fit([batch(ROWS, 5)])
        for options in ({}, {"pad": PAD}):
            with pytest.raises(PiperError, match=rf"A row is longer here .*cut it.*{proposed}"):
                trainer.fit([batch(ROWS, 9)], **options)  # type: ignore[arg-type]
        assert steps(trainer, [(batch(ROWS, LONGEST), ())]).losses
