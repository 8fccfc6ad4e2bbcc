"""Where regions begin and end, as text: each chunk's contents, inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import annotate
from piper.capture.chunk.chunks import Chunk
from piper.capture.model import Captured, capture
from piper.models import MoEConfig, MoETransformer, lm_loss
from tests.one_device import SingleDevice

X, Y = torch.randn(4, 6), torch.randn(4, 6)


def text(captured: Captured) -> str:
    """One line per chunk: its regions, state, inputs and outputs; then the results.

    Batch tensors have the caller's names, other values have numbers.
    """
    example, cut = captured.example, captured.cut

    def values(indices: tuple[int, ...]) -> list[str]:
        return [f"v{i}" if i >= len(example.tensors) else example.path(i) for i in indices]

    def line(chunk: Chunk) -> str:
        fields = {
            "params": chunk.parameters,
            "buffers": chunk.buffers,
            "in": values(chunk.inputs),
            "out": values(chunk.outputs),
            "updates": chunk.updates,
        }
        shown = [f"{key}={','.join(found)}" for key, found in fields.items() if found]
        return " ".join([str(chunk.index), chunk.name, *shown])

    results = {
        "loss": (cut.loss,),
        "count": () if cut.count is None else (cut.count,),
        "outputs": cut.outputs,
    }
    last = [f"{key}={','.join(values(found))}" for key, found in results.items() if found]
    return "\n".join([*map(line, cut.chunks), " ".join(last)])


def chunks(model: nn.Module, **options: Any) -> Captured:
    options = {"inputs": (X,), "targets": (Y,), "loss": F.mse_loss, **options}
    return capture(model, **options)


def expect(captured: Captured, expected: str) -> None:
    assert text(captured) == dedent(expected).strip()


def ops(chunk: Chunk) -> list[str]:
    return [str(n.target) for n in chunk.body.module.graph.nodes if n.op == "call_function"]


def linear() -> nn.Linear:
    return nn.Linear(6, 6, bias=False)


class Model(nn.Module):
    """Bias-free layers ``a``, ``b``, ``c``, a vector ``scale``, and the test's own ``forward``."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self, *inputs)


# --- chains and nesting


def test_what_stands_before_the_first_region_and_after_the_last() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.layers = nn.ModuleList(linear() for _ in range(2))
            self.head = linear()

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                with annotate("layer"):
                    x = layer(x).tanh()
            return self.head(x)

    captured = chunks(
        Chain(),
        inputs=(torch.zeros(4, 5, dtype=torch.long),),
        targets=(torch.zeros(4, 5, dtype=torch.long),),
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        microbatches=2,
    )
    expect(
        captured,
        """
        0 layer[0] params=embed.weight,layers.0.weight in=inputs[0] out=v4
        1 layer[1] params=layers.1.weight,head.weight in=v4 out=v5
        2 loss[0] in=v5,targets[0],v2,v3 out=v6
        loss=v6
        """,
    )
    assert [str(value.spec) for value in captured.cut.values] == [
        "int64[2, 5]",
        "int64[2, 5]",
        "float64[]",  # the number of targets of the whole batch that count
        "float64[]",  # the number of parts that the loss is taken in
        "float32[2, 5, 6]",
        "float32[2, 5, 6]",
        "float32[]",
    ]
    assert [value.producer for value in captured.cut.values] == [*[None] * 4, 0, 1, 2]


def test_a_nested_region_cuts_its_outer_region_in_three() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = m.a(x)
            with annotate("EP"):
                x = m.b(x)
            return m.c(x)

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[0]/EP[0] params=b.weight in=v2 out=v3
        2 layer[0] params=c.weight in=v3 out=v4
        3 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )


def test_no_regions_at_all() -> None:
    expect(
        chunks(Model(lambda m, x: m.b(m.a(x)))),
        """
        0 model params=a.weight,b.weight in=inputs[0] out=v2
        1 loss[0] in=v2,targets[0] out=v3
        loss=v3
        """,
    )


