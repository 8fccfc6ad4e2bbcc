"""Records as plain JSON data and back, by their type hints: msgspec with torch's dtypes.

Input is untrusted: every item has the hinted type, or a ``MalformedError`` says where it does not.
Every file begins with a ``Format``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

from piper.base.errors import PiperError
from piper.base.reading import DTYPES, MalformedError, shown, torch_name
from piper.base.units import class_text

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, a size or an offset."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ArrayRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record whose fields are a JSON array, in their order."""


@dataclass(frozen=True, slots=True)
class Format:
    """The name and version of a file format."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"piper {self.name} {self.version}"

    def headed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """``content`` with this format's name and version as the first entry."""
        return {"format": str(self), **content}

    def content(self, data: Any) -> dict[str, Any]:
        """The inverse of ``headed``. Refuses other data and other versions."""
        format_name = data.get("format") if type(data) is dict else None
        if format_name != str(self):
            other = shown(format_name) if type(format_name) is str else "nothing that Piper wrote"
            raise MalformedError(
                f"this holds {other}, not {str(self)!r}: write it again with this version of Piper"
            )
        return {name: item for name, item in data.items() if name != "format"}


def picked(item: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of ``item`` with these names: fields that two records share."""
    return {name: getattr(item, name) for name in names}


def encode(item: Any) -> Any:
    """``item`` as JSON data."""
    return msgspec.to_builtins(item, enc_hook=_written, str_keys=True)


def decode(kind: Any, data: Any) -> Any:
    """The object of type ``kind`` that ``encode`` wrote as ``data``. Refuses anything else."""
    try:
        return msgspec.convert(data, kind, dec_hook=_read, str_keys=True)
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from None
    except UnicodeError as error:  # JSON may hold half a character
        raise MalformedError(f"this is not text: {error}") from None
    except MalformedError:
        raise
    except PiperError as error:  # a type that checks itself
        raise MalformedError(str(error)) from None


def _written(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return torch_name(item)
    if isinstance(item, Mapping):
        return dict(item)
    raise TypeError(f"{class_text(item)} cannot be written to a file")


def _read(kind: Any, data: Any) -> Any:
    if kind is torch.dtype and type(data) is str and data in DTYPES:
        return DTYPES[data]
    raise ValueError(f"{shown(data)} is not a {kind.__name__}")


_PLACE = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$(?P<place>.*)`", re.DOTALL)


def _malformed(said: str) -> MalformedError:
    """The error of msgspec as ours: it ends with the path to the data."""
    match = _PLACE.fullmatch(said)
    error = MalformedError(match["what"] if match else said)
    if match:
        error.at.append(match["place"])
    return error
