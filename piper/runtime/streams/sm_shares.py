"""Shares of a GPU's multiprocessors (SMs): what ``stream(..., sms=)`` asks for, as CUDA streams.

In: the rules of all streams. Out: streams whose kernels run on the SMs of their share and on no
other. All shares of a GPU are cut from one split of it by the CUDA driver: those with numbers never
overlap, and all streams that ask for the rest have one share, which overlaps with none of these.
The driver hands out SMs in units, 8 on Hopper, so a number is rounded up to whole units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from piper.base.errors import PiperError
from piper.ir.rules import Rest, Sms, StreamRule

_UNIT = 8
"""The unit where the driver does not tell it: one that every GPU so far can give."""


def divide(total: int, unit: int, remainder: int, asked: Mapping[str, Sms]) -> dict[str, range]:
    """The units of each stream, counted from 0: those with numbers have theirs one after another.

    A GPU has ``total`` SMs: units of ``unit``, and a ``remainder`` that fills none and belongs to
    the rest.
    """
    units = (total - remainder) // unit
    found: dict[str, range] = {}
    asks: list[str] = []
    used = 0
    for name, sms in asked.items():
        if not isinstance(sms, Rest):
            found[name] = range(used, used + -(-sms // unit))
            used = found[name].stop
            asks.append(f"{name!r} asks for {sms}, which takes {len(found[name])} of them")
    if used > units:
        raise PiperError(
            f"the shares of streams do not fit on the GPU, whose {total} SMs are handed out in "
            f"{units} units of {unit}: {'; '.join(asks)}. Give stream(..., sms=) numbers that, "
            f"each rounded up to a multiple of {unit}, add up to at most {units * unit}"
        )
    rest = [name for name in asked if name not in found]
    if rest and used == units and not remainder:
        raise PiperError(
            f"sms='rest' of {' and '.join(map(repr, rest))}: nothing is left of the GPU, whose "
            f"{total} SMs are handed out in {units} units of {unit}: {'; '.join(asks)}. Give "
            f"stream(..., sms=) numbers that, each rounded up to a multiple of {unit}, add up to "
            f"at most {(units - 1) * unit}"
        )
    return found | {name: range(used, units) for name in rest}


class Shares:
    """The shares of one GPU, from one split of it: what ``rules`` asks for, by stream. Where no
    stream asks for a share, the driver is left alone."""

    def __init__(self, device: torch.device, rules: Mapping[str, StreamRule]) -> None:
        self._device = device
        self._units: dict[str, range] = {}
        """Streams with the same units have the same share."""
        self._parts: dict[str, list[Any]] = {}
        """By stream, what the driver calls its units."""
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
        groups = groups[:count]  # the driver may find fewer, as on a chip with uneven parts
        sizes = [int(group.sm.smCount) for group in groups]
        remainder = total - sum(sizes)
        self._units = divide(total, max(sizes, default=unit), remainder, asked)
        for name, units in self._units.items():
            self._parts[name] = groups[units.start : units.stop]
            if remainder and isinstance(asked[name], Rest):
                self._parts[name].append(left)

    def stream(self, name: str, priority: int) -> torch.cuda.Stream:
        """A new CUDA stream in the share of the stream ``name``: each call makes another. Lower
        priorities are more urgent; the driver takes the nearest that it has."""
        flag = self._driver.module.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = self._driver("cuGreenCtxStreamCreate", self._context(name), flag, priority)
        return torch.cuda.ExternalStream(int(made), device=self._device)

    def sms_of(self, name: str) -> int:
        """The SMs that the stream ``name`` really has."""
        return sum(int(part.sm.smCount) for part in self._parts[name])

    def close(self) -> None:
        """Forget the contexts made here. The driver keeps them and their streams until the process
        ends, about 6 MB for each share.

        They are not destroyed, because tensors may outlive them: when a tensor dies, torch records
        an event on every stream that used it, and the process aborts if one of these is gone. torch
        never destroys the streams of its own pool either.
        """
        self._contexts.clear()

    def _context(self, name: str) -> Any:
        """The green context of a share, made once."""
        units, parts = self._units[name], self._parts[name]
        if units not in self._contexts:
            flag = self._driver.module.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            described = self._driver("cuDevResourceGenerateDesc", parts, len(parts))
            self._contexts[units] = self._driver("cuGreenCtxCreate", described, self._gpu, flag)
        return self._contexts[units]


def _unit(sms: Any) -> int:
    """How many SMs are handed out together; older bindings do not tell."""
    told = (getattr(sms, name, 0) for name in ("minSmPartitionSize", "smCoscheduledAlignment"))
    return int(max(told)) or _UNIT


class _Driver:
    """NVIDIA's bindings of the CUDA driver: calls by name, and every error code is checked."""

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
        """What the driver's function ``name`` returns besides its error code."""
        try:
            code, *found = getattr(self.module, name)(*given)
        except RuntimeError as error:  # the bindings know the function and the driver does not
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
        return _single(found)


def _single(found: Sequence[Any]) -> Any:
    return found[0] if len(found) == 1 else found
