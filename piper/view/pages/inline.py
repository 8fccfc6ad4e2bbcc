"""One HTML file from a template, its style, its script and its data: no server, no network.

The data are names that users chose, so nothing of them can end the element they stand in; and the
page allows itself only the script and the style that it came with.
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
    """The page ``template`` of the assets with everything it needs inside; the scripts share one
    module, in the order given."""
    style = "\n".join(asset(name) for name in styles)
    script = "\n".join(asset(name) for name in scripts)
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'",
        "title": _escaped(title),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    # In one go: a name of the user's that looks like one of these stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset(template))


def asset(name: str) -> str:
    """A file of the folder ``assets``."""
    return (files("piper.view") / "assets" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """``data`` as JSON that can stand inside a script element whatever its strings hold: neither
    ``</script>`` nor ``<!--`` nor a separator of lines is left in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _escaped(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
