"""Optimizers that do not treat each parameter by itself, because they count their steps or look at
all parameters together; and factories that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import DirectiveError, PiperError
from piper.ir.plan.instructions import Verb
from piper.state.optimizer.nature import KNOWN, is_known, needs_whole_tensors
from piper.state.optimizer.probe import cost_of
from piper.state.optimizer.trial import Piece, looks_across, steps_by_bucket, works_on_parts
from piper.strategies.directives import Directive, replicate
from tests.training import (
    Batch,
    Optimizer,
    adamw,
    assert_same,
    compiled,
    data_parallel,
    one_f_one_b,
    pipeline,
    plain,
    sgd,
    shared_captures,
    train,
)

ROWS, WIDTH, STEPS = 16, 8, 6
BUCKET = WIDTH * WIDTH * 8 / 2**20
"""The size of one layer's weight, in MiB."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Layers(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        if tied:
            self.layers[5].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x))
        return x


class Counting(torch.optim.Optimizer):
    """Decays with the number of its steps, which it stores in its groups."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Own(Counting):
    """The same with the count in the optimizer itself; it has an effect only later."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["k"] = 0 if self.calls < 100 else 10
        super().step()


class Normed(torch.optim.Optimizer):
    """Scales by the norm of all gradients if that is large."""

    def __init__(self, parameters: Any, lr: float = 0.5, limit: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "limit": limit})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
        for group in self.param_groups:
            scale = torch.clamp(group["limit"] / norm, max=1.0)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * scale, alpha=group["lr"])


def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose hook counts steps and changes the learning rate accordingly."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    calls = [0]

    def before(made: torch.optim.Optimizer, *_: Any) -> None:
        calls[0] += 1
        made.param_groups[0]["lr"] = 0.5 / calls[0]

    optimizer.register_step_pre_hook(before)
    return optimizer


def data(dtype: torch.dtype = torch.float64) -> list[Batch]:
    torch.manual_seed(1)
    rows = [torch.randn(ROWS, WIDTH, dtype=dtype) for _ in range(2 * STEPS)]
    return [((x,), (y,)) for x, y in zip(rows[::2], rows[1::2], strict=True)]


