"""Prints what torch's optimizers make of a parameter without torch's tracer, and whether the tracer
was imported."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from piper.state.optimizer.nature import KNOWN
from piper.state.optimizer.untraced import leave_out_tracer


def trained() -> dict[str, list[list[float]]]:
    """The parameter after some steps with each optimizer, of which one is loaded again."""
    made = {}
    for kind in sorted(KNOWN, key=lambda kind: kind.__name__):
        parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        of: Any = kind
        optimizer = of([parameter], lr=0.1)
        for step in range(3):
            parameter.grad = torch.sin(parameter.detach() + step)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        made[kind.__name__] = parameter.tolist()
    return made


if __name__ == "__main__":
    leave_out_tracer()
    print(json.dumps([trained(), "torch._dynamo" in sys.modules]))
