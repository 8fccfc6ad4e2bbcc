"""The strategy language: each directive is data and a pure function from DAG to DAG."""

from piper.directives.base import Directive
from piper.directives.order import Order, order
from piper.directives.partition import Partition, partition
from piper.directives.place import Place, place
from piper.directives.remat import Remat, remat
from piper.directives.replicate import Replicate, replicate
from piper.directives.shard import Shard, shard
from piper.directives.split import Split, split
from piper.directives.stream import Stream, stream

__all__ = [
    "Directive",
    "Order",
    "Partition",
    "Place",
    "Remat",
    "Replicate",
    "Shard",
    "Split",
    "Stream",
    "order",
    "partition",
    "place",
    "remat",
    "replicate",
    "shard",
    "split",
    "stream",
]
