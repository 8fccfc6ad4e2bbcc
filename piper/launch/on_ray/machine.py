"""The part of one machine: an actor that owns the worker processes there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from piper.launch.launchers import WorkerOptions
from piper.launch.messages.calling_group import DeviceAnswers
from piper.launch.messages.calls import StoreAddress
from piper.launch.workers.first_failure import CallAnswers, StillWaiting
from piper.launch.workers.local_workers import LocalWorkers

Answered = DeviceAnswers | StillWaiting
_CLEAN = """exec 3<&0; (cat <&3; for _ in 1 2 3 4 5; do rm -rf "$1" && exit; sleep 1; done) &"""
"""Removes a folder when the standard input closes, in a process that is neither a child of the
actor nor in its group: Ray kills these without letting them clean up."""


@dataclass(frozen=True, slots=True)
class RayMachineFacts:
    """Where an actor runs."""

    name: str
    """The name of the machine, for messages."""
    folder: Path
    """The folder of its workers, on its own disk."""


class RayMachine:
    """The workers of one machine."""

    def __init__(self, address: str, options: WorkerOptions) -> None:
        """``address`` is the one at which the other machines reach this one."""
        self._address = address
        self._workers = LocalWorkers(options)
        self._cleaner = subprocess.Popen(
            ["sh", "-c", _CLEAN, "sh", str(self._workers.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._answers: CallAnswers | None = None
        self._store: dist.TCPStore | None = None

    def facts(self) -> RayMachineFacts:
        return RayMachineFacts(f"{os.uname().nodename} ({self._address})", self._workers.folder)

    def open_store(self) -> StoreAddress:
        """Open the store in which all workers find each other. It outlives every worker."""
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return StoreAddress(self._address, self._store.port, self._address)

    def put(self, name: str, content: bytes) -> None:
        """Write a file for the workers."""
        (self._workers.folder / name).write_bytes(content)

    def seat(
        self,
        devices: Iterable[int],
        kind: torch.device,
        store: StoreAddress,
        paths: Sequence[str],
    ) -> list[int]:
        """Start workers for new devices, and end the others. Returns the new ones."""
        sys.path += [path for path in paths if path not in sys.path]
        return self._workers.seat(devices, kind, replace(store, own=self._address))

    def call(self, calls: Iterable[tuple[int, bytes]], seconds: float) -> Answered:
        """Send each worker its message, and wait as ``answers`` does."""
        self._answers = self._workers.call(calls, alone=False)
        return self.answers(seconds)

    def answers(self, seconds: float) -> Answered:
        """The answers to the last call, unless they take longer than ``seconds``."""
        assert self._answers is not None
        return self._answers.within(seconds)

    def rename(self, devices: Mapping[int, int]) -> None:
        """Workers of these devices become those of others, which have none."""
        self._workers.rename(devices)

    def keep_idle(self) -> list[int]:
        """After a failed call, here or on another machine, keep the workers that can take another
        one. Returns their devices."""
        if self._answers is not None:
            self._workers.keep_idle(self._answers)
        return self._workers.devices

    def close(self) -> None:
        """End all workers."""
        self._workers.close()
