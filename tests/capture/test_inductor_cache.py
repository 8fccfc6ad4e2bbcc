"""Inductor keeps in its cache what it compiles for workers, which have graphs from a file."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import mse_loss

from piper.capture.code.codegen import Inductor
from piper.capture.code.serialize import program_from_json, program_to_json
from piper.capture.model import capture
from piper.ir.passes import Pass


@pytest.mark.slow
def test_a_second_start_compiles_no_graph_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    captured = capture(model, inputs=(x,), targets=(x,), loss=mse_loss, compiler="inductor")
    data = program_to_json(captured.programs[0])
    seen = []
    for _ in range(2):
        counters.clear()
        for which, function in program_from_json(data).functions.items():
            if which in (Pass.F, Pass.B):
                Inductor().compile(function, which, torch.device("cpu"))
        seen.append({k for k in counters["inductor"] if k.startswith("fxgraph_cache_")})
    assert seen == [{"fxgraph_cache_miss"}, {"fxgraph_cache_hit"}]
