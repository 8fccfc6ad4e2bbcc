"""Language models for training and tests: a dense and a mixture-of-experts decoder.

Tokens enter, logits leave. `annotate` names their regions, and every model can be exported.
"""

from piper.models.dense import DenseConfig, DenseTransformer
from piper.models.layers import lm_loss, lm_loss_sum
from piper.models.moe import MoEConfig, MoETransformer
from piper.models.text_data import ByteBatches, stdlib_bytes

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
