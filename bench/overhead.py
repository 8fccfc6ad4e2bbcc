"""The executor's overhead per instruction, besides its kernels, beside torch's pipelining.

Both run the same stages on one device in one process, with the same microbatches and kernels too
small to matter: two stages in sequence, no communication. The time of the kernels is subtracted.
For ours it is measured inside the same steps: the chunk programs, gradient accumulation, and the
few operations for loss, norm and update. For theirs the same modules run without a schedule; theirs
computes no norm and updates nothing. The two alternate, so that a noisy machine affects both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from options import File
from report import Case, Comparison
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from turns import Found

import piper
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.codegen import Runner, Runners
from piper.ir.passes import Pass
from piper.ir.plan.instructions import Verb
from piper.runtime.executor import LoadedInstruction
from piper.runtime.pending import Pending

WIDTH, ROWS = 8, 2


class Stage(nn.Module):
    """A few small layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(layers) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            with piper.annotate("PP"):
                x = stage(x)
        return x


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class Timed(Runners):
    """Runners that add up the time of their kernels."""

    seconds = 0.0

    def get(self, program: ChunkProgram, which: Pass) -> Runner:
        run = super().get(program, which)

        def timed(arguments: list[Tensor]) -> Sequence[Tensor]:
            start = time.perf_counter()
            results = run(arguments)
            self.seconds += time.perf_counter() - start
            return results

        return timed


def order(microbatches: int) -> piper.Strategy:
    """All forwards, then all backwards, microbatch by microbatch, both stages on device 0."""
    rows = []
    for m in range(microbatches):
        rows += [[{"PP": s, "MB": m, "PASS": "F"}] for s in (0, 1)]
        rows += [[{"PP": s, "MB": m, "PASS": "B"}] for s in (1, 0)]
    return piper.Strategy(
        [piper.split(parts=microbatches), piper.place({}, devices=[0]), piper.order(*rows)]
    )


def main(
    microbatches: Annotated[int, typer.Option(min=2)] = 16,
    layers: Annotated[int, typer.Option(min=1, help="Small layers in each stage.")] = 2,
    rounds: Annotated[int, typer.Option(min=3)] = 40,
    file: File = None,
) -> None:
    """Print microseconds for each instruction."""
    torch.set_num_threads(1)
    batch = microbatches * ROWS
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    model = Model(layers)
    ours = Ours(model, microbatches, x, y)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    theirs = Theirs(model, microbatches, x, y)
    for runner in (ours, theirs):
        for _ in range(3):
            runner.step()
    samples: dict[str, list[float]] = {"piper": [], "torch Interleaved1F1B": []}
    for _ in range(rounds):
        samples["piper"].append(ours.overhead())
        samples["torch Interleaved1F1B"].append(theirs.overhead())
    dist.destroy_process_group()
    each = {
        "piper, each instruction": ("piper", ours.count),
        "torch, each action": ("torch Interleaved1F1B", theirs.count),
    }
    notes = []
    for label, (name, count) in each.items():
        values = sorted(1e6 * v / count for v in samples[name])
        low, high = Found(seconds=values).spread
        notes.append(
            f"{label}: {statistics.median(values):.1f} µs ({low:.1f} to {high:.1f}), {count} a step"
        )
    found = {name: Found(seconds=seconds) for name, seconds in samples.items()}
    case = Case(f"{microbatches} microbatches", "torch Interleaved1F1B", found)
    comparison = Comparison(
        "host time", "beside the kernels, one device, one thread", [case], notes
    )
    comparison.conclude(file)


class Ours:
    """A step of Piper's executor."""

    def __init__(self, model: Model, microbatches: int, x: Tensor, y: Tensor) -> None:
        from piper.launch.device.device_programs import device_programs, first_weights
        from piper.launch.device.loaded_device import LoadedDevice
        from piper.runtime.comm.loopback import Hub, Loopback
        from piper.runtime.executor import Executor
        from piper.runtime.feeding import cut
        from piper.runtime.streams.streams import streams_for
        from piper.state.device.device_state import DeviceState

        program = piper.compile(model, order(microbatches), inputs=(x,), targets=(y,), loss=loss_fn)
        self.add = torch._foreach_add_
        self.runners = Timed(program.compiler, program.device)
        comm = Loopback(Hub(accelerator=False), 0)
        mine = device_programs(program)(0)
        state = DeviceState(mine, program.device, first_weights(program))
        streams = streams_for(program.device, mine.streams, None, tracked=False)
        self.device = LoadedDevice(mine, Executor(state, comm, streams, self.runners))
        plan = program.plan_of(0)
        loaded = self.device._training
        loaded = replace(loaded, ops=tuple(map(self._once_a_step, loaded.ops)))
        self.device._training = loaded
        self.given = cut(plan, program.training_step.code, 0, [x, y])
        self.count = len(plan.instructions)

    def _once_a_step(self, op: LoadedInstruction) -> LoadedInstruction:
        """Count an instruction of the loss, the norm or the update as kernel time: it consists of
        tensor operations only."""
        instruction = self.device._training.context.plan.instructions[op.pc]
        if instruction.verb not in (Verb.COLLECTIVE, Verb.UPDATE):
            return op

        def timed() -> Pending | None:
            start = time.perf_counter()
            begun = op.execute()
            self.runners.seconds += time.perf_counter() - start
            return begun

        return op._replace(execute=timed)

    def step(self) -> None:
        for _ in self.device.step(list(self.given)):
            pass

    def _timed_add(self, sums: list[Tensor], new: list[Tensor]) -> None:
        start = time.perf_counter()
        self.add(sums, new)
        self.runners.seconds += time.perf_counter() - start

    def overhead(self) -> float:
        self.runners.seconds = 0.0
        torch._foreach_add_ = self._timed_add
        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start - self.runners.seconds
        torch._foreach_add_ = self.add
        return seconds


class Theirs:
    """A step of torch.distributed.pipelining, and the same modules without it."""

    def __init__(self, model: Model, microbatches: int, x: Tensor, y: Tensor) -> None:
        device = torch.device("cpu")
        stages = [PipelineStage(stage, i, 2, device) for i, stage in enumerate(model.stages)]
        self.schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_fn)
        self.model, self.x, self.y, self.parts = model, x, y, microbatches
        self.count = 4 * microbatches

    def step(self) -> None:
        self.schedule.step(self.x, target=self.y)
        self.model.zero_grad()

    def overhead(self) -> float:
        start = time.perf_counter()
        self.schedule.step(self.x, target=self.y)
        whole = time.perf_counter() - start
        self.model.zero_grad()
        start = time.perf_counter()
        for part, target in zip(self.x.chunk(self.parts), self.y.chunk(self.parts), strict=True):
            loss_fn(self.model(part), target).backward()
        bare = time.perf_counter() - start
        self.model.zero_grad()
        return whole - bare


if __name__ == "__main__":
    typer.run(main)
