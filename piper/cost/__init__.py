"""How long a step takes on devices that need not be there: clusters, costs, simulation."""

from piper.cost.cluster import Cluster, Device, Link, Machine, Sharing
from piper.cost.simulate.simulation import Simulation, simulate
from piper.cost.recorded import Recorded

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "Machine",
    "Recorded",
    "Sharing",
    "Simulation",
    "simulate",
]
