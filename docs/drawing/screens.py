"""Screenshots of the pages that Piper writes for the programs of the tutorial. The tutorial's
snippets run, and their results are shown."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright

import piper
from piper.strategies import mesh
from piper.view.pages.timeline_page import timeline_page

FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --no-first-run"
COLOURS = 200
"""Colours of a screenshot: enough for rare ones and for the antialiased edges of letters."""
Do = Callable[[Page], object]
"""Acts on a page as a user would, before the screenshot."""


def collapsed(page: Page) -> None:
    """Show one line per device."""
    page.keyboard.press("X")


def first_open(page: Page) -> None:
    """Show one line per device, and all streams of the first."""
    page.keyboard.press("X")
    page.wait_for_timeout(200)
    page.mouse.click(13, 165)
    page.mouse.move(600, 20)


def untouched(page: Page) -> None:
    pass


@dataclass(frozen=True)
class Shot:
    """A page to write, the actions on it, and the size of the picture."""

    write: Callable[[Path], object]
    height: int
    do: Do = untouched
    width: int = 1280


def run_page(page: Path) -> dict[str, Any]:
    """Run the snippets of a page in a temporary folder; returns the names they define."""
    found: dict[str, Any] = {"__name__": "__main__"}
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in snippets:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, page.name, "exec"), found)
    return found


def measured(given: Mapping[str, Any], page: Path) -> None:
    """Write a page with a measured step of two processes beside its simulation from the profile."""
    torch.manual_seed(0)
    model = given["Net"](layers=4, width=192, vocab=256)
    x, y = torch.randint(256, (2, 32, 32))
    strategy = mesh(pp=2, schedule="1f1b", microbatches=8)
    how = {"loss": given["loss"], "optimizer": given["adamw"], "tags": given["tags"]}
    program = piper.compile(model, strategy, inputs=(x,), targets=(y,), **how)
    with piper.launch(program, on="processes", threads=1) as trainer:
        for _ in range(3):
            trainer.step(x, y)
        profiles = [trainer.profile(x, y, steps=5) for _ in range(6)]
    profile = min(profiles, key=lambda one: one.seconds)  # the least disturbed one
    cluster = piper.Cluster.of("CPU", 2)
    profile.show(page, beside=program.simulate(cluster, profile.recorded))


def screenshots(tutorial: Path) -> dict[str, Shot]:
    """All screenshots by name."""
    given = run_page(tutorial)
    box = given["box"]
    one, two = (given[name].simulate(box) for name in ("one", "two"))

    def both(path: Path) -> None:
        path.write_text(timeline_page(one.run("1F1B"), two.run("DualPipeV")), encoding="utf-8")

    return {
        "tutorial_dag": Shot(given["program"].show_dag, 540),
        "tutorial_first": Shot(given["found"].show, 450, first_open),
        "tutorial_compare": Shot(both, 480),
        "timeline": Shot(two.show, 472, first_open),
        "compare": Shot(lambda path: measured(given, path), 420, collapsed),
    }


@contextlib.contextmanager
def browser() -> Iterator[Callable[[Path, int, int], Page]]:
    """Yields a function that opens a page offline, in a window of the given size."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=FLAGS.split()
        )
        context = made.new_context(offline=True, color_scheme="light")

        def opened(path: Path, width: int, height: int) -> Page:
            page = context.new_page()
            page.set_viewport_size({"width": width, "height": height})
            page.goto(path.as_uri())
            page.wait_for_timeout(600)
            return page

        yield opened
        made.close()


def take(pictures: Path, tutorial: Path, wanted: list[str]) -> Iterator[Path]:
    """Take the screenshots, with few colours."""
    with tempfile.TemporaryDirectory() as folder, browser() as opened:
        for name, shot in screenshots(tutorial).items():
            if wanted and name not in wanted:
                continue
            file = Path(folder) / f"{name}.html"
            shot.write(file)
            page = opened(file, shot.width, shot.height)
            shot.do(page)
            page.wait_for_timeout(400)
            path = pictures / f"{name}.png"
            reduced(Image.open(io.BytesIO(page.screenshot()))).save(path, optimize=True)
            yield path


def reduced(whole: Image.Image) -> Image.Image:
    """The picture in its most frequent colours, which stay exact; others become the nearest one."""
    pixels = np.asarray(whole.convert("RGB")).astype(np.int32)
    coded = (pixels[..., 0] << 16) + (pixels[..., 1] << 8) + pixels[..., 2]
    found, places, counts = np.unique(coded, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)
    kept = colours[np.argsort(-counts)[:COLOURS]]
    nearest = ((colours[:, None] - kept[None]) ** 2).sum(-1).argmin(1)
    few = Image.fromarray(nearest[places].reshape(coded.shape).astype(np.uint8), mode="P")
    few.putpalette(kept.astype(np.uint8).tobytes())
    return few
