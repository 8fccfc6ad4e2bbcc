"""Small models of the ``transformers`` library: one table of configurations for all tests.

A family is the library's own model at small sizes; ``dropout=False`` sets every dropout of its
configuration to 0. Batches are dicts with labels, from which the model computes its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, SEQ, BATCH = 32, 8, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "use_cache": False,
}
_PLAIN: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")
}
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
Batch = dict[str, Tensor]


def tokens(*, seed: int = 0) -> Batch:
    """A batch for a language model."""
    draw = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(3, VOCAB, (2, BATCH, SEQ), generator=draw)
    return {"input_ids": ids, "labels": labels}


def image(*, seed: int = 0) -> Batch:
    """A batch for an image classifier."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(BATCH, 3, 8, 8, generator=draw, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(3, (BATCH,), generator=draw)}


def audio(*, seed: int = 0) -> Batch:
    """A batch for a speech transcriber."""
    draw = torch.Generator().manual_seed(seed)
    sound = torch.randn(BATCH, 4, 16, generator=draw, dtype=torch.float64)
    return {"input_features": sound, "labels": tokens(seed=seed)["labels"]}


DECODER = {"model.embed_tokens": "embed", "model.layers.*": "layer", "lm_head": "head"}
GPT2 = {"transformer.wte": "embed", "transformer.h.*": "layer", "lm_head": "head"}


@dataclass(frozen=True)
class Family:
    """A model of the library: its class, configuration and batches."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=lambda: DECODER)
    batch: Callable[..., Batch] = tokens

    def make(self, *, dropout: bool = True, **changes: Any) -> nn.Module:
        """A model of this family with random weights, in training mode."""
        import transformers  # this file must import without it

        config = getattr(transformers, self.config)(**{**self.sizes, **changes})
        if not dropout:
            for name, value in config.to_dict().items():
                if "drop" in name and "layer" not in name and isinstance(value, float):
                    setattr(config, name, 0.0)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()


def _causal(name: str, **changes: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", {**SIZES, **changes})


FAMILIES: dict[str, Family] = {
    "Llama": _causal("Llama"),
    "Llama, tied": _causal("Llama", tie_word_embeddings=True),
    "Mistral": _causal("Mistral", sliding_window=4),
    "Gemma": _causal("Gemma"),
    "Gemma 2": _causal("Gemma2", sliding_window=4),
    "Gemma 3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "sliding_window": 4}),
    "OLMo": _causal("Olmo", num_key_value_heads=4, pad_token_id=0),
    "OLMo 2": _causal("Olmo2"),
    "Phi 3": _causal("Phi3", pad_token_id=0),
    "Qwen 2": _causal("Qwen2"),
    "Qwen 3": _causal("Qwen3"),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_positions": 16,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "use_cache": False,
        },
        GPT2,
    ),
    "GPT-NeoX": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _PLAIN,
        {"gpt_neox.embed_in": "embed", "gpt_neox.layers.*": "layer", "lm_head": "head"},
    ),
    "Falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_hidden_size": 24,
            "use_cache": False,
        },
        {"transformer.word_embeddings": "embed", "transformer.h.*": "layer", "lm_head": "head"},
    ),
    "Bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4, "use_cache": False},
        {"transformer.word_embeddings": "embed", "transformer.h.*": "layer", "lm_head": "head"},
    ),
    "OPT": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_PLAIN, "ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 0},
        {"model.decoder.embed_tokens": "embed", "model.decoder.layers.*": "layer"},
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_ENCODER_DECODER, "max_position_embeddings": 16},
        {"model.encoder.layers.*": "layer", "model.decoder.layers.*": "layer"},
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_ENCODER_DECODER,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        {"model.encoder.layers.*": "layer", "model.decoder.layers.*": "layer"},
        audio,
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        {"encoder.block.*": "layer", "decoder.block.*": "layer"},
    ),
    "BERT": Family(
        "BertForMaskedLM",
        "BertConfig",
        {name: value for name, value in _PLAIN.items() if name != "use_cache"},
        {"bert.embeddings": "embed", "bert.encoder.layer.*": "layer", "cls": "head"},
    ),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **{name: value for name, value in _PLAIN.items() if name != "use_cache"},
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        {"model.embeddings": "embed", "model.layers.*": "layer", "head": "head"},
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 3,
        },
        {"vit.embeddings": "embed", "vit.layers.*": "layer", "classifier": "head"},
        image,
    ),
    "Mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        {"backbone.embeddings": "embed", "backbone.layers.*": "layer", "lm_head": "head"},
    ),
    "Mamba 2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        {"backbone.embeddings": "embed", "backbone.layers.*": "layer", "lm_head": "head"},
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **SIZES,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            **_EXPERTS,
            "shared_expert_intermediate_size": 12,
        },
    ),
    "Mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": _causal("Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=12),
    "Qwen3-MoE": _causal("Qwen3Moe", **_EXPERTS),
    "OLMoE": _causal("Olmoe", num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "DeepSeek-V2": _causal("DeepseekV2", **_DEEPSEEK),
    "DeepSeek-V3": _causal("DeepseekV3", **_DEEPSEEK, qk_head_dim=8),
    "GPT-OSS": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "SmolLM 3": _causal("SmolLM3", pad_token_id=0),
    "DeBERTa 2": Family(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **{name: value for name, value in _PLAIN.items() if name != "use_cache"},
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
        },
        {"deberta.embeddings": "embed", "deberta.encoder.layer.*": "layer"},
    ),
    "Swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "num_labels": 3,
        },
        {"swin.embeddings": "embed", "swin.encoder.layers.*": "layer", "classifier": "head"},
        image,
    ),
}
