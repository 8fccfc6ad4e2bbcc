"""Two ranks under ``torchrun``: each saves shards of DTensors as safetensors with DCP, then loads a
trainer's checkpoint into DTensors and prints whether they are right."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from piper.state.checkpoint.dcp import CheckpointReader
from tests.state.test_dcp import once


def placed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors sharded along each dimension in turn; some are replicated."""
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Tensor] = {}
    for i, (key, x) in enumerate(state.items()):
        dim = i % (x.dim() + 1)
        how = Shard(dim) if dim < x.dim() and x.shape[dim] % 2 == 0 else Replicate()
        found[key] = distribute_tensor(x, mesh, [how])
    return found


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    state = placed(once())
    for name, how in (("shards", {}), ("consolidated", {"enable_consolidation": True})):
        writer = dcp.HuggingFaceStorageWriter(str(folder / name), save_distributed=True, **how)
        dcp.save(state, storage_writer=writer)
    found = placed({key: torch.zeros_like(x) for key, x in once().items()})
    dcp.load(found, storage_reader=CheckpointReader(folder / "saved"))
    same = all(torch.equal(whole(found[key]), x) for key, x in once().items())
    print(f"{dist.get_rank()} {same}\n", end="", flush=True)  # one write: the ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
