"""FLOPs and bytes sent of each strategy, beside a count by hand.

Unmodified Llama, Phi and Mixtral of ``transformers`` on the meta device: nothing runs. "products"
are the floating-point operations of all devices, divided by those of a single-device program. Bytes
are those that a device sends in a step along an axis, in units of one activation [rows, sequence,
width] of the whole batch. The count by hand is Megatron's traffic. (Megatron has no parallel
residual as in Phi: there the count is two all-reduces per layer. Experts sharded by ``tp``
communicate the rows of each of a token's experts.) A model has 2 layers and a vocabulary that
``tp`` shards. The count by hand leaves out the loss, which is a few numbers per row.
From the root of the project: ``python -m bench.counts``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import piper
from piper.ir.ops import Compute
from piper.strategies import mesh

ROWS, SEQ, DIM, HEADS, KV, LAYERS, TOP_K = 8, 64, 64, 8, 4, 2, 2
G = KV / HEADS
STREAMS = {"ep": "exchange"}
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": DIM,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "use_cache": False,
}


def loss(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def captured(name: str) -> piper.Capture:
    more = {"num_local_experts": 8, "num_experts_per_tok": TOP_K} if name == "Mixtral" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).train()
        tokens = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    tags = {"model.layers.*": "layer"}
    if name == "Mixtral":
        tags["model.layers.*.mlp.experts"] = "EP"
    return piper.capture(
        model, inputs={"input_ids": tokens}, targets=(tokens,), loss=loss, tags=tags
    )


def products(program: piper.Program) -> int:
    """Floating-point operations of all devices in a step."""
    dag = program.dag
    total = 0
    for node in dag.nodes:
        if isinstance(node.op, Compute):
            chunk = program.models[node.parts].chunks[node.op.chunk]
            passes = chunk.variants[dag.policy(chunk.index)].passes
            total += passes[node.op.which].flops * len(node.devices)
    return total


def sent(program: piper.Program, axis: str) -> float:
    """Traffic of the busiest device along an axis in a step, in activations."""
    activation = ROWS * SEQ * DIM * 4
    each = [
        sum(f.nbytes for f in traffic.flows if f.stream == STREAMS.get(axis, axis))
        for traffic in program.traffic
    ]
    return max(each) / activation


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    how: dict[str, Any]
    by_hand: dict[str, float]
    """Traffic of a step in activations, by axis."""


def reduced(t: int, layers: float, share: float = 1) -> float:
    """All-reduces of ``share`` of an activation: ``layers`` per layer, embedding and head."""
    return 2 * (t - 1) / t * (layers * LAYERS + 2) * share


def headed(n: int, share: float = 1) -> float:
    """All-to-alls of queries, keys, values and outputs, forward and backward."""
    return LAYERS * (4 + 4 * G) * (n - 1) / n**2 * share


def gathered(n: int, share: float = 1) -> float:
    """All-gather of keys and values, reduce-scatter of their gradients."""
    return LAYERS * 4 * G * (n - 1) / n * share


def dispatched(n: int, devices: int) -> float:
    """Dispatch and combine of rows, forward and backward."""
    return LAYERS * 4 * TOP_K * (n - 1) / n / devices


CASES = [
    Case("Llama", {"tp": 2}, {"tp": reduced(2, 4)}),
    Case("Llama", {"tp": 4}, {"tp": reduced(4, 4)}),
    Case("Llama", {"tp": 8}, {"tp": reduced(8, 4)}),
    Case("Llama", {"tp": 4, "sequence_parallel": True}, {"tp": reduced(4, 4)}),
    Case("Llama", {"cp": 4}, {"cp": headed(4)}),
    Case("Llama", {"cp": 4, "attention": "all_gather"}, {"cp": gathered(4)}),
    Case("Llama", {"tp": 2, "cp": 2}, {"tp": reduced(2, 4, 1 / 2), "cp": headed(2, 1 / 2)}),
    Case(
        "Llama",
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        {"tp": reduced(2, 4, 1 / 2), "cp": headed(2, 1 / 2)},
    ),
    Case("Phi", {"tp": 2}, {"tp": reduced(2, 2)}),
    Case("Phi", {"tp": 4, "sequence_parallel": True}, {"tp": reduced(4, 2)}),
    Case("Mixtral", {"dp": 4, "ep": 4, "capacity": 1.0}, {"ep": dispatched(4, 4)}),
    Case("Mixtral", {"tp": 4}, {"tp": reduced(4, 2 + 2 * TOP_K)}),
    Case(
        "Mixtral",
        {"cp": 2, "dp": 2, "ep": 4, "capacity": 1.0},
        {"cp": headed(2, 1 / 2), "ep": dispatched(4, 4)},
    ),
    Case(
        "Mixtral",
        {"tp": 2, "dp": 2, "ep": 4, "capacity": 1.0},
        {"tp": reduced(2, 4, 1 / 2), "ep": dispatched(4, 4)},
    ),
    Case(
        "Mixtral",
        {"tp": 2, "dp": 2, "ep": 4, "capacity": 1.0, "sequence_parallel": True},
        {"tp": reduced(2, 4, 1 / 2), "ep": dispatched(4, 4)},
    ),
]


def main() -> None:
    """Print a line for each case."""
    warnings.simplefilter("ignore", piper.PiperWarning)
    transformers.logging.set_verbosity_error()
    table = Table(title="products over one device's; activations sent by a device in a step")
    for column in ("model", "strategy", "products", "axis", "sent", "by hand", "ratio"):
        table.add_column(column)
    models: dict[str, piper.Capture] = {}
    for case in CASES:
        model = models.setdefault(case.model, captured(case.model))
        one = products(model.compile(mesh()))
        how = ", ".join(f"{k}={v}" for k, v in case.how.items())
        try:
            program = model.compile(mesh(**case.how))
        except piper.PiperError as error:
            table.add_row(case.model, how, f"refused: {str(error)[:60]}")
            continue
        ratio = f"{products(program) / one:.3f}"
        for axis, wanted in case.by_hand.items():
            found = sent(program, axis)
            table.add_row(
                case.model,
                how,
                ratio,
                axis,
                f"{found:.3f}",
                f"{wanted:.3f}",
                f"{found / wanted:.3f}",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
