"""The training DAG: one graph of a whole step over all devices, its checks and its text."""

from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import ChunkFacts, Model, ParameterFacts, PassFacts, ValueFacts, Variant, facts_of
from piper.ir.dag.filters import Filter
from piper.ir.ops import Compute, Group
from piper.ir.dag.values import Role, Value, ValueTable
from piper.ir.dag.verify_dag import verify

__all__ = [
    "ChunkFacts",
    "Compute",
    "Dag",
    "Filter",
    "Group",
    "Model",
    "Node",
    "ParameterFacts",
    "PassFacts",
    "Role",
    "Value",
    "ValueFacts",
    "ValueTable",
    "Variant",
    "build",
    "facts_of",
    "verify",
]
