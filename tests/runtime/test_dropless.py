"""Experts without dropped tokens: the grouped products of unmodified Hugging Face models, under
expert parallelism, equal one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import piper
from piper.ir.dag.build import build
from piper.ir.ops import Collective
from piper.ir.plan.instructions import Verb
from piper.ir.plan.plan import Plan
from piper.lower.lower import Settings, lower
from piper.program.storage import with_plans
from piper.runtime.instructions.expert_rows import packed, padded
from piper.strategies import mesh
from tests.facts import at, dropless
from tests.plan_checker import check as check_plans
from tests.training import Batch, Run, assert_same, plain, sgd, steps, train

TAGS = {"model.layers.*": "layer", "model.layers.*.mlp.experts": "EP"}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 12, "num_experts": 8, "head_dim": 8},
    "Olmoe": {"intermediate_size": 12, "num_experts": 4},
    "DeepseekV3": {
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "qk_head_dim": 8,
    },
    "GptOss": {
        "intermediate_size": 12,
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def batch(rows: int = 8) -> Batch:
    tokens = torch.randint(1, 64, (rows, 9))
    return {"input_ids": tokens[:, :-1].clone()}, (tokens[:, 1:].clone(),)


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    found: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    for parameter in found.parameters():  # zero routers would route all rows alike
        torch.nn.init.normal_(parameter, std=0.3)
    return found


@cache
def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [batch() for _ in range(3)]


@cache
def captured(name: str) -> piper.Capture:
    (inputs, targets) = batches()[0]
    return piper.capture(
        model(name),
        inputs=inputs,
        targets=targets,
        loss=next_token_loss,
        tags=TAGS,
        optimizer=sgd,
    )


@cache
def reference(name: str, microbatches: int) -> Run:
    """Plain PyTorch, with one product per row."""
    whole = copy.deepcopy(model(name))
    whole.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    return plain(whole, next_token_loss, batches(), microbatches=microbatches)


def check(name: str, microbatches: int, strategy: piper.Strategy) -> piper.Program:
    program = captured(name).compile(strategy)
    assert_same(train(program, batches()), reference(name, microbatches), 1e-12)
    return program


STRATEGIES: dict[str, tuple[int, Callable[[], piper.Strategy]]] = {
    "ep 2": (2, lambda: mesh(dp=2, ep=2)),
    "ep 4": (4, lambda: mesh(dp=4, ep=4, zero=1)),
    "dp 2, ep 2": (4, lambda: mesh(dp=4, ep=2, zero=2)),
    "pp 2, ep 2": (8, lambda: mesh(pp=2, dp=2, ep=2, microbatches=4, zero=3)),
    "DualPipeV": (8, lambda: mesh(pp=1, dp=2, ep=2, schedule="dualpipev", microbatches=4)),
}


@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hugging_face_models(name: str, strategy: str) -> None:
    microbatches, make = STRATEGIES[strategy]
    check(name, microbatches, make())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_hugging_face_model(name: str) -> None:
    check(name, 4, mesh(dp=2, ep=2, microbatches=2, zero=1))


@cache
def llama_4() -> tuple[nn.Module, piper.Capture]:
    """Every expert computes every row, weighted by 0 where it is not chosen; rows enter and leave
    without an expert dimension."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size=12,
        intermediate_size_mlp=24,
        num_local_experts=4,
        head_dim=8,
        attention_chunk_size=4,
    )
    whole = transformers.Llama4ForCausalLM(config).double().train()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (inputs, targets), *_ = batches()
    tags = {"model.layers.*": "layer", "model.layers.*.feed_forward.experts": "EP"}
    return whole, piper.capture(
        whole, inputs=inputs, targets=targets, loss=next_token_loss, tags=tags, optimizer=sgd
    )


@pytest.mark.cases(fast=0, slow=5)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_llama_4(strategy: str) -> None:
    whole, found = llama_4()
    microbatches, make = STRATEGIES[strategy]
    expected = plain(copy.deepcopy(whole), next_token_loss, batches(), microbatches=microbatches)
    assert_same(train(found.compile(make()), batches()), expected, 1e-12)


def with_balance(output: Any, targets: Tensor) -> Tensor:
    return next_token_loss(output, targets) + 0.02 * output.aux_loss


@pytest.mark.slow
def test_auxiliary_losses() -> None:
    given = [({**inputs, "output_router_logits": True}, y) for inputs, y in batches()]
    program = piper.compile(
        model("Mixtral"),
        mesh(pp=2, dp=2, ep=2, microbatches=2),
        inputs=given[0][0],
        targets=given[0][1],
        loss=with_balance,
        outputs=lambda output, _: {"balance": output.aux_loss},
        tags=TAGS,
        optimizer=sgd,
    )
    whole = copy.deepcopy(model("Mixtral"))
    whole.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    expected = plain(whole, with_balance, given, microbatches=4)
    assert_same(train(program, given), expected, 1e-12)
    with piper.launch(program) as trainer, torch.no_grad():
        found = trainer.step(given[0][0], *given[0][1]).outputs["balance"]
        ids = given[0][0]["input_ids"].chunk(4)
        wanted = [whole(input_ids=part, output_router_logits=True).aux_loss for part in ids]
    assert float(found) == pytest.approx(float(sum(wanted)) / 4, rel=1e-12)


