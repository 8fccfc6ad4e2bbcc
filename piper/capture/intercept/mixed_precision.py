"""``precision="bf16"``: operations that ``torch.autocast`` computes in fp32 compute in fp32.

Parameters and inputs are bf16 when a model is traced. Losses, softmax, exponentials and sums take
fp32 copies and return fp32; products of mixed dtypes compute in bf16. The operation lists are those
of CUDA autocast, on every device. There are two differences from autocast. Norms, and sums along
some dimensions, compute in fp32 and return the dtype of their input, so that the residual stream,
which stages send, stays bf16. A product of fp32 tensors only, which the model chose itself, stays
fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_HOMES = (torch, Tensor, F, torch.special, torch.linalg)


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    """The functions and methods of these names, in all of torch's namespaces."""
    candidates: Iterable[Any] = (getattr(home, n, None) for n in names.split() for home in _HOMES)
    return frozenset(function for function in candidates if function is not None)


_WIDE = _functions(
    "acos arccos asin arcsin cosh erfinv exp exp2 expm1 log log10 log2 log1p reciprocal rsqrt sinh "
    "tan pow float_power square __pow__ __rpow__ __rdiv__ __rtruediv__ softplus logsumexp renorm "
    "norm vector_norm matrix_norm normalize dist pdist cdist cosine_similarity pairwise_distance "
    "cross_entropy nll_loss poisson_nll_loss gaussian_nll_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss multi_margin_loss "
    "triplet_margin_loss triplet_margin_with_distance_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits ctc_loss gumbel_softmax"
)
"""Functions that take fp32 copies of their arguments."""
_WIDE_RESULT = _functions("softmax log_softmax softmin sum prod cumsum cumprod")
"""Functions with an argument for the dtype that they compute in and return."""
_SUMS = _functions("sum")
_NARROW = _functions(
    "linear bilinear matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm "
    "einsum chain_matmul multi_dot vecdot tensordot conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention "
    "multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _grouped_mm grouped_mm"
)
"""Functions that compute in bf16 if their arguments have mixed dtypes."""
_ALIKE = _functions(
    "layer_norm group_norm rms_norm instance_norm addcdiv addcmul atan2 cross dot grid_sample lerp "
    "index_put index_add index_copy scatter scatter_add masked_scatter"
)
"""Functions that need arguments of one dtype: fp32 if they are mixed."""
_WRITES = _functions(
    "__setitem__ index_put_ index_add_ index_copy_ scatter_ scatter_add_ masked_scatter_ "
    "addcdiv_ addcmul_ lerp_"
)
"""Functions that write into their first argument, whose dtype stays."""
_LOW = (torch.bfloat16, torch.float16)


class MixedPrecision(TorchFunctionMode):
    """While active, each operation computes in the precision that autocast would choose, for a
    model with bf16 parameters."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _WIDE:
            args, given = _cast((args, given), torch.float32)
        elif func in _WIDE_RESULT:
            chosen = any(isinstance(x, torch.dtype) for x in (*args, *given.values()))
            partial = func in _SUMS and (len(args) > 1 or "dim" in given or "axis" in given)
            if not chosen and not partial and any(x.dtype in _LOW for x in _floats((args, given))):
                given = {**given, "dtype": torch.float32}
        elif func in _NARROW and _is_mixed((args, given)):
            args, given = _cast((args, given), torch.bfloat16)
        elif func in _ALIKE and _is_mixed((args, given)):
            args, given = _cast((args, given), torch.float32)
        elif func in _WRITES and _is_mixed((args, given)):
            rest, given = _cast((args[1:], given), args[0].dtype)
            args = (args[0], *rest)
        return func(*args, **given)


def _floats(tree: Any) -> list[Tensor]:
    """The bf16, fp16 and fp32 tensors of ``tree``; float64 is left alone."""
    tensors = (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))
    return [x for x in tensors if x.dtype in (*_LOW, torch.float32)]


def _is_mixed(tree: Any) -> bool:
    return len({x.dtype for x in _floats(tree)}) > 1


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    known = set(map(id, _floats(tree)))
    return pytree.tree_map(lambda x: x.to(dtype) if id(x) in known else x, tree)
