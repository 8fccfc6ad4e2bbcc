"""One plan per rank equivalence class: small frozen instructions over numbered slots.

A worker needs a plan, the programs and its state, nothing else. A plan states the order, stream,
participants and waits of each instruction; the slots it allocates, reads, writes, adds to and
frees; and the content of each slot. No reader derives any of this again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piper.base.codec import COLUMNS, Format, decode, encode
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, check_limits, parsed
from piper.ir.ops import Group
from piper.ir.plan import plan_text
from piper.ir.plan.instructions import Given, Instruction, PlanParts, Returned, Seed, Slot

_FORMAT = Format("plan", 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """The instructions of one class of devices for one step."""

    devices: Group
    instructions: tuple[Instruction, ...] = field(metadata=COLUMNS)
    given: tuple[Given, ...]
    seeds: tuple[Seed, ...]
    slots: tuple[Slot, ...] = field(metadata=COLUMNS)
    returned: tuple[Returned, ...] = ()

    @property
    def first_slots(self) -> tuple[int, ...]:
        """The slots that are filled when the step begins."""
        return (*(given.slot for given in self.given), *(seed.slot for seed in self.seeds))

    def __str__(self) -> str:
        return plan_text.text(
            PlanParts(
                self.devices, self.instructions, self.given, self.seeds, self.slots, self.returned
            )
        )

    @staticmethod
    def parse(text: str) -> Plan:
        """The plan that prints as ``text``."""
        return Plan(*plan_text.parse(text))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; values that instructions share are written once."""
        return _FORMAT.headed(encode(Plan, self))

    @staticmethod
    def from_json(data: str | Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote."""
        try:
            if isinstance(data, str):
                data = parsed(data)
            else:
                check_limits(data)
            content = _FORMAT.content(data)
            plan: Plan = decode(Plan, content)
        except MalformedError as error:
            raise PiperError(f"the plan cannot be read: {error}") from None
        return plan
