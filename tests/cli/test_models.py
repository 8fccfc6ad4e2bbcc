"""The models: causality, routing against a slow reference, gradients, export, dtypes, losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.capture.regions import recording, tags_of
from piper.cli.demo.layers import Attention, Rotary
from piper.cli.demo.moe import MoE, Routing, load_balance
from piper.models import (
    DenseConfig,
    DenseTransformer,
    MoEConfig,
    MoETransformer,
    lm_loss,
    lm_loss_sum,
)

DENSE = DenseConfig(vocab=23, dim=24, layers=2, heads=4, kv_heads=2, mlp_dim=20, max_seq=16)
# Capacity for every choice, so that no token is dropped unless a test asks for it.
MOE = MoEConfig(
    vocab=23,
    dim=24,
    layers=2,
    heads=4,
    mlp_dim=20,
    max_seq=16,
    experts=5,
    top_k=2,
    capacity_factor=2.5,
)
CONFIGS = {
    "dense": DENSE,
    "dense-mha-tied": replace(DENSE, kv_heads=None, tie_embeddings=True),
    "moe": MOE,
    "moe-k1-tight": replace(MOE, top_k=1, capacity_factor=0.7),
    "moe-aux-tied": replace(MOE, kv_heads=1, aux_loss_weight=0.1, tie_embeddings=True),
}


def build(config: DenseConfig) -> DenseTransformer | MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(config) if isinstance(config, MoEConfig) else DenseTransformer(config)


def sharpen(model: nn.Module) -> nn.Module:
    """Spread the router's choices: at std 0.02 the probabilities are nearly equal."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_()
    return model


def tokens(batch: int, seq: int, vocab: int = 23) -> Tensor:
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> DenseConfig:
    return request.param


@pytest.mark.parametrize("config", [DENSE, MOE, replace(MOE, top_k=1)], ids=["dense", "moe", "k1"])
def test_a_token_changes_no_logits_before_it(config: DenseConfig) -> None:
    model = sharpen(build(config)).double()
    x = tokens(2, 13)
    changed = x.clone()
    changed[:, 6] = (changed[:, 6] + 1) % config.vocab
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 6], before[:, 6])
    assert not torch.allclose(after[:, 12], before[:, 12]), "attention does not reach back"


def test_attention_knows_order_and_distance_but_not_absolute_position() -> None:
    torch.manual_seed(0)
    cos, sin = Rotary(dim=6, max_seq=9, base=100.0).double()(9)
    attention = Attention(dim=6, heads=1, kv_heads=1).double()
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    near = attention(x, cos[:4], sin[:4])
    far = attention(x, cos[5:9], sin[5:9])
    torch.testing.assert_close(near, far, rtol=1e-6, atol=1e-6)  # the tables are computed in fp32
    swapped = attention(x[:, [1, 0, 2, 3]], cos[:4], sin[:4])
    assert not torch.allclose(swapped[:, 3], near[:, 3], rtol=1e-3, atol=1e-3)


def test_grouped_heads_equal_repeated_key_and_value_heads() -> None:
    torch.manual_seed(0)
    grouped, full = Attention(24, heads=4, kv_heads=2), Attention(24, heads=4, kv_heads=4)
    q, k, v = grouped.w_qkv.weight.detach().split((24, 12, 12))
    with torch.no_grad():
        repeated = [w.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1) for w in (k, v)]
        full.w_qkv.weight.copy_(torch.cat((q, *repeated)))
        full.w_out.weight.copy_(grouped.w_out.weight)
    table = Rotary(6, 11, 10_000.0)(11)
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(grouped(x, *table), full(x, *table))


def reference_routing(
    probs: list[list[float]], k: int, capacity: int
) -> tuple[list[dict[int, float]], set[tuple[int, int]]]:
    """{expert: weight} of each token, and the (choice, token) pairs beyond the capacity."""
    ranked = [sorted(range(len(p)), key=lambda e: -p[e])[:k] for p in probs]
    room = dict.fromkeys(range(len(probs[0])), capacity)
    given: list[dict[int, float]] = [{} for _ in probs]
    dropped = set()
    for choice in range(k):
        for token, experts in enumerate(ranked):
            expert = experts[choice]
            if room[expert] == 0:
                dropped.add((choice, token))
                continue
            room[expert] -= 1
            total = sum(probs[token][e] for e in experts) if k > 1 else 1.0
            given[token][expert] = probs[token][expert] / total
    return given, dropped


