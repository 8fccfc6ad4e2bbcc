"""State that capture could silently freeze: the training mode, and numbers not from torch."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.utils.checkpoint import checkpoint

import piper
from piper.base.modes import default_dtype
from piper.callbacks import Callback
from piper.runtime.torch_flags import Flags
from piper.strategies.directives import Directive, partition, place, split

WIDTH = 4
X, Y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)


class Net(nn.Module):
    """A layer, scaled by ``factor`` of each call."""

    def __init__(self, factor: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.factor = factor
        self.seen: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor(self)


def compile_net(net: nn.Module) -> piper.Program:
    return piper.compile(
        net,
        piper.Strategy([place({}, devices=[0])]),
        inputs=(X,),
        targets=(Y,),
        loss=F.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )


def mode_of(module: nn.Module) -> bool:
    return module.training


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "factor",
    [
        lambda m: 3.0 if mode_of(m) else 1.0,
        lambda m: 3.0 if getattr(m, "".join(["train", "ing"])) else 1.0,
    ],
    ids=["helper", "getattr"],
)
def test_the_mode_may_be_read_anywhere(factor: Callable[[nn.Module], float]) -> None:
    net = Net(factor)
    with piper.launch(compile_net(net)) as trainer:
        found = trainer.evaluate(X, Y).loss
        trained = trainer.step(X, Y).loss
    assert net.training
    torch.testing.assert_close(trained, F.mse_loss(net(X), Y))
    torch.testing.assert_close(found, F.mse_loss(net.eval()(X), Y))


class Modal(nn.Module):
    """Four layers for a pipeline of two stages, and a buffer; ``layer`` computes each layer."""

    def __init__(self, layer: Callable[[Modal, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra = nn.Sequential(nn.Linear(WIDTH, 9 * WIDTH), nn.Linear(9 * WIDTH, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            with piper.annotate("layer"):
                x = self.layer(self, i, x)
        return x


def compile_stages(net: nn.Module, by: str = "flops") -> piper.Program:
    stages = [place({"PP": stage}, devices=[stage]) for stage in range(2)]
    return piper.compile(
        net,
        piper.Strategy([partition("layer", into="PP", parts=2, by=by), split(parts=2), *stages]),
        inputs=(X,),
        targets=(Y,),
        loss=F.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )


def more_in_training(net: Modal, i: int, x: Tensor) -> Tensor:
    return net.layers[i](x).tanh() + (net.extra(x) if net.training and i == 3 else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["flops", "params"])
def test_evaluation_has_the_stages_of_training(by: str) -> None:
    """Partitioned by its own cost, it would need parameters of another stage."""
    net = Modal(more_in_training)
    program = compile_stages(net, by)
    assert {layer.split(".")[1] for layer in state_of(program, 1) if "layers" in layer} == {"3"}
    with piper.launch(program) as trainer:
        found = trainer.evaluate(X, Y).loss
        trained = trainer.step(X, Y).loss
    torch.testing.assert_close(trained, F.mse_loss(net(X), Y).detach())
    torch.testing.assert_close(found, F.mse_loss(net.eval()(X), Y).detach())


def state_of(program: piper.Program, device: int) -> list[str]:
    return [n for b in program.buckets if (device,) in b.groups for n in b.parameters]


def average_read_elsewhere(net: Modal, i: int, x: Tensor) -> Tensor:
    if i == 3 and net.training:
        net.average.lerp_(net.layers[0].weight.detach(), 0.1)
    if i == 0 and not net.training:
        return F.linear(x, net.average)
    return net.layers[i](x)


def weight_read_elsewhere(net: Modal, i: int, x: Tensor) -> Tensor:
    return net.layers[i](x) if net.training or i else net.layers[3](x)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            average_read_elsewhere,
            r"F layer\[0\].* uses the buffer 'average' in evaluation on devices \[0\], and F "
            r"layer\[3\].* in training on \[1\]: .* update it in the region that reads it",
        ),
        (
            weight_read_elsewhere,
            r"F layer\[0\].* uses the parameter 'layers\.3\.\w+' in evaluation on devices \[0\], "
            r"but training keeps it on \[1\]: use it in the same regions",
        ),
    ],
)
def test_state_that_evaluation_needs_elsewhere_is_refused(
    layer: Callable[[Modal, int, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(piper.DirectiveError, match=message):
        compile_stages(Modal(layer))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    "factor",
    [
        lambda m: random.random(),
        lambda m: float(np.random.rand()),
        lambda m: torch.from_numpy(np.random.rand(WIDTH).astype(np.float32)),
        lambda m: time.perf_counter(),
    ],
    ids=["random", "numpy", "numpy-tensor", "time"],
)
@pytest.mark.filterwarnings("ignore::piper.PiperWarning")
def test_numbers_from_outside_of_torch_are_refused(factor: Callable[[nn.Module], float]) -> None:
    with pytest.raises(piper.CaptureError, match="Net computes something else each time"):
        compile_net(Net(factor))


def skips_rarely(module: nn.Module) -> float:
    return 0.0 if random.random() < 0 else 1.0


def test_draws_that_leave_no_trace_are_warned_of() -> None:
    with pytest.warns(piper.PiperWarning, match="draws from Python's random"):
        compile_net(Net(skips_rarely))


def counts(module: Net) -> float:
    module.seen["calls"] += 1
    return 1.0 + module.seen["calls"]


def test_state_of_python_that_changes_is_warned_of() -> None:
    with pytest.warns(piper.PiperWarning, match="'seen' changes from one call"):
        compile_net(Net(counts))


def test_state_of_a_class_that_changes_is_warned_of() -> None:
    class Counted(Net):
        calls = 0

    def counting(module: Counted) -> float:
        module.calls += 1
        return float(module.calls)

    with pytest.warns(piper.PiperWarning, match="'calls' changes from one call"):
        compile_net(Counted(counting))


def test_a_model_left_in_evaluation_mode_is_warned_of_once() -> None:
    with pytest.warns(piper.PiperWarning, match="Net is in evaluation mode") as caught:
        compile_net(Net(lambda m: 1.0).eval())
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_checkpointing_is_warned_of_once_unless_the_strategy_decides() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                with piper.annotate("layer"):
                    x = checkpoint(layer, x, use_reentrant=False)
            return x

    def compile_with(directives: list[Directive], remat: str | None = None) -> None:
        piper.compile(
            Checkpointed(),
            piper.Strategy([split(parts=2), *directives]),
            inputs=(X,),
            targets=(Y,),
            loss=F.mse_loss,
            remat=remat,
        )

    groups = [place({"layer": 0}, devices=[0, 1]), place({"layer": 1}, devices=[0])]
    with pytest.warns(piper.PiperWarning, match="Checkpointed asks for activation check") as caught:
        compile_with(groups)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_with([*groups, piper.remat({"layer": 0}, "all")])
        compile_with(groups, remat="none")


def test_an_ordinary_model_is_compiled_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))


class ByRows(nn.Module):
    """Computes something else on fewer than ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = layer(x) if len(x) < self.rows else layer(x).exp().sin()
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "rows", "message"),
    [
        (
            2,
            2,
            "of a microbatch each of 2 devices has 1 row, and torch .* give a larger batch",
        ),
        (1, 4, "its operations depend on the number of rows; give all regions groups of one size"),
    ],
    ids=["one-row", "two-rows"],
)
def test_groups_on_which_the_model_computes_differently_are_refused(
    microbatches: int, rows: int, message: str
) -> None:
    groups = [place({"layer": 0}, devices=[0, 1]), place({"layer": 1}, devices=[2])]
    with pytest.raises(piper.PiperError, match=f"for groups of 1 device than .* 2: {message}"):
        piper.compile(
            ByRows(rows),
            piper.Strategy([split(parts=microbatches), *groups]),
            inputs=(X,),
            targets=(Y,),
            loss=F.mse_loss,
        )


