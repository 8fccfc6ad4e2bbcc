"""Unmodified models of the ``transformers`` library, tagged by module path: equal to eager bit for
bit.

One thread: the CPU's index_put with accumulate, which sums the gradients of an embedding and of
batched experts, adds in an order that depends on the threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import CaptureError
from piper.capture.loss.own_loss import own_loss
from piper.capture.model import capture
from piper.strategies import mesh
from piper.strategies.directives import place
from tests.hugging_face import BATCH, DECODER, FAMILIES, GPT2, SEQ, SIZES, VOCAB
from tests.reference import assert_equal_to_eager
from tests.training import Batch, assert_same, compiled, pipeline, plain, train

transformers = pytest.importorskip("transformers")
from bench.models import Mode, examine  # noqa: E402 - it needs the library


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (BATCH, SEQ)), torch.randint(VOCAB, (BATCH, SEQ))


def check(model: nn.Module, tags: Mapping[str, str] = DECODER, **extra: Tensor) -> None:
    x, y = tokens()
    inputs = {"input_ids": x, **extra}
    captured = assert_equal_to_eager(model, inputs, (y,), loss, tags=tags)
    names = [chunk.name for chunk in captured.chunks]
    assert {"layer[0]", "layer[1]"} <= {name.split("/")[0] for name in names}


def test_llama() -> None:
    check(FAMILIES["Llama"].make())


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("mode", sorted(Mode, key=lambda mode: mode is not Mode.UNNAMED))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_as_it_is(name: str, mode: Mode) -> None:
    """Two stages, two microbatches, dicts with labels: the losses equal plain PyTorch's. Without
    tags on four devices, and on two in tensor parallelism, also the final state."""
    found = examine(FAMILIES[name], mode)
    assert not found.refusal
    if mode is Mode.UNNAMED:  # replicas sum losses, some of them in fp32, and gradients
        assert found.difference is not None
        assert found.state is not None
        assert found.difference < 1e-6
        in_fp32 = name == "Qwen3-Next"  # PyTorch differs as much between 2 and 4 microbatches
        assert found.state < (1e-8 if in_fp32 else 1e-12)
    elif mode is Mode.TENSOR:  # norms, the loss and its gradient are fp32 in fp64 models, too
        assert found.difference is not None
        assert found.state is not None
        assert found.difference < 2e-6
        assert found.state < 1e-7
    else:
        assert found.difference == (None if mode is Mode.SHIPPED else 0.0)


def test_layers_left_out_at_random_are_refused() -> None:
    family = FAMILIES["OPT"]
    with pytest.raises(CaptureError, match=r"modeling_opt\.py:\d+ .*layerdrop=0"):
        capture(family.make(layerdrop=0.5), inputs=family.batch(), tags=family.tags)


@pytest.mark.slow
def test_a_microbatch_that_ignores_all_its_labels() -> None:
    """Divided by the label count of the whole batch, it adds nothing to the loss."""
    family = FAMILIES["Llama"]
    model = family.make().double()
    batch = family.batch()
    batch["labels"][: BATCH // 2] = -100

    def counted(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        return output.loss, (labels[:, 1:] != -100).sum()

    given: Batch = ({**batch, "num_items_in_batch": 1}, (batch["labels"],))
    program = compiled(model, pipeline([[0], [1]], 2), counted, [given], tags=family.tags)
    found = train(program, [given])
    assert_same(found, plain(model, counted, [given], microbatches=2))
    torch.testing.assert_close(found.losses[0], model(**batch).loss)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("Llama", mesh(dp=2, microbatches=2)),
        ("Llama", mesh(tp=2, dp=2)),
        ("Llama", mesh(cp=2, microbatches=2)),
        ("BERT", mesh(dp=2, microbatches=2)),
        ("BERT", mesh(cp=2, microbatches=2)),
    ],
    ids=["replicas", "vocabulary", "context", "BERT", "BERT, context"],
)
def test_ignored_labels_are_those_of_the_whole_batch(name: str, strategy: piper.Strategy) -> None:
    """The model's own loss (computed in fp32) and its gradients are right, without a warning."""
    family = FAMILIES[name]
    model = family.make(dropout=False).double()
    batch = family.batch()
    batch["labels"][: BATCH // 2] = -100
    batch["labels"][-1, : SEQ // 2] = -100
    given: Batch = (batch, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error", piper.PiperWarning)
        program = compiled(model, strategy.directives, None, [given], tags=family.tags)
    expected = plain(model, own_loss, [given], microbatches=1)
    found = train(program, [given])
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=1e-7)


def test_a_model_without_labels_has_no_loss() -> None:
    with pytest.raises(CaptureError, match=r"CausalLMOutput.* without one; .*'labels'"):
        capture(FAMILIES["Llama"].make(), inputs={"input_ids": tokens()[0]})


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_left_to_the_strategy(reentrant: bool) -> None:
    model = FAMILIES["Llama"].make()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    x, y = tokens()
    with pytest.warns(piper.PiperWarning, match=r"asks for activation .* piper\.remat") as caught:
        program = piper.compile(
            model,
            piper.Strategy([place({}, devices=[0])]),
            inputs={"input_ids": x},
            targets=(y,),
            loss=loss,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
            tags=DECODER,
        )
    assert len(caught) == 1
    with piper.launch(program) as trainer:
        found = trainer.step({"input_ids": x}, y).loss
        state = trainer.state_dict()
    expected = loss(model(input_ids=x), y)
    expected.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(found, expected.detach())
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())


@pytest.mark.slow
def test_gpt2_with_a_padding_mask() -> None:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    for row, padding in enumerate((3, 1, 0, 5)):  # some in every microbatch: else eager drops it
        mask[row, :padding] = 0
    check(FAMILIES["GPT-2"].make(dropout=False), GPT2, attention_mask=mask)


@pytest.mark.slow
def test_t5_whose_attention_learns_its_mask() -> None:
    family = FAMILIES["T5"]
    check(family.make(dropout=False), family.tags, decoder_input_ids=tokens()[0])


def qwen3_moe(experts: str) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
    )
    config._experts_implementation = experts
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.slow
def test_qwen3_moe_with_batched_experts() -> None:
    check(qwen3_moe("batched_mm"), {**DECODER, "model.layers.*.mlp.experts": "EP"})


def test_experts_that_decide_by_the_data_are_refused() -> None:
    x, y = tokens()
    with pytest.raises(CaptureError, match=r"\.py:\d+"):
        capture(qwen3_moe("eager"), inputs={"input_ids": x}, targets=(y,), loss=loss, tags=DECODER)
