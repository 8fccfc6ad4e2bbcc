"""Optimizers that get their parameters by name: groups by name, several optimizers, and whole
tensors under ZeRO, each equal to plain PyTorch with the same factory."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import DirectiveError, PiperError, annotate
from piper.lower.state.packing import in_a_row, packed
from piper.state.optimizer.factory import takes_names
from piper.strategies.directives import Directive, place, replicate, shard
from tests.scripts import known_optimizers
from tests.training import (
    Batch,
    Optimizer,
    Run,
    assert_same,
    compiled,
    data_parallel,
    one_f_one_b,
    pipeline,
    plain,
    shared_captures,
    steps,
    train,
)

ROWS, WIDTH, STEPS = 32, 8, 4
Named = list[tuple[str, nn.Parameter]]
Factory = Callable[[Named], Any]


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.norm.bias)  # otherwise a gradient of ``up`` is singular
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        rows = x.unflatten(0, (-1, 4)).transpose(0, 1)
        with annotate("EP"):
            rows = torch.tanh(torch.bmm(rows, self.experts))
        return x + rows.transpose(0, 1).flatten(0, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = layer(x)
        return self.head(x)


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@functools.cache
def data() -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, STEPS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return tuple(((a,), (b,)) for a, b in zip(x, y, strict=True))


loss = nn.functional.mse_loss


class Polar(torch.optim.Optimizer):
    """The exact form of what Muon approximates: a step to the nearest orthogonal matrix."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                    p.sub_(u @ v, alpha=group["lr"])


def groups(named_parameters: Named) -> torch.optim.Optimizer:
    """No decay for norms and biases, another learning rate for the head."""
    rows: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        decay = 0.0 if "norm" in name or name.endswith("bias") else 0.3
        rate = 0.003 if name.startswith("head") else 0.01
        rows.setdefault((rate, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": row, "lr": lr, "weight_decay": decay} for (lr, decay), row in rows.items()]
    )


def several(named_parameters: Named) -> list[torch.optim.Optimizer]:
    """One optimizer for the matrices of the layers, another for the rest."""
    hidden = [(n, p) for n, p in named_parameters if n.endswith(("up.weight", "down.weight"))]
    others = [(n, p) for n, p in named_parameters if not n.endswith(("up.weight", "down.weight"))]
    kinds: list[tuple[Any, Named]] = [(Polar, hidden), (functools.partial(adamw), others)]
    return [make(row) for make, row in kinds if row]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


FACTORIES: dict[str, Factory] = {"groups": groups, "several": several}


class Stepped:
    """Wraps several optimizers as one, for plain PyTorch."""

    def __init__(self, made: Any) -> None:
        self._made = made if isinstance(made, list) else [made]

    def step(self) -> None:
        for one in self._made:
            one.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for one in self._made:
            one.zero_grad(set_to_none=set_to_none)


@functools.cache
def reference(name: str, parts: int) -> Run:
    names = [n for n, _ in net().named_parameters()]

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        return Stepped(FACTORIES[name](list(zip(names, parameters, strict=True))))

    return plain(net(), loss, data(), microbatches=parts, optimizer=optimizer)


def check(strategy: Sequence[Directive], name: str, parts: int) -> piper.Program:
    program = compiled(net(), strategy, loss, data(), optimizer=FACTORIES[name])
    assert_same(train(program, data()), reference(name, parts), 1e-9)
    return program


def zero(level: int, devices: int = 2, **options: Any) -> list[Directive]:
    return [*data_parallel(devices, 2), replicate({}, zero=level, **options)]


STAGES = pipeline([[0], [1]], 2, *one_f_one_b(2, 2))
EXPERTS = [place({}, devices=[0, 1]), shard({"EP": "*"})]
TENSOR: list[Directive] = [
    place({}, devices=piper.Mesh([0, 1], dp=1, tp=2), batch="dp"),
    shard({"EP": "-"}, axis="tp", parameters={"*.up.*": "column", "*.down.weight": "row"}),
]


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("level", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", FACTORIES)
def test_every_zero_level(name: str, level: int) -> None:
    program = check(zero(level, bucket_mb=1e-3), name, 4)
    needed = set(program.settings.optimizer.tensors)
    wanted = {f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")}
    assert needed == (wanted if name == "several" else set())
    for bucket in program.buckets:
        whole = needed.issuperset(bucket.parameters)
        assert bucket.sliced is (level > 0 and not whole)
        assert whole or needed.isdisjoint(bucket.parameters)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (STAGES, 2),
        pytest.param(EXPERTS, 2, marks=pytest.mark.slow),
        pytest.param([*EXPERTS, replicate({"EP": "-"}, zero=2)], 2, marks=pytest.mark.slow),
        pytest.param(zero(3, 4, within=2), 8, marks=pytest.mark.slow),
        pytest.param(zero(1, 4), 8, marks=pytest.mark.slow),
    ],
    ids=["stages", "experts", "experts-zero-2", "hsdp", "zero-1"],
)
def test_other_strategies(strategy: Sequence[Directive], parts: int, name: str) -> None:
    check(strategy, name, parts)


@pytest.mark.slow
def test_groups_under_tensor_parallelism() -> None:
    check(TENSOR, "groups", 1)


@pytest.mark.slow
def test_whole_tensors_cannot_be_shards() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"shard\(.*Polar, as given, must have the whole of 'layers\.0\.(up|down)\.weight'",
    ):
        compiled(net(), TENSOR, loss, data(), optimizer=several)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (zero(3), STAGES),
        pytest.param(STAGES, zero(1, 4, bucket_mb=1e-3), marks=pytest.mark.slow),
        pytest.param(data_parallel(1, 2), zero(2, 4, within=2), marks=pytest.mark.slow),
        pytest.param(EXPERTS, data_parallel(1, 2), marks=pytest.mark.slow),
    ],
    ids=["zero3-stages", "stages-zero1", "one-hsdp", "experts-one"],
)
def test_checkpoints_of_any_strategy(
    before: Sequence[Directive], after: Sequence[Directive], name: str, tmp_path: Path
) -> None:
    """Half the steps under one strategy, the rest under another."""
    made = [compiled(net(), s, loss, data(), optimizer=FACTORIES[name]) for s in (before, after)]
    with piper.launch(made[0]) as trainer:
        first = steps(trainer, data()[:2])
        trainer.save(tmp_path / "state")
    with piper.launch(made[1]) as trainer:
        trainer.load(tmp_path / "state")
        rest = steps(trainer, data()[2:])
    found = Run(first.losses + rest.losses, first.norms + rest.norms, rest.state)
    assert_same(found, reference(name, 4), 1e-9)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    with piper.launch(
        compiled(net(), data_parallel(1, 2), loss, data(), optimizer=several)
    ) as trainer:
        trainer.save(tmp_path / "state")
    with (
        piper.launch(
            compiled(net(), data_parallel(1, 2), loss, data(), optimizer=groups)
        ) as trainer,
        pytest.raises(PiperError, match="AdamW and Polar, but this program trains with AdamW"),
    ):
        trainer.load(tmp_path / "state")


