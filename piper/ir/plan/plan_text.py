"""A plan as text and back: ``parse(text(parts)) == parts``.

First the slots, then the slots given when the step begins, the seeds and the slots returned when it
ends, then one instruction per line:

    9 [pp/send] send 0->1 PP[0]: s9 ->  frees s9 waits 2! 6 holds s9 # 14 0/1->1/1 dim 0 value 5

This is instruction 9, on stream ``pp/send``. It waits for instruction 6 and completes
communication 2 (``2!``), then reads slot 9 and frees it, but holds its memory until it ends. It is
node 14 of the DAG and sends value 5. ``0/1->1/1``: the source and the target, each followed by how
many adjacent devices hold the same part. ``S(1)->S(0) 0,1 value 5``: a collective among devices 0
and 1 that changes the layout of value 5. A pass is written like ``3F0``: chunk 3, forward,
microbatch 0. ``+s3``: the result is added to slot 3. ``workspace``, ``beside`` and ``ending`` are
temporary bytes. ``early 7``: the receive may be issued before computation 7. ``on 0-3/2``: rows
are sharded over devices 0 to 3, of which 2 adjacent ones have the same. ``tp/1%2``: the computation
depends on a device's rank along ``tp``: its place among these devices, divided by 1, modulo 2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, groupby

import torch

from piper.base.errors import PiperError
from piper.base.reading import DTYPES, cut, shown, torch_name
from piper.ir.collectives import COLLECTIVES, ENDS, Placement, Sharded
from piper.ir.dag.values import Content
from piper.ir.grouped import grouped
from piper.ir.ops import Add, Collective, Compute, Copy, Op, Select, Transfer, Update
from piper.ir.passes import Pass
from piper.ir.plan.instructions import (
    NO_ROWS,
    Given,
    Instruction,
    MemoryKind,
    PlanParts,
    Returned,
    RowShards,
    Seed,
    Slot,
    Verb,
)

_SAID = {Verb.SEND: "send ", Verb.RECV: "send ", Verb.UPDATE: "update "}
_SAID |= {Verb.ADD: "add ", Verb.COPY: "copy "}
"""Prefixes of node names that repeat the verb; they are not written."""
_HEAD = "plan of devices "
_MOST = 10**6
"""The most numbers that a range may stand for."""
_DIGITS = 18
_PLACEMENTS: Mapping[str, Placement] = {str(x): x for x in (*chain(*ENDS.values()), Sharded(1))}


def text(plan: PlanParts) -> str:
    """The plan as text, for people and for ``parse``."""
    lines = [_HEAD + _numbers(plan.devices)]
    same = grouped((slot, number) for number, slot in enumerate(plan.slots))
    lines += [f"slots {_numbers(row)}: {_slot(slot)}" for slot, row in same.items()]
    lines += [f"given s{s}: {v} of MB {m} on {_rows(on)}" for s, v, m, on in plan.given]
    lines += [f"seed s{s}: {v} on one of {n}, 1/{parts}" for s, v, n, parts in plan.seeds]
    lines += [f"returned s{s}: {v} of MB {m} on {_rows(on)}" for s, v, m, on in plan.returned]
    lines += [f"{pc:>4} {_line(x)}" for pc, x in enumerate(plan.instructions)]
    return "\n".join(lines)


def _slot(slot: Slot) -> str:
    own = f", own {slot.own}" if slot.own != slot.nbytes else ""
    bucket = f", bucket {slot.bucket}" if slot.bucket is not None else ""
    lies_in = f", in {_numbers(slot.lies_in)}" if slot.lies_in else ""
    names = ""
    pairs = zip(slot.dtypes, slot.names, strict=True)
    for dtype, row in groupby(pairs, key=lambda pair: torch_name(pair[0])):
        names += f", {dtype} {' '.join(_quoted(name, _WORD) for _, name in row)}"
    return f"{slot.holder.value} {slot.nbytes} bytes{own}{bucket}{lies_in}{names}"


def _line(x: Instruction) -> str:
    said = _SAID.get(x.verb, "")
    name = json.dumps(x.name)
    if x.name.startswith(said):
        name = _quoted(x.name.removeprefix(said), _NAME)
    reads = " ".join(f"s{s}" for s in x.reads)
    writes = " ".join(f"+s{s}" if s in x.adds else f"s{s}" for s in x.writes)
    more = {
        "allocates": [f"s{s}" for s in x.allocates],
        "frees": [f"s{s}" for s in x.frees],
        "waits": [f"{w}!" if w in x.ends else str(w) for w in x.waits],
        "buckets": map(str, x.buckets),
        "weights": map(repr, x.weights),
        "holds": [f"s{s}" for s in x.holds],
        **{word: [str(n)] for word, n in _bytes(x).items() if n},
        "early": [] if x.early is None else [str(x.early)],
    }
    words = [" ".join([word, *row]) for word, items in more.items() if (row := list(items))]
    about = "" if x.content is None else f" {x.content.value} {x.of}"
    what = f"{x.node} {_op(x)}{about}"
    line = " ".join([f"{name}: {reads} -> {writes}", *words])
    return f"[{_quoted(x.stream, _STREAM)}] {x.verb.value} {line} # {what}"


def _bytes(x: Instruction) -> dict[str, int]:
    return {"workspace": x.workspace, "beside": x.beside, "ending": x.at_end}


def _op(x: Instruction) -> str:
    match op := x.op:
        case Compute(chunk=chunk, which=which, microbatch=microbatch):
            axes = "".join(f" {axis}/{stride}%{ways}" for axis, stride, ways in x.axes)
            return f"{chunk}{which.value}{microbatch} on {_rows(x.rows)}{axes}"
        case Transfer(source=source, target=target, dim=dim, replicas=(ours, theirs)):
            counts = "" if op.counts is None else f" counts of {op.counts} rows"
            return f"{_numbers(source)}/{ours}->{_numbers(target)}/{theirs} dim {dim}{counts}"
        case Collective(before=before, after=after, groups=groups, rows=rows, runs=runs):
            counted = ", padded" * op.padded + ", by the host" * op.by_host
            room = "" if rows is None else f" room for {rows} rows{counted}"
            merged = f" of {runs} runs" if runs > 1 else ""
            return f"{before}->{after} {'|'.join(map(_numbers, groups))}{room}{merged}"
        case Update(bucket=bucket):
            return f"bucket {bucket}"
        case Add(value=value, chunk=chunk, microbatch=microbatch):
            return f"value {value} of {chunk}.{microbatch}"
        case Select(groups=groups):
            return "|".join(map(_numbers, groups))
        case Copy(bucket=bucket, nbytes=nbytes):
            return f"bucket {bucket}, {nbytes} bytes"


def _rows(shards: RowShards) -> str:
    return _numbers(shards.devices) + (f"/{shards.copies}" if shards.copies > 1 else "")


def _numbers(row: Iterable[int]) -> str:
    """Numbers with commas; three or more consecutive ones as ``first-last``."""
    runs: list[list[int]] = []
    for number in row:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    items = (f"{a}-{b}" if b > a + 1 else ",".join(map(str, range(a, b + 1))) for a, b in runs)
    return ",".join(items)


_WORD = r'[^\s",]+'
_NAME = r'[^":#\s]([^":#]*[^":#\s])?'
_STREAM = r'[^"\[\]\s]([^"\[\]]*[^"\[\]\s])?'
_JSON = r'"(?:[^"\\]|\\.)*"'


def _quoted(written: str, plain: str) -> str:
    return written if re.fullmatch(plain, written) else json.dumps(written)


def _unquoted(written: str, said: str = "") -> str:
    return str(json.loads(written)) if written.startswith('"') else said + written


_SLOTS = re.compile(
    r"slots (?P<row>\S+): (?P<holder>[a-z ]+) (?P<nbytes>\d+) bytes(?:, own (?P<own>\d+))?"
    r"(?:, bucket (?P<bucket>\d+))?(?:, in (?P<lies_in>[\d,-]+))?(?P<names>(?:, .*)?)"
)
_GIVEN = re.compile(r"(given|returned) s(\d+): (\d+) of MB (\d+) on (\S+?)(?:/(\d+))?")
_SEED = re.compile(r"seed s(\d+): (\d+) on one of (\d+), 1/(\d+)")
_INSTRUCTION = re.compile(
    rf"\s*\d+ \[(?P<stream>{_JSON}|{_STREAM})\] (?P<verb>\w+) (?P<name>{_JSON}|{_NAME}): "
    r"(?P<reads>[s\d ]*?) ?-> (?P<writes>[+s\d ]*?)(?: allocates (?P<allocates>[s\d ]+?))?"
    r"(?: frees (?P<frees>[s\d ]+?))?(?: waits (?P<waits>[\d! ]+?))?"
    r"(?: buckets (?P<buckets>[\d ]+?))?(?: weights (?P<weights>[\d.e+ -]+?))?"
    r"(?: holds (?P<holds>[s\d ]+?))?(?: workspace (?P<workspace>\d+))?(?: beside (?P<beside>\d+))?"
    r"(?: ending (?P<ending>\d+))?(?: early (?P<early>\d+))? # "
    r"(?P<node>\d+) (?P<op>.+)"
)
_MESSAGE = re.compile(r"(\S*)/(\d+)->(\S*)/(\d+) dim (\d+)(?: counts of (\d+) rows)? (\w+) (\d+)")
_OPS = {
    Verb.COMPUTE: re.compile(r"(\d+)([A-Z]+)(\d+) on (\S+?)(?:/(\d+))?((?: \w+/\d+%\d+)*)"),
    Verb.SEND: _MESSAGE,
    Verb.RECV: _MESSAGE,
    Verb.COLLECTIVE: re.compile(
        r"(\S+)->(\S+) (\S+)(?: room for (\d+) rows(, padded)?(, by the host)?)?"
        r"(?: of (\d+) runs)? (\w+) (\d+)"
    ),
    Verb.UPDATE: re.compile(r"bucket (\d+)"),
    Verb.ADD: re.compile(r"value (\d+) of (\d+)\.(\d+)"),
    Verb.SELECT: re.compile(r"(\S+)"),
    Verb.COPY: re.compile(r"bucket (\d+), (\d+) bytes"),
}


def parse(written: str) -> PlanParts:
    """The plan that ``text`` wrote."""
    head, *lines = written.strip().splitlines() or [""]
    with _reading(head):
        if not head.startswith(_HEAD):
            raise ValueError(f"a plan begins with '{_HEAD}'")
        devices = _range(head.removeprefix(_HEAD))
    slots: dict[int, Slot] = {}
    given: list[Given] = []
    returned: list[Returned] = []
    seeds: list[Seed] = []
    instructions: list[Instruction] = []
    for line in lines:
        with _reading(line):
            if match := _SLOTS.fullmatch(line):
                slots |= dict.fromkeys(_range(match["row"]), _parsed_slot(match))
            elif match := _GIVEN.fullmatch(line):
                word, *numbers, on, copies = match.groups()
                slot, value, microbatch = map(_int, numbers)
                shards = _row_shards(on, copies)
                if word == "given":
                    given.append(Given(slot, value, microbatch, shards))
                else:
                    returned.append(Returned(slot, value, microbatch, shards))
            elif match := _SEED.fullmatch(line):
                seeds.append(Seed(*map(_int, match.groups())))
            else:
                instructions.append(_parsed(line))
    if missing := slots.keys() ^ range(len(slots)):
        raise PiperError(f"the plan does not define slot {min(missing)}: each needs a line 'slots'")
    row = tuple(slots[number] for number in range(len(slots)))
    return PlanParts(devices, tuple(instructions), tuple(given), tuple(seeds), row, tuple(returned))


@contextmanager
def _reading(line: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        why = cut(str(error))
        raise PiperError(f"this is not a line of a plan: {shown(line, 200)} ({why})") from None


def _parsed_slot(match: re.Match[str]) -> Slot:
    nbytes, own, bucket = _int(match["nbytes"]), match["own"], match["bucket"]
    names: list[str] = []
    dtypes: list[torch.dtype] = []
    for part in re.findall(rf", ((?:{_JSON}|{_WORD}| )+)", match["names"]):
        dtype, *row = re.findall(rf"{_JSON}|{_WORD}", part)
        names += map(_unquoted, row)
        dtypes += [DTYPES[dtype]] * len(row)
    return Slot(
        MemoryKind(match["holder"]),
        nbytes,
        nbytes if own is None else _int(own),
        None if bucket is None else _int(bucket),
        tuple(names),
        tuple(dtypes),
        _range(match["lies_in"] or ""),
    )


def _parsed(line: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(line)
    if match is None:
        raise ValueError("it matches no kind of line")
    verb = Verb(match["verb"])
    what = _OPS[verb].fullmatch(match["op"])
    if what is None:
        raise ValueError(f"a {verb.value} is not {match['op']!r}")
    op, content, of = _parsed_op(verb, what)
    computes = verb is Verb.COMPUTE
    waits = (match["waits"] or "").split()
    return Instruction(
        verb=verb,
        node=_int(match["node"]),
        name=_unquoted(match["name"], _SAID.get(verb, "")),
        stream=_unquoted(match["stream"]),
        op=op,
        content=content,
        of=of,
        rows=_row_shards(what[4], what[5]) if computes else NO_ROWS,
        axes=_axes(what[6]) if computes else (),
        reads=tuple(_integers(match["reads"])),
        writes=tuple(_integers(match["writes"])),
        adds=tuple(_integers(" ".join(re.findall(r"\+s\d+", match["writes"])))),
        allocates=tuple(_integers(match["allocates"])),
        frees=tuple(_integers(match["frees"])),
        waits=tuple(_int(wait.rstrip("!")) for wait in waits),
        ends=tuple(_int(wait[:-1]) for wait in waits if wait.endswith("!")),
        buckets=tuple(_integers(match["buckets"])),
        weights=tuple(map(float, (match["weights"] or "").split())),
        workspace=_int(match["workspace"] or "0"),
        beside=_int(match["beside"] or "0"),
        at_end=_int(match["ending"] or "0"),
        holds=tuple(_integers(match["holds"])),
        early=None if match["early"] is None else _int(match["early"]),
    )


def _parsed_op(verb: Verb, match: re.Match[str]) -> tuple[Op, Content | None, int]:
    """The op, what it moves, and the value or bucket."""
    row = match.groups()
    if verb is Verb.COMPUTE:
        return Compute(_int(row[0]), Pass(row[1]), _int(row[2])), None, 0
    if verb is Verb.UPDATE:
        return Update(_int(row[0])), None, _int(row[0])
    if verb is Verb.COPY:
        return Copy(*map(_int, row)), None, _int(row[0])
    if verb is Verb.ADD:
        return Add(*map(_int, row)), None, 0
    if verb is Verb.SELECT:
        return Select(tuple(map(_range, row[0].split("|")))), None, 0
    content, of = Content(row[-2]), _int(row[-1])
    if verb is Verb.COLLECTIVE:
        before, after = (_PLACEMENTS[written] for written in row[:2])
        groups = tuple(map(_range, row[2].split("|")))
        room = None if row[3] is None else _int(row[3])
        padded, by_host, runs = row[4] is not None, row[5] is not None, _int(row[6] or "1")
        op = Collective(before, after, groups, room, padded, by_host, runs)
        if op.kind not in COLLECTIVES:
            raise ValueError(f"no collective turns {before} into {after}")
        return op, content, of
    source, ours, target, theirs, dim, rows, *_ = row
    replicas, counts = (_int(ours), _int(theirs)), None if rows is None else _int(rows)
    return Transfer(_range(source), _range(target), _int(dim), replicas, counts), content, of


def _row_shards(devices: str, copies: str | None) -> RowShards:
    shards = RowShards(_range(devices), _int(copies or "1"))
    if shards.copies < 1 or len(shards.devices) % shards.copies:
        raise ValueError(f"{len(shards.devices)} devices are not copies of {shards.copies} each")
    return shards


def _axes(written: str) -> tuple[tuple[str, int, int], ...]:
    words = [re.split("[/%]", word) for word in written.split()]
    axes = tuple((axis, _int(stride), _int(ways)) for axis, stride, ways in words)
    if any(stride < 1 or ways < 1 for _, stride, ways in axes):
        raise ValueError("the strides and ways of axes are from 1 on")
    return axes


def _integers(written: str | None) -> Iterator[int]:
    return (_int(word.lstrip("+s")) for word in (written or "").split())


def _range(written: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, written.split(",")):
        first, _, last = part.partition("-")
        run = range(_int(first), _int(last or first) + 1)
        if not 0 < len(run) <= _MOST - len(numbers):
            raise ValueError(f"{part} are none, or more than {_MOST:,} numbers")
        numbers += run
    return tuple(numbers)


def _int(written: str) -> int:
    if len(written) > _DIGITS:
        raise ValueError(f"a number has at most {_DIGITS} digits")
    return int(written)
