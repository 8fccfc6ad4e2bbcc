"""The messages between a worker and its parent process. Tensors are sent by value."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from piper.launch.torch_flags import Flags
from piper.state.checkpoint.index import Index


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The settings that a worker starts with."""

    device: int
    local: int
    """The index of its GPU on the machine, if it uses one."""
    waits: bool
    """Whether it waits for a switch instead of starting the first program."""
    threads: int
    timeout: float
    start_timeout: float
    paths: tuple[str, ...]
    imports: tuple[str, ...]
    """Modules that define the model's custom operations."""
    script: str | None
    """The user's script, if it defines some of them."""
    share_gpus: bool
    cuda_graphs: bool
    shake: int | None


@dataclass(frozen=True, slots=True)
class SwitchTask:
    """The settings that a worker switches to."""

    folder: str
    """The folder of the program; its callables are beside it."""
    members: tuple[int, ...]
    """The devices of all workers, before and after."""
    threads: int
    index: Index


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a worker."""

    method: str
    argument: Any = None
    flags: Flags | None = None
    """The caller's torch flags, for calls that compute."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's report of an error."""

    summary: str
    trace: str
    cause: bytes | None
    """The error itself, if it can be pickled."""
    consequence: bool
    """Whether it is a failed communication, most likely because another worker failed first."""


def dumped(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(dumped(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
