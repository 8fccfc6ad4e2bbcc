"""``--set name=value``: settings of a job. They are the parameters of the function ``job`` that
have defaults, which say their types:

    def job(lr: float = 3e-4, model: ModelConfig = ModelConfig(layers=4)) -> piper.Job: ...

    --set lr=1e-4 --set model.layers=8
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import msgspec

from piper.base.arguments import nearest
from piper.base.errors import PiperError


def job_with(job: Callable[..., Any], given: Sequence[str]) -> Any:
    """The result of ``job`` with the settings ``given``, each as "name=value"."""
    settings = _settings(job)
    kinds = get_type_hints(job) if given else {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise PiperError(f"--set {text}: write name=value. {_listed(settings)}")
        settings = _changed(settings, kinds, name.strip().split("."), value.strip(), text, settings)
    return job(**settings)


def settings_text(job: Callable[..., Any]) -> str:
    """The settings of ``job`` and their defaults, as they are written."""
    rows = [f"  --set {name}={_written(x)}" for name, x in _flat(_settings(job)).items()]
    return "\n".join(["Settings of the job, with their defaults:", *rows]) if rows else _NONE


def refuse_settings(given: Sequence[str], script: object) -> None:
    """Refuse settings of a job that is no function."""
    if given:
        raise PiperError(
            f"--set {given[0]}: {script} defines 'job' as a finished Job. Settings are parameters "
            "with defaults of a function: write def job(lr: float = 3e-4) -> piper.Job: ..."
        )


def _settings(job: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of ``job`` that have defaults."""
    parameters = inspect.signature(job).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def _changed(
    whole: Any, kinds: Mapping[str, Any], path: Sequence[str], value: str, text: str, root: Any
) -> Any:
    """``whole``, a dataclass or a mapping, with ``value`` at ``path``."""
    inside = _inside(whole)
    first, *rest = path
    if first not in inside or (rest and not _inside(inside[first])):
        names = list(_flat(root))
        wrong = text.partition("=")[0].strip()
        hint = nearest(wrong, names)
        raise PiperError(f"--set {text}: there is no such setting{hint or '.'} {_listed(root)}")
    now = inside[first]
    if rest:
        own = get_type_hints(type(now)) if is_dataclass(now) else {}
        new = _changed(now, own, rest, value, text, root)
    else:
        new = _parsed(value, kinds.get(first, type(now)), text)
    return {**whole, first: new} if isinstance(whole, Mapping) else replace(whole, **{first: new})


def _parsed(value: str, kind: Any, text: str) -> Any:
    """``value`` as the type of its setting; lists and tables are written as JSON."""
    try:
        if value[:1] in ("[", "{"):
            return msgspec.json.decode(value, type=kind, strict=False)
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda kind, x: kind(x))
    except Exception as error:  # noqa: BLE001 - the user's own type may raise any
        name = getattr(kind, "__name__", None) or str(kind)
        why = "write true or false" if kind is bool else error
        raise PiperError(f"--set {text}: {value!r} is not a valid {name} ({why})") from None


def _inside(item: Any) -> Mapping[str, Any]:
    """The settings within a setting; none if it is a single value."""
    if is_dataclass(item) and not isinstance(item, type):
        return {x.name: getattr(item, x.name) for x in fields(item) if x.init}
    return item if isinstance(item, Mapping) else {}


def _flat(item: Any, prefix: str = "") -> dict[str, Any]:
    """The single values among the settings, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in _inside(item).items():
        inner = _flat(value, f"{prefix}{name}.")
        found |= inner or {f"{prefix}{name}": value}
    return found


_NONE = "The function `job` has no parameter with a default, so there is nothing to set"


def _listed(settings: Any) -> str:
    rows = [f"{name}={value!r}" for name, value in _flat(settings).items()]
    return f"The settings of this job are {', '.join(rows)}" if rows else _NONE


def _written(value: Any) -> str:
    """``value`` as ``--set`` takes it."""
    if value is None:
        return "None"
    return msgspec.json.encode(value, enc_hook=str).decode().strip('"')
