"""A backward may overwrite the tensors it consumes: no later pass may read them.

The compiler of these tests fills every consumed argument with NaN after each pass, and the weight
passes wait until all input passes are done, as in a zero-bubble schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import annotate
from piper.capture.chunk.donation import private_results
from piper.capture.code.chunk_program import Function
from piper.capture.code.codegen import Eager, Runner
from piper.capture.model import Captured, capture
from piper.ir.passes import Kind, Pass, Ref
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from tests.one_device import runners_of

POLICIES = ("none", "min-cut", "all")


class Poisoning(Eager):
    """Runs a pass, then destroys the tensors that it may overwrite."""

    def compile(self, function: Function, which: Pass, where: torch.device) -> Runner:
        run = super().compile(function, which, where)
        consumed = [i for i, ref in enumerate(function.arguments) if ref in function.consumes]

        def poisoned(arguments: list[Tensor]) -> list[Tensor]:
            doomed = [arguments[i] for i in consumed]
            results = list(run(arguments))
            for tensor in doomed:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            return results

        return poisoned


def delayed_step(
    captured: Captured, model: nn.Module, batch: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """All forwards, all input passes, then all weight passes; the outputs are read last."""
    captured = replace(captured, compiler=Poisoning())
    runners = runners_of(captured)
    state = {name: x.detach().clone() for name, x in model.named_parameters()}
    state |= {name: x.detach().clone() for name, x in model.named_buffers()}
    state |= {name: x.clone() for name, x in captured.constants.items()}
    totals = captured.totals.of(batch, len(batch[0])) if captured.totals is not None else ()
    values = dict(enumerate(x.clone() for x in (*batch, *totals)))
    held: list[dict[Ref, Tensor]] = []

    def call(index: int, which: Pass) -> None:
        function = captured.programs[index].functions.get(which)
        if function is None:
            return
        chunk = captured.chunks[index]
        named = {Kind.PARAMETER: chunk.parameters, Kind.BUFFER: chunk.buffers}
        arguments = [
            state[named[ref.kind][ref.index]] if ref.kind in named else held[index][ref]
            for ref in function.arguments
        ]
        held[index].update(zip(function.results, runners[index][which](arguments), strict=True))

    for chunk in captured.chunks:
        held.append({Ref(Kind.INPUT, i): values[v] for i, v in enumerate(chunk.inputs)})
        call(chunk.index, Pass.F)
        values |= {v: held[-1][Ref(Kind.OUTPUT, i)] for i, v in enumerate(chunk.outputs)}
    loss = values[captured.cut.loss]
    gradients = {captured.cut.loss: torch.ones_like(loss)}
    for chunk in reversed(captured.chunks):
        mine = held[chunk.index]
        for i, v in enumerate(chunk.outputs):
            if v in gradients:
                mine[Ref(Kind.OUTPUT_GRAD, i)] = gradients[v]
        call(chunk.index, Pass.BI)
        for ref, term in mine.items():
            if ref.kind is Kind.INPUT_GRAD:
                v = chunk.inputs[ref.index]
                gradients[v] = gradients[v] + term if v in gradients else term
    found: dict[str, Tensor] = {}
    for chunk in reversed(captured.chunks):
        call(chunk.index, Pass.BW)
        for i, name in enumerate(chunk.parameters):
            part = held[chunk.index].get(Ref(Kind.PARAMETER_GRAD, i))
            if part is not None:
                found[name] = found[name] + part if name in found else part
    return loss, found, [values[v] for v in captured.cut.outputs]


def check(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Any]) -> None:
    """Under every policy, the delayed and poisoned step equals eager PyTorch bit for bit."""
    output = model(*batch[:-1])
    expected = loss(output, batch[-1])
    expected.backward()
    outputs = output if isinstance(output, tuple) else (output,)
    for policy in POLICIES:
        captured = capture(
            model,
            inputs=batch[:-1],
            targets=batch[-1:],
            loss=loss,
            remat=policy,
            outputs=lambda output, *_: output,
        )
        found, gradients, kept = delayed_step(captured, model, batch)
        assert torch.equal(found, expected), policy
        for name, parameter in model.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), f"{policy}: {name}"
        assert all(torch.equal(a, b) for a, b in zip(kept, outputs, strict=True)), policy


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def passes_a_view_on(net: Net, x: Tensor) -> Tensor:
    with annotate("r"):
        h = net.a(x).sin()
    with annotate("r"):
        view, z = h.t(), net.b(h).cos()
    with annotate("r"):
        return net.c(view) + z


def returns_a_view(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    with annotate("r"):
        h = net.a(x)
    with annotate("r"):
        return h.view(-1), net.c(net.b(h).sin())


def splits(net: Net, x: Tensor) -> Tensor:
    with annotate("r"):
        left, right = net.a(x).tanh().chunk(2, -1)
    with annotate("r"):
        y = net.b(torch.cat([left.exp(), right], -1))
    with annotate("r"):
        return net.c(torch.cat([y[:, :3], left], -1)).relu()


def skips(net: Net, x: Tensor) -> Tensor:
    with annotate("r"):
        x = net.a(x).sin()
    with annotate("r"):
        y = net.b(x).exp() + x
    with annotate("r"):
        return net.c(y * x).tanh() + x


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("forward", [passes_a_view_on, returns_a_view, splits, skips])
def test_small_models(forward: Callable[[Net, Tensor], Any]) -> None:
    torch.manual_seed(0)

    def loss(output: Any, target: Tensor) -> Tensor:
        last = output[-1] if isinstance(output, tuple) else output
        return F.mse_loss(last, target)

    check(Net(forward), (torch.randn(6, 6), torch.randn(6, 6)), loss)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: DenseTransformer(
                DenseConfig(vocab=31, dim=16, layers=2, heads=2, mlp_dim=12, tie_embeddings=True)
            ),
            id="dense",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: MoETransformer(
                MoEConfig(vocab=31, dim=16, layers=2, heads=2, mlp_dim=12, experts=2)
            ),
            id="moe",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_transformers(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(31, (2, 5))
    check(model(), (tokens, tokens.roll(-1, 1)), lm_loss)


@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES)
def test_inductor_leaves_kept_outputs_alone(remat: str) -> None:
    from tests.one_device import SingleDevice

    torch.manual_seed(0)
    model = Net(returns_a_view)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=lambda o, y: F.mse_loss(o[1], y),
        compiler="inductor",
        remat=remat,
        outputs=lambda output, *_: output,
    )
    _, _, (output,) = SingleDevice(captured, model).differentiate(x, y)
    for mine, theirs in zip(output, model(x), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_results_that_are_alone_in_their_memory() -> None:
    """Results are not private if they are views of an argument, or two views of one tensor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("first"):
                x = x * self.w
            with annotate("a"):
                twice = x * 2
                made = twice, twice.t(), x.view(-1), x + 1, (x + 2).t()
            with annotate("b"):
                return torch.stack([one.sum() for one in made])

    captured = capture(model=Net(), inputs=(torch.randn(3, 3),), loss=torch.sum)
    (chunk,) = [c for c in captured.chunks if c.name == "a[0]"]
    forward = captured.programs[chunk.index].functions[Pass.F]
    assert [ref.index for ref in private_results(forward) if ref.kind is Kind.OUTPUT] == [3, 4]
