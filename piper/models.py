"""Language models for training and tests: a dense and a mixture-of-experts decoder.

Tokens enter, logits leave. `annotate` names their regions, and every model can be exported.
"""

from piper.cli.demo.dense import DenseConfig, DenseTransformer
from piper.cli.demo.layers import lm_loss, lm_loss_sum
from piper.cli.demo.moe import MoEConfig, MoETransformer
from piper.cli.demo.text_data import ByteBatches, stdlib_bytes

__all__ = [
    "ByteBatches",
    "DenseConfig",
    "DenseTransformer",
    "MoEConfig",
    "MoETransformer",
    "lm_loss",
    "lm_loss_sum",
    "stdlib_bytes",
]
