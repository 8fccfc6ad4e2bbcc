"""Losses, outputs, gradients and buffers of a captured step equal those of eager PyTorch bit for
bit.

Every case runs with fused and with split backward. One thread: with several, some CPU kernels
(index_put with accumulate, large sums) add in an order that varies from run to run.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from piper import CaptureError, PiperError, annotate
from piper.capture.code.codegen import Eager
from piper.capture.graphs import is_random
from piper.capture.model import Captured, capture
from piper.ir.passes import Pass
from piper.ir.tensors import TensorSpec
from piper.models import (
    DenseConfig,
    DenseTransformer,
    MoEConfig,
    MoETransformer,
    lm_loss,
    lm_loss_sum,
)
from piper.runtime.draw_seeds import fold
from tests.one_device import SingleDevice
from tests.reference import Net, assert_equal, assert_equal_to_eager, eager, piper_step
from tests.training import sgd

ALL = ("none", "min-cut", "all")
CPU = torch.device("cpu")
DENSE = DenseConfig(vocab=19, dim=16, layers=2, heads=4, mlp_dim=12, max_seq=8)
MOE = MoEConfig(vocab=19, dim=16, layers=2, heads=4, mlp_dim=12, max_seq=8, experts=4)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def rows(n: int = 8) -> Tensor:
    return torch.randn(n, 6)


def tokens(config: DenseConfig = DENSE, batch: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randint(config.vocab, (batch, config.max_seq))
    return x, torch.randint(config.vocab, (batch, config.max_seq))


def transformer(config: DenseConfig) -> nn.Module:
    return MoETransformer(config) if isinstance(config, MoEConfig) else DenseTransformer(config)


@pytest.mark.slow
def test_products_are_written_where_the_caller_wants_them() -> None:
    """Results go into the caller's buffers if given, else into new ones; the numbers are equal."""
    model, x, y = DenseTransformer(DENSE), *tokens()
    captured = capture(model, inputs=(x,), targets=(y,), loss=lm_loss)
    compiler, found = Eager(), 0
    for program in captured.programs:
        function = program.functions.get(Pass.B)
        if function is None:
            continue
        given = [drawn(program.specs[ref]) for ref in function.arguments]
        run, into = compiler.compile(function, Pass.B, CPU), compiler.into(function)
        plain = run(list(given))
        homes = [torch.full_like(plain[i], float("nan")) for i in into]
        moved = run([*given, *homes])
        assert all(moved[i] is home for i, home in zip(into, homes, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
        some = run([*given, *(None for _ in into)])
        assert all(torch.equal(a, b) for a, b in zip(plain, some, strict=True))
        found += len(into)
    assert found


class Ops(TorchDispatchMode):
    """Records the operations that run, and the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen.append((func, made.numel() if isinstance(made, Tensor) else 0))
        return made


def test_what_changes_no_bit_is_left_out() -> None:
    """In the gradient of an RMS norm; the numbers stay equal to eager's."""

    def normed(self: Net, x: Tensor) -> Tensor:
        x = self.a(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = Net(normed, a=linear())
    program = check(model).programs[0]
    function = program.functions[Pass.B]
    ops = Ops()
    with ops:
        Eager().compile(function, Pass.B, CPU)(
            [drawn(program.specs[r]) for r in function.arguments]
        )
    aten, rows = torch.ops.aten, ops.seen[0][1] // 6
    assert (aten.pow.Tensor_Scalar, rows * 6) not in ops.seen
    divisions = (aten.div.Scalar, aten.div.Tensor)
    assert [count for op, count in ops.seen if op in divisions] == [rows]


def drawn(spec: TensorSpec) -> Tensor:
    like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    return like.uniform_(0.5, 1) if spec.dtype.is_floating_point else like.zero_()


ULPS = 4 * torch.finfo(torch.float32).eps


def check(
    model: nn.Module,
    *inputs: Tensor,
    remat: tuple[str, ...] = ("none",),
    gradient_tolerance: float = 0.0,
) -> Captured:
    """Compare ``model``, which maps batches of 8 to [8, 6], under a mean squared error."""
    return assert_equal_to_eager(
        model,
        inputs or (rows(),),
        (rows(),),
        F.mse_loss,
        remat=remat,
        gradient_tolerance=gradient_tolerance,
    )


# --- language models -------------------------------------------------------------------------


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("config", "remat"),
    [
        pytest.param(DENSE, ALL, marks=pytest.mark.slow),
        (replace(DENSE, kv_heads=2, tie_embeddings=True), ("min-cut",)),
        pytest.param(MOE, ("min-cut", "all"), marks=pytest.mark.slow),
        (replace(MOE, aux_loss_weight=0.1, kv_heads=1, tie_embeddings=True), ("none",)),
        (replace(MOE, top_k=1, capacity_factor=0.7), ("none",)),
    ],
    ids=["dense", "dense-gqa-tied", "moe", "moe-aux-gqa-tied", "moe-dropping"],
)
def test_language_models(config: DenseConfig, remat: tuple[str, ...]) -> None:
    x, y = tokens(config)
    assert_equal_to_eager(transformer(config), (x,), (y,), lm_loss, remat=remat)


def test_bf16_model() -> None:
    x, y = tokens()
    assert_equal_to_eager(DenseTransformer(DENSE).bfloat16(), (x,), (y,), lm_loss)


def test_three_microbatches_and_batch_of_one() -> None:
    model = DenseTransformer(DENSE)
    x, y = tokens(batch=3)
    assert_equal_to_eager(model, (x,), (y,), lm_loss, microbatches=3)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("config", [DENSE, replace(MOE, aux_loss_weight=0.1)], ids=["dense", "moe"])
def test_sum_and_count_with_unevenly_ignored_tokens(config: DenseConfig) -> None:
    x, y = tokens(config)
    y[0, :7] = -100
    y[1, 2:] = -100
    assert_equal_to_eager(transformer(config), (x,), (y,), lm_loss_sum, microbatches=4)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_adamw_training_equals_eager_training(split: bool) -> None:
    config = replace(DENSE, tie_embeddings=True)
    model = DenseTransformer(config)
    x, y = tokens()
    captured = capture(model, inputs=(x,), targets=(y,), loss=lm_loss, microbatches=2)
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    single = SingleDevice(
        captured, model, lambda p: torch.optim.AdamW(p, lr=0.01), split_backward=split
    )
    for _ in range(4):
        x, y = tokens()
        expected = eager(theirs, (x,), (y,), lm_loss, 2)
        for name, parameter in theirs.named_parameters():
            parameter.grad = expected.gradients[name]
        optimizer.step()
        assert torch.equal(single.step(x, y).loss, expected.loss)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(single.parameters[name], parameter), name


# --- structure of regions --------------------------------------------------------------------


def test_skip_connections_over_three_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("first"):
            x = first = self.a(x)
        with annotate("block"):
            x = x + self.b(x).tanh() * x
        with annotate("block"):
            x = x + self.c(x).tanh() * x
        with annotate("block"):
            x = x + self.d(x).tanh() * first
        with annotate("last"):
            return x + first * first

    check(Net(forward, a=linear(), b=linear(), c=linear(), d=linear()), remat=("min-cut",))


def test_skip_computed_outside_any_region() -> None:
    """The scaled skip reads the first region alone, and runs after all regions.

    It joins the first chunk, so its term of the skip's gradient, one of three, is added last; eager
    adds it first.
    """

    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            skip = self.a(x)
        with annotate("r"):
            y = self.b(skip).tanh()
        with annotate("r"):
            y = self.c(y + skip)
        return y + skip * 0.37

    model = Net(forward, a=linear(), b=linear(), c=linear())
    check(model, gradient_tolerance=ULPS)


def test_no_region() -> None:
    captured = check(nn.Sequential(linear(), nn.Tanh(), linear()))
    assert [chunk.name for chunk in captured.chunks] == ["model", "loss[0]"]


def test_no_region_and_blocks_in_the_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            weight = output.abs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = output @ target.t()
        return (weight * (output - target) ** 2).mean() + product.float().mean()

    assert_equal_to_eager(linear(), (rows(),), (rows(),), loss)


def test_nested_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        for block in (self.a, self.b):
            with annotate("outer"):
                x = x.sin()
                with annotate("inner"):
                    x = block(x)
                x = x.cos()
        return x

    captured = check(Net(forward, a=linear(), b=linear()))
    names = [chunk.name for chunk in captured.chunks]
    assert names[:3] == ["outer[0]", "outer[0]/inner[0]", "outer[0]"]


def test_region_named_loss() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("loss"):
            return self.a(x)

    with suppress(CaptureError):  # refusing is as good as being right
        check(Net(forward, a=linear()))


@pytest.mark.parametrize("uses", [(1, 1), (1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_shared_layer(uses: tuple[int, ...]) -> None:
    """``uses``: how often each region calls the shared layer.

    A region that uses a parameter twice sums both terms before it adds those of later regions. That
    is g3 + (g2 + g1); one undivided backward would compute (g3 + g2) + g1.
    """

    def forward(self: Net, x: Tensor) -> Tensor:
        for times in uses:
            with annotate("r"):
                for _ in range(times):
                    x = self.a(x).tanh()
        return x

    tolerance = ULPS if uses == (2, 1) else 0.0
    check(Net(forward, a=linear()), rows(), gradient_tolerance=tolerance)


def test_chunks_that_only_reshape() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("a"):
            x = self.a(x)
        with annotate("view"):
            x = x.view(-1, 2, 3).transpose(1, 2)
        with annotate("flatten"):
            x = x.reshape(-1, 6)
        with annotate("b"):
            return self.b(x)

    check(Net(forward, a=linear(), b=linear()), remat=ALL)


def test_gradient_arrives_with_other_strides_than_the_value_left() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
        with annotate("r"):
            return self.b(x.transpose(1, 2)).sum(1)

    check(Net(forward, a=linear(), b=linear()), torch.randn(8, 6, 6), remat=ALL)


@pytest.mark.parametrize("pool", [lambda x: x.mean(1), lambda x: x[:, -1], lambda x: x.amax(1)])
def test_pooling_after_a_border(pool: object) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
        with annotate("r"):
            return pool(x)  # type: ignore[operator]

    check(Net(forward, a=linear()), torch.randn(8, 3, 6))


def test_multi_output_ops_across_borders() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            top, index = self.a(x).topk(6)
            left, right = top.split(3, dim=1)
        with annotate("r"):
            p, q, r = (right.sin() @ self.w).unbind(1)
        with annotate("r"):
            y = self.b(torch.cat((left, torch.stack((p, q, r), 1)), 1))
        with annotate("r"):
            return y.gather(1, index) + top

    check(
        Net(forward, a=linear(), b=linear(), w=nn.Parameter(torch.randn(3, 3))), remat=("min-cut",)
    )


def test_unbind_of_an_input_before_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        left, right = x.unbind(1)
        with annotate("r"):
            left = self.a(left)
        with annotate("r"):
            return self.b(left + right)

    check(Net(forward, a=linear(), b=linear()), torch.randn(8, 2, 6))


def test_split_of_a_parameter_before_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        left, right = self.w.split(3)
        with annotate("r"):
            x = x @ left.t() @ left
        with annotate("r"):
            return x @ right.t() @ right

    check(Net(forward, w=nn.Parameter(torch.randn(6, 6))))


# --- inputs, outputs, constants --------------------------------------------------------------


def two_inputs(self: Net, x: Tensor, scale: Tensor, shift: float = 0.5) -> dict[str, object]:
    with annotate("r"):
        y = self.a(x)
    with annotate("r"):
        z = self.b(y * scale + shift)
    return {"z": z, "parts": (y, x), "weight": self.a.weight, "name": "net", "again": z}


def two_losses(output: dict[str, Tensor], target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (output["z"] - target) ** 2).mean() + output["weight"].square().sum()


@pytest.mark.parametrize("keywords", [False, True], ids=["positional", "keywords"])
def test_several_inputs_and_targets_and_dict_output(keywords: bool) -> None:
    model = Net(two_inputs, a=linear(), b=linear())
    inputs = {"scale": rows(), "x": rows()} if keywords else (rows(), rows())
    assert_equal_to_eager(model, inputs, (rows(), rows()), two_losses)


def test_changed_number_among_the_inputs_is_not_ignored() -> None:
    model = Net(lambda self, x, scale: self.a(x) * scale, a=linear())
    x, y = rows(), rows()
    captured = capture(model, inputs=(x, 2.0), targets=(y,), loss=F.mse_loss)
    with pytest.raises(PiperError):
        SingleDevice(captured, model).differentiate(x, 3.0, y)


def test_batch_with_other_strides_than_the_example() -> None:
    model = Net(lambda self, x: self.a(x).sum(1), a=linear())
    x, y = torch.randn(8, 6, 5).transpose(1, 2), rows()
    captured = capture(
        model,
        inputs=(torch.empty(8, 5, 6),),
        targets=(y,),
        loss=F.mse_loss,
        microbatches=2,
        outputs=lambda output, *_: output,
    )
    # the programs expect the strides of the example, so the reference gets them too
    expected = eager(model, (x.contiguous(),), (y,), F.mse_loss, 2)
    for split in (False, True):
        assert_equal(piper_step(captured, model, (x,), (y,), split_backward=split), expected)


def test_constants_are_never_sent() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(6, 6))
        position = torch.arange(6) * 0.1
        table = self.cos[:6] * 2
        for block in (self.a, self.b, self.c):
            with annotate("r"):
                x = (block(x) * table + position) @ mask
        return x

    model = Net(forward, a=linear(), b=linear(), c=linear(), cos=torch.randn(9))
    captured = check(model, remat=("min-cut",))
    taken = {captured.cut.values[i].name for chunk in captured.chunks for i in chunk.inputs}
    assert len(taken) == len(captured.chunks) + 1  # x, one activation per border, the target
    assert all(chunk.buffers == ("cos",) for chunk in captured.chunks[:3])


def test_complex_rotary_buffer() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
        with annotate("r"):
            turned = torch.view_as_complex(x.view(-1, 3, 2)) * self.turn
            return self.b(torch.view_as_real(turned).flatten(1))

    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    check(Net(forward, a=linear(), b=linear(), turn=turn), remat=("min-cut",))


def test_input_used_by_a_late_region() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            y = self.a(x)
        with annotate("r"):
            y = self.b(y)
        with annotate("r"):
            return y * x + x.sum(1, keepdim=True)

    check(Net(forward, a=linear(), b=linear()))


# --- trained parts ---------------------------------------------------------------------------


def test_frozen_and_unused_parameters() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("frozen"):
            x = self.a(x).tanh()
        with annotate("trained"):
            x = self.b(x).tanh()
        with annotate("frozen"):
            x = self.c(x).tanh()
        with annotate("trained"):
            self.unused(x)
            return self.d(x) + self.e(x).detach()

    layers = {name: linear() for name in ("a", "b", "c", "d", "e", "unused")}
    model = Net(forward, **layers)
    model.a.requires_grad_(False)
    model.c.requires_grad_(False)
    captured = check(model, remat=("min-cut",))
    assert set(captured.programs[0].functions) == {next(iter(captured.programs[0].functions))}


def test_no_grad_and_detach() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
            with torch.no_grad():
                gate = self.b(x).sigmoid()
        with torch.no_grad():
            with annotate("teacher"):
                far = self.b(x)
            with annotate("teacher"):
                far = self.c(far)
                with torch.enable_grad():
                    near = self.d(x)
        with annotate("r"):
            return self.c(x * gate) + far + near + x.detach() * x

    check(Net(forward, a=linear(), b=linear(), c=linear(), d=linear()), remat=("min-cut",))


def test_in_place_change_without_gradient() -> None:
    """The gradient ignores in-place changes under ``no_grad``."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
        with annotate("r"):
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            return self.b(x)

    with suppress(CaptureError):  # refusing is as good as being right
        check(Net(forward, a=linear(), b=linear()))


def test_in_place_ops_across_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x) * 2
        with annotate("r"):
            x += self.b(x.clone())
            x[:, 0] += 1
        with annotate("r"):
            x[:, 1] = x[:, 2] * 3
            x = x + self.c(x.clone())
            x.mul_(2)
        return x.add_(1)

    check(Net(forward, a=linear(), b=linear(), c=linear()), remat=("min-cut",))


def test_autocast_spanning_regions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with annotate("r"):
                x = self.a(x).tanh()
            with annotate("r"):
                x = self.b(x).tanh()
        with annotate("r"):
            return self.c(x.float())

    check(Net(forward, a=linear(), b=linear(), c=linear()), remat=("min-cut",))


def test_shared_layer_under_autocast() -> None:
    """Eagerly, autocast casts a weight once: its two gradients add up in bf16. Here each region
    casts it, and the gradients add up in fp32: the difference is one rounding to bf16."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with annotate("r"):
                x = self.a(x).tanh()
            with annotate("r"):
                x = self.a(x).tanh()
        return x.float()

    check(Net(forward, a=linear()), gradient_tolerance=torch.finfo(torch.bfloat16).eps)


def test_dtype_changes_at_borders() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x).to(torch.bfloat16)
        with annotate("r"):
            x = self.b(x).double()
        with annotate("r"):
            return self.c(x).float()

    check(Net(forward, a=linear(), b=linear().bfloat16(), c=linear().double()), remat=("min-cut",))


def test_channels_last_convolutions() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x.to(memory_format=torch.channels_last)).relu()
        with annotate("r"):
            return self.b(x).mean((2, 3))

    model = Net(forward, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 6, 3))
    check(model, torch.randn(8, 3, 7, 7), remat=("min-cut",))


def test_gradient_of_a_parameter_that_is_one_number_repeated() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            return self.a(x) * (self.w.sum() * 0.3).sin()

    check(Net(forward, a=linear(), w=nn.Parameter(torch.randn(5))))


def test_parameter_gradient_is_not_shared_with_an_input_gradient() -> None:
    """In the last region ``w`` and ``x`` have the same gradient; ``w`` then accumulates more."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
            z = x.sin()
        with annotate("r"):
            h = (z * self.w).tanh()
        with annotate("r"):
            return (x + self.w).relu() + h

    check(Net(forward, a=linear(), w=nn.Parameter(torch.randn(4, 6))))


def test_loss_module_with_a_parameter() -> None:
    loss = Net(lambda self, x, y: (self.scale * x - y).square().mean(), scale=nn.Parameter(rows(1)))
    assert_equal_to_eager(linear(), (rows(),), (rows(),), loss, remat=("min-cut",))


def test_loss_that_shares_a_parameter_with_the_model() -> None:
    model = linear()
    loss = Net(lambda self, x, y: (x @ self.w - y).square().mean(), w=model.weight)
    x, y = rows(), rows()
    try:
        captured = capture(model, inputs=(x,), targets=(y,), loss=loss)
    except CaptureError:
        return  # refusing is as good as being right
    expected = eager(model, (x,), (y,), loss, 1).gradients["weight"]
    found = piper_step(captured, model, (x,), (y,), split_backward=False, loss=loss)
    assert torch.equal(found.gradients["weight"], expected)


def test_loss_that_closes_over_a_parameter_of_the_model() -> None:
    model = Net(lambda self, x: self.a(x).tanh(), a=linear(), head=linear())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model.head(output), target)

    x, y = rows(), rows()
    try:
        captured = capture(model, inputs=(x,), targets=(y,), loss=loss)
    except CaptureError:
        return  # refusing is as good as being right
    _, gradients, _ = SingleDevice(captured, model).differentiate(x, y)
    assert "head.weight" in gradients


def doubles_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


def test_gradients_that_the_user_rewrites_are_kept_or_refused() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = doubles_gradient(self.a(x))
        with annotate("r"):
            return self.b(x)

    with suppress(CaptureError):  # refusing is as good as being right
        check(Net(forward, a=linear(), b=linear()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_block(reentrant: bool) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
        with annotate("r"):
            return checkpoint(lambda t: self.b(t).tanh(), x, use_reentrant=reentrant)

    check(Net(forward, a=linear(), b=linear()))


def test_a_checkpoint_that_would_train_nothing_is_refused() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = checkpoint(lambda t: self.a(t).tanh(), x, use_reentrant=True)
        with annotate("r"):
            return self.b(x)

    with pytest.raises(CaptureError, match=r"none of its inputs needs .* say use_reentrant=False"):
        check(Net(forward, a=linear(), b=linear()))


# --- buffers that change ---------------------------------------------------------------------


def test_batch_norm() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            with annotate("r"):
                x = self.norm(layer(x)).relu()  # one norm, used twice per microbatch
        return x

    model = Net(forward, a=linear(), b=linear(), norm=nn.BatchNorm1d(6))
    assert_equal_to_eager(
        model, (rows(12),), (rows(12),), F.mse_loss, microbatches=3, remat=("none", "all")
    )


def test_batch_norm_over_a_transposed_view() -> None:
    """Its gradient has other strides than the traced ones."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        with annotate("r"):
            return self.b(x)

    model = Net(forward, b=linear(), norm=nn.BatchNorm1d(6))
    x, y = torch.randn(12, 4, 6), torch.randn(12, 4, 6)
    assert_equal_to_eager(model, (x,), (y,), F.mse_loss, microbatches=3, remat=("none", "all"))


def test_buffer_updated_then_used() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x)
            self.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
            x = (x * self.scale).tanh()
        with annotate("r"):
            return self.b(x)

    check(Net(forward, a=linear(), b=linear(), scale=torch.rand(6)), remat=ALL)


