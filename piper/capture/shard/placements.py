"""The placement of a value along one mesh axis, in DTensor's terms."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from piper.ir.collectives import Placement

Placements = Placement | tuple["Placements | None", ...]
"""Of one tensor, or of each result of an operation."""

REPLICATED = Replicate()