@pytest.mark.slow
def test_a_parameter_that_changes_its_optimizer_is_refused(tmp_path: Path) -> None:
    """The momentum of one optimizer is not that of the other."""

    def others(named_parameters: Named) -> list[torch.optim.Optimizer]:
        hidden = [p for n, p in named_parameters if n.endswith("up.weight")]
        rest = [p for n, p in named_parameters if not n.endswith("up.weight")]
        return [Polar(hidden), adamw(rest)]

    one = data_parallel(1, 2)
    with piper.launch(compiled(net(), one, loss, data(), optimizer=several)) as trainer:
        trainer.save(tmp_path / "state")
    with (
        piper.launch(compiled(net(), one, loss, data(), optimizer=others)) as trainer,
        pytest.raises(PiperError, match=r"down\.weight was trained by Polar, but here by AdamW"),
    ):
        trainer.load(tmp_path / "state")


@pytest.mark.slow
def test_a_scheduler_of_several() -> None:
    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    made = compiled(net(), zero(1), loss, data(), optimizer=several, scheduler=halving)
    names = [n for n, _ in net().named_parameters()]

    class Halved(Stepped):
        def step(self) -> None:
            super().step()
            for one in self._made:
                for group in one.param_groups:
                    group["lr"] /= 2

    expected = plain(
        net(), loss, data(), microbatches=4,
        optimizer=lambda ps: Halved(several(list(zip(names, ps, strict=True)))),  # type: ignore
    )  # fmt: skip
    assert_same(train(made, data()), expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_torchs_muon_beside_adamw(level: int) -> None:
    """Muon computes in bf16 internally."""

    def muon(named_parameters: Named) -> list[torch.optim.Optimizer]:
        hidden = [p for n, p in named_parameters if n.endswith(("up.weight", "down.weight"))]
        known = set(map(id, hidden))
        rest = [p for _, p in named_parameters if id(p) not in known]
        made: list[torch.optim.Optimizer] = []
        made += [torch.optim.Muon(hidden, lr=0.01)] if hidden else []
        return made + ([adamw(rest)] if rest else [])

    names = [n for n, _ in net().named_parameters()]
    expected = plain(
        net(), loss, data(), microbatches=4,
        optimizer=lambda ps: Stepped(muon(list(zip(names, ps, strict=True)))),  # type: ignore
    )  # fmt: skip
    program = compiled(net(), zero(level), loss, data(), optimizer=muon)
    assert_same(train(program, data()), expected, 1e-3)


# factories


def both(named_parameters: Named) -> list[torch.optim.Optimizer]:
    return [adamw([p for _, p in named_parameters]), Polar([named_parameters[0][1]])]


def left_out(named_parameters: Named) -> torch.optim.Optimizer:
    return adamw([p for n, p in named_parameters if "norm" not in n])


def outside(named_parameters: Named) -> torch.optim.Optimizer:
    return adamw(list(net().parameters()))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (both, r"puts 1 of its parameters \(layers\.0\.norm\.weight\) into several optimizers"),
        (left_out, r"AdamW .* leaves out 4 of the 16 .*\(layers\.0\.norm\.weight, .*, \.\.\.\)"),
        (outside, r"was given 16 parameters, but the AdamW that it returned is for 16 others"),
        (lambda named_parameters: [], "returned an empty list"),
        (lambda named_parameters: [adamw(named_parameters), 3], "it returned an int"),
    ],
    ids=["twice", "left-out", "outside", "none", "no-optimizer"],
)
def test_factories_that_are_refused(factory: Optimizer, message: str) -> None:
    with pytest.raises(PiperError, match=message):
        compiled(net(), data_parallel(1, 2), loss, data(), optimizer=factory)