@pytest.mark.parametrize(
    ("batch", "seq", "experts", "k", "factor", "drops"),
    [
        (2, 9, 4, 2, 1.0, True),
        (1, 7, 3, 1, 0.5, True),
        (3, 5, 7, 3, 0.8, True),
        (1, 1, 4, 2, 1.25, False),
        (2, 6, 5, 5, 1.0, False),
        (2, 11, 4, 2, 2.0, False),
        (1, 8, 1, 1, 0.5, True),
    ],
)
def test_mixture_equals_the_token_by_token_reference(
    batch: int, seq: int, experts: int, k: int, factor: float, drops: bool
) -> None:
    torch.manual_seed(2)
    config = replace(MOE, experts=experts, top_k=k, capacity_factor=factor)
    moe = MoE(config).double()
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(batch, seq, config.dim, dtype=torch.float64)
    flat = x.flatten(0, 1)
    capacity = math.ceil(factor * batch * seq * k / experts)
    probs = (flat @ moe.router.gate.weight.T).softmax(-1).tolist()
    given, dropped = reference_routing(probs, k, capacity)

    expected = torch.zeros_like(flat)
    for token, weights in enumerate(given):
        for e, weight in weights.items():
            gate = F.silu(flat[token] @ moe.experts.w_gate[e])
            y = (gate * (flat[token] @ moe.experts.w_in[e])) @ moe.experts.w_out[e]
            expected[token] += weight * y
    out, routing = moe(x)
    torch.testing.assert_close(out, expected.view_as(x))
    got_dropped = (routing.slot == experts * capacity).nonzero().tolist()
    assert {tuple(pair) for pair in got_dropped} == dropped
    assert bool(dropped) == drops, "the case no longer shows what it is here for"


def test_first_choices_come_before_second_ones_and_dropped_tokens_give_zero() -> None:
    # Tokens 0 and 1 prefer expert 0, then 1; tokens 2 and 3 prefer 1, then 0. Capacity is 2 each.
    config = replace(MOE, dim=4, heads=2, experts=2, top_k=2, capacity_factor=0.5)
    moe = MoE(config)
    for parameter in moe.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        moe.router.gate.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    x = torch.ones(1, 4, 4)
    x[0, 2:, 0] = -1
    _, routing = moe(x)
    assert routing.slot.tolist() == [[0, 1, 2, 3], [4, 4, 4, 4]]

    only = MoE(replace(config, top_k=1, capacity_factor=0.5))
    only.load_state_dict(moe.state_dict())
    out, routing = only(x)
    assert routing.slot.tolist() == [[0, 2, 1, 2]]
    assert not out[0, [1, 3]].any()
    assert out[0, [0, 2]].any(dim=-1).all()


def test_empty_slots_hold_zeros() -> None:
    moe = MoE(replace(MOE, dim=4, heads=2, experts=2, top_k=1, capacity_factor=1.0))
    x = torch.randn(3, 4)
    rows = moe.dispatch(x, torch.tensor([[2, 0, 4]]))  # the last token is dropped
    assert torch.equal(rows, torch.stack((x[1], 0 * x[0], x[0], 0 * x[0])).view(2, 2, 4))


def test_load_balance_is_one_when_even_and_grows_to_the_number_of_experts() -> None:
    def routing(probs: Tensor, expert: Tensor) -> Routing:
        return Routing(probs=probs, expert=expert, weight=probs, slot=expert)

    even = routing(torch.full((6, 3), 1 / 3), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    worst = routing(torch.eye(3)[torch.zeros(6, dtype=torch.long)], torch.zeros(1, 6).long())
    assert load_balance(even).item() == pytest.approx(1.0)
    assert load_balance(worst).item() == pytest.approx(3.0)


def test_auxiliary_loss_is_the_weighted_mean_over_blocks() -> None:
    config = replace(MOE, aux_loss_weight=0.5)
    model = sharpen(build(config))
    x, y = tokens(2, 7), tokens(2, 7).flip(0)
    seen: list[Tensor] = []
    for block in model.layers:
        block.register_forward_hook(lambda _m, _i, out: seen.append(load_balance(out[1])))
    logits, aux = model(x)
    torch.testing.assert_close(aux, 0.5 * torch.stack(seen).mean())
    torch.testing.assert_close(lm_loss((logits, aux), y), lm_loss(logits, y) + aux)
    plain = build(MOE)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x), logits, rtol=0, atol=0)


