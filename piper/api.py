"""All public names, which ``import piper`` offers."""

import torch

from piper import callbacks, strategies
from piper.base.errors import (
    CapacityError,
    CaptureError,
    DirectiveError,
    PiperError,
    PiperWarning,
    warn,
)
from piper.capture.regions import annotate
from piper.cost.cluster import Cluster
from piper.cost.hardware import Device, Link, Machine, Sharing
from piper.cost.recorded import Recorded
from piper.cost.rough_costs import Costs
from piper.cost.simulate.estimate import Estimate
from piper.cost.simulate.simulation import Simulation
from piper.cost.tasks import CostModel, Task
from piper.ir.mesh import Mesh
from piper.ir.plan.instructions import MemoryKind
from piper.ir.plan.memory import Memory
from piper.launch.launch import launch
from piper.launch.trainer.trainer import Trainer
from piper.launch.tuning import tune
from piper.launch.verify import Verification, verify
from piper.lower.traffic import Traffic
from piper.program.compile.compiler import Capture, capture, compile
from piper.program.job import Job
from piper.program.program import Program
from piper.program.tune.tuned import Tuned
from piper.state.optimizer.ema import EMA
from piper.state.weights.source import Source
from piper.state.weights.weight_files import weights
from piper.strategies.directives import (
    order,
    partition,
    place,
    remat,
    replicate,
    shard,
    split,
    stream,
)
from piper.strategies.strategy import Strategy

__all__ = [
    "EMA",
    "CapacityError",
    "Capture",
    "CaptureError",
    "Cluster",
    "CostModel",
    "Costs",
    "Device",
    "DirectiveError",
    "Estimate",
    "Job",
    "Link",
    "Machine",
    "Memory",
    "MemoryKind",
    "Mesh",
    "PiperError",
    "PiperWarning",
    "Program",
    "Recorded",
    "Sharing",
    "Simulation",
    "Source",
    "Strategy",
    "Task",
    "Traffic",
    "Trainer",
    "Tuned",
    "Verification",
    "annotate",
    "callbacks",
    "capture",
    "compile",
    "launch",
    "order",
    "partition",
    "place",
    "remat",
    "replicate",
    "shard",
    "split",
    "strategies",
    "stream",
    "tune",
    "verify",
    "weights",
]

if torch.__version__ >= "2.16":
    warn(
        f"torch {torch.__version__} is newer than the versions that Piper was tried with (2.11 to "
        "2.15): compare a few steps with one device by piper.verify(program)"
    )
