"""A trainer beyond steps: evaluation, state, checkpoints, padding, errors."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError, annotate
from piper.strategies.directives import Directive, place, replicate, shard
from tests.reference import Net
from tests.training import (
    STEPS,
    ULPS,
    Batch,
    Optimizer,
    Run,
    adamw,
    assert_same,
    compiled,
    data_parallel,
    one_f_one_b,
    pipeline,
    plain,
    sgd,
    shared_captures,
    steps,
    train,
    zero_bubble,
)

ROWS, WIDTH = 8, 6


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Small(nn.Module):
    """Four layers with dropout; ``norm`` adds buffers that training changes."""

    def __init__(self, norm: bool = False, drop: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                x = x + torch.tanh(layer(x))
                if i == 0:
                    x = self.norm(x)
                if self.drop:
                    x = F.dropout(x, self.drop, self.training)
                if i == 3:
                    x = x * self.gain
        return x


class Experts(nn.Module):
    """A parameter of each kind: whole, sharded by expert, tied, scalar, frozen, unused; and an
    unread buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, 3, 3))
        self.b = nn.Linear(WIDTH, WIDTH)
        self.again = self.a.weight
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = torch.tanh(self.a(x)) + self.shift
            rows = x.unflatten(1, (2, 3)).transpose(0, 1).contiguous()
            with annotate("EP"):
                rows = torch.tanh(torch.bmm(rows, self.experts))
            x = x + rows.transpose(0, 1).reshape(x.shape)
        with annotate("layer"):
            return self.b(x) * self.gain + F.linear(x, self.again)


@functools.cache
def batches(dtype: torch.dtype = torch.float32) -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, STEPS, ROWS, WIDTH, generator=generator, dtype=dtype)
    return tuple(((a,), (b,)) for a, b in zip(x, y, strict=True))


