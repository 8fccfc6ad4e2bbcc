"""Runs a plan on one device: a generator that yields the communication it must wait for.

When a plan is loaded, every instruction becomes a function of no arguments with everything it needs
resolved: nothing is looked up by name while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.capture.batch import strided_like
from piper.capture.codegen import Runner, compile_program
from piper.capture.program import Kind, Pass, Ref
from piper.errors import PiperError
from piper.ir.dag import Collective, Compute, Transfer, Update
from piper.ir.facts import bundled
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction, Plan, Verb
from piper.program import Code
from piper.random import fold, seeded
from piper.runtime.comm import Comm, Handle
from piper.runtime.messages import exchange_back, exchange_out, rows_received, rows_sent
from piper.runtime.state import DeviceState, Held
from piper.runtime.streams import Streams

Act = Callable[[], "Pending | None"]
Slots = list[Any]
Place = list[int] | memoryview[int]
"""One number: a place in a plan."""
BUNDLES = (Kind.SAVED, Kind.HANDOFF, Kind.PARAMETER_GRAD)


class Pending:
    """A communication under way, and what is to be done with what it brings."""

    __slots__ = ("_finish", "_handles", "name")

    def __init__(
        self, name: str, handles: Sequence[Handle], finish: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._handles = handles
        self._finish = finish

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Return when it is over."""
        for handle in self._handles:
            handle.wait()

    def complete(self) -> None:
        """Wait for it, and take in what it brings."""
        self.wait()
        if self._finish is not None:
            self._finish()


@dataclass(slots=True)
class Op:
    """One loaded instruction."""

    act: Act
    waits: tuple[int, ...]
    """Places of what must be done before."""
    stream: str
    awaited: bool
    """Whether something waits for it."""
    name: str


@dataclass(slots=True)
class Totals:
    """The scalars of a step."""

    loss: Tensor | None = None
    """The sum of the losses and of what they are divided by."""
    norm: Tensor | None = None
    """The squared norm of all gradients."""


class InstructionError(PiperError):
    """An instruction failed; the cause is the error that it raised."""


class Executor:
    """One device: its state, its programs, its end of the communication."""

    def __init__(self, state: DeviceState, comm: Comm, streams: Streams) -> None:
        self.state = state
        self.comm = comm
        self.streams = streams
        self.device = state.device
        self.where = state.where
        self.at: Place = [0]
        """The place in the plan, for those who ask from outside; may be shared memory."""
        self._runners: dict[int, dict[Pass, Runner]] = {}

    def load(self, plan: Plan, code: Code) -> Loaded:
        """``plan`` ready to be run."""
        return Loaded(self, plan, code)

    def runner(self, program: Any, which: Pass) -> Runner:
        """The callable of a program's pass; each program is compiled once."""
        if id(program) not in self._runners:
            self._runners[id(program)] = compile_program(program, self.state.program.compiler)
        return self._runners[id(program)][which]

    def run(self, loaded: Loaded, given: Sequence[Tensor]) -> Generator[Pending, None, Totals]:
        """One step on this device's part of the batch, in the order of the plan's ``given``."""
        loaded.begin(given)
        pending: dict[int, Pending] = {}
        marks: dict[int, Callable[[], None]] = {}
        streams = self.streams
        streams.begin()
        at = self.at
        for place, op in enumerate(loaded.ops):
            at[0] = place
            for other in op.waits:
                if other in pending:
                    while not pending[other].done():
                        yield pending[other]
                    self._complete(loaded, other, pending, marks)
            try:
                with streams.on(op.stream):
                    for other in op.waits:
                        if other in marks:
                            marks[other]()
                    begun = op.act()
                    if begun is not None:
                        pending[place] = begun
                    elif op.awaited:
                        marks[place] = streams.mark()
            except Exception as error:
                raise self._failed(place, op, error) from error
        for place in list(pending):
            while not pending[place].done():
                yield pending[place]
            self._complete(loaded, place, pending, marks)
        streams.finish()
        loaded.end()
        return loaded.totals

    def _complete(
        self,
        loaded: Loaded,
        place: int,
        pending: dict[int, Pending],
        marks: dict[int, Callable[[], None]],
    ) -> None:
        op = loaded.ops[place]
        try:
            with self.streams.on(op.stream):
                pending.pop(place).complete()
                marks[place] = self.streams.mark()
        except Exception as error:
            raise self._failed(place, op, error) from error

    def _failed(self, place: int, op: Op, error: Exception) -> InstructionError:
        return InstructionError(
            f"device {self.device}, instruction {place} ({op.name}): "
            f"{type(error).__name__}: {error}"
        )