def test_gradient_reaches_every_parameter(config: DenseConfig) -> None:
    model = sharpen(build(config))
    lm_loss(model(tokens(3, 11)), tokens(3, 11).roll(1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_training_reduces_the_loss(config: DenseConfig) -> None:
    model = build(config)
    x, y = tokens(2, 11), tokens(2, 11).roll(-1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = lm_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(replace(DENSE, tie_embeddings=True)), build(DENSE)
    assert tied.head.weight is tied.embedding.weight
    count = sum(p.numel() for p in tied.parameters())
    assert sum(p.numel() for p in untied.parameters()) == count + DENSE.vocab * DENSE.dim


def test_odd_shapes(config: DenseConfig) -> None:
    model = sharpen(build(config))
    for batch, seq in [(1, 1), (1, 7), (3, 13), (2, 16)]:
        output = model(tokens(batch, seq))
        logits = output[0] if isinstance(output, tuple) else output
        assert logits.shape == (batch, seq, config.vocab)
        assert logits.isfinite().all()


@pytest.mark.cases(fast=2)
def test_export_gives_the_same_numbers(config: DenseConfig) -> None:
    model = sharpen(build(config))
    x = tokens(1, 11)
    program = torch.export.export(model, (x,), strict=False)
    other = x.flip(1)
    torch.testing.assert_close(program.module()(other), model(other), rtol=0, atol=0)
    operations = [node for node in program.graph.nodes if node.op == "call_function"]
    schemas = [n.target._schema for n in operations if isinstance(n.target, torch._ops.OpOverload)]
    assert not [schema.name for schema in schemas if schema.is_mutable]
    unused = {str(node.target) for node in operations if not node.users}
    assert unused <= {"aten._assert_tensor_metadata.default"}


def test_regions_cover_every_operation_and_hold_the_experts_apart() -> None:
    model = build(MOE)
    with recording(), torch.fx.traceback.preserve_node_meta():
        program = torch.export.export(model, (tokens(1, 7),), strict=False)
    stacks: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.users:  # torch 2.11 adds bare asserts
            stack = "/".join(str(region) for region in tags_of(node.meta))
            stacks.setdefault(stack, []).append(str(node.target))
    assert list(stacks) == [
        "embed[0]",
        "layer[0]",
        "layer[0]/EP[0]",
        "layer[1]",
        "layer[1]/EP[1]",
        "head[0]",
    ]
    assert sorted(stacks["layer[1]/EP[1]"]) == [
        "aten.bmm.default",
        "aten.bmm.default",
        "aten.bmm.default",
        "aten.mul.Tensor",
        "aten.silu.default",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(config: DenseConfig, dtype: torch.dtype) -> None:
    model = build(config).to(dtype)
    output = model(tokens(1, 7))
    logits = output[0] if isinstance(output, tuple) else output
    assert logits.dtype == dtype
    loss = lm_loss(output, tokens(1, 7))
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    if not isinstance(config, MoEConfig):
        # Rounding may change a router's choice, but it changes a dense model only slightly.
        exact = build(config).double()(tokens(1, 7))
        torch.testing.assert_close(logits.double(), exact, rtol=0.05, atol=0.02)


def test_repeated_runs_are_bitwise_equal(config: DenseConfig) -> None:
    def run() -> list[Tensor]:
        model = build(config)
        loss = lm_loss(model(tokens(2, 11)), tokens(2, 11))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_weights_start_scaled() -> None:
    model = build(MoEConfig(vocab=64, dim=64, layers=8, heads=4, mlp_dim=64, experts=4))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            std = 0.02 / 4 if "w_out" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name


def test_a_meta_model_can_be_filled_later(config: DenseConfig) -> None:
    with torch.device("meta"):
        meta = build(config)
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))
    assert lm_loss(meta(tokens(1, 7).to("meta")), tokens(1, 7).to("meta")).is_meta
    meta.to_empty(device="cpu")
    torch.manual_seed(0)
    meta.reset_parameters()
    real = build(config)
    torch.manual_seed(0)
    real.reset_parameters()
    x = tokens(2, 9)
    torch.testing.assert_close(meta(x), real(x), rtol=0, atol=0)
    assert len(list(meta.parameters())) == len(list(real.parameters()))


def test_a_generator_fills_a_parameter_the_same_way_each_time() -> None:
    model = build(DENSE)
    a, b = torch.empty(5, 7), torch.empty(5, 7)
    model.init_parameter("layers.0.mlp.w_in.weight", a, torch.Generator().manual_seed(3))
    model.init_parameter("layers.0.mlp.w_in.weight", b, torch.Generator().manual_seed(3))
    assert torch.equal(a, b)


def test_dropout_acts_in_training_only() -> None:
    model = build(replace(DENSE, dropout=0.5))
    x = tokens(2, 9)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    torch.testing.assert_close(model(x), build(DENSE)(x))


def test_mean_loss_is_cross_entropy_in_fp32() -> None:
    logits = torch.randn(2, 7, 23).bfloat16()
    y = tokens(2, 7)
    expected = -torch.stack(
        [logits[b, t].float().log_softmax(-1)[y[b, t]] for b in range(2) for t in range(7)]
    ).mean()
    assert lm_loss(logits, y).dtype == torch.float32
    torch.testing.assert_close(lm_loss(logits, y), expected)


@pytest.mark.parametrize("aux", [None, 0.3])
def test_sum_and_count_agree_with_the_mean(aux: float | None) -> None:
    logits, y = torch.randn(3, 5, 23), tokens(3, 5)
    output = logits if aux is None else (logits, torch.tensor(aux))
    total, count = lm_loss_sum(output, y)
    assert count.item() == 15
    torch.testing.assert_close(total / count, lm_loss(output, y))


def test_ignored_tokens_count_for_nothing() -> None:
    logits, y = torch.randn(2, 5, 23), tokens(2, 5)
    y[0, 1:4] = 7
    masked = y.clone()
    masked[0, 1:4] = -100
    total, count = lm_loss_sum(logits, masked)
    kept = [F.cross_entropy(logits[0, t], y[0, t]) for t in (0, 4)]
    kept += [F.cross_entropy(logits[1, t], y[1, t]) for t in range(5)]
    assert count.item() == 7
    torch.testing.assert_close(total, torch.stack(kept).sum())
    renamed = masked.masked_fill(masked == -100, 22)
    renamed[1] = renamed[1].clamp(max=21)
    masked[1] = masked[1].clamp(max=21)
    masked[0, [0, 4]] = renamed[0, [0, 4]] = 3
    torch.testing.assert_close(lm_loss_sum(logits, renamed, 22), lm_loss_sum(logits, masked))


def test_a_batch_without_counted_tokens_gives_zero_not_nan() -> None:
    output = (torch.randn(1, 4, 23), torch.tensor(0.5))
    total, count = lm_loss_sum(output, torch.full((1, 4), -100))
    assert (total.item(), count.item()) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 25}, "use a multiple of 8"),
        ({"dim": 12}, "use a multiple of 8"),
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"kv_heads": 0}, "kv_heads=0 must divide"),
        ({"layers": 0}, "layers=0: must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"top_k": 6}, "top_k=6: must be from 1 to experts=5"),
        ({"top_k": 0}, "top_k=0"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight=-1.0"),
    ],
)
def test_a_wrong_config_says_what_to_change(change: dict[str, int | float], message: str) -> None:
    with pytest.raises(PiperError, match=message):
        replace(MOE, **change)


def test_a_sequence_beyond_the_tables_says_what_to_change() -> None:
    with pytest.raises(PiperError, match="17 tokens is longer than max_seq=16: raise max_seq"):
        build(DENSE)(tokens(1, 17))
    assert build(DENSE)(tokens(1, 16)).shape == (1, 16, 23)