def given(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    (x,), (y,) = batches(dtype)[step]
    return x, y


@functools.cache
def model(norm: bool = False, drop: float = 0.3) -> Small:
    torch.manual_seed(0)
    return Small(norm, drop)


@functools.cache
def experts() -> Experts:
    torch.manual_seed(0)
    return Experts().double()


STAGES = pipeline([[0], [1]], 4, *zero_bubble(2, 4))
ZERO = [*pipeline([[0, 1], [2, 3]], 2, *one_f_one_b(2, 2)), replicate({}, zero=3)]


@functools.cache
def program(name: str = "stages", norm: bool = False, drop: float = 0.3) -> piper.Program:
    strategy = {"stages": STAGES, "zero": ZERO}[name]
    return compiled(model(norm, drop), strategy, F.mse_loss, batches(), optimizer=adamw)


@pytest.fixture
def trainer() -> Iterator[piper.Trainer]:
    with piper.launch(program(drop=0.0)) as launched:
        yield launched


# evaluation

PROGRAMS = pytest.mark.parametrize(
    ("name", "norm"), [("stages", True), ("zero", False)], ids=["stages", "zero-3"]
)


@pytest.mark.cases(fast=1)
@PROGRAMS
def test_evaluation_changes_nothing(name: str, norm: bool) -> None:
    made = program(name, norm)
    expected = train(made, batches())
    random = torch.get_rng_state()
    losses = []
    with piper.launch(made) as trainer:
        trainer.evaluate(*given(1))
        for step in range(STEPS):
            losses.append(trainer.step(*given(step)).loss)
            first, second = trainer.evaluate(*given(0)), trainer.evaluate(*given(0))
            assert torch.equal(first.loss, second.loss)
        found = Run(tuple(losses), expected.norms, trainer.state_dict())
        assert trainer.steps == STEPS
    assert_same(found, expected)
    assert torch.equal(torch.get_rng_state(), random)
    assert model(norm).training


@PROGRAMS
def test_evaluation_is_in_evaluation_mode(name: str, norm: bool) -> None:
    with piper.launch(program(name, norm)) as trainer:
        steps(trainer, batches())
        found = trainer.evaluate(*given(0))
        mine = copy.deepcopy(model(norm)).eval()
        mine.load_state_dict(trainer.state_dict())
    (x, y), parts = given(0), 4
    with torch.no_grad():
        losses = [F.mse_loss(mine(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    expected = torch.stack(losses).sum() / parts
    assert found.grad_norm is None
    assert (found.loss - expected).abs() <= (0 if name == "stages" else ULPS) * expected


def doubled_in_training(self: Net, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = torch.tanh(self.a(x)) * (2 if self.training else 1)
    with annotate("layer"):
        return self.b(x)


def helped_in_training(self: Net, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = torch.tanh(self.a(x))
        if self.training:
            x = x + F.dropout(self.c(x), 0.3)
    with annotate("layer"):
        return self.b(x)


def helped_in_evaluation(self: Net, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = torch.tanh(self.a(F.dropout(x, 0.3, self.training)))
        if not self.training:
            x = x + self.c(x)
    with annotate("layer"):
        return self.b(x)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("forward", [doubled_in_training, helped_in_training, helped_in_evaluation])
@pytest.mark.parametrize("zero", [0, *(pytest.param(z, marks=pytest.mark.slow) for z in (1, 2, 3))])
def test_models_that_compute_something_else_in_evaluation(
    forward: Callable[..., Tensor], zero: int
) -> None:
    torch.manual_seed(0)
    net = Net(forward, **{name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
    strategy = [*pipeline([[0, 1], [2, 3]], 2), replicate({}, zero=zero, bucket_mb=1e-5)]
    with piper.launch(compiled(net, strategy, F.mse_loss, batches())) as trainer:
        steps(trainer, batches())
        found = trainer.evaluate(*given(0)).loss
        net.load_state_dict(trainer.state_dict())
    x, y = given(0)
    with torch.no_grad():
        expected = F.mse_loss(net.eval()(x), y)
    assert (found - expected).abs() <= ULPS * expected


def test_evaluation_with_counts() -> None:
    made = counted_program()
    with piper.launch(made) as trainer:
        x, y = counted_batch()
        total, count = sum_and_count(model(drop=0.0)(x), y)
        expected = (total / count).detach()
        assert (trainer.evaluate(x, y).loss - expected).abs() <= ULPS * expected


# the state


@functools.cache
def made(name: str) -> piper.Program:
    """``Experts`` under a strategy, in fp64 with AdamW; each one splits the rows into four
    blocks."""
    return compiled(
        experts(),
        STRATEGIES[name],
        F.mse_loss,
        batches(torch.float64),
        optimizer=adamw,
        scheduler=halving,
    )


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


STRATEGIES: dict[str, Sequence[Directive]] = {
    "one": pipeline([[0]], 4),
    "stages": pipeline([[0], [1]], 4, *zero_bubble(2, 4)),
    "replicas": [*data_parallel(4, 1), replicate({}, zero=0)],
    "zero-1": [*data_parallel(2, 2), replicate({}, zero=1, bucket_mb=1e-4)],
    "zero-2-experts": [
        *pipeline([[0, 1], [2, 3]], 2),
        shard({"EP": "*"}),
        replicate({"EP": "*"}, zero=0),
        replicate({"EP": "-"}, zero=2),
    ],
    "zero-3-experts": [
        *data_parallel(4, 1),
        shard({"EP": "*"}, ways=2),
        replicate({}, zero=3, bucket_mb=1e-4),
    ],
}
UNEVEN = 1e-9
"""AdamW amplifies the rounding of sums (1e-16 in fp64)."""


@functools.cache
def uninterrupted() -> Run:
    return plain(
        experts(),
        F.mse_loss,
        batches(torch.float64),
        microbatches=4,
        optimizer=adamw,
        scheduler=halving,
    )


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_state_is_the_models(name: str) -> None:
    with piper.launch(made(name)) as trainer:
        first = trainer.state_dict()
        wanted = experts().state_dict()
        assert list(first) == list(wanted)
        assert all(torch.equal(first[key], x) for key, x in wanted.items())
        found = steps(trainer, batches(torch.float64))
    assert_same(found, uninterrupted(), UNEVEN)
    assert {k: (x.shape, x.dtype) for k, x in found.state.items()} == {
        k: (x.shape, x.dtype) for k, x in wanted.items()
    }
    fresh = Experts().double()
    fresh.load_state_dict(found.state, strict=True)
    assert all(torch.equal(x, found.state[key]) for key, x in fresh.state_dict().items())


@pytest.mark.parametrize("norm", [False, True])
def test_a_state_is_not_changed_by_later_steps(norm: bool) -> None:
    with piper.launch(program(norm=norm)) as trainer:
        trainer.step(*given(0))
        found = trainer.state_dict()
        before = {name: x.clone() for name, x in found.items()}
        trainer.step(*given(1))
        assert all(torch.equal(x, before[name]) for name, x in found.items())


def test_a_state_is_not_the_models_own_memory() -> None:
    with piper.launch(made("one")) as trainer:
        found = trainer.state_dict()
    own = {x.data_ptr() for x in experts().state_dict().values()}
    assert not own & {x.data_ptr() for x in found.values()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_loading_a_state(name: str) -> None:
    """All of it is loaded, also state that no region uses, and training continues from it."""
    torch.manual_seed(1)
    other = Experts().double()
    other.count += 7
    data = batches(torch.float64)
    expected = plain(other, F.mse_loss, data, microbatches=4, optimizer=adamw, scheduler=halving)
    with piper.launch(made(name)) as trainer:
        trainer.load_state_dict(other.state_dict())
        found = trainer.state_dict()
        assert all(torch.equal(x, found[key]) for key, x in other.state_dict().items())
        assert_same(steps(trainer, data), expected, UNEVEN)


def test_loading_a_state_keeps_the_optimizers() -> None:
    made = program("zero")
    with piper.launch(made) as trainer:
        steps(trainer, batches()[:2])
        trainer.load_state_dict(trainer.state_dict())
        after = steps(trainer, batches()[2:])
    whole = train(made, batches())
    assert_same(after, Run(whole.losses[2:], whole.norms[2:], whole.state))


class Added(nn.Module):
    """Adds to its state dict: extra state, a tensor from a hook, and an object that is not data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._register_state_dict_hook(self._norm)
        self.register_state_dict_post_hook(self._kind)

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 3, "scale": torch.tensor(2.0)}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == 3

    @staticmethod
    def _norm(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "norm"] = module.layer.weight.detach().norm()

    @staticmethod
    def _kind(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "kind"] = type(module)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            return self.layer(x)


def test_what_modules_add_to_their_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Added(), Added())
    made = compiled(net, pipeline([[0], [1]], 2), F.mse_loss, batches())
    with piper.launch(made) as trainer:
        trainer.step(*given(0))
        state = trainer.state_dict()
        assert list(state) == list(net.state_dict())
        assert state["0._extra_state"]["version"] == 3
        assert torch.equal(state["1.norm"], state["1.layer.weight"].norm())
        assert not torch.equal(state["1.norm"], net.state_dict()["1.norm"])
        trainer.save(tmp_path / "state")
        trainer.load_state_dict(state)
        trainer.load(tmp_path / "state")
        copy.deepcopy(net).load_state_dict(state, strict=False)


# checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint after two steps under each strategy."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in STRATEGIES:
        with piper.launch(made(name)) as trainer:
            steps(trainer, batches(torch.float64)[:2])
            trainer.save(folder / name)
    return {name: folder / name for name in STRATEGIES}


@pytest.mark.cases(fast=12, slow=12)
@pytest.mark.parametrize("to", STRATEGIES)
@pytest.mark.parametrize("source", STRATEGIES)
def test_going_on_under_another_strategy(
    checkpoints: dict[str, Path], source: str, to: str
) -> None:
    whole = uninterrupted()
    with piper.launch(made(to)) as trainer:
        trainer.load(checkpoints[source])
        assert trainer.steps == 2
        found = steps(trainer, batches(torch.float64)[2:])
        assert trainer.steps == STEPS
    assert_same(found, Run(whole.losses[2:], whole.norms[2:], whole.state), UNEVEN)


@PROGRAMS
def test_going_on_under_the_same_strategy_is_bit_for_bit(
    tmp_path: Path, name: str, norm: bool
) -> None:
    """Including dropout, buffers and the optimizer; a trainer that ran further may go back."""
    made = program(name, norm)
    whole = train(made, batches())
    with piper.launch(made) as trainer:
        steps(trainer, batches()[:2])
        trainer.save(tmp_path / "state")
        steps(trainer, batches())
        trainer.load(str(tmp_path / "state"))
        found = steps(trainer, batches()[2:])
    assert_same(found, Run(whole.losses[2:], whole.norms[2:], whole.state))


@pytest.mark.slow
def test_a_checkpoint_of_bf16_keeps_the_fp32_weights(tmp_path: Path) -> None:
    made = compiled(model(), ZERO, F.mse_loss, batches(), optimizer=adamw, precision="bf16")
    whole = train(made, batches())
    with piper.launch(made) as trainer:
        steps(trainer, batches()[:2])
        trainer.save(tmp_path / "state")
    with piper.launch(made) as trainer:
        trainer.load(tmp_path / "state")
        found = steps(trainer, batches()[2:])
    assert_same(found, Run(whole.losses[2:], whole.norms[2:], whole.state))


def test_frozen_weights_stay_fp32_under_bf16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen = Small(drop=0.0)
    frozen.layers[0].requires_grad_(False)
    made = compiled(frozen, ZERO, F.mse_loss, batches(), precision="bf16")
    with piper.launch(made) as trainer:
        trainer.step(*given(0))
        state = trainer.state_dict()
    assert all(
        torch.equal(x, state[f"layers.0.{n}"]) for n, x in frozen.layers[0].named_parameters()
    )


def test_a_checkpoint_before_any_step(tmp_path: Path) -> None:
    made = program("zero")
    with piper.launch(made) as trainer:
        trainer.save(tmp_path / "state")
        steps(trainer, batches()[:1])
        trainer.load(tmp_path / "state")
        assert trainer.steps == 0
        assert_same(steps(trainer, batches()), train(made, batches()))


# batches that are too small


def sum_and_count(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets[:, 0] > -100
    return (F.mse_loss(output, targets, reduction="none").mean(1) * counts).sum(), counts.sum()


@functools.cache
def counted_program(optimizer: Optimizer = sgd) -> piper.Program:
    return compiled(model(drop=0.0), ZERO, sum_and_count, batches(), optimizer=optimizer)


def counted_batch() -> tuple[Tensor, Tensor]:
    x, y = given(0)
    y = y.clone()
    y[2:5] = -100
    return x, y


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_padding(rows: int) -> None:
    """Padding rows do not count: the step equals one on the given rows alone."""
    x, y = given(0)
    x, y = x[:rows], y[:rows]
    expected = plain(model(drop=0.0), sum_and_count, [((x,), (y,))], microbatches=1)
    with piper.launch(counted_program()) as trainer:
        evaluated = trainer.evaluate(x, y, pad=(0, -100))
        result = trainer.step(x, y, pad=(0, -100))
        found = Run((result.loss,), (result.grad_norm,), trainer.state_dict())
    assert_same(found, expected, ULPS)
    assert (evaluated.loss - expected.losses[0]).abs() <= ULPS * expected.losses[0]
    assert result.tokens == rows * WIDTH


# step results


def test_metrics(trainer: piper.Trainer) -> None:
    result = trainer.step(*given(0))
    assert result.seconds > 0
    assert result.tokens == ROWS * WIDTH
    assert result.tokens_per_second == result.tokens / result.seconds
    assert result.memory > 2**20
    assert float(result) == float(result.loss)
    assert result.loss.shape == result.grad_norm.shape == ()
    assert not result.loss.requires_grad
    assert trainer.evaluate(*given(0)).tokens == ROWS * WIDTH


@pytest.mark.parametrize(
    ("counted", "clip"),
    [
        (True, 0.1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(False, None), (True, None), (False, 0.1)]
        ),
    ],
)
@pytest.mark.parametrize("on", ["virtual", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_step_that_reports_nothing_trains_the_same(
    counted: bool, clip: float | None, on: str
) -> None:
    """Sums that the step itself needs are computed all the same."""
    loss, batch = (sum_and_count, counted_batch()) if counted else (F.mse_loss, given(0))
    made = compiled(model(drop=0.0), ZERO, loss, [((batch[0],), (batch[1],))], clip_norm=clip)
    expected = train(made, [((batch[0],), (batch[1],))] * 3)
    with piper.launch(made, on=on) as trainer:
        for _ in range(2):
            result = trainer.step(*batch, report=False)
        if counted:
            assert torch.equal(result.loss, expected.losses[1])
        else:
            assert result.grad_norm is None
            with pytest.raises(PiperError, match="not to report its loss"):
                _ = result.loss
        result = trainer.step(*batch)
        found = Run((*expected.losses[:2], result.loss), (), trainer.state_dict())
    assert_same(found, Run(expected.losses, (), expected.state))


@pytest.mark.parametrize("count", [None, 0, 2])
def test_iterate_is_step_after_step(count: int | None) -> None:
    made = program()
    expected = train(made, batches())
    with piper.launch(made) as trainer:
        rows = [(*inputs, *targets) for inputs, targets in batches()]
        losses = [r.loss for r in trainer.iterate(rows, steps=count, progress=False)]
        assert trainer.steps == len(losses)
    assert len(losses) == (STEPS if count is None else count)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected.losses, strict=False))


def test_iterate_takes_no_more_batches_than_it_trains_on(trainer: piper.Trainer) -> None:
    rows = iter([(*inputs, *targets) for inputs, targets in batches()])
    assert len(list(trainer.iterate(rows, steps=2))) == 2
    assert len(list(rows)) == STEPS - 2


def test_iterate_trains_only_as_far_as_it_is_read(trainer: piper.Trainer) -> None:
    rows = [(*inputs, *targets) for inputs, targets in batches()]
    for result in trainer.iterate(rows):
        assert float(result) > 0
        break
    assert trainer.steps == 1


# trainers


def test_trainers_of_one_program_know_nothing_of_each_other() -> None:
    made = program("zero")
    expected = train(made, batches())
    with piper.launch(made) as first, piper.launch(made) as second:
        found = []
        for inputs, targets in batches():
            second.step(*reversed([*inputs, *targets]))
            found.append(first.step(*inputs, *targets).loss)
        assert_same(Run(tuple(found), expected.norms, first.state_dict()), expected)


def test_a_batch_that_is_refused_leaves_no_trace() -> None:
    made = program("zero")
    expected = train(made, batches())
    with piper.launch(made) as trainer:
        steps(trainer, batches()[:2])
        with pytest.raises(PiperError):
            trainer.step(*given(0)[:1])
        with pytest.raises(PiperError):
            trainer.step(*(x[:4] for x in given(0)))
        found = steps(trainer, batches()[2:])
    assert_same(found, Run(expected.losses[2:], expected.norms[2:], expected.state))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = self.table(x)
        with annotate("layer"):
            return self.layer(x)


def test_a_step_that_fails_leaves_no_trace() -> None:
    """A token outside the table: the error says where, and the next step is unaffected."""
    torch.manual_seed(0)
    rows = [(torch.randint(5, (ROWS,)), torch.randn(ROWS, WIDTH)) for _ in range(3)]
    data: list[Batch] = [((x,), (y,)) for x, y in rows]
    made = compiled(Lookup(), ZERO, F.mse_loss, data)
    expected = train(made, data)
    with piper.launch(made) as trainer:
        found = [trainer.step(*rows[0]).loss]
        bad = rows[1][0].clone()
        bad[-1] = 5
        with pytest.raises(PiperError, match=r"device 1, .*F layer\[0\] PP\[0\] MB\[1\]"):
            trainer.step(bad, rows[1][1])
        with pytest.raises(PiperError, match=r"layer\[0\].*index out of range"):
            trainer.evaluate(bad, rows[1][1])
        assert trainer.steps == 1
        found += [trainer.step(*batch).loss for batch in rows[1:]]
        assert_same(Run(tuple(found), expected.norms, trainer.state_dict()), expected)


def test_a_closed_trainer_says_so() -> None:
    with piper.launch(program(drop=0.0)) as trainer:
        trainer.step(*given(0))
    trainer.close()
    x, y = given(0)
    calls: list[Callable[[], Any]] = [
        lambda: trainer.step(x, y),
        lambda: trainer.evaluate(x, y),
        lambda: list(trainer.iterate([(x, y)])),
        trainer.state_dict,
        lambda: trainer.load_state_dict({}),
        lambda: trainer.save("state"),
        lambda: trainer.load("state"),
    ]
    for call in calls:
        with pytest.raises(PiperError, match="the trainer is closed: launch the program again"):
            call()


# errors


def batch_errors() -> dict[str, tuple[Callable[[piper.Trainer], Any], str]]:
    x, y = given(0)
    return {
        "nothing": (
            lambda t: t.step(),
            "1 input and 1 target, as in the example that was captured; 0 values given",
        ),
        "one-too-many": (lambda t: t.step(x, y, y), "1 input and 1 target"),
        "fewer-rows": (lambda t: t.step(x[:4], y[:4]), "pad"),
        "more-rows": (
            lambda t: t.step(torch.cat([x, x]), torch.cat([y, y])),
            "inputs[0] is float32[16, 6], but float32[8, 6]",
        ),
        "rows-that-disagree": (lambda t: t.step(x, y[:4]), "targets[0]"),
        "other-width": (lambda t: t.step(x[:, :3], y), "inputs[0]"),
        "other-dtype": (lambda t: t.step(x.double(), y), "inputs[0]"),
        "a-number": (lambda t: t.step(3, y), "inputs[0] is an int, but a Tensor"),
        "none": (lambda t: t.step(None, y), "inputs[0]"),
        "an-array": (lambda t: t.step(np.zeros((8, 6)), y), "inputs[0] is a ndarray"),
        "a-list": (lambda t: t.step([x], y), "inputs[0] is a tuple or list, but a tensor"),
        "a-mapping": (lambda t: t.step({"x": x}, y), "inputs[0] is a dict, but a tensor"),
        "no-values": (lambda t: t.step(x.to("meta"), y), "on the meta device and has no values"),
        "evaluated": (lambda t: t.evaluate(x), "1 input and 1 target"),
        "fitted": (lambda t: list(t.iterate([(x,)])), "1 input and 1 target"),
        "fitted-with-a-tensor": (lambda t: list(t.iterate([x])), "batch"),
        "padded-mean": (lambda t: t.step(x[:4], y[:4], pad=(0, 0)), "a mean over all rows"),
    }


@pytest.mark.parametrize("name", batch_errors())
def test_batches_that_are_refused(trainer: piper.Trainer, name: str) -> None:
    call, words = batch_errors()[name]
    with pytest.raises(PiperError, match=re.escape(words)):
        call(trainer)


@pytest.mark.parametrize(
    ("pad", "words"),
    [
        ((0,), "pad=(0,) must give one number for each of the 2 tensors of the batch"),
        ((0, 0, 0), "one number for each of the 2 tensors"),
        (0, "pad=0"),
        ((0, "x"), "pad"),
    ],
)
def test_padding_that_is_refused(pad: Any, words: str) -> None:
    x, y = given(0)
    with (
        piper.launch(counted_program()) as trainer,
        pytest.raises(PiperError, match=re.escape(words)),
    ):
        trainer.step(x[:4], y[:4], pad=pad)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.a(x) * scale


@functools.cache
def named_program() -> piper.Program:
    x, y = given(0)
    return compiled(Named(), [place({}, devices=[0])], F.mse_loss, [({"x": x, "scale": 2.0}, (y,))])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "captured as a mapping of keywords (x, scale); give a mapping again"),
        ({"scale": 2.0}, "inputs['x']"),
        ({"scale": 3.0}, "inputs['scale'] is 3.0, but the program was captured with 2.0"),
        ({"scale": 2.0, "other": 1.0}, "inputs['other']"),
    ],
    ids=["positional", "missing", "changed", "extra"],
)
def test_keywords_that_are_refused(inputs: dict[str, Any] | None, words: str) -> None:
    x, y = given(0)
    if inputs is not None and words != "inputs['x']":
        inputs = {"x": x, **inputs}
    with (
        piper.launch(named_program()) as trainer,
        pytest.raises(PiperError, match=re.escape(words)),
    ):
        trainer.step(x if inputs is None else inputs, y)


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (lambda: model(), {}, "launch takes what piper.compile returns, not a Small"),
        (lambda: piper.Strategy(STAGES), {}, "not a Strategy"),
        (lambda: None, {}, "not a NoneType"),
        (program, {"on": "gpu"}, "on='gpu' is a kind of device"),
        (program, {"on": None}, "on=None is unknown"),
        (program, {"cuda_graphs": True}, "compiled with device='cuda', not cpu"),
        (program, {"nonsense": 3}, "nonsense"),
    ],
)
def test_launches_that_are_refused(
    what: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PiperError, match=re.escape(words)):
        piper.launch(what(), **options)


def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, trainer: piper.Trainer
) -> None:
    """Adam's averages are useless to SGD."""
    trainer.step(*given(0))
    trainer.save(tmp_path / "state")
    other = compiled(model(drop=0.0), STAGES, F.mse_loss, batches(), optimizer=sgd)
    with piper.launch(other) as second, pytest.raises(PiperError, match="optimizer"):
        second.load(tmp_path / "state")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("gain"), "the state dict is not this model's. 1 of"),
        (lambda state: state.update(extra=torch.zeros(1)), "1 tensor is not in the model: extra"),
        (lambda state: state.update(gain=torch.zeros(2)), "gain, [2] instead of []"),
        (lambda state: state.update(gain=np.zeros(())), "gain"),
        (lambda state: state.update(gain=None), "gain"),
    ],
    ids=["missing", "extra", "shape", "array", "none"],
)
def test_states_that_are_refused(
    trainer: piper.Trainer, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    state = dict(trainer.state_dict())
    change(state)
    before = trainer.state_dict()
    with pytest.raises(PiperError, match=re.escape(words)):
        trainer.load_state_dict(state)
    assert all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": STAGES}, "must be a piper.Strategy"),
        ({"model": Small}, "the model must be an nn.Module, not the class Small"),
        ({"loss": 3}, "loss=3 cannot be called"),
        ({"inputs": torch.zeros(8, 6)}, "inputs is a tensor: give a tuple"),
        ({"targets": torch.zeros(8, 6)}, "targets is a tensor: give a tuple"),
        ({"targets": (torch.zeros(4, 6),)}, "disagree on the batch size"),
        ({"optimizer": "adam"}, "optimizer= is a str: it must be a function"),
        ({"optimizer": lambda p: 3}, "it returned an int"),
        ({"scheduler": 3}, "scheduler= is an int: it must be a function"),
        ({"clip_norm": 0}, "clip_norm=0 must be a positive number"),
        ({"clip_norm": "1"}, "clip_norm='1' must be a positive number"),
        ({"clip_norm": float("nan")}, "clip_norm=nan must be a positive number"),
        ({"clip_norm": True}, "clip_norm=True must be a positive number"),
        ({"precision": "fp8"}, "precision='fp8' is unknown: one of fp32, bf16"),
        ({"compiler": "gcc"}, "gcc"),
        ({"device": "nowhere"}, "nowhere"),
        ({"remat": "some"}, "remat='some' is unknown"),
        ({"memory_limit": 100}, "100"),
        ({"memory_limit": "0.1kB"}, "memory_limit=100 is not enough"),
        (
            {"memory_limit": "1 gigabyte"},
            "memory_limit='1 gigabyte' is not a valid size: give bytes",
        ),
        ({"memory_limit": -1}, "memory_limit=-1 is not a valid size"),
        ({"seed": "x"}, "seed='x'"),
        ({"init": 3}, "init=3"),
        ({"tags": {"nowhere.*": "layer"}}, "nowhere"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_compilations_that_are_refused(options: dict[str, Any], words: str) -> None:
    x, y = given(0)
    arguments = {
        "model": model(),
        "strategy": piper.Strategy(STAGES),
        "inputs": (x,),
        "targets": (y,),
        "loss": F.mse_loss,
        "optimizer": adamw,
        **options,
    }
    with pytest.raises(PiperError, match=re.escape(words)):
        piper.compile(arguments.pop("model"), arguments.pop("strategy"), **arguments)


@pytest.mark.parametrize(
    ("devices", "parts", "words"),
    [
        (3, 1, "give a batch that is a multiple of 3"),
        (2, 3, "give microbatches= (split: parts=) one of [1, 2, 4]"),
        (16, 1, "give a batch that is a multiple of 16"),
    ],
)
def test_batches_that_do_not_divide(devices: int, parts: int, words: str) -> None:
    with pytest.raises(PiperError, match=re.escape(words)):
        compiled(model(), data_parallel(devices, parts), F.mse_loss, batches())