class Draws(nn.Module):
    """Draws random numbers, makes tensors, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps.add_(1.0)
        return F.dropout(self.layer(x), 0.3) + torch.ones(WIDTH) * torch.rand(WIDTH)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_depends_on_no_mode_of_its_caller(precision: str, tmp_path: Path) -> None:
    """Virtual devices run in the caller's thread, processes do not: both give the same numbers."""
    torch.manual_seed(0)
    program = piper.compile(
        Draws(),
        piper.Strategy([place({}, devices=[0])]),
        inputs=(X,),
        targets=(Y,),
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW,
        precision=precision,
        clip_norm=0.5,
    )

    def numbers(mode: AbstractContextManager[Any]) -> list[float]:
        with mode:
            trainer = piper.launch(program)
            first = [trainer.step(X, Y).loss.item(), trainer.evaluate(X, Y).loss.item()]
            trainer.profile(X, Y)
            trainer.measure_memory(X, Y)
            trainer.save(tmp_path / "saved")
            trainer.load(tmp_path / "saved")
            steps = dict(trainer.stream_state())["steps"].sum().item()
        with trainer:
            return [*first, steps, trainer.step(X, Y).loss.item(), *trainer.rows.tolist()]

    expected = numbers(nullcontext())
    for mode in (
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        torch.no_grad(),
        torch.device("meta"),
        default_dtype(torch.float64),
    ):
        assert numbers(mode) == expected, mode


