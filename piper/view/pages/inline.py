"""One HTML file from a template, its styles, its scripts and its data: no server, no network.

The data contain user-chosen names, so they are escaped and cannot end the element that holds them.
The page's content security policy allows only its own script and style. Distinct items of the data
have numbers, so that a page holds each once.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any


def page(
    title: str, template: str, styles: Sequence[str], scripts: Sequence[str], data: Any
) -> str:
    """The asset ``template`` with everything it needs inlined; the scripts form one module, in the
    given order."""
    style = "\n".join(asset(name) for name in styles)
    script = "\n".join(asset(name) for name in scripts)
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'",
        "title": _escaped(title),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    # One pass: a placeholder inside user data is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset(template))


def asset(name: str) -> str:
    """A file of the folder ``assets``."""
    return (files("piper.view") / "assets" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """``data`` as JSON that is safe inside a script element, whatever its strings contain: it has
    no ``</script>``, no ``<!--`` and no line separators."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _escaped(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class Numbered:
    """Numbers distinct items from 0."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of ``item``; a new item gets the next number."""
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[Any]:
        """The distinct items in the order of their numbers."""
        return list(self._numbers)
