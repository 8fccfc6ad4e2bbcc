"""Torch settings that choose how operations compute. They are per process: the calling process
sends its own to its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import backends
from torch.backends import cuda, cudnn, mkldnn
from torch.utils import deterministic


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Flags:
    """The settings of one process."""

    values: tuple[Any, ...]
    """In the order of ``_SETTINGS``; None for a setting that could not be read."""

    @staticmethod
    def here() -> Flags:
        """The settings of this process."""
        return Flags(tuple(setting.read() for setting in _SETTINGS))

    def set(self) -> None:
        """Apply them to this process; settings that already match are not written."""
        for setting, value in zip(_SETTINGS, self.values, strict=True):
            if value is not None and setting.read() != value:
                setting.write(value)


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _precision(backend: Any, operation: str) -> _Setting:
    return _attribute(getattr(backend, operation), "fp32_precision")


def _if_one(read: Callable[[], Any]) -> Callable[[], Any]:
    """Like ``read``, but None if torch refuses: a setting made per backend or operation has no
    single value."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return value


def _reduction(name: str) -> _Setting:
    """Whether half-precision matmuls may reduce in half precision, and with split-k."""
    names = (name, f"{name}_split_k")
    return _Setting(
        lambda: tuple(getattr(cuda.matmul, each, True) for each in names),
        # earlier torch versions accept no pair, and have no split-k to forbid
        lambda value: setattr(cuda.matmul, name, value[0] if value[1] else value),
    )


_CUDNN_TF32 = _attribute(cudnn, "allow_tf32")
_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(deterministic, "fill_uninitialized_memory"),
    # global first, then per backend: a per-backend value overrides the global one
    _Setting(_if_one(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision),
    _Setting(_if_one(_CUDNN_TF32.read), _CUDNN_TF32.write),
    _attribute(backends, "fp32_precision"),
    _attribute(cudnn, "fp32_precision"),
    _attribute(mkldnn, "fp32_precision"),
    _precision(cuda, "matmul"),
    _precision(cudnn, "conv"),
    _precision(cudnn, "rnn"),
    _precision(mkldnn, "matmul"),
    _precision(mkldnn, "conv"),
    _precision(mkldnn, "rnn"),
    _reduction("allow_fp16_reduced_precision_reduction"),
    _reduction("allow_bf16_reduced_precision_reduction"),
    _attribute(cuda.matmul, "allow_fp16_accumulation"),
    _attribute(cudnn, "enabled"),
    _attribute(cudnn, "deterministic"),
    _attribute(cudnn, "benchmark"),
    _attribute(mkldnn, "enabled"),
    _attribute(mkldnn, "deterministic"),
    _Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    _Setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    _Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    _Setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
