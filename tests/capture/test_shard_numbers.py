"""Operations whose shards look independent but are not: under tensor and context parallelism they
equal a run on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError, annotate, place, replicate, shard, split

ROWS, LENGTH, WIDTH, WORDS = 4, 16, 8, 12

sgd = functools.partial(torch.optim.SGD, lr=0.1)


class Between(nn.Module):
    """Two linear layers, followed by a function before the loss."""

    def __init__(self, function: Callable[[Tensor], Tensor], last: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, last)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.last(torch.tanh(self.first(x))))


def context(attention: str = "all_to_all") -> piper.Strategy:
    mesh = piper.Mesh([0, 1], dp=1, cp=2)
    return piper.Strategy([place({}, devices=mesh, batch="dp", sequence="cp", attention=attention)])


def tensor(**parameters: int | str) -> piper.Strategy:
    mesh = piper.Mesh([0, 1], dp=1, tp=2)
    return piper.Strategy(
        [place({}, devices=mesh, batch="dp"), shard({}, axis="tp", parameters=parameters)]
    )


STRATEGIES = {"context": context(), "tensor": tensor(last="column")}


def plain(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> tuple[list[float], nn.Module]:
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(2):
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.detach()))
    return losses, model


def assert_alike(
    model: nn.Module, strategy: piper.Strategy, loss: Any, x: Tensor, y: Tensor
) -> None:
    losses, trained = plain(model, loss, x, y)
    program = piper.compile(model, strategy, inputs=(x,), targets=(y,), loss=loss, optimizer=sgd)
    with piper.launch(program) as trainer:
        found = [float(trainer.step(x, y).loss) for _ in range(2)]
        assert found == pytest.approx(losses, rel=1e-11, nan_ok=True)
        state = trainer.state_dict()
    for name, should in trained.state_dict().items():
        torch.testing.assert_close(state[name], should, rtol=1e-10, atol=1e-11, equal_nan=True)


def batch(classes: int | None = None) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=draws, dtype=torch.float64)
    if classes is None:
        return x, torch.randn(x.shape, generator=draws, dtype=torch.float64)
    y = torch.randint(classes, (ROWS, LENGTH), generator=draws)
    return x, y.masked_fill(torch.rand(y.shape, generator=draws) < 0.3, -100)


def first_positions(x: Tensor) -> Tensor:
    index = torch.arange(8)[None, :, None].expand(ROWS, 8, 4)
    return x.gather(2, index % WIDTH)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum along the sequence": lambda x: x.cumsum(-2),
    "cumsum along the width": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-2),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "positions of a mask": lambda x: x * (x[..., 0] > 0).long().cumsum(-1)[..., None],
    "a gather of few positions": lambda x: F.pad(first_positions(x), (0, 4, 0, 8)),
    "a gather of its own": lambda x: x.gather(-1, x.argsort(-1)),
    "heads into rows": lambda x: (
        x.view(ROWS, LENGTH, 2, 4)
        .transpose(1, 2)
        .reshape(2 * ROWS, LENGTH, 4)
        .softmax(1)
        .view(ROWS, 2, LENGTH, 4)
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    "a frequency filter": lambda x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1)[:, :8] * torch.complex(x[:1, :8], x[:1, 8:]), n=LENGTH, dim=1
    ),
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("how", STRATEGIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, how: str) -> None:
    torch.manual_seed(0)
    assert_alike(Between(FUNCTIONS[name]).double(), STRATEGIES[how], F.mse_loss, *batch())


WEIGHT = torch.linspace(0.2, 3, WORDS, dtype=torch.float64)


def flat(function: Any) -> Any:
    """A loss on flattened logits and targets."""
    return lambda x, y: function(x.flatten(0, 1), y.flatten())


def deep(function: Any) -> Any:
    """A loss whose classes are in the second of three dimensions."""
    return lambda x, y: function(x.transpose(1, 2), y)


def of_probabilities(x: Tensor, y: Tensor) -> Tensor:
    wanted = F.one_hot(y.clamp(min=0), WORDS).double() * 0.7 + 0.3 / WORDS
    return F.cross_entropy(x.flatten(0, 1), wanted.flatten(0, 1))


LOSSES: dict[str, Any] = {
    "weights, flat": flat(functools.partial(F.cross_entropy, weight=WEIGHT)),
    "weights, deep": deep(functools.partial(F.cross_entropy, weight=WEIGHT)),
    "ignored, deep": deep(F.cross_entropy),
    "nll, flat": flat(lambda x, y: F.nll_loss(x.log_softmax(-1), y)),
    "nll, deep": deep(lambda x, y: F.nll_loss(x.log_softmax(1), y)),
    "probabilities": of_probabilities,
    "smoothed": flat(functools.partial(F.cross_entropy, label_smoothing=0.1)),
}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("how", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, how: str) -> None:
    torch.manual_seed(0)
    model = Between(lambda x: x, WORDS).double()
    assert_alike(model, STRATEGIES[how], LOSSES[name], *batch(WORDS))


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("strategy", [context(), tensor(words="row"), tensor(words="column")])
def test_gradients_scaled_by_frequency(strategy: piper.Strategy) -> None:
    torch.manual_seed(0)
    x = torch.randint(5, (ROWS, LENGTH))
    model = Words(scale_grad_by_freq=True).double()
    assert_alike(model, strategy, flat(F.cross_entropy), x, x)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("wrong", ["words", "targets"])
def test_numbers_that_no_shard_has_are_refused(wrong: str) -> None:
    x, y = torch.randint(WORDS, (2, ROWS, LENGTH))
    program = piper.compile(
        Words(), tensor(words="row", head="column"), inputs=(x,), targets=(y,),
        loss=flat(F.cross_entropy), optimizer=sgd,
    )  # fmt: skip
    (x if wrong == "words" else y)[0, 0] = WORDS
    with piper.launch(program) as trainer, pytest.raises(PiperError, match="out of"):
        trainer.step(x, y)


class Hidden(nn.Module):
    """Attention with dropout, in which some positions attend to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask[3] = False
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
        return made.transpose(1, 2).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [context(), tensor(q="column", k="column", v="column")])
