"""Shares of a GPU's multiprocessors (SMs) for ``stream(..., sms=)``, as CUDA green contexts.

In: the rules of all streams. Out: CUDA streams whose kernels run only on the SMs of their share.
All shares come from one split of the GPU by the CUDA driver. Shares with numbers never overlap. All
streams with ``sms="rest"`` have one common share, which overlaps with no other share. The driver
assigns SMs in units, 8 on Hopper, so a number is rounded up to whole units.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from piper.base.errors import PiperError
from piper.ir.rules import Rest, Sms, StreamRule

_UNIT = 8
"""The unit if the driver does not report one. Every GPU so far supports it."""


def divide(total: int, unit: int, remainder: int, asked: Mapping[str, Sms]) -> dict[str, range]:
    """The unit indices of each stream. Streams with numbers get consecutive ranges, from 0.

    A GPU has ``total`` SMs: whole units of ``unit`` SMs, and a ``remainder`` outside of units that
    belongs to the rest.
    """
    units = (total - remainder) // unit
    shares: dict[str, range] = {}
    asks: list[str] = []
    used = 0
    for name, sms in asked.items():
        if not isinstance(sms, Rest):
            shares[name] = range(used, used + -(-sms // unit))
            used = shares[name].stop
            asks.append(f"{name!r} asks for {sms}, which takes {len(shares[name])} of them")
    if used > units:
        raise PiperError(
            f"the shares of streams do not fit on the GPU, whose {total} SMs are handed out in "
            f"{units} units of {unit}: {'; '.join(asks)}. Give stream(..., sms=) numbers that, "
            f"each rounded up to a multiple of {unit}, add up to at most {units * unit}"
        )
    rest = [name for name in asked if name not in shares]
    if rest and used == units and not remainder:
        raise PiperError(
            f"sms='rest' of {' and '.join(map(repr, rest))}: nothing is left of the GPU, whose "
            f"{total} SMs are handed out in {units} units of {unit}: {'; '.join(asks)}. Give "
            f"stream(..., sms=) numbers that, each rounded up to a multiple of {unit}, add up to "
            f"at most {(units - 1) * unit}"
        )
    return shares | {name: range(used, units) for name in rest}


class Shares:
    """The SM shares that ``rules`` ask for on one GPU, from one split of it. If no stream asks for
    a share, the driver is not called.

    Green contexts and their streams stay until the process ends, about 6 MB for each share, because
    tensors may outlive this object. When a tensor is freed, torch records an event on every stream
    that used it, and the process aborts if such a stream is gone. torch never destroys the streams
    of its own pool either.
    """

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._units: dict[str, range] = {}
        """By stream, its units. Streams with the same units have the same share."""
        self._parts: dict[str, list[Any]] = {}
        """By stream, the driver's resources for its units."""
        self._contexts: dict[range, Any] = {}
        asked = {name: rule.sms for name, rule in rules.items() if rule.sms is not None}
        if asked:
            self._driver = _Driver()
            self._split(asked)

    def _split(self, asked: Mapping[str, Sms]) -> None:
        call = self._driver
        call("cuInit", 0)
        device = self._device.index
        self._gpu = call("cuDeviceGet", torch.cuda.current_device() if device is None else device)
        kind = call.module.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = call("cuDeviceGetDevResource", self._gpu, kind)
        total, unit = int(whole.sm.smCount), _unit(whole.sm)
        most = max(1, total // unit)
        groups, count, left = call("cuDevSmResourceSplitByCount", most, whole, 0, unit)
        groups = groups[:count]  # the driver may return fewer, as on a chip with uneven parts
        sizes = [int(group.sm.smCount) for group in groups]
        remainder = total - sum(sizes)
        self._units = divide(total, max(sizes, default=unit), remainder, asked)
        for name, units in self._units.items():
            self._parts[name] = groups[units.start : units.stop]
            if remainder and isinstance(asked[name], Rest):
                self._parts[name].append(left)

    def stream(self, name: str, priority: int) -> torch.cuda.Stream:
        """A new CUDA stream in the share of the stream ``name``; each call makes another. Lower
        numbers are higher priorities. The driver takes the nearest priority it supports."""
        flag = self._driver.module.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = self._driver("cuGreenCtxStreamCreate", self._context(name), flag, priority)
        return torch.cuda.ExternalStream(int(made), device=self._device)

    def sms_of(self, name: str) -> int:
        """The number of SMs that the stream ``name`` actually has."""
        return sum(int(part.sm.smCount) for part in self._parts[name])

    def _context(self, name: str) -> Any:
        """The green context of a share, created once."""
        units, parts = self._units[name], self._parts[name]
        if units not in self._contexts:
            flag = self._driver.module.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            described = self._driver("cuDevResourceGenerateDesc", parts, len(parts))
            self._contexts[units] = self._driver("cuGreenCtxCreate", described, self._gpu, flag)
        return self._contexts[units]


def _unit(sms: Any) -> int:
    """The number of SMs in a unit; older bindings do not report it."""
    told = (getattr(sms, name, 0) for name in ("minSmPartitionSize", "smCoscheduledAlignment"))
    return int(max(told)) or _UNIT


class _Driver:
    """NVIDIA's bindings of the CUDA driver: calls by name, with every error code checked."""

    def __init__(self) -> None:
        try:
            self.module: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise PiperError(
                f"stream(..., sms=) needs NVIDIA's bindings of the CUDA driver ({error}): "
                "pip install cuda-bindings, or leave sms out"
            ) from None
        if not hasattr(self.module, "cuGreenCtxStreamCreate"):
            raise PiperError(
                "stream(..., sms=) needs newer bindings of the CUDA driver, of CUDA 12.5 or later: "
                "pip install --upgrade cuda-bindings, or leave sms out"
            )

    def __call__(self, name: str, *given: Any) -> Any:
        """Calls the driver function ``name``. Returns its results without the error code."""
        try:
            code, *results = getattr(self.module, name)(*given)
        except RuntimeError as error:  # the bindings have the function, but the driver does not
            raise PiperError(
                f"stream(..., sms=): the CUDA driver has no {name} ({error}): use a newer driver, "
                "or leave sms out"
            ) from None
        if code:
            _, text = self.module.cuGetErrorName(code)
            raise PiperError(
                f"stream(..., sms=): the CUDA driver refused {name} with {text.decode()}: "
                "leave sms out"
            )
        return results[0] if len(results) == 1 else results
