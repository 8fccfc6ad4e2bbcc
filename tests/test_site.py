"""The documentation site builds without a warning, has every page, and loads nothing remote."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

mkdocs_config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed: make env")
ROOT = Path(__file__).parent.parent
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "src"), ("iframe", "src")}
"""What a browser loads by itself; links for readers may lead anywhere."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a site that was built in strict mode, into its own folder."""
    from mkdocs.commands.build import build

    folder = tmp_path_factory.mktemp("site")
    found = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    build(found)  # a warning is an error
    return found


def pages(entry: Any) -> Iterator[str]:
    """The Markdown files in the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(inner)


@pytest.mark.slow
def test_every_page_of_the_navigation_is_there(config: Any) -> None:
    found = list(pages(config.nav))
    assert len(found) > 25
    for page in found:
        html = Path(config.site_dir, page).with_suffix(".html").read_text()
        heading = re.search(r"^# (.+)$", Path(config.docs_dir, page).read_text(), re.M)
        assert heading is not None, page
        assert heading[1] in html, page


def test_every_page_is_in_the_navigation(config: Any) -> None:
    docs = Path(config.docs_dir)
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} == set(pages(config.nav))


class Assets(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        self.found += [value for name, value in attrs if (tag, name) in LOADED and value]


def test_nothing_is_fetched_from_elsewhere(config: Any) -> None:
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        assets = Assets()
        assets.feed(path.read_text())
        assert assets.found, path
        outside = [url for url in assets.found if re.match(r"[a-z]*:?//", url)]
        assert not outside, path
        for url in assets.found:
            from_root = url.startswith("/")  # as on the 404 page
            place = (site if from_root else path.parent) / re.split("[?#]", url.lstrip("/"))[0]
            assert url.startswith("data:") or place.exists(), (path, url)
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", path.read_text()), path


def test_pictures_are_small(config: Any) -> None:
    sizes = {path.name: path.stat().st_size for path in Path(config.docs_dir, "pictures").iterdir()}
    assert max(sizes.values()) < 80 * 1024
    assert sum(sizes.values()) < 900 * 1024


def test_every_picture_is_shown(config: Any) -> None:
    docs = Path(config.docs_dir)
    pictures = docs / "pictures"
    text = "".join(path.read_text() for path in docs.rglob("*.md"))
    kept = {path.name for path in pictures.iterdir() if path.suffix in (".svg", ".png")}
    assert {name for name in kept if f"pictures/{name})" not in text} == set()
