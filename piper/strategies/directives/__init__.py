"""The strategy language: each directive is data and a pure function from DAG to DAG."""

from piper.strategies.directives.directive import Directive
from piper.strategies.directives.order import Order, order
from piper.strategies.directives.partition import Partition, partition
from piper.strategies.directives.place import Place, place
from piper.strategies.directives.remat import Remat, remat
from piper.strategies.directives.replicate import Replicate, replicate
from piper.strategies.directives.shard import Shard, shard
from piper.strategies.directives.split import Split, split
from piper.strategies.directives.stream import Stream, stream

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