class Untyped(nn.Module):
    """Makes tensors without an explicit dtype, in the forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (torch.arange(WIDTH) / 3)


def compile_doubles() -> piper.Program:
    """A model in float64, which is the default dtype."""
    with default_dtype(torch.float64):
        return piper.compile(
            Untyped(),
            piper.Strategy([place({}, devices=[0])]),
            inputs=(X.double(),),
            targets=(Y.double(),),
            loss=F.mse_loss,
            optimizer=torch.optim.AdamW,
        )


def losses_of(trainer: piper.Trainer) -> list[float]:
    with trainer:
        return [trainer.step(X.double(), Y.double()).loss.item() for _ in range(3)]


def test_a_program_keeps_the_default_dtype_of_its_capture(tmp_path: Path) -> None:
    program = compile_doubles()
    with default_dtype(torch.float64):
        expected = losses_of(piper.launch(program))
    assert losses_of(piper.launch(program)) == expected
    program.save(tmp_path / "program")
    loaded = piper.Program.load(
        tmp_path / "program", source=program.source, optimizer=torch.optim.AdamW
    )
    assert losses_of(piper.launch(loaded)) == expected
    assert torch.get_default_dtype() is torch.float32


def test_strategies_of_a_capture_have_one_default_dtype() -> None:
    with default_dtype(torch.float64):
        captured = piper.capture(
            Untyped(),
            inputs=(X.double(),),
            targets=(Y.double(),),
            loss=F.mse_loss,
            optimizer=torch.optim.AdamW,
        )
    program = captured.compile(piper.Strategy([place({}, devices=[0])]))
    with default_dtype(torch.float64):
        expected = losses_of(piper.launch(program))
    assert losses_of(piper.launch(program)) == expected
    assert program.training.default_dtype is torch.float64


def test_a_switch_to_another_default_dtype_is_refused() -> None:
    net = Untyped()
    program = compile_net(net)
    with default_dtype(torch.float64):
        other = compile_net(net)
    message = r"with torch.float64 as torch's default dtype, .*set_default_dtype\(torch.float32\)"
    with piper.launch(program) as trainer, pytest.raises(piper.PiperError, match=message):
        trainer.switch(other)


class Seeing(list[Any]):
    """Batches with a state that record the modes in which they are called."""

    def __init__(self) -> None:
        super().__init__([(X, Y), (X, Y)])
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def note(self) -> None:
        self.seen.add((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))

    def __iter__(self) -> Iterator[Any]:
        for batch in list.__iter__(self):
            self.note()
            yield batch

    def state_dict(self) -> dict[str, int]:
        self.note()
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.note()


def test_loaders_and_callbacks_keep_the_modes_of_the_caller(tmp_path: Path) -> None:
    batches = Seeing()
    with piper.launch(compile_net(Untyped())) as trainer:
        modes = torch.autocast("cpu", torch.bfloat16), default_dtype(torch.float64)
        with modes[0], modes[1]:
            trainer.fit(batches, checkpoint=tmp_path, callbacks=[Noting(batches)], progress=False)
    assert batches.seen == {(True, torch.float64)}


class Noting(Callback):
    def __init__(self, batches: Seeing) -> None:
        self.batches = batches

    def on_step(self, step: int, result: piper.StepResult) -> None:
        self.batches.note()


def rate_by_flags(step: int) -> float:
    """A learning rate that encodes the flags it is computed under."""
    precise = torch.get_float32_matmul_precision() == "highest"
    settled = torch.are_deterministic_algorithms_enabled()
    return float(1 + precise + 2 * settled + 4 * (torch.get_default_dtype() is torch.float64))


@contextmanager
def flags(precision: str, *, deterministic: bool) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_processes_have_the_flags_of_their_caller() -> None:
    with default_dtype(torch.float64):
        program = piper.compile(
            Untyped(),
            piper.Strategy([place({}, devices=[0])]),
            inputs=(X.double(),),
            targets=(Y.double(),),
            loss=F.mse_loss,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate_by_flags),
        )

    def results(on: str) -> list[tuple[float, Any]]:
        rows = []
        with flags("high", deterministic=True):
            trainer = piper.launch(program, on=on)
            rows.append(trainer.step(X.double(), Y.double()))
        with trainer:
            rows += [trainer.step(X.double(), Y.double()) for _ in range(2)]
        return [(row.loss.item(), row.learning_rates) for row in rows]

    expected = results("virtual")
    assert [rates for _, rates in expected] == [(7.0,), (7.0,), (6.0,)]
    assert results("processes") == expected


def test_flags_set_what_was_read() -> None:
    with flags("highest", deterministic=False):
        usual = Flags.here()
    with flags("medium", deterministic=True), cudnn.flags(enabled=True, allow_tf32=False):
        there = Flags.here()
    with flags("highest", deterministic=False):
        there.set()
        assert Flags.here() == there != usual
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.are_deterministic_algorithms_enabled()
        assert not cudnn.allow_tf32
        usual.set()
        assert Flags.here() == usual
        assert cudnn.allow_tf32