class Experts(nn.Module):
    """``experts`` experts, with the routing given and torch's own grouped products."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 8, 12))
        self.bias = nn.Parameter(torch.randn(experts, 12))
        self.down = nn.Parameter(torch.randn(experts, 12, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        experts, order = chosen.sort(stable=True)
        offsets = nn.functional.one_hot(experts, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        hidden = torch.nn.functional.grouped_mm(x[order], self.up, offs=offsets)
        hidden = (hidden + self.bias[experts]).relu()
        made = torch.nn.functional.grouped_mm(hidden, self.down, offs=offsets)
        return x.index_add(0, order, made)


class Routed(nn.Module):
    """A model whose routing is given with the batch."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.experts = Experts(experts)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x), chosen))


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def routed(chosen: Tensor) -> list[Batch]:
    torch.manual_seed(2)
    rows = len(chosen)
    x, y = torch.randn(rows, 8).double(), torch.randn(rows, 8).double()
    return [((x, chosen), (y,))] * 2


@cache
def routed_model(experts: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Routed(experts).double()


def by_hand(found: nn.Module, given: list[Batch], microbatches: int) -> Run:
    """A loop over the experts instead of grouped products, which torch has in few dtypes."""

    class Looped(nn.Module):
        def __init__(self, whole: nn.Module) -> None:
            super().__init__()
            self.first, self.experts, self.last = whole.first, whole.experts, whole.last

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            x = self.first(x)
            made = torch.zeros_like(x)
            for i, (up, bias, down) in enumerate(
                zip(self.experts.up, self.experts.bias, self.experts.down, strict=True)
            ):
                mine = (x @ up + bias).relu() @ down
                made = made + mine * (chosen == i).unsqueeze(1)
            return self.last(x + made)

    return plain(Looped(copy.deepcopy(found)), square_loss, given, microbatches=microbatches)


def compiled(given: list[Batch], strategy: piper.Strategy, experts: int = 4) -> piper.Program:
    inputs, targets = given[0]
    return piper.compile(
        routed_model(experts),
        strategy,
        inputs=inputs,
        targets=targets,
        loss=square_loss,
        tags={"experts": "EP"},
        optimizer=sgd,
    )


def spread(*directives: Any, devices: int = 2, parts: int = 2, **options: Any) -> piper.Strategy:
    return piper.Strategy(
        [
            piper.split(parts=parts),
            piper.place({}, devices=list(range(devices))),
            piper.replicate({}),
            piper.shard({"EP": "*"}, stream="ep", **options),
            *directives,
        ]
    )


CHOICES = {
    "skewed": [0, 0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 0, 0, 1, 0],
    "an expert without rows": [0, 1, 3, 3, 1, 0, 3, 1, 0, 0, 1, 1, 3, 0, 1, 3],
    "all on one": [2] * 16,
    "all on the last": [3] * 16,
}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("choice", CHOICES)
def test_skewed_routing(choice: str) -> None:
    given = routed(torch.tensor(CHOICES[choice]))
    program = compiled(given, spread())
    assert_same(train(program, given), by_hand(routed_model(), given, 4), 1e-12)


def test_a_device_without_rows_for_its_experts() -> None:
    given = routed(torch.zeros(16, dtype=torch.int64))
    program = compiled(given, spread(devices=4, parts=1))
    assert_same(train(program, given), by_hand(routed_model(), given, 4), 1e-12)


def refused(program: piper.Program, given: list[Batch]) -> str:
    """The error of a step whose rows exceed the capacity."""
    with pytest.raises(piper.CapacityError) as error, piper.launch(program) as trainer:
        trainer.step(*given[0][0], *given[0][1])
    return str(error.value)


def test_too_many_rows_are_an_error_that_names_them() -> None:
    given = routed(torch.tensor(CHOICES["all on one"]))
    program = compiled(given, spread(parts=1, capacity=1.5))
    text = refused(program, given)
    assert "EP[0]" in text
    assert "device 1 is sent 16 rows for its experts ([8, 8] from each device)" in text
    assert "room for 12" in text


def test_capacity_is_memory() -> None:
    given = routed(torch.arange(256) % 4)
    peaks = [
        compiled(given, spread(parts=1, capacity=capacity)).memory[0].peak
        for capacity in (1.0, 1.5, None)
    ]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize("capacity", [1.5, None])
def test_memory_is_within_what_was_predicted(capacity: float | None) -> None:
    given = routed(torch.arange(256) % 4)
    program = compiled(given, spread(capacity=capacity))
    with piper.launch(program) as trainer:
        steps(trainer, given)
        measured = trainer.measure_memory(*given[0][0], *given[0][1])
    (memory,) = program.memory
    for device in measured.values():
        assert 0.5 * memory.peak < device.peak <= memory.peak


def counts_ended(plan: Plan) -> int:
    """How many all-to-alls by counts the host starts only after it has the counts."""
    made = {slot: pc for pc, x in enumerate(plan.instructions) for slot in x.writes}
    moves = [x for x in plan.instructions if isinstance(x.op, Collective) and x.op.rows]
    return sum(made[x.reads[-1]] in x.ends for x in moves)


def test_rows_follow_their_counts() -> None:
    """The all-to-all of rows starts at once where a stream's thread reads the counts, and does not
    wait for the next computation. On a GPU the host reads the counts, unless rows are padded to the
    capacity."""
    given = routed(torch.arange(256) % 4)
    program = compiled(given, spread(capacity=1.5))
    (plan,) = program.plans
    assert counts_ended(plan) == 0
    places = [pc for pc, x in enumerate(plan.instructions) if x.stream == "ep"]
    for before, pc in itertools.pairwise(places):
        between = range(before + 1, pc)
        passes = [c for c in between if plan.instructions[c].verb is Verb.COMPUTE]
        assert not passes or passes[-1] in plan.instructions[pc].waits
    gpu = replace(program.settings, gpu=True)
    (plan,) = with_plans(replace(program, settings=gpu), piper.Program).plans
    assert ", by the host" in str(plan)
    assert counts_ended(plan) == 2, "one in each microbatch"
    assert Plan.parse(str(plan)) == plan


def test_load_is_reported() -> None:
    chosen = torch.tensor(CHOICES["skewed"])
    given = routed(chosen)
    for strategy in (spread(), piper.strategies.mesh(dp=2, microbatches=2, regions="EP")):
        with piper.launch(compiled(given, strategy)) as trainer:
            result = trainer.step(*given[0][0], *given[0][1])
        assert {k: x.tolist() for k, x in result.expert_load.items()} == {
            "experts": chosen.bincount(minlength=4).tolist()
        }
        assert result.expert_imbalance["experts"] == pytest.approx(12 / 4)


@pytest.mark.slow
def test_unequal_splits_over_gloo() -> None:
    given = routed(torch.tensor(CHOICES["skewed"]))
    program = compiled(given, spread())
    with piper.launch(program, on="processes") as trainer:
        found = steps(trainer, given)
    assert_same(found, train(program, given))


def test_a_region_with_a_router_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x, self.router(x).argmax(1))

    x = torch.randn(8, 8)
    with pytest.raises(piper.DirectiveError, match="mixes experts"):
        piper.compile(
            nn.Sequential(nn.Linear(8, 8), Both()),
            spread(),
            inputs=(x,),
            targets=(x,),
            loss=square_loss,
            tags={"1": "EP"},
        )


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 10], [10, 0, 0, 0], [0, 0, 0, 0]])
def test_padded_rows_come_back(counts: list[int]) -> None:
    """Where the host must not know the counts, rows are padded to the capacity."""
    x, found = torch.randn(10, 3), torch.tensor(counts)
    total = sum(counts)
    for room in (10, 12):
        there = padded(x, found, room)
        assert len(there) == room * len(counts)
        for part, rows in zip(there.chunk(len(counts)), x[:total].split(counts), strict=True):
            assert torch.equal(part[: len(rows)], rows)
        assert torch.equal(packed(there, found, 10)[:total], x[:total])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("capacity", [None, 1.0, 1.5])
