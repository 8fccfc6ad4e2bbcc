"""One plan per rank equivalence class: small frozen instructions over numbered slots.

A worker needs a plan, the programs and its state, nothing else. A plan states the order, stream,
participants, waits and temporary memory of each instruction; the slots it allocates, reads, writes,
adds to, holds and frees; and the content of each slot. No reader derives any of this again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper.ir.ops import Group
from piper.ir.plan import plan_text
from piper.ir.plan.instructions import Given, Instruction, PlanParts, Returned, Seed, Slot


@dataclass(frozen=True, slots=True)
class Plan:
    """The instructions of one class of devices for one step."""

    devices: Group
    instructions: Sequence[Instruction]
    given: tuple[Given, ...]
    seeds: tuple[Seed, ...]
    slots: tuple[Slot, ...]
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
