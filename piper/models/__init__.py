"""Language models to train and to test with: a dense and a mixture-of-experts decoder.

Tokens enter, logits leave; regions are named with `annotate`, and every model can be exported.
"""

from piper.models.dense import DenseConfig, DenseTransformer
from piper.models.layers import lm_loss, lm_loss_sum
from piper.models.moe import MoEConfig, MoETransformer

__all__ = [
    "DenseConfig",
    "DenseTransformer",
    "MoEConfig",
    "MoETransformer",
    "lm_loss",
    "lm_loss_sum",
]