def test_buffer_used_then_assigned() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        before = self.scale
        with annotate("r"):
            x = self.a(x)
            y = (x * self.scale).tanh()
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
        with annotate("r"):
            return self.b(y) * before

    model = Net(forward, a=linear(), b=linear(), scale=torch.rand(6))
    with suppress(CaptureError):  # refusing is as good as being right
        check(model, remat=ALL)


@pytest.mark.parametrize("remat", ALL)
def test_spectral_norm(remat: str) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = self.a(x).relu()
        with annotate("r"):
            return self.b(x)

    normed = nn.utils.parametrizations.spectral_norm(linear())
    check(Net(forward, a=normed, b=linear()), remat=(remat,))


# --- random ops ------------------------------------------------------------------------------

DROPOUT = replace(DENSE, dropout=0.3)


@pytest.fixture(scope="module", params=ALL)
def dropout(request: pytest.FixtureRequest) -> tuple[DenseTransformer, Tensor, Tensor, Captured]:
    torch.manual_seed(0)
    model = DenseTransformer(DROPOUT)
    x, y = tokens()
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=lm_loss,
        microbatches=4,
        remat=request.param,
        outputs=lambda output, *_: output,
    )
    return model, x, y, captured


def reseed_regions(model: nn.Module, microbatch: int, step: int = 0) -> None:
    """Seed each region of the decoder on entry with Piper's seed for its chunk."""
    assert isinstance(model, DenseTransformer)
    for chunk, module in enumerate((model.embedding, *model.layers)):
        module._forward_pre_hooks.clear()
        seed = fold(0, step=step, chunk=chunk, microbatch=microbatch)
        module.register_forward_pre_hook(lambda *_, seed=seed: torch.manual_seed(seed) and None)


