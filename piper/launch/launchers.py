"""The launchers: the name of each for ``on=``, its options and its worker group.

A launcher takes the options of its class, and sends them to its workers as they are. Nothing here
needs torch: the command line reads the names. A worker group is imported when it is launched.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
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


class Where(Enum):
    """The values of ``on=``."""

    VIRTUAL = "virtual"
    """All devices in this process."""
    PROCESSES = "processes"
    """One process per device, on this machine."""
    TORCHRUN = "torchrun"
    """This process is one device; ``torchrun`` started the others."""
    RAY = "ray"
    """One process per device, on the machines of a Ray cluster."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """What ``on=`` selects."""

    group: str
    """Its ``WorkerGroup``, which is made of the options: a module in this package, and a class."""
    options: type[Options]

    def worker_group(self) -> Any:
        """The class of its worker group."""
        return pkgutil.resolve_name(f"piper.launch.{self.group}")


LAUNCHERS: Mapping[Where, Launcher] = {
    Where.VIRTUAL: Launcher("workers.virtual:VirtualWorkerGroup", Options),
    Where.PROCESSES: Launcher("workers.processes:ProcessWorkerGroup", WorkerOptions),
    Where.TORCHRUN: Launcher("workers.torchrun:TorchrunWorkerGroup", TorchrunOptions),
    Where.RAY: Launcher("on_ray.ray_group:RayWorkerGroup", RayOptions),
}
