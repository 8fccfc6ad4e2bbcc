"""Under torchrun rank 0 alone compiles.

Every process numbers its compilations. The n-th of another rank waits for the n-th of rank 0 in the
job's store. If that compiles what this one was given and succeeds, the program here is
``Deferred``. In any other case this rank compiles for itself: then it gets the same error at the
same line, or a program of its own, which is compared at launch. Rank 0 waits for nobody, so nothing
hangs if ranks call compile in different places.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from piper.base.errors import PiperError

P = TypeVar("P")
_BEGINS = 60.0
"""Seconds that another rank waits for rank 0 to begin a compilation."""
_ENDS = 3600.0
"""Seconds that it waits for its end."""
_DONE = b"done"
_ANSWERS = 10.0
"""Seconds within which the store of torchrun accepts a connection."""


def refuse_orphan() -> None:
    """Refuse to go on without the store of torchrun, which was there before this process: torch
    would wait for it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.create_connection((host, int(port)), _ANSWERS).close()
    except ConnectionRefusedError as error:
        raise PiperError(
            f"torchrun has ended: nothing answers at {host}:{port}, where its ranks find each "
            "other. Start it again"
        ) from error
    except OSError:
        return  # not known: joining says what is wrong


class JobStore:
    """The processes of this job, and their store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    @staticmethod
    def of_this_process() -> JobStore | None:
        """None if this process is alone, or no store is known yet."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            if os.environ["WORLD_SIZE"] == "1":
                return None
            refuse_orphan()
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return JobStore(dist.TCPStore(address, port), int(os.environ["RANK"]))
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return JobStore(dist.distributed_c10d._get_default_store(), dist.get_rank())

    def compiled(self, given: str, here: Callable[[], P], deferred: Callable[[], P]) -> P:
        """The program of ``here`` on rank 0, and of ``deferred`` on ranks that were ``given`` the
        same."""
        number = self._next()
        begins, ends = f"piper compilation {number}", f"piper compilation {number} ends"
        if self._rank != 0:
            same = self._value(begins, _BEGINS) == given.encode()
            return deferred() if same and self._value(ends, _ENDS) == _DONE else here()
        self._say(begins, given)
        said = "failed"
        try:
            program = here()
            said = "done"
        finally:
            self._say(ends, said)
        return program

    def _next(self) -> int:
        with suppress(RuntimeError):  # here and below: the store may be gone
            return self._store.add(f"piper compilations of {self._rank}", 1)
        return 0

    def _say(self, key: str, value: str) -> None:
        with suppress(RuntimeError):
            self._store.set(key, value)

    def _value(self, key: str, seconds: float) -> bytes | None:
        """What a key holds, once it is there."""
        start = time.monotonic()
        with suppress(RuntimeError):
            while not self._store.check([key]):
                waited = time.monotonic() - start
                if waited > seconds:
                    return None
                time.sleep(min(1.0, 0.01 + waited / 10))
            return bytes(self._store.get(key))
        return None
