"""A program on a worker group: how it starts, and what a trainer asks of its devices, in calls of
``WorkerDevice``.

Under torchrun several processes have a trainer, each calls its own devices, and what all must know
goes through ``once``. A process may have no device in the program: it waits, and gets the report of
a step from the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from piper.launch.device.device import WorkerDevice
from piper.launch.device.device_programs import device_programs, first_weights
from piper.launch.device.report import ProfileKind, Report
from piper.launch.device.worker_group import BatchRows, Each, WorkerGroup, answers_of_all, everyone
from piper.program.program import Program


def start(group: WorkerGroup, program: Program) -> None:
    """Load the program on the devices of ``group``, with its initial weights."""
    weights, agreement = first_weights(program), group.agreement
    if agreement is not None:
        agreement.agree_on(program)
    group.seat(program.devices, program.device)
    job = group.once(lambda: uuid.uuid4().hex)
    fetch = weights if agreement is None else agreement.noting(weights)
    group.call(WorkerDevice.load, job, Each(device_programs(program), own=program.training), fetch)
    if agreement is not None:
        agreement.refuse_other_weights()


def rows_of(group: WorkerGroup) -> list[int] | None:
    """The rows of a batch that the devices of this process read; None for all rows."""
    if group.trainers == 1:
        return None
    return sorted(set().union(*group.call(WorkerDevice.rows_read)))


def train(
    group: WorkerGroup,
    program: Program,
    batch: Sequence[Tensor],
    *,
    report: bool = True,
    own_rows: bool = False,
    observe: ProfileKind | None = None,
) -> Report:
    """Train on one batch, and measure what ``observe`` says of the step. With ``own_rows`` the
    batch has only the rows of this process."""
    rows = rows_of(group) if own_rows else None
    if group.agreement is not None:
        group.agreement.refuse_other_steps(
            batch, rows, lambda: [x for groups in group.call(WorkerDevice.groups) for x in groups]
        )
    given = BatchRows(program, batch, rows)
    if observe is None:
        return _told(group, program, group.call(WorkerDevice.step, given, report))
    own = [report.on_host() for report in group.call(WorkerDevice.profile, given, observe)]
    return Report.joined(answers_of_all(group, own))


def evaluate(
    group: WorkerGroup, program: Program, batch: Sequence[Tensor], *, own_rows: bool = False
) -> Report:
    """The loss and the outputs of one batch; nothing changes."""
    rows = rows_of(group) if own_rows else None
    if group.agreement is not None:
        group.agreement.refuse_other_batches(batch, rows)
    given = BatchRows(program, batch, rows, evaluated=True)
    report = _told(group, program, group.call(WorkerDevice.evaluate, given))
    if group.trainers == 1 or not program.codes[1].outputs:
        return report
    mine = {place: x.cpu() for place, x in report.returned.items()}
    return replace(report, returned={p: x for row in everyone(group, mine) for p, x in row.items()})


def _told(group: WorkerGroup, program: Program, reports: Sequence[Report]) -> Report:
    """The report of a step, also in processes that wait: the program's first device sends it to
    them."""
    if len(program.devices) >= group.trainers:
        return Report.joined(reports)
    first = program.devices[0] in group.devices
    mine = reports[0].on_host() if first else None
    sent = group.once(lambda rows: next(x for x in rows if x is not None), mine)
    return Report.joined(reports) if reports else sent