def test_positions_that_see_nothing_under_dropout(strategy: piper.Strategy) -> None:
    torch.manual_seed(0)
    (x, y), model = batch(), Hidden().double()
    losses = []
    for one in (piper.Strategy([place({}, devices=[0])]), strategy):
        program = piper.compile(
            model, one, inputs=(x,), targets=(y,), loss=F.mse_loss, optimizer=sgd
        )
        with piper.launch(program) as trainer:
            losses.append([float(trainer.step(x, y).loss) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


class Wide(nn.Module):
    """Attention whose values have another width than its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 6)
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


@pytest.mark.slow
def test_values_of_another_width_than_queries() -> None:
    torch.manual_seed(0)
    assert_alike(Wide().double(), context("all_gather"), F.mse_loss, *batch())


class Turned(nn.Module):
    """Puts the sequence dimension first, by an operation that capture knows nothing about."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            hidden = self.a(self.words(x.t()).flatten(0, 1))
        with annotate("layer"):
            made = self.b(torch.tanh(hidden))
        return made.unflatten(0, (LENGTH, -1)).transpose(0, 1)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("groups", [([0, 1], [2]), ([0], [1, 2])])
def test_rows_that_are_not_outermost_do_not_go_between_groups_of_other_size(groups: Any) -> None:
    x = torch.randint(WORDS, (ROWS, LENGTH))
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            split({}, into="MB", parts=1),
            *(place({"PP": i}, devices=group) for i, group in enumerate(groups)),
        ]
    )
    with pytest.raises(PiperError, match="do not lie one after another"):
        piper.compile(
            Turned(), strategy, inputs=(x,), targets=(x,), loss=flat(F.cross_entropy),
            optimizer=sgd,
        )  # fmt: skip


class Biased(nn.Module):
    """Experts with a bias for each row's expert, added to sorted or to unsorted rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.bias = (nn.Parameter(torch.randn(4, *s)) for s in ((WIDTH, WIDTH), (WIDTH,)))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.sort(stable=True)
        ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        made = F.grouped_mm(x[order], self.up, offs=ends)
        if self.kind == "sorted":
            made = made + self.bias[expert]
        elif self.kind == "indexed":
            made = made + self.bias[chosen[order]]
        elif self.kind == "unsorted":
            made = made + self.bias[chosen][order]
        out = torch.zeros_like(x).index_add(0, order, made)
        return out + self.bias[chosen] if self.kind == "after" else out


class Mixture(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), Biased(kind)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(self.first(x), chosen)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("kind", ["sorted", "indexed", "unsorted", "after"])
def test_biases_of_experts(kind: str) -> None:
    torch.manual_seed(0)
    model = Mixture(kind).double()
    x, y = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    chosen = torch.randint(4, (16,))
    h = model.first(x)
    rows = torch.stack([row @ model.experts.up[e] for row, e in zip(h, chosen, strict=True)])
    should = float(F.mse_loss(rows + model.experts.bias[chosen], y).detach())
    options: dict[str, Any] = {
        "inputs": (x, chosen), "targets": (y,), "loss": F.mse_loss, "optimizer": sgd,
        "tags": {"experts": "EP"},
    }  # fmt: skip
    one = piper.compile(model, piper.Strategy([place({}, devices=[0])]), **options)
    with piper.launch(one) as trainer:
        assert float(trainer.step(x, chosen, y).loss) == pytest.approx(should, rel=1e-12)
    two = piper.Strategy([place({}, devices=[0, 1]), replicate({}), shard({"EP": "*"})])
    if kind != "sorted":
        with pytest.raises(PiperError):
            piper.compile(model, two, **options)
        return
    with piper.launch(piper.compile(model, two, **options)) as trainer:
        assert float(trainer.step(x, chosen, y).loss) == pytest.approx(should, rel=1e-12)