def test_a_factory_that_fails_for_what_a_device_has() -> None:
    """The first stage has no parameters for the second optimizer. On one device the same works."""

    def first(named_parameters: Named) -> list[torch.optim.Optimizer]:
        mine = [p for n, p in named_parameters if n.startswith("layers.0")]
        rest = [p for n, p in named_parameters if not n.startswith("layers.0")]
        return [adamw(mine), adamw(rest)]

    compiled(net(), data_parallel(1, 2), loss, data(), optimizer=first)
    with pytest.raises(
        PiperError, match=r"7 parameters of device 0 \(.*empty parameter list.*leave out optimizers"
    ):
        compiled(net(), STAGES, loss, data(), optimizer=first)


@pytest.mark.slow
def test_groups_by_the_place_in_the_list_are_refused_on_stages() -> None:
    def first(named_parameters: Named) -> torch.optim.Optimizer:
        (_, one), *rest = named_parameters
        slow = {"params": [one], "lr": 0.001}
        return torch.optim.SGD([slow, {"params": [p for _, p in rest]}], lr=0.1)

    compiled(net(), data_parallel(2, 2), loss, data(), optimizer=first)
    with pytest.raises(DirectiveError, match=r"'layers\.1\..*' other settings .* device 1"):
        compiled(net(), STAGES, loss, data(), optimizer=first)


def test_what_is_given_names() -> None:
    assert takes_names(lambda named_parameters: adamw(named_parameters))
    assert takes_names(functools.partial(lambda named_parameters, lr: None, lr=1))
    assert not takes_names(torch.optim.AdamW)
    assert not takes_names(lambda parameters, named_parameters=None: None)


@pytest.mark.slow
def test_the_smallest_difference_between_groups_is_seen() -> None:
    """A decay of 0.01 at a learning rate of 3e-4 changes nothing in a few steps; yet a slice is
    flat, and would be in the group without decay."""

    def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        flat = [p for p in parameters if p.ndim < 2]
        rows = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01}]
        return torch.optim.AdamW([*rows, {"params": flat, "weight_decay": 0.0}], lr=3e-4)

    made = compiled(net(), zero(1), loss, data(), optimizer=decayed)
    assert set(made.settings.optimizer.tensors) == {
        name for name, p in net().named_parameters() if p.ndim > 1
    }


def test_an_optimizer_says_that_it_needs_whole_tensors() -> None:
    """A trial on small tensors could not find that it treats only large matrices differently."""

    class Large(torch.optim.SGD):
        needs_whole_tensors = True

    made = compiled(net(), zero(1), loss, data(), optimizer=lambda ps: Large(ps, lr=0.1))
    assert not any(bucket.sliced for bucket in made.buckets)


# the layout of parameters


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_memory_with_whole_tensors_is_within_what_is_predicted(level: int) -> None:
    program = compiled(net(), zero(level), loss, data(), optimizer=several)
    (x,), (y,) = data()[0]
    with piper.launch(program, on="virtual") as trainer:
        trainer.step(x, y)
        measured = trainer.measure_memory(x, y)
    for memory in program.memory:
        assert all(measured[device].peak <= memory.peak for device in memory.devices)


def test_parameters_are_packed_into_parts() -> None:
    assert in_a_row((3, 3, 1), 2) == ((0, 3, 6), 4)
    assert packed((3, 3, 1), 2) == ((0, 4, 3), 4)
    assert packed((5, 1, 1), 3) == ((0, 5, 10), 5)


@pytest.mark.slow
def test_a_bucket_has_room_for_a_tensor_of_every_device() -> None:
    """Otherwise a bucket would be padded to many times its size."""
    program = compiled(net(), zero(1, 4, bucket_mb=1e-6), loss, data(), optimizer=several)
    (bucket,) = [b for b in program.buckets if not b.sliced]
    assert bucket.share * bucket.within == bucket.elements


@pytest.mark.slow
def test_without_the_tracer_they_train_the_same() -> None:
    """As in worker processes."""
    command = [sys.executable, "-m", "tests.scripts.known_optimizers"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    trained, imported = json.loads(printed)
    assert trained == known_optimizers.trained()
    assert not imported