class Loaded:
    """A plan whose instructions are functions over one list of slots."""

    def __init__(self, executor: Executor, plan: Plan, code: Code) -> None:
        self._executor = executor
        self._state = executor.state
        self._device = executor.device
        self._where = executor.where
        self._comm = executor.comm
        self._plan = plan
        self._code = code
        self._parts = executor.state.program.microbatches
        self.slots: Slots = [None] * len(plan.slot_bytes)
        self.totals = Totals()
        self._wanted = self._strides()
        self._readable = {
            s for x in plan.instructions if x.verb is not Verb.FREE for s in (*x.reads, *x.adds)
        }
        self._buckets = self._slot_buckets()
        self._grads = self._slot_gradients()
        self._constants = {n: x.to(self._where) for n, x in code.constants.items()}
        writers: dict[int, int] = {}
        awaited = {w for x in plan.instructions for w in x.waits}
        users = self._users()
        self.ops: list[Op] = []
        for place, x in enumerate(plan.instructions):
            # what a communication brings is there when it is complete, on its own stream too
            implied = {writers[s] for s in (*x.reads, *x.adds) if s in writers}
            if x.verb is Verb.FREE:
                self.ops.append(Op(self._free(x.reads[0], users), (), "compute", False, "free"))
                continue
            waits = tuple(sorted({*x.waits, *implied}))
            name = x.name if x.verb.value in x.name else f"{x.verb.value} {x.name}"
            self.ops.append(Op(self._load(x), waits, x.stream, place in awaited, name))
            if x.verb in (Verb.RECV, Verb.COLLECTIVE):
                writers |= dict.fromkeys(x.writes, place)

    def begin(self, given: Sequence[Tensor]) -> None:
        """Put this device's part of the batch where the plan expects it."""
        self.totals = Totals()
        for (slot, value, _, group), rows in zip(self._plan.given, given, strict=True):
            spec = self._code.values[len(group)][value]
            self.slots[slot] = strided_like(rows.to(spec.dtype), spec.stride, self._where)

    def abandon(self) -> None:
        """Let go of everything after a step that failed."""
        self.slots[:] = [None] * len(self.slots)

    def end(self) -> None:
        """Everything that the plan made must have been let go by it."""
        assert all(content is None for content in self.slots)

    # what is known of slots before anything runs

    def _strides(self) -> dict[int, tuple[int, ...]]:
        """For each slot that programs read a tensor from, the strides that they expect."""
        found: dict[int, tuple[int, ...]] = {}
        for x in self._plan.instructions:
            if isinstance(x.op, Compute):
                program = self._code.programs[len(x.group)][x.op.chunk]
                for ref, slot in self._read(x).items():
                    if ref.kind not in BUNDLES:
                        found.setdefault(slot, program.specs[ref].stride)
        return found

    def _read(self, x: Instruction) -> dict[Ref, int]:
        """What the slots that a computation reads are to its program."""
        assert isinstance(x.op, Compute)
        program = self._code.programs[len(x.group)][x.op.chunk]
        refs = bundled(program.functions[x.op.which].arguments)
        given = [ref for ref in refs if not self._is_seed(x.op.chunk, ref)]
        return dict(zip(given, x.reads, strict=False))

    def _is_seed(self, chunk: int, ref: Ref) -> bool:
        outputs = self._code.pieces[chunk].outputs
        return ref.kind is Kind.OUTPUT_GRAD and outputs[ref.index] == self._code.loss

    def _slot_buckets(self) -> dict[int, int]:
        """For each slot with something of a bucket, the bucket."""
        of_bucket = (ExtraRole.REDUCED, ExtraRole.GATHERED)
        return {s: x.of for x in self._plan.instructions if x.role in of_bucket for s in x.writes}

    def _slot_gradients(self) -> dict[int, tuple[str, ...]]:
        """For each slot with a bundle of gradients, the parameters they are of."""
        found: dict[int, tuple[str, ...]] = {}
        for x in self._plan.instructions:
            if isinstance(x.op, Compute):
                program = self._code.programs[len(x.group)][x.op.chunk]
                names = self._code.pieces[x.op.chunk].parameters
                results = program.functions[x.op.which].results
                grads = tuple(names[r.index] for r in results if r.kind is Kind.PARAMETER_GRAD)
                for ref, slot in zip(bundled(results), x.writes, strict=True):
                    if ref.kind is Kind.PARAMETER_GRAD:
                        found[slot] = grads
        return found

    def _store(self, slot: int, content: Any) -> None:
        """Keep what a communication brought, unless nobody reads it: then it is freed already."""
        if slot in self._readable:
            self.slots[slot] = content

    def _users(self) -> dict[int, set[str]]:
        """The streams that use each slot."""
        found: dict[int, set[str]] = {}
        for x in self._plan.instructions:
            if x.verb is not Verb.FREE:
                for slot in (*x.reads, *x.writes):
                    found.setdefault(slot, set()).add(x.stream)
        return found

    # instructions

    def _load(self, x: Instruction) -> Act:
        match x.op:
            case Compute():
                return self._compute(x, x.op)
            case Transfer():
                return self._send(x, x.op) if x.verb is Verb.SEND else self._receive(x, x.op)
            case Collective():
                return self._collective(x, x.op)
            case Update():
                return self._update(x, x.op)
            case None:
                raise AssertionError(f"{x.verb} has nothing to do")

    def _free(self, slot: int, users: dict[int, set[str]]) -> Act:
        slots, keep = self.slots, self._executor.streams.keep
        streams = sorted(users.get(slot, ())) if self._where.type == "cuda" else []

        def act() -> None:
            for tensor in _tensors(slots[slot]) if streams else ():
                for stream in streams:
                    keep(tensor, stream)
            slots[slot] = None

        return act

    def _compute(self, x: Instruction, op: Compute) -> Act:
        group = len(x.group)
        program = self._code.programs[group][op.chunk]
        function = program.functions[op.which]
        piece = self._code.pieces[op.chunk]
        run = self._executor.runner(program, op.which)
        slots, read = self.slots, self._read(x)
        gathered = {self._buckets[slot]: slot for slot in x.reads[len(read) :]}
        fixed: list[Any] = []
        direct: list[tuple[int, int]] = []
        nested: list[tuple[int, int, Any]] = []
        for position, ref in enumerate(function.arguments):
            fixed.append(None)
            if ref.kind is Kind.PARAMETER:
                name = piece.parameters[ref.index]
                if name in self._state.views:
                    fixed[position] = self._state.views[name]
                else:
                    nested.append((position, gathered[self._state.bucket_of[name]], name))
            elif ref.kind is Kind.BUFFER:
                fixed[position] = self._buffer(piece.buffers[ref.index])
            elif self._is_seed(op.chunk, ref):
                fixed[position] = self._seed(program.specs[ref], group)
            elif ref.kind in BUNDLES:
                nested.append((position, read[Ref(ref.kind, 0)], ref.index))
            else:
                direct.append((position, read[ref]))
        made = dict(zip(bundled(function.results), x.writes, strict=True))
        single = [
            (made[r], i)
            for i, r in enumerate(function.results)
            if r in made and r.kind not in BUNDLES
        ]
        bundles = [
            (slot, [i for i, r in enumerate(function.results) if r.kind is ref.kind])
            for ref, slot in made.items()
            if ref.kind in BUNDLES and slot not in x.adds
        ]
        adds = [
            (slot, [i for i, r in enumerate(function.results) if r.kind is ref.kind])
            for ref, slot in made.items()
            if slot in x.adds
        ]
        updates = [
            (self._buffer(piece.updates[r.index]), i)
            for i, r in enumerate(function.results)
            if r.kind is Kind.UPDATE
        ]
        master = self._state.program.training.master
        gradients = {slot for ref, slot in made.items() if ref.kind is Kind.PARAMETER_GRAD}

        def act() -> None:
            arguments = fixed.copy()
            for position, slot in direct:
                arguments[position] = slots[slot]
            for position, slot, key in nested:
                arguments[position] = slots[slot][key]
            results = run(arguments)
            for slot, i in single:
                slots[slot] = results[i]
            for slot, places in bundles:
                slots[slot] = [results[i] for i in places]
                if master is not None and slot in gradients:
                    slots[slot] = [g.to(master) for g in slots[slot]]
            for slot, places in adds:
                for total, i in zip(slots[slot], places, strict=True):
                    total.add_(results[i])
            for buffer, i in updates:
                buffer.copy_(results[i])

        if not function.random:
            return act
        state, where = self._state, self._where
        part = op.microbatch * group + x.group.index(self._device)

        def drawing() -> None:
            draws = fold(
                state.program.training.seed, step=state.steps, chunk=op.chunk, microbatch=part
            )
            with seeded(where, draws):
                act()

        return drawing

    def _buffer(self, name: str) -> Tensor:
        return self._constants[name] if name in self._constants else self._state.buffers[name]

    def _seed(self, spec: Any, group: int) -> Tensor:
        """The gradient of one device's loss of one microbatch."""
        seed = torch.ones(spec.shape, dtype=spec.dtype, device=self._where)
        return seed if self._code.count is not None else seed.div_(self._parts * group)

    def _send(self, x: Instruction, op: Transfer) -> Act:
        slots, comm = self.slots, self._comm
        (slot,) = x.reads
        messages = rows_sent(op, self._device)

        def act() -> Pending:
            data = slots[slot].contiguous()
            handles = [
                comm.send(x.node, x.stream, peer, data.chunk(parts)[part] if parts > 1 else data)
                for peer, part, parts in messages
            ]
            return Pending(x.name, handles)

        return act

    def _receive(self, x: Instruction, op: Transfer) -> Act:
        comm, where = self._comm, self._where
        store = self._store
        (slot,) = x.writes
        spec = self._code.values[len(op.target)][x.of]
        messages = rows_received(op, self._device)
        arrange = self._arranged(slot)

        def act() -> Pending:
            out = torch.empty(spec.shape, dtype=spec.dtype, device=where)
            handles = [
                comm.receive(x.node, x.stream, peer, out.chunk(parts)[part] if parts > 1 else out)
                for peer, part, parts in messages
            ]

            def finish() -> None:
                store(slot, arrange(out))

            return Pending(x.name, handles, finish)

        return act

    def _arranged(self, slot: int) -> Callable[[Tensor], Tensor]:
        """Gives a contiguous tensor the strides that the slot's readers expect."""
        stride, where = self._wanted.get(slot), self._where
        if stride is None:
            return lambda x: x
        return lambda x: strided_like(x, stride, where)

    def _collective(self, x: Instruction, op: Collective) -> Act:
        group = next(group for group in op.groups if self._device in group)
        match x.role:
            case ExtraRole.EXCHANGED | ExtraRole.PARTIAL:
                return self._exchange(x, group)
            case ExtraRole.REDUCED:
                return self._reduce(x)
            case ExtraRole.GATHERED:
                return self._gather(x)
            case ExtraRole.TOTAL:
                return self._total(x, group)
            case ExtraRole.NORM:
                return self._norm(x, group)
            case _:
                raise AssertionError(f"a collective cannot make {x.role}")

    def _exchange(self, x: Instruction, group: tuple[int, ...]) -> Act:
        slots, comm, ways = self.slots, self._comm, len(group)
        store = self._store
        (slot,), (target,) = x.reads, x.writes
        pack, unpack = exchange_out(ways) if x.role is ExtraRole.EXCHANGED else exchange_back(ways)
        arrange = self._arranged(target)

        def act() -> Pending:
            data = pack(slots[slot])
            out = torch.empty_like(data)
            handle = comm.all_to_all(x.node, x.stream, group, data, out)

            def finish() -> None:
                store(target, arrange(unpack(out)))

            return Pending(x.name, [handle], finish)

        return act

    def _reduce(self, x: Instruction) -> Act:
        slots, comm, where = self.slots, self._comm, self._where
        store = self._store
        held = self._state.held[x.of]
        layout = held.layout
        kind = layout.bucket.gradient
        (target,) = x.writes
        sources = self._sources(held, x.reads)
        adds = target in x.adds

        def act() -> Pending:
            flat = torch.zeros(layout.padded, dtype=kind, device=where)
            for name, places in sources:
                view = layout.view(flat, name)
                for slot, i in places:
                    view.add_(slots[slot][i])
            if layout.divided:
                out = torch.empty(layout.share, dtype=kind, device=where)
                handle = comm.reduce_scatter(x.node, x.stream, layout.group, flat, out)
            else:
                out = flat
                handle = comm.all_reduce(x.node, x.stream, layout.group, flat)

            def finish() -> None:
                store(target, slots[target].add_(out) if adds else out)

            return Pending(x.name, [handle], finish)

        return act

    def _sources(
        self, held: Held, reads: tuple[int, ...]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """For each parameter of a bucket, the slots with its gradients and their places there."""
        bundles = [(slot, self._grads[slot]) for slot in reads if slot in self._grads]
        return [
            (name, [(slot, names.index(name)) for slot, names in bundles if name in names])
            for name in held.layout.bucket.parameters
        ]

    def _gather(self, x: Instruction) -> Act:
        comm, where = self._comm, self._where
        store = self._store
        held = self._state.held[x.of]
        layout = held.layout
        (target,) = x.writes

        def whole() -> Pending:
            low, high = layout.mine
            part = held.flat[low:high].clone()
            handle = comm.all_gather(x.node, x.stream, layout.group, part, held.flat)

            def finish() -> None:
                store(target, ())

            return Pending(x.name, [handle], finish)

        def parts() -> Pending:
            out = torch.empty(layout.padded, dtype=held.flat.dtype, device=where)
            handle = comm.all_gather(x.node, x.stream, layout.group, held.flat, out)

            def finish() -> None:
                store(target, {n: layout.view(out, n) for n in layout.bucket.parameters})

            return Pending(x.name, [handle], finish)

        return parts if layout.scattered else whole

    def _total(self, x: Instruction, group: tuple[int, ...]) -> Act:
        slots, comm, where = self.slots, self._comm, self._where
        store = self._store
        (target,) = x.writes
        counted = self._code.count is not None
        half = len(x.reads) // 2 if counted else len(x.reads)

        def act() -> Pending:
            data = torch.zeros(2, dtype=torch.float64, device=where)
            for i, part in enumerate((x.reads[:half], x.reads[half:])):
                if part:
                    data[i] = torch.stack([slots[slot].reshape(()) for slot in part]).sum()
            handle = comm.all_reduce(x.node, x.stream, group, data)

            def finish() -> None:
                self.totals.loss = data
                store(target, data)

            return Pending(x.name, [handle], finish)

        return act

    def _norm(self, x: Instruction, group: tuple[int, ...]) -> Act:
        slots, comm, where = self.slots, self._comm, self._where
        store = self._store
        (target,) = x.writes
        before = self._state.program.training.clip_norm is not None
        takers = [u for u in self._plan.instructions if isinstance(u.op, Update)] if before else []
        collect = [
            (self._state.held[u.op.bucket], self._gradients(u)) for u in takers
            if isinstance(u.op, Update)
        ]  # fmt: skip

        def act() -> Pending:
            data = torch.zeros((), dtype=torch.float64, device=where)
            for held, gradients in collect:
                if _counts(held):
                    data += _squares(gradients())
            for slot in () if before else x.reads:
                data += slots[slot]
            handle = comm.all_reduce(x.node, x.stream, group, data)

            def finish() -> None:
                self.totals.norm = data
                store(target, data)

            return Pending(x.name, [handle], finish)

        return act

    def _gradients(self, x: Instruction) -> Callable[[], list[Tensor]]:
        """Gives the summed gradient of each fragment that an update is about."""
        assert isinstance(x.op, Update)
        held = self._state.held[x.op.bucket]
        layout, slots = held.layout, self.slots
        reduced = [slot for slot in x.reads if self._buckets.get(slot) == x.op.bucket]
        if reduced:
            (slot,) = reduced
            if layout.divided:
                return lambda: [slots[slot][f.start : f.stop] for f in layout.fragments]
            return lambda: [layout.view(slots[slot], f.name) for f in layout.fragments]
        sources = self._sources(held, x.reads)

        def summed() -> list[Tensor]:
            found = []
            for _, places in sources:
                first, *others = [slots[slot][i] for slot, i in places]
                for other in others:
                    first = first + other
                found.append(first)
            return found

        return summed

    def _update(self, x: Instruction, op: Update) -> Act:
        slots, state = self.slots, self._state
        held = state.held[op.bucket]
        training = state.program.training
        collect = self._gradients(x)
        counted, clip = self._code.count is not None, training.clip_norm
        (target,) = x.writes
        counts = _counts(held)

        def act() -> None:
            gradients = collect()
            if counted:
                assert self.totals.loss is not None
                for gradient in gradients:
                    gradient.div_(self.totals.loss[1].to(gradient.dtype))
            if clip is not None:
                coefficient = self._clip(clip, counted)
                for gradient in gradients:
                    gradient.mul_(coefficient.to(gradient.dtype))
            elif counts:
                slots[target] = _squares(gradients)
            if slots[target] is None:
                slots[target] = torch.zeros((), dtype=torch.float64, device=self._where)
            state.update(held, gradients)

        return act

    def _clip(self, limit: float, counted: bool) -> Tensor:
        """What all gradients are multiplied with so that their norm stays within ``limit``."""
        assert self.totals.norm is not None
        norm = self.totals.norm.sqrt()
        if counted:
            assert self.totals.loss is not None
            norm = norm / self.totals.loss[1]
        return (limit / (norm + 1e-6)).clamp(max=1.0)


def _counts(held: Held) -> bool:
    """Whether this device's gradients of a bucket enter the norm: equal ones do once."""
    return held.layout.divided or held.layout.rank == 0


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm of all gradients together."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _tensors(content: Any) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    items = content.values() if isinstance(content, dict) else content
    return [x for x in items or () if isinstance(x, Tensor)]
