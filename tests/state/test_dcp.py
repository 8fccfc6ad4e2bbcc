"""Torch's distributed checkpoint (DCP) reads the files of trainers, and trainers read DCP's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

import piper
from piper import PiperError
from piper.state.checkpoint.dcp import CheckpointReader
from piper.state.weights.matching import located
from piper.state.weights.source import Source, StateNames
from tests.state.test_checkpoints import STRATEGIES, Net, batches, given, net
from tests.training import adamw, compiled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a save and an export after one step, and the state."""
    folder = tmp_path_factory.mktemp("trained")
    program = compiled(
        net(Net), STRATEGIES["dp2-tp2-zero1"], F.mse_loss, batches(), optimizer=adamw
    )
    with piper.launch(program) as trainer:
        trainer.step(*given(0))
        trainer.save(folder / "saved")
        trainer.export(folder / "exported", file_gb=1e-6)
        return folder, trainer.state_dict()


def loaded(reader: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {key: torch.zeros_like(x) for key, x in state.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def equal(found: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], x) for key, x in state.items())


@pytest.mark.slow
def test_dcp_reads_what_is_exported(trained: tuple[Path, dict[str, Tensor]]) -> None:
    """Tied tensors are stored under one of their names."""
    folder, state = trained
    there = {key: x for key, x in state.items() if key != "down.0.bias"}
    assert equal(loaded(HuggingFaceStorageReader(str(folder / "exported")), there), there)


def test_dcp_reads_what_is_saved(trained: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = trained
    assert equal(loaded(CheckpointReader(folder / "saved"), state), state)
    with pytest.raises(CheckpointException, match="there is no folder of weights"):
        loaded(CheckpointReader(folder / "nothing"), state)


def once() -> dict[str, Tensor]:
    """The model's state, with tied tensors under one name."""
    state = net(Net).state_dict()
    return {key: x.contiguous() for key, x in state.items() if key != "tied"}


def read(folder: Path) -> dict[str, Tensor]:
    """The model's state, read from files."""
    names = StateNames.of(Source(net(Net)))
    found = located(Source(net(Net)), names, piper.weights(folder))
    return names.named(lambda name: found[name].whole())


@pytest.mark.parametrize(
    "how",
    [{}, {"fqn_to_index_mapping": True}, {"save_distributed": True}],
    ids=["one-file", "several", "shards"],
)
def test_what_dcp_wrote_is_read(how: dict[str, Any], tmp_path: Path) -> None:
    state = once()
    if "fqn_to_index_mapping" in how:
        how = {"fqn_to_index_mapping": {key: i % 2 + 1 for i, key in enumerate(state)}}
    writer = HuggingFaceStorageWriter(str(tmp_path / "dcp"), **how)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert equal(read(tmp_path / "dcp"), state)


def shards(folder: Path, starts: tuple[int, int]) -> Path:
    """Files as two ranks write them, with ``starts`` as the row offsets of ``up.0.weight``."""
    folder.mkdir()
    state = once()
    weight = state.pop("up.0.weight")
    for rank, start in enumerate(starts):
        mine: dict[str, Tensor] = {**(state if rank else {})}
        half = len(weight) // 2
        mine["up.0.weight"] = weight[rank * half : (rank + 1) * half].contiguous()
        offsets = {key: {"saved_offsets": [0] * x.dim()} for key, x in mine.items()}
        offsets["up.0.weight"] = {"saved_offsets": [start, 0]}
        save_file(
            mine,
            folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"},
        )
    return folder


def test_shards_of_several_ranks_are_read(tmp_path: Path) -> None:
    state = once()
    assert equal(read(shards(tmp_path / "shards", (0, 16))), state)
    for i, starts in enumerate([(0, 15), (0, 17)]):
        with pytest.raises(PiperError, match=r"the slices of up\.0\.weight .* they overlap or"):
            read(shards(tmp_path / f"wrong {i}", starts))


@pytest.mark.slow
def test_ranks_with_shards(tmp_path: Path) -> None:
    """DTensors sharded along every dimension, on two ranks, in both directions."""
    from tests.launch.test_torchrun import LIMIT, torchrun

    program = compiled(net(Net), STRATEGIES["zero3"], F.mse_loss, batches(), optimizer=adamw)
    with piper.launch(program) as trainer:
        trainer.save(tmp_path / "saved")
    with torchrun(2, "dcp_ranks.py", tmp_path) as run:
        printed, said = run.communicate(timeout=LIMIT)
    assert sorted(printed.splitlines()) == ["0 True", "1 True"], said
    assert len(list((tmp_path / "shards").iterdir())) == 2
    assert equal(read(tmp_path / "shards"), once())
    # torch writes zeros for 0-dimensional tensors when it consolidates
    there = {key: x for key, x in once().items() if x.dim()}
    assert equal(read(tmp_path / "consolidated"), there)
