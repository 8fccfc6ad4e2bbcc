"""The candidates of a search as an interactive page: figures go in, one HTML file comes out."""

from __future__ import annotations

from typing import Any

from piper.view.pages.inline import page


def tuning_page(title: str, data: Any) -> str:
    """A page with the front of time against memory, a table that can be sorted, the parts of each
    step, what was refused, and the strategy as code and JSON. ``data`` is ``Tuned.to_json``."""
    styles = ("common.css", "tuning.css")
    return page(title, "tuning.html", styles, ("common.js", "tuning.js"), {"title": title, **data})
