"""Loads the target of a command: a script that defines a job, or the folder of a saved program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from piper.base.errors import PiperError
from piper.cost.cluster import Cluster
from piper.lower.plans.memory_limit import check_limit
from piper.program.job import Job
from piper.program.job_settings import job_with, refuse_settings, settings_text
from piper.program.program import Program
from piper.strategies import mesh
from piper.strategies.strategy import Strategy


def job_in(script: Path, settings: Sequence[str] | None = None) -> Job:
    """The job that a script defines, with ``settings`` as "name=value"."""
    module = _loaded(script)
    job = getattr(module, "job", None)
    if callable(job) and not isinstance(job, Job):
        job = job_with(job, settings or ())
    else:
        refuse_settings(settings or (), script)
    if not isinstance(job, Job):
        raise PiperError(
            f"{script} defines no job: write `def job() -> piper.Job: ...` "
            f"(found {type(job).__name__ if job is not None else 'nothing'} by that name)"
        )
    return job


def settings_in(script: Path) -> str:
    """The settings of the job that a script defines, and their defaults."""
    job = getattr(_loaded(script), "job", None)
    return settings_text(job) if callable(job) else f"{script} defines no function `job`"


def program_of(
    target: Path,
    strategy: Strategy | None,
    settings: Sequence[str] | None = None,
    *,
    memory_limit: int | None = None,
    cluster: Cluster | None = None,
) -> Program:
    """The program of ``target``, a script or the folder of a saved program."""
    if target.is_dir():
        if settings:
            raise PiperError(
                f"--set {settings[0]}: {target} is a program compiled already; give the script"
            )
        return _saved(target, strategy, memory_limit)
    return job_in(target, settings).compile(strategy, memory_limit=memory_limit, cluster=cluster)


def strategy_of(path: Path | None, spec: str | None) -> Strategy | None:
    """A strategy from a JSON file, or from arguments of ``mesh``: "pp=2,dp=2,schedule=zb-v"."""
    if path is not None and spec is not None:
        raise PiperError("give --strategy or --mesh, not both")
    if path is not None:
        return Strategy.load(path)
    return meshed(spec) if spec is not None else None


def meshed(spec: str) -> Strategy:
    """``mesh`` with the arguments in ``spec``."""
    arguments = _arguments("--mesh", spec)
    try:
        return mesh(**arguments)
    except PiperError as error:
        raise PiperError(f"--mesh {spec!r}: {error}") from None


def launch_options(given: Sequence[str] | None) -> dict[str, Any]:
    """The options of ``launch`` in ``given``."""
    return _arguments("--launch", ",".join(given or ()))


def _arguments(option: str, spec: str) -> dict[str, Any]:
    """The arguments in text such as "pp=2,dp=4"."""
    arguments: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise PiperError(f"{option} {spec!r}: {part!r} is not of the form name=value")
        arguments[name] = _value(value)
    return arguments


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _saved(folder: Path, strategy: Strategy | None, limit: int | None) -> Program:
    if strategy is not None:
        raise PiperError(
            f"{folder} is a program compiled already, whose strategy is fixed: give a script to "
            "compile another"
        )
    program = Program.load(folder)
    if limit is None:
        return program
    for plan, memory in zip(program.plans, program.memory, strict=True):
        check_limit(program.dag, memory, plan, limit)
    return replace(program, settings=replace(program.settings, memory_limit=limit))


def _loaded(script: Path) -> ModuleType:
    if not script.is_file():
        raise PiperError(f"there is no script {script}")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise PiperError(f"{script} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(script.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python itself does for a script
    sys.modules[script.stem] = module
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # no .pyc beside the script, as with python script.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    return module
