"""The messages between a worker and its parent process, and how a worker restores what
``pickling.py`` sends. Tensors are sent by value."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.serialize import program_from_json
from piper.launch.launchers import WorkerOptions
from piper.launch.messages.custom_ops import define
from piper.runtime.torch_flags import Flags


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The store by which workers on several machines find each other: a TCP port."""

    host: str
    port: int
    own: str
    """The address at which other machines reach the worker's own machine."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The settings that a worker starts with."""

    device: int
    local: int
    """The index of its GPU on the machine, if it uses one."""
    paths: tuple[str, ...]
    """``sys.path`` of its parent."""
    store: StoreAddress | None
    """None if all workers are on this machine: they find each other in a file."""
    options: WorkerOptions


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a worker."""

    method: Callable[..., Any]
    """A method of ``WorkerDevice``."""
    arguments: tuple[Any, ...]
    flags: Flags
    """The caller's torch flags."""
    threads: int


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


def unpacked(modules: tuple[str, ...], script: str | None, content: bytes) -> Any:
    """An item that was pickled by value, once the operations that it uses are defined."""
    define(modules, script)
    return cloudpickle.loads(content)


def program(content: bytes) -> ChunkProgram:
    """A chunk's program from its plain data."""
    return program_from_json(pickle.loads(content))


def attribute_of(module: str, name: str) -> Any:
    """What a module has under ``name``."""
    return getattr(importlib.import_module(module), name)
