"""Piper: distributed training of PyTorch models from named regions and a few directives."""

from piper import callbacks, strategies
from piper.capture.regions import annotate
from piper.compiler import Capture, capture, compile
from piper.cost import Cluster, Device, Link, Machine, Recorded, Sharing, Simulation
from piper.directives import order, partition, place, remat, replicate, shard, split, stream
from piper.errors import CapacityError, CaptureError, DirectiveError, PiperError, PiperWarning
from piper.first_weights import Source
from piper.ir.mesh import Mesh
from piper.job import Job
from piper.launch import Trainer, launch
from piper.lower.costs import Costs
from piper.lower.memory import Memory
from piper.lower.plan import Holder
from piper.lower.tasks import CostModel, Task
from piper.lower.traffic import Traffic
from piper.program import Program
from piper.strategy import Strategy
from piper.weight_files import weights

__all__ = [
    "CapacityError",
    "Capture",
    "CaptureError",
    "Cluster",
    "CostModel",
    "Costs",
    "Device",
    "DirectiveError",
    "Holder",
    "Job",
    "Link",
    "Machine",
    "Memory",
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
    "weights",
]
