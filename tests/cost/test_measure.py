"""``piper measure``: the figures of this machine as a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import piper
from piper.cli.app import app
from piper.cost.measure.this_machine import measure_machine
from piper.cost.measure.time_kernels import Timer, measure_products


def test_products_are_measured_by_their_shapes() -> None:
    told: list[float] = []
    timer = Timer(torch.device("cpu"))
    peak, table = measure_products(
        timer, torch.float32, (16, 64), 0.0, 1.0, lambda _, done: told.append(done)
    )
    assert len(told) == 2**3
    assert told == sorted(told)
    assert peak > 1.0
    assert table.best == pytest.approx(1.0)  # the fastest product is the peak of an unknown device
    assert table.sizes == (16, 64)


def test_a_known_peak_stays_the_peak() -> None:
    timer = Timer(torch.device("cpu"))
    peak, table = measure_products(
        timer, torch.float32, (16,), 0.0, 1e18, lambda _what, _done: None
    )
    assert peak == 1e18
    assert 0 < table.best < 1e-3


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(piper.PiperError, match="no device 'tpu'"):
        measure_machine("tpu", None, lambda _what, _done: None)


@pytest.mark.slow
def test_the_command_writes_a_cluster_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["measure", "--device", "cpu", "-o", str(path)])
    assert done.exit_code == 0, done.output
    cluster = piper.Cluster.load(path)
    assert len(cluster) == 2
    device = cluster.device(0)
    assert device.synchronous
    assert 0 < device.efficiency[torch.float32].best <= 1
    assert piper.Cluster.load(path).to_toml() == path.read_text()