def model(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Layers(tied).double()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    wanted = target > -0.5
    squares = (output - target).square()
    return torch.where(wanted, squares, 0.0).sum(), wanted.sum()


def check(
    strategy: Sequence[Directive],
    optimizer: Optimizer,
    parts: int,
    *,
    whole: bool = True,
    tied: bool = False,
    loss: Callable[..., Any] = mean_loss,
    **options: Any,
) -> None:
    net, batches = model(tied), data()
    program = compiled(net, strategy, loss, batches, optimizer=optimizer, **options)
    assert program.settings.optimizer.whole is whole
    expected = plain(
        net,
        loss,
        batches,
        microbatches=parts,
        optimizer=optimizer,
        clip_norm=options.get("clip_norm"),
    )
    assert_same(train(program, batches), expected, 1e-12)


STEP_ONCE: dict[str, Optimizer] = {"group": Counting, "hook": hooked}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", STEP_ONCE)
def test_an_optimizer_that_counts_steps_on_replicas(name: str, zero: int) -> None:
    """A step is one call, whatever the number of buckets."""
    strategy = [*data_parallel(2, 2), replicate({}, zero=zero, bucket_mb=BUCKET)]
    check(strategy, STEP_ONCE[name], 4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_optimizer_that_counts_steps_on_stages(tied: bool) -> None:
    """Stages hold different buckets, and a tied weight belongs to both."""
    strategy = [
        *pipeline([[0, 1], [2, 3]], 2, *one_f_one_b(2, 2)),
        replicate({}, zero=0, bucket_mb=BUCKET),
    ]
    check(strategy, Counting, 4, tied=tied)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_optimizer_that_counts_steps_with_counts_and_clipping(clip_norm: float | None) -> None:
    strategy = [*data_parallel(2, 2), replicate({}, zero=1, bucket_mb=BUCKET)]
    check(strategy, Counting, 4, loss=counted_loss, clip_norm=clip_norm)


def test_an_optimizer_that_looks_across_parameters_on_replicas() -> None:
    strategy = [*data_parallel(2, 2), replicate({}, zero=0, bucket_mb=BUCKET)]
    check(strategy, Normed, 4)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "strategy",
    [
        pipeline([[0], [1]], 2, *one_f_one_b(2, 2)),
        [*data_parallel(2, 2), replicate({}, zero=1)],
        [*data_parallel(2, 2), replicate({}, zero=3)],
    ],
    ids=["stages", "zero-1", "zero-3"],
)
def test_an_optimizer_that_looks_across_parameters_needs_all(strategy: Sequence[Directive]) -> None:
    with pytest.raises(
        DirectiveError, match=r"Normed looks at all parameters together.*devices 0,1"
    ):
        compiled(model(), strategy, mean_loss, data(), optimizer=Normed)


def first_is_slower(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups by the position in the list."""
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": rest}], lr=0.5)


class Backwards(Layers):
    """Uses its layers in another order than their names."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x))
        return x


def test_groups_by_the_place_in_the_list_are_the_models_or_refused() -> None:
    torch.manual_seed(0)
    net = Backwards().double()
    program = compiled(net, data_parallel(1, 2), mean_loss, data(), optimizer=first_is_slower)
    expected = plain(net, mean_loss, data(), microbatches=2, optimizer=first_is_slower)
    assert_same(train(program, data()), expected)
    stages = pipeline([[0], [1]], 2)
    with pytest.raises(DirectiveError, match="or groups by the place in the list"):
        compiled(net, stages, mean_loss, data(), optimizer=first_is_slower)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    ("strategy", "other", "message"),
    [
        (pipeline([[0], [1]], 2), Normed, "Normed looks at all parameters together"),
        (data_parallel(2, 2), Counting, None),  # its plans already take one step for all
        ([*data_parallel(2, 2), replicate({}, zero=1)], torch.optim.Adafactor, None),
        (data_parallel(2, 2), lambda ps: torch.optim.SGD(ps[:1], lr=0.1), "SGD .* leaves out"),
        (data_parallel(2, 2), torch.optim.AdamW, None),
    ],
    ids=["across", "counting", "not-elementwise", "leaves-out", "adamw"],
)
def test_a_loaded_program_tries_the_optimizer_that_it_is_given(
    strategy: Sequence[Directive], other: Any, message: str | None, tmp_path: Path
) -> None:
    compiled(model(), strategy, mean_loss, data(), optimizer=sgd).save(tmp_path)
    if message is None:
        program = piper.Program.load(tmp_path, optimizer=other)
        assert program.training.optimizer is other
        assert program.settings.optimizer.whole is (other is Counting)
        whole = other is torch.optim.Adafactor
        assert bool(program.settings.optimizer.tensors) is whole
        assert not any(bucket.sliced for bucket in program.buckets)
        return
    with pytest.raises(PiperError, match=message):
        piper.Program.load(tmp_path, optimizer=other)


def test_what_an_optimizer_counts_for_later_is_found() -> None:
    """The count has an effect from the hundredth call on, which is after the trial."""
    program = compiled(model(), data_parallel(2, 2), mean_loss, data(), optimizer=Own)
    assert program.settings.optimizer.whole


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ],
    ids=["adamw", "momentum", "adagrad", "adafactor", "nadam"],
)
def test_torchs_own_step_bucket_by_bucket(optimizer: Optimizer) -> None:
    """Updates can then follow their reductions, and gradients are freed early."""
    program = compiled(model(), data_parallel(2, 2), mean_loss, data(), optimizer=optimizer)
    assert not program.settings.optimizer.whole


@pytest.mark.parametrize("kind", sorted(KNOWN, key=lambda kind: kind.__name__))
def test_the_table_says_of_torchs_own_what_a_trial_finds(kind: Any) -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        more = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {}
        made: torch.optim.Optimizer = kind([p for _, p in given], lr=0.05, **more)
        return made

    cpu, pieces = torch.device("cpu"), [Piece(str(i), i, (16, 16)) for i in range(4)]
    made = make([("", nn.Parameter(torch.zeros(4, 4)))])
    assert is_known(made)
    assert steps_by_bucket(make, pieces, cpu)
    assert not any(looks_across(make, pieces, cpu, of_all=x) for x in (False, True))
    for cut in (lambda x: x.flatten().chunk(2), lambda x: x.chunk(2), lambda x: x.chunk(2, 1)):
        assert works_on_parts(make, pieces[0], cut, [], cpu) is not needs_whole_tensors(made)


@pytest.mark.parametrize("change", ["subclass", "hook", "step"])
def test_torchs_own_is_tried_once_it_is_changed(change: str) -> None:
    given = [nn.Parameter(torch.zeros(2))]
    made = torch.optim.SGD(given) if change != "subclass" else Worn(given)
    if change == "hook":
        made.register_step_post_hook(lambda *_: None)
    if change == "step":
        made.step = made.step  # type: ignore[method-assign]
    assert not is_known(made)


