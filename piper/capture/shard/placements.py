"""How a value lies along one axis of a mesh, in torch's words."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from piper.ir.layouts import Placement

Placements = Placement | tuple["Placements | None", ...]
"""Of one tensor, or of an operation with several results."""

REPLICATED = Replicate()