@pytest.mark.parametrize("zero", range(4))
def test_plans_are_right(zero: int, capacity: float | None) -> None:
    """The independent checker accepts the plans and their memory."""
    model = dropless(2, 4)
    sizes = {n: at(model, n) for n in (2, 4)}
    for devices, ways, apart, clip in itertools.product((2, 4), (None, 2), (0, 4), (False, True)):
        if zero == 3 and ways is None:
            continue  # there is nothing left to shard
        row = list(range(devices))
        strategy = piper.Strategy(
            [
                piper.split(parts=2),
                piper.place({"EP": "-"}, devices=row),
                piper.place({"EP": "*"}, devices=[apart + d for d in row]),
                piper.replicate({"EP": "-"}, zero=zero),
                piper.replicate({"EP": "*"}, zero=zero),
                piper.shard({"EP": "*"}, stream="ep", ways=ways, capacity=capacity),
            ]
        )
        found = lower(strategy.apply(build(model)), sizes, Settings(clip=clip))
        check_plans(found.dag, found.plans, found.memory, models=sizes, clip=clip)


class Counting(nn.Module):
    """Counts how often each number occurs, scaled."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins, self.scale = bins, nn.Parameter(torch.ones(bins))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bincount(x, minlength=self.bins) * self.scale


def test_counts_have_as_many_bins_as_are_asked_for() -> None:
    x, y = torch.tensor([0, 2, 2, 1]), torch.zeros(4, 5)
    program = piper.compile(
        Counting(5),
        piper.Strategy([piper.place({}, devices=[0])]),
        inputs=(x,),
        targets=(y,),
        loss=lambda out, target: out.square().sum() + 0 * target.sum(),
    )
    with piper.launch(program) as trainer:
        assert float(trainer.evaluate(x, y).loss) == 1 + 1 + 4
        with pytest.raises(piper.PiperError, match="was given the number 7"):
            trainer.evaluate(torch.tensor([0, 7, 2, 1]), y)