def test_trying_an_optimizer_draws_nothing_from_the_users_generator() -> None:
    def noisy(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        torch.rand(3)
        return Counting(parameters)

    cost_of(Counting, {"w": (4, 4)}, torch.device("cpu"))
    before = torch.get_rng_state()
    cost_of(noisy, {"w": (4, 4)}, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_wait_for_the_step_are_counted(zero: int) -> None:
    """Predicted and measured memory both hold them until the step."""
    x = torch.zeros(2, WIDTH, dtype=torch.float64)
    held = {}
    for name, optimizer in {"once": Counting, "in turn": torch.optim.SGD}.items():
        strategy = [*data_parallel(2, 1), replicate({}, zero=zero, bucket_mb=BUCKET)]
        batches = [((x,), (x,))]
        program = compiled(model(), strategy, mean_loss, batches, optimizer=optimizer)
        with piper.launch(program, on="virtual") as trainer:
            trainer.step(x, x)
            measured = trainer.measure_memory(x, x)
        (plan,), (memory,) = program.plans, program.memory
        for found in measured.values():
            assert 0.9 * memory.peak <= found.peak <= memory.peak
        last = max(i for i, y in enumerate(plan.instructions) if y.verb is Verb.UPDATE)
        held[name] = memory.over_time[last - 1][1] - memory.parameters
        gradients = sum(
            b.elements * b.gradient.itemsize // (b.within if zero else 1) for b in program.buckets
        )
    assert held["in turn"] < gradients <= held["once"]


# groups


class Halves(nn.Module):
    """The first half has only matrices, the second only a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("layer"):
            x = torch.tanh(self.first(x))
        with piper.annotate("layer"):
            return x * self.scale


def without_empty_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5, "lr": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        [2],
    )


TWO = pipeline([[0], [1]], 2, *one_f_one_b(2, 2))
ONE = data_parallel(1, 2)


@pytest.mark.parametrize(
    ("before", "after"), [(TWO, TWO), (ONE, TWO), (TWO, ONE)], ids=["2-2", "1-2", "2-1"]
)
def test_groups_are_matched_by_what_they_hold(
    before: Sequence[Directive], after: Sequence[Directive], tmp_path: Path
) -> None:
    """Devices have different groups: no group gets the settings of another."""
    torch.manual_seed(0)
    net, batches = Halves().double(), data()
    how: dict[str, Any] = {"optimizer": without_empty_groups, "scheduler": halving}
    expected = plain(net, mean_loss, batches, microbatches=2, **how)
    with piper.launch(compiled(net, before, mean_loss, batches, **how)) as trainer:
        for (x,), (y,) in batches[:3]:
            trainer.step(x, y)
        trainer.save(tmp_path / "state")
    with piper.launch(compiled(net, after, mean_loss, batches, **how)) as trainer:
        trainer.load(tmp_path / "state")
        losses = [trainer.step(x, y).loss for (x,), (y,) in batches[3:]]
        state = trainer.state_dict()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses[3:]))
    for name, tensor in expected.state.items():
        torch.testing.assert_close(state[name], tensor)


def test_groups_that_were_apart_cannot_be_one(tmp_path: Path) -> None:
    net, batches = Halves().double(), data()
    made = compiled(net, ONE, mean_loss, batches, optimizer=without_empty_groups)
    with piper.launch(made) as trainer:
        trainer.save(tmp_path / "state")
    made = compiled(net, ONE, mean_loss, batches, optimizer=adamw)
    with (
        piper.launch(made) as trainer,
        pytest.raises(PiperError, match=r"first\.weight and scale were in groups"),
    ):
        trainer.load(tmp_path / "state")


# factories


def test_a_factory_that_ignores_its_parameters() -> None:
    net = model()
    with pytest.raises(PiperError, match="AdamW that it returned is for 12 others"):
        compiled(
            net,
            data_parallel(2, 2),
            mean_loss,
            data(),
            optimizer=lambda _: adamw([*net.parameters()]),
        )


def test_a_factory_that_leaves_parameters_out() -> None:
    def matrices(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw([p for p in parameters if p.ndim > 1] or parameters)

    with pytest.raises(PiperError, match="AdamW that optimizer= returned leaves out"):
        compiled(model(), data_parallel(2, 2), mean_loss, data(), optimizer=matrices)


def test_an_optimizer_that_does_not_take_every_parameter() -> None:
    def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)

    with pytest.raises(PiperError, match=r"layers\.0\.bias \(8\).*2D.*requires_grad_\(False\)"):
        compiled(model(), data_parallel(2, 2), mean_loss, data(), optimizer=muon)


class Worn(torch.optim.SGD):
    """Raises in its tenth step."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 10:
            raise LookupError("worn out")
        return super().step(closure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": lambda p: adamw(p).nothing},
            r"optimizer= failed in a trial .*AttributeError",
        ),
        ({"optimizer": Worn}, r"optimizer= failed in a trial .* LookupError: worn out"),
        (
            {"optimizer": adamw, "scheduler": lambda o: {}[o]},
            r"scheduler= failed in a trial .* KeyError",
        ),
    ],
    ids=["factory", "step", "scheduler"],
)
def test_what_raises_when_it_is_tried(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PiperError, match=message) as caught:
        compiled(model(), data_parallel(2, 2), mean_loss, data(), **options)
    assert isinstance(caught.value.__cause__, AttributeError | LookupError)