# --- edges to chunks other than the next


def test_a_skip_connection_is_an_edge_to_a_later_chunk() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            first = m.a(x)
        with annotate("layer"):
            x = m.b(first)
        with annotate("layer"):
            return m.c(x) + first

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=b.weight in=v2 out=v3
        2 layer[2] params=c.weight in=v3,v2 out=v4
        3 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )


def test_an_input_feeds_a_late_chunk_directly() -> None:
    def forward(m: Model, x: Tensor, *, gate: Tensor) -> Tensor:
        with annotate("layer"):
            x = m.a(x)
        with annotate("layer"):
            return m.b(x) * gate

    class Gated(Model):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return forward(self, x, gate=gate)

    expect(
        chunks(Gated(forward), inputs={"x": X, "gate": X}),
        """
        0 layer[0] params=a.weight in=inputs['x'] out=v3
        1 layer[1] params=b.weight in=v3,inputs['gate'] out=v4
        2 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )


def test_an_input_that_nothing_uses() -> None:
    def forward(m: Model, x: Tensor, unused: Tensor) -> Tensor:
        with annotate("layer"):
            return m.a(x)

    expect(
        chunks(Model(forward), inputs=(X, X)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v3
        1 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )


def test_a_chunk_with_several_outputs() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            u, v = m.a(x).chunk(2, -1)
        with annotate("layer"):
            w = torch.cat([u, u], -1)
        with annotate("layer"):
            return m.b(w) + torch.cat([v, v], -1)

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2,v3
        1 layer[1] in=v2 out=v4
        2 layer[2] params=b.weight in=v4,v3 out=v5
        3 loss[0] in=v5,targets[0] out=v6
        loss=v6
        """,
    )


# --- constants


def test_tables_and_masks_are_computed_where_used_and_never_sent() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        angles = torch.arange(6.0).cos()
        causal = torch.ones(4, 4).tril() == 0
        for layer in (m.a, m.b):
            with annotate("layer"):
                x = layer(x) * angles
                x = (x @ x.T).masked_fill(causal, 0.0) @ x
        return x

    captured = chunks(Model(forward))
    expect(
        captured,
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=b.weight in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )
    for chunk in captured.chunks[:2]:
        for made in ("aten.arange", "aten.cos", "aten.tril"):
            assert sum(op.startswith(made) for op in ops(chunk)) == 1


def test_a_constant_made_inside_one_region_and_used_in_another() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            table = torch.arange(6.0).sin()
            x = m.a(x) * table
        with annotate("layer"):
            return m.b(x) * table

    captured = chunks(Model(forward))
    expect(
        captured,
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=b.weight in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )
    assert all("aten.sin.default" in ops(chunk) for chunk in captured.chunks[:2])


def test_a_fixed_buffer_is_state_of_every_chunk_that_reads_it() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        table = m.seen.sin()
        for layer in (m.a, m.b):
            with annotate("layer"):
                x = layer(x) * table
        return x

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight buffers=seen in=inputs[0] out=v2
        1 layer[1] params=b.weight buffers=seen in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )


def test_random_numbers_are_drawn_once_and_sent() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        noise = torch.rand(6)
        with annotate("layer"):
            x = m.a(x) * noise
        with annotate("layer"):
            return m.b(x) * noise

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2,v3
        1 layer[1] params=b.weight in=v3,v2 out=v4
        2 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )


# --- ops outside any region


def test_untagged_ops_between_regions_join_what_feeds_them() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = m.a(x)
        x = x * m.scale
        with annotate("layer"):
            return m.b(x)

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight,scale in=inputs[0] out=v2
        1 layer[1] params=b.weight in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )


def test_an_untagged_op_on_two_chunks_joins_the_later() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            first = m.a(x)
        with annotate("layer"):
            second = m.b(first)
        both = (first + second) * m.scale
        with annotate("layer"):
            return m.c(both)

    expect(
        chunks(Model(forward)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=b.weight,scale in=v2 out=v3
        2 layer[2] params=c.weight in=v3 out=v4
        3 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )


def test_an_untagged_op_on_inputs_alone_joins_its_first_user() -> None:
    def forward(m: Model, x: Tensor, mask: Tensor) -> Tensor:
        keep = mask * m.scale
        with annotate("layer"):
            x = m.a(x)
        with annotate("layer"):
            x = m.b(x) * keep
        with annotate("layer"):
            return m.c(x) * keep

    expect(
        chunks(Model(forward), inputs=(X, X)),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v3
        1 layer[1] params=scale,b.weight in=inputs[1],v3 out=v4,v5
        2 layer[2] params=c.weight in=v5,v4 out=v6
        3 loss[0] in=v6,targets[0] out=v7
        loss=v7
        """,
    )


def test_an_untagged_op_with_two_results_that_go_to_two_regions() -> None:
    """Only tensors can be sent: the tuple stays in one chunk."""

    def forward(m: Model, x: Tensor) -> Tensor:
        u, v = x.chunk(2, -1)
        with annotate("layer"):
            h = m.a(torch.cat([u, u], -1))
        with annotate("layer"):
            return m.b(h) + torch.cat([v, v], -1)

    model = Model(forward)
    captured = chunks(model)
    assert [chunk.name for chunk in captured.chunks] == ["layer[0]", "layer[1]", "loss[0]"]
    same_as_eager(model, captured)


# --- state


def test_a_tied_parameter_has_one_name_in_both_chunks() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = m.a(x)
        with annotate("layer"):
            return m.b(x).tanh() @ m.a.weight

    model = Model(forward)
    model.b.weight = model.a.weight
    expect(
        chunks(model),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=a.weight in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )


def test_a_mutated_buffer_belongs_to_one_chunk() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            x = m.a(x)
            m.seen.mul_(0.9).add_(x.detach().mean(0))
        with annotate("layer"):
            return m.b(x) + m.seen

    model = Model(forward)
    captured = chunks(model, microbatches=2)
    expect(
        captured,
        """
        0 layer[0] params=a.weight buffers=seen in=inputs[0] out=v2,v3 updates=seen
        1 layer[1] params=b.weight in=v2,v3 out=v4
        2 loss[0] in=v4,targets[0] out=v5
        loss=v5
        """,
    )
    same_as_eager(model, captured)


def same_as_eager(model: nn.Module, captured: Captured) -> None:
    """Loss, gradients and buffers of one step equal those of the model run on each microbatch."""
    reference = copy.deepcopy(model)
    single = SingleDevice(captured, copy.deepcopy(model))
    loss, gradients, _ = single.differentiate(X, Y)
    n = captured.microbatches
    losses = []
    for x, y in zip(X.chunk(n), Y.chunk(n), strict=True):
        part = F.mse_loss(reference(x), y) / n
        part.backward()
        losses.append(part.detach())
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    expected = {k: p.grad for k, p in reference.named_parameters() if p.grad is not None}
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(dict(single.buffers), dict(reference.named_buffers()))


def read_before_update(m: Model, x: Tensor) -> Tensor:
    before = m.seen.clone()
    with annotate("layer"):
        x = m.a(x)
        m.seen.add_(1)
    with annotate("layer"):
        return m.b(x) * before


def needed_by_backward(m: Model, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = m.a(x) * m.seen.clone()
        m.seen.add_(1)
    return x


def updated_by_a_later_chunk(m: Model, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = m.a(x) * m.seen.clone()
    with annotate("layer"):
        m.seen.add_(1)
        return m.b(x)


@pytest.mark.parametrize("remat", ["none", "all"])
@pytest.mark.parametrize(
    "forward", [read_before_update, needed_by_backward, updated_by_a_later_chunk]
)
def test_a_buffer_keeps_the_value_that_was_read(
    forward: Callable[[Model, Tensor], Tensor], remat: str
) -> None:
    """An update must not change values read before it, in forward or in backward."""
    model = Model(forward)
    same_as_eager(model, chunks(model, microbatches=2, remat=remat))


# --- loss and results


def test_a_sum_and_its_count() -> None:
    def loss(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (out - y).square().sum(), (y > 0).sum()

    expect(
        chunks(Model(lambda m, x: m.a(x)), loss=loss),
        """
        0 model params=a.weight in=inputs[0] out=v2
        1 loss[0] in=v2,targets[0] out=v3,v4
        loss=v3 count=v4
        """,
    )


def test_a_count_that_is_a_constant() -> None:
    def loss(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (out - y).square().sum(), torch.full((), out.numel())

    expect(
        chunks(Model(lambda m, x: m.a(x)), loss=loss),
        """
        0 model params=a.weight in=inputs[0] out=v2
        1 loss[0] in=v2,targets[0] out=v3,v4
        loss=v3 count=v4
        """,
    )


def test_a_loss_with_parameters_and_regions_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            with annotate("head"):
                out = out * self.temperature
            return F.mse_loss(out, y)

    def forward(m: Model, x: Tensor) -> Tensor:
        with annotate("layer"):
            return m.a(x)

    expect(
        chunks(Model(forward), loss=Scaled()),
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 loss[0]/head[0] params=loss:temperature in=v2 out=v3
        2 loss[0] in=v3,targets[0] out=v4
        loss=v4
        """,
    )


def test_a_region_of_the_model_may_be_named_loss() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        x = m.a(x)
        with annotate("loss"):
            penalty = x.square().mean()
        return x * penalty

    expect(
        chunks(Model(forward)),
        """
        0 loss[0] params=a.weight in=inputs[0] out=v2
        1 loss[1] in=v2,targets[0] out=v3
        loss=v3
        """,
    )


def test_outputs_that_are_kept() -> None:
    def forward(m: Model, x: Tensor) -> dict[str, Any]:
        with annotate("layer"):
            hidden = m.a(x)
        with annotate("layer"):
            return {"out": m.b(hidden), "hidden": hidden, "x": x, "depth": 2, "none": None}

    model = Model(forward)
    captured = chunks(
        model, loss=lambda o, y: (o["out"] - y).square().mean(), outputs=lambda output, *_: output
    )
    expect(
        captured,
        """
        0 layer[0] params=a.weight in=inputs[0] out=v2
        1 layer[1] params=b.weight in=v2 out=v3
        2 loss[0] in=v3,targets[0],inputs[0] out=v4,v5
        loss=v4 outputs=v3,v2,v5
        """,
    )
    (kept,) = SingleDevice(captured, model).step(X, Y).outputs
    torch.testing.assert_close(kept, model(X))


# --- invariants of every model


def test_every_edge_runs_forward_and_equal_layers_share_a_program() -> None:
    config = MoEConfig(vocab=11, dim=8, layers=3, heads=2, mlp_dim=8, max_seq=6, experts=2, top_k=1)
    model = MoETransformer(config)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    captured = capture(
        model, inputs=(tokens,), targets=(tokens,), loss=lm_loss, tags={"layers.*": "block"}
    )
    made: set[int] = {v.index for v in captured.cut.values if v.producer is None}
    for chunk in captured.chunks:
        assert set(chunk.inputs) <= made
        made |= set(chunk.outputs)
        assert all(captured.cut.values[i].producer == chunk.index for i in chunk.outputs)
    assert made == set(range(len(captured.cut.values)))
    held = {name for chunk in captured.chunks for name in chunk.parameters}
    assert held == {name for name, _ in model.named_parameters()}
    by_name = {c.name: p for c, p in zip(captured.chunks, captured.programs, strict=True)}
    experts = [p for name, p in by_name.items() if "EP" in name]
    assert len(experts) == 3
    assert len({id(program) for program in experts}) == 1
