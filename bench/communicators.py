"""The cost of an NCCL communicator: GPU memory and creation time, with ranks that share one GPU.

    python bench/communicators.py [--ranks 2]

Also times messages between two ranks: as broadcasts on the current stream, which is how Piper sends
them, beside torch's send and receive, which use a stream of their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_c10d: Any = torch._C._distributed_c10d

COUNT = 8
SIZES = (2**10, 2**20, 2**24)
"""Elements of a message, in fp32."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    if "RANK" in os.environ:
        one_rank(ranks)
        return
    port = str(20000 + os.getpid() % 20000)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--ranks", str(ranks)],
            env={
                **os.environ, "RANK": str(rank), "MASTER_PORT": port,
                "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    sys.exit(max(abs(process.wait(120)) for process in processes))


def one_rank(ranks: int) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0, limit)
    where, x = torch.device("cuda", 0), torch.ones(SIZES[-1], device="cuda")
    barriers = iter(range(1000))

    def barrier() -> None:
        key = f"barrier {next(barriers)}"
        store.set(f"{key} {rank}", "")
        store.wait([f"{key} {other}" for other in range(ranks)])

    def used() -> float:
        """GPU memory per rank, in MiB."""
        torch.cuda.synchronize()
        barrier()
        free, total = torch.cuda.mem_get_info()
        barrier()
        return (total - free) / 2**20 / ranks

    def made(name: str, blocks: int | None = None) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        if blocks is not None:
            options.config.max_ctas = blocks
        found: Any = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, ranks, options)
        found._set_sequence_number_for_group()
        found.eager_connect_single_device(where)
        return found

    def told(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    first = made("first")
    first.allreduce([x]).wait()
    if ranks == 2:
        first.broadcast(x, 0).wait()
        (first.send if rank == 0 else first.recv)([x], 1 - rank, 0).wait()
    told(f"a process with its first communicator: {used():.0f} MiB a rank")
    for blocks in (None, 8, 2):
        before, start = used(), time.perf_counter()
        group = [made(f"{blocks} {i}", blocks) for i in range(COUNT)]
        barrier()
        seconds = (time.perf_counter() - start) / COUNT
        idle = (used() - before) / COUNT
        for one in group:
            one.allreduce([x]).wait()
        after = (used() - before) / COUNT
        told(
            f"each further one (blocks: {blocks or 'as NCCL likes'}): {idle:.1f} MiB when made, "
            f"{after:.1f} MiB after an all-reduce, {1e3 * seconds:.0f} ms to make"
        )
        for one in group:
            one.shutdown()
    if ranks == 2:
        messages(first, made("messages"), x, rank, told, barrier)
    first.shutdown()


def messages(first: Any, second: Any, x: Any, rank: int, told: Any, barrier: Any) -> None:
    options = _c10d.BroadcastOptions()
    options.asyncOp = False
    options.rootRank = 0

    def broadcast(data: Any) -> None:
        second.broadcast([data], options)

    def send(data: Any) -> None:
        (first.send if rank == 0 else first.recv)([data], 1 - rank, 0).wait()

    for size in SIZES:
        found = {}
        for name, call in (("broadcast", broadcast), ("send", send), ("broadcast ", broadcast)):
            data = x[:size]
            for _ in range(3):
                call(data)
            torch.cuda.synchronize()
            barrier()
            start = time.perf_counter()
            for _ in range(20):
                call(data)
            host = (time.perf_counter() - start) / 20
            torch.cuda.synchronize()
            found[name] = host, (time.perf_counter() - start) / 20
        told(
            f"{4 * size:,} bytes: "
            + ", ".join(
                f"{n} host {1e6 * h:.0f} us, whole {1e3 * w:.2f} ms" for n, (h, w) in found.items()
            )
        )


if __name__ == "__main__":
    main()
