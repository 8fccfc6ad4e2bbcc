"""What a worker and the process that started it say to each other. Tensors travel by value."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from piper.launch.torch_flags import Flags
from piper.state.checkpoint.index import Index


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker is to be."""

    device: int
    local: int
    """Which GPU of the machine it takes, if it takes one."""
    waits: bool
    """Whether it is to wait for a switch, and not to begin with the program that is there."""
    threads: int
    timeout: float
    start_timeout: float
    paths: tuple[str, ...]
    imports: tuple[str, ...]
    """Modules that define the model's own operations."""
    script: str | None
    """The user's script, if that defines some of them."""
    share_gpus: bool
    cuda_graphs: bool
    shake: int | None


@dataclass(frozen=True, slots=True)
class SwitchTask:
    """What a worker is to be next."""

    folder: str
    """That of the program and its callables."""
    members: tuple[int, ...]
    """The devices of all workers, before and after."""
    threads: int
    index: Index


@dataclass(frozen=True, slots=True)
class Call:
    """What a worker is asked to do."""

    method: str
    argument: Any = None
    flags: Flags | None = None
    """Those of the caller, where they choose what is computed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker says when something went wrong."""

    summary: str
    trace: str
    cause: bytes | None
    """The error itself, if it can travel."""
    consequence: bool
    """Whether it is a failed communication, most likely because another worker failed before."""


def dumped(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(dumped(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
