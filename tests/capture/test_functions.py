"""Autograd functions train by their own backward; control flow on a random draw is resolved or
refused; a model may compute its own loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import CaptureError, PiperWarning, annotate
from piper.capture.loss.own_loss import own_loss
from piper.capture.model import capture
from tests.reference import Net, assert_equal_to_eager
from tests.training import assert_same, compiled, data_parallel, pipeline, plain, train


class Scaled(torch.autograd.Function):
    """Two results, and gradients that autograd itself would not give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: float, name: str = "") -> Any:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return x * weight, x + 1.0, name

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, _: None) -> Any:
        x, weight = ctx.saved_tensors
        return product * weight * ctx.by + total * 3, (product * x).sum(0) * 7, None, None


class Reversed(torch.autograd.Function):
    """Returns its input; negates the gradient. Calls ``apply`` inside ``forward``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return Scaled.apply(x, torch.ones(4), 1.0)[0].view_as(x)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Doubled(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        return inner(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Layers(nn.Module):
    """Equal layers with autograd functions inside."""

    def __init__(self, by: tuple[float, float] = (2.0, 2.0)) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in by)
        self.weights = nn.ParameterList(torch.randn(4) for _ in by)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, weight, by in zip(self.layers, self.weights, self.by, strict=True):
            with annotate("layer"):
                product, total, name = Scaled.apply(layer(x), weight, by, "given")
                assert name == "given"
                x = Reversed.apply(product.tanh()) + total
        return x


ROWS = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("by", "programs"), [((2.0, 2.0), 3), ((2.0, 3.0), 4)])
def test_a_function_trains_by_its_own_backward(by: tuple[float, float], programs: int) -> None:
    """Equal layers share one program; a different number makes them different."""
    x, y = ROWS
    model = Layers((2.0, *by))
    captured = assert_equal_to_eager(model, (x,), (y,), F.mse_loss, remat=("none", "all"))
    assert len(captured.unique_programs) == programs


def test_a_function_in_a_pipeline() -> None:
    batches = [((x,), (y,)) for x, y in (ROWS, ROWS)]
    model = Layers()
    program = compiled(model, pipeline([[0], [1]], 2), F.mse_loss, batches)
    assert_same(train(program, batches), plain(model, F.mse_loss, batches, microbatches=2))


def scaling(by: float) -> Any:
    """A new class for each number, all with the same name."""

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ torch.eye(4) * by

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * by * 10

    return Scaling


def test_functions_of_one_name_and_under_autocast() -> None:
    """The forward of a function is under the autocast of its call; its backward is not."""
    first, second = scaling(0.3), scaling(0.7)

    def forward(self: Net, x: Tensor) -> Tensor:
        x = second.apply(first.apply(self.a(x)))
        with torch.autocast("cpu", torch.bfloat16):
            low = first.apply(x)
        with torch.no_grad():
            fixed = second.apply(x)
        return low.float() + fixed  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(4, 4))
    assert_equal_to_eager(model, ROWS[:1], ROWS[1:], F.mse_loss)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda x: Doubled.apply(x), r"function Doubled, used at .*\.py:\d+, writes in place"),
        (lambda x: Called.apply(x, torch.tanh), r"Called is given a builtin\w* at .*\.py:\d+"),
    ],
)
def test_functions_that_cannot_be_kept(use: Callable[[Tensor], Tensor], says: str) -> None:
    model = Net(lambda self, x: use(self.a(x) + 1), a=nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=says):
        capture(model, inputs=ROWS[:1], targets=ROWS[1:], loss=F.mse_loss)


SCALE = {"by": 1.0}


class CountsInBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        CountsInBackward.calls += 1
        return grad * CountsInBackward.calls


class ReadsGlobal(CountsInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        SCALE["by"] += 1
        return grad * SCALE["by"]


class ReadsTheTime(CountsInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * time.perf_counter()


@pytest.mark.parametrize(
    ("function", "name"), [(CountsInBackward, "CountsInBackward.calls"), (ReadsGlobal, "SCALE")]
)
def test_state_that_a_backward_changes_is_warned_of(function: Any, name: str) -> None:
    model = Net(lambda self, x: function.apply(self.a(x)), a=nn.Linear(4, 4))
    with pytest.warns(PiperWarning, match=f"'{name}' changes from one call of an autograd"):
        capture(model, inputs=ROWS[:1], targets=ROWS[1:], loss=F.mse_loss)


def test_a_backward_that_is_another_each_time_is_refused() -> None:
    model = Net(lambda self, x: ReadsTheTime.apply(self.a(x)), a=nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="function ReadsTheTime computes something else each"):
        capture(model, inputs=ROWS[:1], targets=ROWS[1:], loss=F.mse_loss)


def drops(probability: float) -> Net:
    """A model that skips a layer with some probability."""

    def forward(self: Net, x: Tensor) -> Tensor:
        x = self.a(x)
        if torch.rand([]) < probability:  # leaves it out
            return x
        return self.b(x)  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


@pytest.mark.parametrize(("probability", "trained"), [(0.0, 4), (1, 2)])
def test_a_draw_that_decides_nothing(probability: float, trained: int) -> None:
    x, y = ROWS
    captured = assert_equal_to_eager(drops(probability), (x,), (y,), F.mse_loss)
    assert sum(len(chunk.parameters) for chunk in captured.chunks) == trained


def test_a_draw_that_decides_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_functions\.py:\d+ .*set the probability to 0"):
        capture(drops(0.1), inputs=ROWS[:1], targets=ROWS[1:], loss=F.mse_loss)


class OwnLoss(nn.Module):
    """Returns its loss, alone or in a dict."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._alone = alone

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        out = self.layer(x)
        loss = F.mse_loss(out, labels)
        return loss if self._alone else {"loss": loss, "out": out}


@pytest.mark.parametrize("alone", [True, False])
def test_the_loss_of_the_model(alone: bool) -> None:
    model, (x, y) = OwnLoss(alone=alone), ROWS
    batches = [({"x": x, "labels": y}, ())] * 2
    program = compiled(model, data_parallel(1, 1), None, batches)
    assert_same(train(program, batches), plain(model, own_loss, batches, microbatches=1))


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (ROWS[1:], "targets= needs a loss, and none is given"),
        ((), r"returns no loss: its output is a dict without one"),
    ],
)
def test_no_loss_at_all(targets: tuple[Tensor, ...], says: str) -> None:
    model = Net(lambda self, x: {"out": self.a(x)}, a=nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=says):
        capture(model, inputs=ROWS[:1], targets=targets)
