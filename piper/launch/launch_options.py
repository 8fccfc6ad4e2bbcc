"""The options of ``launch``, said once: a launcher takes those of its class, and sends them to its
workers as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every launcher, on GPUs."""

    cuda_graphs: bool = False
    """Whether steps are captured as CUDA graphs and replayed."""
    shake: int | None = None
    """The seed of random stream delays, to find races."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions(Options):
    """Those of launchers that have a process for each device."""

    timeout: float = 600.0
    """Seconds that one step may take; under torchrun on CPUs, one communication."""
    share_gpus: bool = False
    """Whether several processes may share a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(ProcessOptions):
    """The options of ``on="processes"``."""

    start_timeout: float = 120.0
    """Seconds until all workers must be ready."""
    threads: int | None = None
    """CPU threads of each worker; None for an even share."""
    imports: Sequence[str] = ()
    """Modules that workers import first, because they define operations that the model uses. Those
    made with ``torch.library.custom_op`` are found without."""
    restarts: int = 0
    """How often training continues after workers die, fail or hang. With 0 the first fault ends
    it."""
    recover: str = "replace"
    """How: "replace" gives lost workers new processes, "restart" all workers; with
    "reroute" the rows of a lost data-parallel replica go to the others."""
    mirror: float = 10.0
    """Seconds between copies of the state, from which it continues; the steps since then are
    repeated."""
    stall: float = 5.0
    """With ``restarts``, seconds after which workers hang if none of them moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(WorkerOptions):
    """The options of ``on="ray"``."""

    address: str | None = None
    """The address of the cluster, as for ``ray.init``, which finds the usual ones without. Not
    needed if the caller has connected."""
    machines: int | None = None
    """The number of machines; by default as few as have room."""
    cpus: float = 1.0
    """CPUs of the cluster that each device takes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the machines must have, such as that of a rack."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's description of the environment on other machines: working directory, variables."""
    shared: str | None = None
    """A folder that all machines share, for copies of the state; needed for ``restarts`` on several
    machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunOptions(ProcessOptions):
    """The options of ``on="torchrun"``."""

    check_weights: bool = True
    """Whether the initial weights of all processes are compared."""
    check_batches: int = 100
    """The first three batches are compared, then every n-th, each with the optimizer's settings; 0
    compares none."""
