"""Fine-tune a Hugging Face model with LoRA, and write the merged model for ``from_pretrained``.

    python examples/lora.py                                  # a small random Llama, made here
    python examples/lora.py --model path/to/llama --on processes --pp 2 --dp 1
    torchrun --nproc-per-node 4 examples/lora.py --on torchrun --pp 1 --dp 4 --zero 3

The base model is frozen: it has no gradients and no optimizer state. A second start with the same
``--checkpoints`` folder resumes from its last checkpoint. The text is the source of Python's
standard library, byte by byte; put your own tokens into ``batch``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import piper
from piper.models import ByteBatches, stdlib_bytes
from piper.strategies import mesh

TAGS = {
    "model.embed_tokens": "embed",
    "model.layers.*": "layer",
    "model.norm": "norm",
    "lm_head": "head",
}


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.randn(rank, base.in_features, **like) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.down.t() @ self.up.t())

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One linear layer that computes the same function."""
        self.base.weight += self.scale * self.up @ self.down
        return self.base


def adapt(model: nn.Module, names: list[str], rank: int, alpha: float) -> None:
    """Freeze a model, and put an adapter around every linear layer with one of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank, alpha))


def merge(model: nn.Module) -> None:
    """Remove the adapters and add their products to the weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merged())


def loss(output: object, targets: Tensor) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)


def small_model(folder: Path) -> Path:
    """Write a model folder as downloaded from Hugging Face, of a model that trains in seconds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="folder of a Llama-like model; default: made here"
    )
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=2, help="devices of each stage")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO level of these")
    parser.add_argument("--microbatches", type=int, default=4, help="gradient accumulation")
    parser.add_argument("--on", default="virtual", choices=("virtual", "processes", "torchrun"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--checkpoints", type=Path, help="checkpoints, to resume from; default: none"
    )
    parser.add_argument(
        "--out", type=Path, help="where to write the merged model; default: nowhere"
    )
    options = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"  # rank 0 under torchrun
    with tempfile.TemporaryDirectory() as folder:
        source = options.model or small_model(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(source, use_cache=False).train()
    torch.manual_seed(0)  # equal adapters in every process of torchrun
    adapt(model, ["q_proj", "v_proj"], options.rank, alpha=2.0 * options.rank)
    batches = ByteBatches(stdlib_bytes(2**20), batch=16, seq=32)

    def batch(step: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens, following = batches[step]
        return {"input_ids": tokens}, following

    inputs, targets = batch(0)
    program = piper.compile(
        model,
        mesh(pp=options.pp, dp=options.dp, microbatches=options.microbatches, zero=options.zero),
        inputs=inputs,
        targets=(targets,),
        loss=loss,
        optimizer=adamw,
        tags=TAGS,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if first:
        print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters trained")
    kept = (
        {"checkpoint": options.checkpoints, "every": 10, "resume": True}
        if options.checkpoints
        else {}
    )
    with piper.launch(program, on=options.on) as trainer:
        for result in trainer.iterate(batch, steps=options.steps, **kept):
            if first and (trainer.steps == 1 or trainer.steps % 5 == 0):
                print(f"step {trainer.steps}: loss {result.loss:.4f}")
        state = trainer.state_dict()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        adapted = model(**inputs).logits
        merge(model)
        apart = (model(**inputs).logits - adapted).abs().max() / adapted.abs().max()
    if first:
        print(f"merged: logits differ by at most {float(apart):.0e} of the largest")
        if options.out is not None:
            model.save_pretrained(options.out)
            print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
