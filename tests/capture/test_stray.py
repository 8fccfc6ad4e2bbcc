"""Cases that tracing would silently get wrong are right or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import annotate
from piper.base.errors import CaptureError, PiperError
from piper.capture.model import capture
from tests.one_device import SingleDevice
from tests.reference import assert_equal_to_eager

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.ones(4))
        self.register_buffer("other", torch.ones(4))
        self.n = torch.ones(())
        self.k = 1
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def refused(model: nn.Module, *says: str, loss: Callable[..., Any] = F.mse_loss) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, inputs=(X,), targets=(Y,), loss=loss)
    for part in says:
        assert part in str(caught.value)


def plain(net: Net, x: Tensor) -> Tensor:
    with annotate("r"):
        x = net.a(x).tanh()
    with annotate("r"):
        return net.b(x)


def test_a_hook_on_a_parameter() -> None:
    model = Net(plain)
    model.a.weight.register_hook(lambda grad: grad * 0)
    refused(model, "a.weight", "hook")


def test_attributes_of_weights_and_buffers_are_read() -> None:
    def scaled(net: Net, x: Tensor) -> Tensor:
        gains = [getattr(x, "gain", 1.0) for x in (net.a.weight, net.state)]
        return plain(net, x) * gains[0] * gains[1]

    model = Net(scaled)
    model.a.weight.gain, model.state.gain = 2.0, 3.0
    loss = F.mse_loss(model(X), Y)
    captured = capture(model, inputs=(X,), targets=(Y,), loss=F.mse_loss)
    found, _, _ = SingleDevice(captured, model).differentiate(X, Y)
    assert torch.equal(found, loss.detach())


class Kind(nn.Parameter):
    pass


def test_a_weight_of_another_class() -> None:
    model = Net(plain)
    model.a.weight = Kind(model.a.weight.detach())
    refused(model, "a.weight is a Kind", "plain tensors")


def by_method(net: Net) -> None:
    net.a.requires_grad_(False)


def by_attribute(net: Net) -> None:
    net.a.weight.requires_grad = False


@pytest.mark.parametrize("freeze", [by_method, by_attribute])
def test_freezing_inside_of_forward(freeze: Callable[[Net], None]) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        freeze(net)
        return plain(net, x)

    model = Net(forward)
    refused(model, "requires_grad of a.weight is set to False at", __file__, "before compile")
    assert model.a.weight.requires_grad


def test_values_may_require_grad_inside_of_forward() -> None:
    """Activation checkpointing and adapters do so with their inputs."""

    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.a(x).detach().requires_grad_(True)
        net.b.weight.requires_grad_(True)  # no change
        return net.b(x)

    captured = capture(Net(forward), inputs=(X,), targets=(Y,), loss=F.mse_loss)
    trained = {n for f in captured.programs for n in f.specs if str(n).startswith("parameter_grad")}
    assert len(trained) == 2


def test_a_write_through_detach() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        h.detach().mul_(2)
        return net.b(h)

    refused(Net(forward), "detach()", "in place")


def counts(net: Net, x: Tensor) -> Tensor:
    net.k += 1
    return net.a(x) * net.k


def replaces(net: Net, x: Tensor) -> Tensor:
    net.n = net.n + 1
    return net.a(x) * net.n


def test_a_tensor_that_would_be_frozen() -> None:
    refused(Net(replaces), "'n'", "buffer")


def test_a_number_that_may_only_count() -> None:
    with pytest.warns(UserWarning, match="'k' changes"):
        capture(Net(counts), inputs=(X,), targets=(Y,), loss=F.mse_loss)


def test_an_attribute_in_the_memory_of_a_weight() -> None:
    model = Net(lambda net, x: net.a(x) * net.shadow.sum())
    model.shadow = model.a.weight.detach()
    refused(model, "a.weight", "memory")


def test_a_buffer_in_the_memory_of_another() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        net.state.mul_(2)
        return net.a(x) * net.other

    model = Net(forward)
    model.other = model.state[:4]
    refused(model, "'state'", "memory")


def test_the_old_tensor_of_an_assigned_buffer_keeps_its_value() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        with annotate("r"):
            h = net.a(x)
        old = net.state
        net.state = h.detach().mean(0)
        with annotate("r"):
            return net.b(h), old

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0] * output[1], target)

    assert_equal_to_eager(Net(forward), (X,), (Y,), loss, microbatches=2)


class Smoothed(nn.Module):
    """A loss with state and with a parameter of the model."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.weight = tied
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output @ self.weight, target)
        self.mean = self.mean * 0.5 + loss.detach()
        return loss * self.mean


def test_a_loss_that_assigns_its_buffer_and_shares_a_parameter() -> None:
    model = Net(plain)
    loss = Smoothed(model.b.weight)
    reference, own = Net(plain), None
    reference.load_state_dict(model.state_dict())
    own = Smoothed(reference.b.weight)
    captured = capture(model, inputs=(X,), targets=(Y,), loss=loss)
    single = SingleDevice(captured, model, lambda p: torch.optim.SGD(p, lr=0.1), loss=loss)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        expected = own(reference(X), Y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert torch.equal(single.step(X, Y).loss, expected.detach())
    assert torch.equal(model.b.weight, reference.b.weight)
    assert torch.equal(single.buffers["loss:mean"], own.mean)


def test_a_model_may_have_a_module_named_loss_fn() -> None:
    class Scale(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(scale))

        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            return x * self.weight if target is None else F.mse_loss(x, target) * self.weight

    model = Net(lambda net, x: net.loss_fn(net.a(x)))
    model.loss_fn = Scale(2.0)
    loss = Scale(3.0)
    captured = capture(model, inputs=(X,), targets=(Y,), loss=loss)
    found, gradients, _ = SingleDevice(captured, model, loss=loss).differentiate(X, Y)
    assert torch.equal(found, loss(model(X), Y).detach())
    assert {"loss_fn.weight", "loss:weight"} <= gradients.keys()


@pytest.mark.parametrize("remat", ["none", "min-cut", "all"])
def test_random_draws_are_not_shared(remat: str) -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with annotate("r"):
            h = net.a(x)
            u, v = torch.empty_like(h).uniform_(), torch.empty_like(h).uniform_()
            return h * u * v, u, v

    model = Net(forward)
    captured = capture(
        model,
        inputs=(X,),
        targets=(Y,),
        loss=lambda output, y: F.mse_loss(output[0], y),
        remat=remat,
        outputs=lambda output, *_: output,
    )
    _, _, ((_, u, v),) = SingleDevice(captured, model).differentiate(X, Y)
    assert (u - v).abs().max() > 0.1


@pytest.mark.slow
def test_a_region_without_tensors_under_inductor() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        with annotate("noise"):
            noise = torch.randn(x.shape)
        with annotate("r"):
            return net.a(x) + noise

    model = Net(forward)
    captured = capture(model, inputs=(X,), targets=(Y,), loss=F.mse_loss, compiler="inductor")
    assert SingleDevice(captured, model).step(X, Y).loss.isfinite()


def test_an_expanded_example() -> None:
    model = Net(plain)
    captured = capture(model, inputs=(X[:1].expand(8, 4),), targets=(Y,), loss=F.mse_loss)
    found = SingleDevice(captured, model).step(X, Y).loss
    assert torch.equal(found, F.mse_loss(model(X), Y).detach())


def test_a_model_of_another_dtype_than_captured() -> None:
    model = Net(plain)
    captured = capture(model, inputs=(X,), targets=(Y,), loss=F.mse_loss)
    with pytest.raises(PiperError, match=r"a\.weight is float64"):
        SingleDevice(captured, model.double())
