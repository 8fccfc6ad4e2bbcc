"""Models of the ``transformers`` library, as they are, tagged by module path: bitwise as eager.

One thread: the CPU's index_put with accumulate, which gathers the gradients of an embedding and of
batched experts, adds in an order that depends on the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import CaptureError
from piper.capture import capture
from piper.directives import place
from tests.reference import assert_equal_to_eager

transformers = pytest.importorskip("transformers")

VOCAB, SEQ, BATCH = 31, 8, 4
TAGS = {"model.embed_tokens": "embed", "model.layers.*": "layer", "lm_head": "head"}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "use_cache": False,
}


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


def check(model: nn.Module, tags: dict[str, str] = TAGS, **extra: Tensor) -> None:
    x, y = tokens()
    inputs = {"input_ids": x, **extra}
    captured = assert_equal_to_eager(model.train(), inputs, (y,), loss, tags=tags)
    names = [chunk.name for chunk in captured.chunks]
    assert {"layer[0]", "layer[1]"} <= {name.split("/")[0] for name in names}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"num_key_value_heads": 2}],
    ids=["mha", "gqa"],
)
def test_llama(changes: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    check(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_left_to_the_strategy(reentrant: bool) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()
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
            tags=TAGS,
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
def test_llama_with_tied_embeddings() -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    check(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
def test_qwen3() -> None:
    config = transformers.Qwen3Config(**{**SIZES, "num_key_value_heads": 2})
    check(transformers.Qwen3ForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


GPT2_TAGS = {"transformer.wte": "embed", "transformer.h.*": "layer", "lm_head": "head"}


@pytest.mark.slow
def test_gpt2() -> None:
    check(gpt2(), GPT2_TAGS)


@pytest.mark.slow
def test_gpt2_with_a_padding_mask() -> None:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    for row, padding in enumerate((3, 1, 0, 5)):  # some in every microbatch: else eager drops it
        mask[row, :padding] = 0
    check(gpt2(), GPT2_TAGS, attention_mask=mask)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.slow
def test_t5_whose_attention_learns_its_mask() -> None:
    tags = {"encoder.block.*": "layer", "decoder.block.*": "layer"}
    check(t5(), tags, decoder_input_ids=tokens()[0])


def qwen3_moe(experts: str) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
    )
    config._experts_implementation = experts
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.slow
def test_qwen3_moe_with_batched_experts() -> None:
    check(qwen3_moe("batched_mm"), {**TAGS, "model.layers.*.mlp.experts": "EP"})


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_experts_that_decide_by_the_data_are_refused(experts: str) -> None:
    x, y = tokens()
    with pytest.raises(CaptureError, match=r"\.py:\d+"):
        capture(qwen3_moe(experts), inputs={"input_ids": x}, targets=(y,), loss=loss, tags=TAGS)
