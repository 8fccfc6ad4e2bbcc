"""Gloo with one thread for all sockets of a process.

A group of torch's own has a thread that wakes a hundred times a second whether or not anything
arrives. A plan has a group for every stream and peer: on more workers than cores their wakes take
time from those that compute.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_NAME = "piper_gloo"


def one_loop() -> str:
    """The backend's name, for ``init_process_group`` and ``new_group``."""
    if not hasattr(dist.Backend, _NAME.upper()):
        device = dist.ProcessGroupGloo.create_default_device()

        def create(
            store: dist.Store, rank: int, size: int, timeout: timedelta
        ) -> dist.ProcessGroupGloo:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
            options._devices = [device]
            options._threads = 1  # a stream asks for one collective after the other
            options._timeout = timeout
            return dist.ProcessGroupGloo(store, rank, size, options)

        dist.Backend.register_backend(_NAME, create, devices=["cpu"])
    return _NAME
