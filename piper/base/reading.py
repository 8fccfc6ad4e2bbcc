"""Reads untrusted files, JSON and TOML, with limits; ``MalformedError`` says what is wrong and
where."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from piper.base.errors import PiperError
from piper.base.paths import path_of

DTYPES: Mapping[str, torch.dtype] = {
    name: item for name, item in vars(torch).items() if isinstance(item, torch.dtype)
}
"""The dtypes by their names in files."""
_SHOWN = 60
_DEPTH = 100
"""Limit on nesting of lists and objects. Our files nest less deeply."""
_MOST = 2**128
"""Limit on the absolute value of integers, so that each fits a message and converts to a float."""
_FILE_BYTES = 2**30
"""Largest file to read, in bytes, unless it holds tensors."""


def torch_name(item: object) -> str:
    """The name of a dtype, layout or memory format in files and messages, without ``torch.``."""
    return str(item).removeprefix("torch.")


class MalformedError(PiperError):
    """Data of the wrong form, and where it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.at: list[str] = []
        """The path to the data, innermost part first."""

    def __str__(self) -> str:
        place = "".join(reversed(self.at)).removeprefix(".")
        return f"{place}: {self.what}" if place else self.what


@contextmanager
def within(place: str | int) -> Iterator[None]:
    """Adds ``place``, a name or an index, to the path of an error raised inside."""
    try:
        yield
    except MalformedError as error:
        error.at.append(f"[{place}]" if isinstance(place, int) else f".{place}")
        raise


def shown(item: Any, most: int = _SHOWN) -> str:
    """``item`` for a message, cut to ``most`` characters."""
    return cut(repr(item), most)


def cut(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else text[: most - 4] + " ..."


def wrong(item: Any, wanted: str) -> MalformedError:
    return MalformedError(f"{shown(item)} is not {wanted}")


def open_file(path: Path) -> BinaryIO:
    """``path``, opened for reading. Refuses anything but a regular file: reading a pipe may block
    forever."""
    file = open(path, "rb", buffering=0, opener=_opener)  # noqa: SIM115 - it is returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise MalformedError("it is not a file, but a pipe or a device: copy it to a file")
    return file


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise opening a pipe waits for a writer


def file_bytes(path: str | Path, most: int = _FILE_BYTES) -> bytes:
    """The whole content of a file of at most ``most`` bytes."""
    with open_file(path_of(path)) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise MalformedError(f"it has {size} bytes, and at most {most} are read")
        return file.read()


def parsed(text: str | bytes) -> Any:
    """The data of a JSON text."""
    return _loaded("JSON", json.loads, text)


def parsed_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text."""
    data: dict[str, Any] = _loaded("TOML", tomllib.loads, text)
    return data


def _loaded(kind: str, loads: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        data = loads(text)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"this is not {kind}: {error}") from None
    except ValueError:  # Python refuses integers of more than a few thousand digits
        raise _too_long() from None
    check_limits(data)
    return data


def _too_deep() -> MalformedError:
    return MalformedError("this is nested too deeply to be read")


def _too_long() -> MalformedError:
    return MalformedError("a number in it has too many digits to be read")


def check_limits(data: Any) -> None:
    """Refuse data nested so deeply that a recursive walk may overflow the stack, and integers that
    reach ``_MOST``."""
    level = [data]
    for _ in range(_DEPTH):
        if any(type(item) is int and not -_MOST < item < _MOST for item in level):
            raise _too_long()
        level = [
            item
            for parent in level
            if type(parent) in (list, dict)
            for item in (parent.values() if type(parent) is dict else parent)
        ]
        if not level:
            return
    raise _too_deep()


def rows(items: Any, read: Callable[[Any], Any]) -> list[Any]:
    """A list whose items are each read by ``read``."""
    if type(items) is not list:
        raise wrong(items, "a list")
    made = []
    for place, item in enumerate(items):
        with within(place):
            made.append(read(item))
    return made