Dropout = tuple[DenseTransformer, Tensor, Tensor, Captured]


@pytest.mark.cases(fast=1)
def test_dropout_equals_eager_with_each_region_reseeded(dropout: Dropout) -> None:
    model, x, y, captured = dropout
    expected = eager(model, (x,), (y,), lm_loss, 4, before=reseed_regions)
    for split in (False, True):
        assert_equal(piper_step(captured, model, (x,), (y,), split_backward=split), expected)


def test_dropout_does_not_depend_on_the_order_of_microbatches(dropout: Dropout) -> None:
    model, x, y, captured = dropout
    single = SingleDevice(captured, model)
    _, _, forwards = single.differentiate(x, y)
    _, _, backwards = single.differentiate(x, y, order=[3, 2, 1, 0])
    found = {tuple(out.flatten().tolist()) for out in backwards}
    assert found == {tuple(out.flatten().tolist()) for out in forwards}
    assert len(found) == 4


def test_outputs_stand_in_the_order_of_microbatches(dropout: Dropout) -> None:
    model, x, y, captured = dropout
    single = SingleDevice(captured, model)
    _, _, forwards = single.differentiate(x, y)
    _, _, backwards = single.differentiate(x, y, order=[3, 2, 1, 0])
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))


def test_steps_seeds_and_microbatches_draw_differently(dropout: Dropout) -> None:
    model, x, y, captured = dropout
    same = x[:1].expand(4, -1).contiguous(), y[:1].expand(4, -1).contiguous()
    single = SingleDevice(captured, model)
    first, second = single.step(*same).outputs, single.step(*same).outputs
    other = SingleDevice(captured, model, seed=1).step(*same).outputs
    draws = [*first, *second, *other]
    assert len({tuple(out.flatten().tolist()) for out in draws}) == len(draws)
    again = SingleDevice(captured, model).step(*same).outputs
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_global_generator_is_left_alone(dropout: Dropout) -> None:
    model, x, y, captured = dropout
    before = torch.get_rng_state()
    SingleDevice(captured, model).step(x, y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_the_backward_of_attention_draws_nothing(kind: str) -> None:
    """Some are tagged as random, but they take the seed that the forward drew."""
    for suffix, draws in (("", True), ("_backward", False)):
        operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{suffix}").default
        node = fx.Graph().call_function(operation, (), {"dropout_p": 0.3})
        assert is_random(node) is draws


@torch.library.custom_op("piper_tests::interrupted", mutates_args=())
def interrupted(x: Tensor) -> Tensor:
    """Let another thread draw in the middle of an instruction."""
    thread = threading.Thread(target=lambda: OTHER.append(torch.rand(3)))
    thread.start()
    thread.join()
    return x.clone()


@interrupted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


interrupted.register_autograd(lambda _, gradient: gradient)
OTHER: list[Tensor] = []


@pytest.mark.parametrize(
    ("compiler", "microbatches"),
    [("eager", 1), ("eager", 2), pytest.param("inductor", 2, marks=pytest.mark.slow)],
)
def test_other_threads_and_steps_draw_apart(compiler: str, microbatches: int) -> None:
    """Draws of another thread in the middle of an instruction do not change dropout, and the step
    does not change the thread's draws."""

    def drawn(between: Callable[[Tensor], Tensor]) -> SingleDevice:
        def forward(self: Net, x: Tensor) -> Tensor:
            with annotate("r"):
                if compiler == "inductor":  # only operations that it draws from seeds
                    return self.b(between(self.a(x) + torch.rand_like(x)) * torch.rand_like(x))
                x = between(F.dropout(self.a(x), 0.5))
                return self.b(F.dropout(x, 0.5) + torch.rand_like(x) * torch.randperm(len(x[0])))

        torch.manual_seed(0)
        model = Net(forward, a=linear(), b=linear())
        captured = capture(
            model, inputs=(rows(),), targets=(rows(),), loss=F.mse_loss, microbatches=microbatches,
            compiler=compiler,
        )  # fmt: skip
        return SingleDevice(captured, model, optimizer=sgd)

    torch.manual_seed(1)
    batch = rows(), rows()
    alone, together = (drawn(between) for between in (torch.clone, interrupted))
    torch.manual_seed(2)
    should = [torch.rand(3) for _ in range(3 * microbatches)]
    torch.manual_seed(2)
    OTHER.clear()
    for _ in range(3):
        assert torch.equal(together.step(*batch).loss, alone.step(*batch).loss)
    assert len(OTHER) == len(should)
    assert all(map(torch.equal, OTHER, should))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.randn_like(x),
        lambda x: x + torch.rand(x.shape, dtype=x.dtype) * torch.randperm(x.shape[-1]),
        lambda x: x * torch.randint_like(x.detach(), 5) + torch.randint_like(x.detach(), 2, 5),
        lambda x: x + torch.normal(x.detach(), 1.0) + torch.poisson(x.detach().abs()),
        lambda x: torch.ops.aten.native_dropout(x, 0.3, True)[0],
        lambda x: x[:, torch.multinomial(torch.ones(x.shape[-1]), x.shape[-1])],
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: F.alpha_dropout(x, 0.3, True),
        lambda x: F.dropout1d(x, 0.3, True),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.gumbel_softmax(x, hard=True),
        lambda x: F.dropout(x, 0.3, True, inplace=True),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
    ],
    ids=[
        "noise",
        "uniform",
        "integers",
        "around",
        "native",
        "choice",
        "bernoulli",
        "alpha",
        "dropout1d",
        "rrelu",
        "gumbel",
        "in-place",
        "attention",
    ],
)
def test_random_ops(draw: object) -> None:
    """The numbers equal those of the default generator with the same seed."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with annotate("r"):
            x = draw(self.a(x))  # type: ignore[operator]
        with annotate("r"):
            return self.b(x)

    def reseed(model: nn.Module, microbatch: int) -> None:
        torch.manual_seed(fold(0, step=0, chunk=0, microbatch=microbatch))

    model = Net(forward, a=linear(), b=linear())
    x, y = rows(), rows()
    expected = eager(model, (x,), (y,), F.mse_loss, 2, before=reseed)
    captured = capture(
        model,
        inputs=(x,),
        targets=(y,),
        loss=F.mse_loss,
        microbatches=2,
        remat="all",
        outputs=lambda output, *_: output,
    )
    for split in (False, True):
        found = piper_step(captured, model, (x,), (y,), split_backward=split)
        assert_equal(found, expected)


# --- a capture changes nothing ---------------------------------------------------------------


def test_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    x, y = rows(), rows()
    state = torch.get_rng_state()
    with torch.no_grad():
        captured = capture(model, inputs=(x,), targets=(y,), loss=F.mse_loss, tags={"*": "r"})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    _, gradients, _ = SingleDevice(captured, model).differentiate(x, y)
    assert gradients.keys() == dict(model.named_parameters()).keys()


def test_a_recurrent_layer() -> None:
    """PyTorch itself runs it by oneDNN on a CPU: equal up to rounding."""
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 8, num_layers=2, batch_first=True)
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.recurrent(x)[0])

    model, x = Reader(), torch.randn(4, 5, 4)
    captured = capture(model, inputs=(x,), loss=lambda out: out.square().mean(), microbatches=2)
    loss, gradients, _ = SingleDevice(captured, model).differentiate(x)
    expected = model(x).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
