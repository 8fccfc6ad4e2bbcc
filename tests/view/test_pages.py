"""The pages as a user sees them, in an offline browser: timelines, and the DAG after each
directive. The browser is Debian's Chromium; without it, or without Playwright, the tests are
skipped."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import piper
from piper.base.errors import PiperError
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.lower.lower import lower
from piper.strategies import mesh
from piper.view.pages.dag_page import dag_page
from piper.view.pages.inline import embedded
from piper.view.pages.timeline_page import timeline_page
from piper.view.runs import Event, Run, ShownDevice, StreamRow
from tests.facts import chain

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make env")
CHROMIUM = shutil.which("chromium")
browses = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium to open pages with: apt-get install chromium"
)
ASSETS = files("piper.view") / "assets"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)
HOSTILE = "</script><img src=x onerror=window.hurt=1><!--\u2028{{script}} & \"'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield made
        made.close()


@dataclass
class Opened:
    """An open page, with its errors and its network requests."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def view(self) -> dict[str, Any]:
        """The state of the timeline, once it is drawn."""
        self.settle()
        return self.ask("piper.view()")

    def settle(self) -> None:
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def middle(self, run: int, index: int) -> tuple[float, float]:
        """The center of an event, in window coordinates."""
        box = self.ask(f"piper.rectOf({run}, {index})")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def text(self, where: str) -> str:
        return self.page.locator(where).inner_text()


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def context(browser: Any) -> Any:
    """A browser context without a network."""
    return browser.new_context(offline=True)


@pytest.fixture
def opening(context: Any, tmp_path: Path) -> Open:
    """Opens a page from a file; when it closes there must be no error and no further request."""

    @contextmanager
    def opened(
        html: str, scheme: str = "light", width: int = 1200, height: int = 800
    ) -> Iterator[Opened]:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        found = Opened(context.new_page())
        found.page.set_default_timeout(10_000)
        found.page.emulate_media(color_scheme=scheme)
        found.page.set_viewport_size({"width": width, "height": height})
        found.page.on("console", lambda said: found.errors.append(said.text))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri())
        found.settle()
        yield found
        assert found.errors == []
        assert found.requests == [path.as_uri()]
        found.page.close()

    return opened


def event(row: int, start: float, length: float, kind: str = "F", **more: Any) -> Event:
    """An event, by default of microbatch 0 and stage ``PP 0``."""
    known: dict[str, Any] = {"microbatch": 0, "stage": "PP 0", "node": 0, "pc": 0, **more}
    label = f"{kind} {known['stage']} MB[{known['microbatch']}]"
    known = {"name": label, "directive": "build", "tags": "layer 0, PP 0", **known}
    return Event(row=row, start=start, end=start + length, kind=kind, **known)


MS = 1e-3
LIMIT = 3 * 2**20


def small(title: str = "a step", slow: float = 1.0) -> Run:
    """Two devices, each with compute and a stream of messages; ``slow`` stretches the backward.

    d0  F0 F1 ..  ..  BBBB B1B1          the two backwards of device 1 overlap
    d1  .. F0 F1 B0B0 B1B1
    """
    b = 2 * MS * slow
    events = (
        event(0, 0, MS, node=1, flops=10**9, critical=True),
        event(0, MS, MS, node=2, microbatch=1),
        event(0, 4 * MS, b, "B", node=7, critical=True),
        event(0, 4 * MS + b, b, "B", node=8, microbatch=1, critical=True),
        event(1, MS, MS / 2, "send", node=3, nbytes=5 * 10**5, directive="place({'PP': 1})"),
        event(2, 2 * MS, MS, node=4, stage="PP 1", tags="layer 1, PP 1"),
        event(2, 3 * MS, MS / 2, "B", node=5, stage="PP 1"),
        event(2, 3.5 * MS, MS / 4, "F", node=6, stage="PP 1", microbatch=1),
        event(2, 3.75 * MS, MS / 4, "B", node=9, stage="PP 1"),
        event(3, MS, MS / 2, "recv", node=3, nbytes=5 * 10**5),
    )
    memory = ((0.0, 2**20), (2 * MS, 2 * 2**20), (5 * MS, 2**19))
    return Run(
        title=title,
        seconds=4 * MS + 2 * b,
        devices=(ShownDevice("device 0", memory, LIMIT), ShownDevice("device 1", memory)),
        rows=(
            StreamRow(0, "compute"),
            StreamRow(0, "p2p/send"),
            StreamRow(1, "compute"),
            StreamRow(1, "p2p/recv"),
        ),
        events=events,
        facts={"tokens/s": f"{1000 / slow:,.0f}", "strategy": title},
    )


def colours(page: Any, *, within: tuple[int, int, int, int] | None = None) -> int:
    """The number of distinct colours in a part of the canvas."""
    x, y, w, h = within or (0, 0, 10**6, 10**6)
    return page.evaluate(
        """([x, y, w, h]) => {
            const canvas = document.getElementById('canvas');
            const wide = Math.min(w, canvas.width - x), high = Math.min(h, canvas.height - y);
            const data = canvas.getContext('2d').getImageData(x, y, wide, high).data;
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        [x, y, w, h],
    )


# The content of a page


def test_nothing_in_the_data_can_end_their_element() -> None:
    text = embedded([HOSTILE])
    assert not set("<>&\u2028\u2029") & set(text)
    assert '\\"' in text


def test_the_scripts_can_stand_in_a_page() -> None:
    scripts = [one for one in ASSETS.iterdir() if one.name.endswith(".js")]
    assert len(scripts) > 5
    for script in scripts:
        text = script.read_text(encoding="utf-8").lower()
        assert "</script" not in text, script
        assert "<!--" not in text, script


def test_a_timeline_is_of_one_run_or_two() -> None:
    with pytest.raises(PiperError, match="one run, or two to compare, not 0"):
        timeline_page()
    with pytest.raises(PiperError, match="not 3"):
        timeline_page(small(), small(), small())


def test_the_dag_page_needs_a_step() -> None:
    with pytest.raises(PiperError, match="at least one step"):
        dag_page("none", [])


# The timeline


@browses
def test_a_timeline_draws_its_events(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        assert seen.page.title() == "a step"
        assert seen.view()["events"] == len(small().events)
        x, y = map(int, seen.middle(0, 0))
        assert seen.ask(f"piper.eventAt({x}, {y})") == {"run": 0, "index": 0}
        assert colours(seen.page) > 20
        assert "Step 8.00 ms" in seen.text("#facts").replace("\n", " ")
        assert "Tokens/s\n1,000" in seen.text("#facts")
        assert [seen.text("#legend")] == ["F\nB\nsend\nrecv"]


@browses
def test_zooming_and_panning_keep_what_is_under_the_pointer(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        whole = seen.view()
        x, y = seen.middle(0, 2)
        seen.page.mouse.move(x, y)
        seen.page.mouse.wheel(0, -600)
        near = seen.view()
        assert near["to"] - near["from"] < 0.5 * (whole["to"] - whole["from"])
        assert seen.ask(f"piper.eventAt({x}, {y})")["index"] == 2
        seen.page.mouse.down()
        seen.page.mouse.move(x + 80, y, steps=4)
        seen.page.mouse.up()
        assert seen.view()["from"] < near["from"]
        assert seen.ask(f"piper.eventAt({x + 80}, {y})")["index"] == 2
        assert seen.view()["selected"] is None, "a drag is no click"
        seen.page.keyboard.down("Shift")
        seen.page.mouse.wheel(0, 200)
        seen.page.keyboard.up("Shift")
        assert seen.view()["from"] > near["from"] - 0.2
        seen.page.mouse.dblclick(x, y)
        assert seen.view()["from"] == whole["from"]
        assert seen.view()["to"] == whole["to"]


@browses
def test_hovering_and_clicking_say_everything_of_an_event(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        seen.page.mouse.move(*seen.middle(0, 4))
        tip = seen.text("#tip")
        assert "send PP 0 MB[0]" in tip
        assert "#3 · device 0 · p2p/send" in tip
        assert "1.00 GB/s" in tip
        seen.page.mouse.click(*seen.middle(0, 0))
        details = seen.text("#details").replace("\n", " ")
        for said in ("Node #1", "Duration 1.00 ms", "1.00 TFLOP/s", "Critical yes", "Stage PP 0"):
            assert said in details
        assert "F PP 0 MB[0], device 0, compute" in seen.text("#live")
        seen.page.mouse.click(*seen.middle(0, 4))
        seen.page.get_by_role("button", name="device 1 · p2p/recv").click()
        assert seen.view()["selected"] == {"run": 0, "index": 9}
        x = seen.middle(0, 0)[0]
        memory = seen.ask("piper.rectOf(0, 4)")
        seen.page.mouse.move(x, memory["y"] + 50)
        assert "Allocated\n1.00 MiB" in seen.text("#tip")
        assert "Peak\n2.00 MiB" in seen.text("#tip")


@browses
def test_search_finds_and_visits_events(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        seen.press("/")
        seen.page.keyboard.type("recv")
        assert seen.text("#matches") == "1 found"
        seen.press("Enter")
        assert seen.text("#matches") == "1 of 1"
        assert seen.view()["selected"] == {"run": 0, "index": 9}
        for query, count in (("#3", 2), ("layer 1", 1), ("place(", 1), ("kind:b", 4), ("mb:1", 3)):
            seen.page.fill("#search", query)
            assert seen.text("#matches") == f"{count} found", query
        seen.press("Escape", "n")
        assert seen.view()["matches"] == 0
        seen.page.get_by_title("Find send").click()
        assert seen.page.input_value("#search") == "kind:send"
        seen.page.locator("#canvas").focus()
        seen.page.fill("#search", "kind:F")
        seen.page.locator("#canvas").focus()
        visited = []
        for key in "nnN":
            seen.press(key)
            visited.append(seen.view()["selected"]["index"])
        assert visited == [0, 1, 0]


@pytest.mark.slow
@browses
def test_colours_legend_and_theme(opening: Open) -> None:
    with opening(timeline_page(small()), "dark") as seen:
        dark = seen.ask("getComputedStyle(document.body).backgroundColor")
        assert seen.ask("document.documentElement.dataset.theme") == "dark"
        seen.page.select_option("#colour", "microbatch")
        assert seen.text("#legend") == "0\n1"
        seen.press("c")
        assert seen.text("#legend") == "PP 0\nPP 1"
        seen.press("c")
        assert seen.text("#legend") == "build\nplace({'PP': 1})"
        seen.page.click("#theme")
        assert seen.ask("getComputedStyle(document.body).backgroundColor") != dark
        assert seen.ask("document.documentElement.dataset.theme") == "light"
        corner = "document.getElementById('canvas').getContext('2d').getImageData(3, 3, 1, 1).data"
        seen.settle()
        assert seen.ask(f"[...{corner}]") == [255, 255, 255, 255]


@browses
def test_everything_can_be_done_with_keys(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        seen.page.locator("#canvas").focus()
        seen.press("]", "]")
        assert seen.view()["selected"] == {"run": 0, "index": 1}
        seen.press("Tab")
        assert seen.view()["selected"]["index"] == 2
        seen.press("Shift+Tab", "[")
        assert seen.view()["selected"]["index"] == 0
        seen.press("j")
        assert seen.view()["selected"]["index"] == 4
        seen.press("Enter")
        wide = seen.view()
        assert wide["to"] - wide["from"] < 0.2
        seen.press("0", "+", "ArrowRight")
        assert seen.view()["from"] > 0.2
        for key, name in (("p", "critical"), ("b", "bubbles"), ("m", "memory")):
            before = seen.view()[name]
            seen.press(key)
            assert seen.view()[name] is not before
        seen.press("x")
        assert seen.view()["collapsed"] == 1
        seen.press("X")
        assert seen.view()["collapsed"] == 2
        seen.press("?")
        assert seen.page.locator("dialog").is_visible()
        seen.press("Escape", "Escape")
        assert not seen.page.locator("dialog").is_visible()
        assert seen.view()["selected"] is None
        seen.press("Tab")
        assert seen.ask("document.activeElement.id") != "canvas", "Tab leaves if nothing is chosen"


@browses
def test_bubbles_overlaps_and_ranges_are_counted(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        seen.press("o")
        assert [
            (p["device"], p["first"]["label"], p["second"]["label"])
            for p in seen.view()["pairs"][0]
        ] == [(1, "PP 1 B0", "PP 1 F1")]
        assert "Overlapped pairs: 1" in seen.text("#pairs")
        left = seen.middle(0, 2)[0] - seen.ask("piper.rectOf(0, 2).width") / 2
        y = seen.middle(0, 0)[1]
        start = seen.ask("piper.rectOf(0, 0).x")
        seen.page.keyboard.down("Shift")
        seen.page.mouse.move(start, y)
        seen.page.mouse.down()
        seen.page.mouse.move(left, y, steps=4)
        seen.page.mouse.up()
        seen.page.keyboard.up("Shift")
        rows = seen.text("#range").replace("\t", " ")
        assert "4.00 ms" in rows
        assert "device 0 50% 50%" in " ".join(rows.split())
        seen.page.get_by_role("button", name="Clear").click()
        assert seen.view()["range"] is None
        device = seen.ask("document.getElementById('canvas').getBoundingClientRect().left") + 40
        seen.page.mouse.click(device, y)
        assert seen.view()["collapsed"] == 1


@browses
def test_two_runs_are_compared(opening: Open) -> None:
    with opening(timeline_page(small("first"), small("second", slow=2.0))) as seen:
        table = " ".join(seen.text("#comparison").split())
        assert "Step 8.00 ms 12.0 ms +50%" in table
        assert "Tokens/s 1,000 500 −50%" in table
        assert "Strategy first second" in table
        seen.page.mouse.move(*seen.middle(0, 2))
        assert seen.view()["partner"] == {"run": 1, "index": 2}
        assert "In B: 4.00 ms, +2.00 ms, +100%" in seen.text("#tip")
        first, second = (seen.ask(f"piper.rectOf({run}, 2).width") for run in (0, 1))
        assert second == pytest.approx(2 * first)
        seen.press("s")
        first, second = (seen.ask(f"piper.rectOf({run}, 2).width") for run in (0, 1))
        assert second == pytest.approx(2 * first * 8 / 12)
        seen.press("X")
        assert seen.view()["collapsed"] == 4


@browses
def test_names_are_text_and_nothing_else(opening: Open) -> None:
    run = small(HOSTILE)
    bad = replace(
        run,
        devices=tuple(replace(d, name=HOSTILE) for d in run.devices),
        rows=tuple(replace(row, stream=HOSTILE) for row in run.rows),
        events=tuple(
            replace(e, name=HOSTILE, kind=HOSTILE, stage=HOSTILE, directive=HOSTILE, tags=HOSTILE)
            for e in run.events
        ),
        facts={HOSTILE: HOSTILE},
    )
    with opening(timeline_page(bad, bad)) as seen:
        for by in ("kind", "stage", "directive"):
            seen.page.select_option("#colour", by)
        seen.press("o", "p", "r")
        seen.ask("piper.select({run: 0, index: 0})")
        seen.page.mouse.move(*seen.middle(0, 0))
        seen.page.fill("#search", "<img")
        assert seen.text("#matches") == "20 found"
        assert seen.ask("window.hurt") is None
        assert seen.ask("document.querySelectorAll('img').length") == 0
        assert seen.page.locator("#details .event-name").text_content() == HOSTILE
        assert seen.page.title() == f"{HOSTILE} and {HOSTILE}"


@pytest.mark.slow
@browses
@pytest.mark.parametrize("many", [0, 1])
def test_hardly_any_events(opening: Open, many: int) -> None:
    run = replace(small(), events=small().events[:many], seconds=MS * many)
    with opening(timeline_page(run)) as seen:
        assert seen.view()["events"] == many
        seen.press("]", "n", "p", "o", "c", "c", "c", "r", "+", "0", "j", "k", "x", "X", "Escape")
    with opening(timeline_page(Run("empty", 0.0, (), (), ()))) as seen:
        assert seen.view()["events"] == 0
        seen.press("]", "p", "b", "o", "m", "c", "r", "+", "0", "X", "Escape")


def large(devices: int, streams: int, each: int) -> Run:
    """Rows full of events, each 0.9 microseconds long."""
    events = tuple(
        event(
            row,
            i * 1e-6,
            0.9e-6,
            "FB"[i % 2] if row % streams == 0 else "all_reduce",
            node=i,
            microbatch=i % 64,
            critical=i % 100 == 0,
        )
        for row in range(devices * streams)
        for i in range(each)
    )
    memory = tuple((i * 1e-6, (i * 7919) % 2**20) for i in range(each))
    return Run(
        title="large",
        seconds=each * 1e-6,
        devices=tuple(ShownDevice(f"device {i}", memory) for i in range(devices)),
        rows=tuple(StreamRow(d, f"stream {s}") for d in range(devices) for s in range(streams)),
        events=events,
    )


@pytest.mark.slow
@browses
def test_a_hundred_thousand_events(opening: Open, capsys: pytest.CaptureFixture[str]) -> None:
    with opening(timeline_page(large(5, 4, 5000))) as seen:
        assert seen.ask("piper.runs[0].size") == 100_000
        drawn = seen.view()
        shown = [i for i in range(20) if seen.ask(f"piper.rectOf(0, {i * 5000}).y") < 800]
        assert 5000 * (len(shown) - 5) < drawn["events"] <= 5000 * len(shown), "rows out of sight"
        assert drawn["shapes"] < drawn["events"] / 3, "what falls on one pixel is one shape"
        seen.ask("piper.look(0.5, 0.502)")
        assert 0 < seen.view()["events"] <= 12 * len(shown), "only what is in sight is looked at"
        seen.ask("piper.look(0, 1)")
        times = seen.ask(
            """async () => {
                const frame = () => new Promise(requestAnimationFrame);
                const before = piper.frameTimes().length;
                for (let i = 0; i < 40; i++) { piper.look(i / 400, 1 + i / 400); await frame(); }
                await frame();
                return piper.frameTimes().slice(before).sort((a, b) => a - b);
            }"""
        )
        assert len(times) >= 40
        with capsys.disabled():
            middle, worst = times[len(times) // 2], times[-1]
            print(f"\n100,000 events: a frame draws in {middle:.1f} ms, at most {worst:.1f} ms")
        seen.page.fill("#search", "mb:3")
        assert seen.text("#matches") == f"{20 * len(range(3, 5000, 64)):,} found"


@pytest.mark.slow
@browses
def test_hundreds_of_devices_begin_collapsed_and_scroll(opening: Open) -> None:
    with opening(timeline_page(large(300, 2, 3))) as seen:
        assert seen.view()["collapsed"] == 300
        assert seen.view()["events"] < 3 * 60, "only the rows in sight are drawn"
        seen.ask("piper.select({run: 0, index: 3 * 2 * 299})")
        assert seen.view()["scroll"] > 5000
        x, y = seen.middle(0, 3 * 2 * 299)
        assert seen.ask(f"piper.eventAt({x}, {y})") == {"run": 0, "index": 3 * 2 * 299}


RED = [0xB3, 0x26, 0x1E, 255]


def reddened(seen: Opened) -> bool:
    """Whether the canvas has a pixel in the colour of an exceeded limit."""
    seen.settle()
    return seen.page.evaluate(
        """(red) => {
            const canvas = document.getElementById('canvas');
            const { width, height } = canvas;
            const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
            return data.some((_, i) => i % 4 === 0 && red.every((c, n) => data[i + n] === c));
        }""",
        RED,
    )


@browses
def test_the_header_has_the_peak_of_the_rows_and_only_exceeded_limits_are_red(
    opening: Open,
) -> None:
    run = replace(small(), facts={"peak memory": "1.9 MiB (too much)", "MFU": "3%"})
    with opening(timeline_page(run)) as seen:
        assert "Peak memory\n2.00 MiB (device 0)\n" in seen.text("#facts")
        assert not reddened(seen)
    tight = tuple(replace(d, limit=2**20) for d in run.devices)
    with opening(timeline_page(replace(run, devices=tight))) as seen:
        assert "Peak memory\n2.00 MiB (device 0, over the limit)" in seen.text("#facts")
        assert reddened(seen)


@browses
def test_nothing_is_shown_before_the_step_or_after_it(opening: Open) -> None:
    with opening(timeline_page(small())) as seen:
        seen.press("-", "-", "ArrowLeft")
        whole = seen.view()
        assert whole["from"] == 0
        assert whole["to"] < 1.02
        seen.page.locator("#canvas").focus()
        seen.press("]", "Enter")
        first = seen.view()
        assert first["from"] == 0
        assert first["to"] < 0.5
        seen.press("0", "+", "+", *["ArrowRight"] * 40)
        assert seen.view()["to"] == pytest.approx(whole["to"])


@browses
def test_an_empty_step_says_so(opening: Open) -> None:
    with opening(timeline_page(Run("empty", 0.0, (), (), ()))) as seen:
        assert "There are no events in this step." in seen.text("#details")


@browses
def test_small_windows_keep_the_toolbar_and_the_current_step_in_sight(opening: Open) -> None:
    with opening(timeline_page(small(), small()), width=1000) as seen:
        find = "(id) => document.getElementById(id).getBoundingClientRect().top"
        tops = seen.ask(f"['search', 'help'].map({find})")
        assert tops[0] == tops[1], "one line"
    steps, _ = real()
    with opening(dag_page("zb-v", steps), width=600, height=500) as seen:
        current = seen.ask("document.querySelector('[aria-current]').getBoundingClientRect()")
        bottom = seen.ask("document.querySelector('nav').getBoundingClientRect().bottom")
        assert current["bottom"] <= bottom + 1


# The DAG


@functools.cache
def real() -> tuple[tuple[tuple[str, Dag], ...], Any]:
    """A chain of four layers on two ranks: the DAG after each directive, and lowered."""
    model = chain(4)
    strategy = mesh(pp=2, schedule="zb-v", microbatches=4)
    first = build(model)
    found = [("build", first)]
    found += [(dag.history[-1], dag) for dag in strategy.steps(first)]
    lowered = lower(found[-1][1], {1: model})
    return (*found, ("lowered", lowered.dag)), lowered


def shown(seen: Opened, pane: str = "after") -> dict[str, int]:
    """The boxes of a pane, with the number of nodes in each."""
    return {box["label"]: box["nodes"] for box in seen.ask(f"piper.shown('{pane}')")}


@browses
def test_the_dag_begins_collapsed_by_stage_and_opens(opening: Open) -> None:
    steps, lowered = real()
    nodes = lowered.dag.nodes
    stages = {f"PP {i}": sum(n.tags.get("PP") == i for n in nodes) for i in range(4)}
    with opening(dag_page("zb-v", steps), width=1500) as seen:
        rest = len(nodes) - sum(stages.values())
        assert shown(seen) == stages | {"no stage": rest}
        values = {(e["from"], e["to"]): e["values"] for e in seen.ask("piper.edges()")}
        assert values["/PP 0", "/PP 1"] >= 4, "one activation for each microbatch"
        seen.page.get_by_role("button", name=f"PP 1, {stages['PP 1']} nodes").click()
        opened = shown(seen)
        assert [label for label in opened if label.startswith("MB")] == [
            f"MB {i}" for i in range(4)
        ]
        assert sum(opened.values()) == len(nodes)
        seen.press("e")
        assert seen.ask("piper.overlaps()") == []
        seen.press("x")
        assert shown(seen) == stages | {"no stage": rest}
        seen.page.select_option("#levels", "2")
        assert [label for label in shown(seen) if label.startswith("MB")] == [
            f"MB {i}" for i in range(4)
        ]


@browses
def test_an_open_graph_has_large_names_and_clicks_zoom_in(opening: Open) -> None:
    steps, lowered = real()
    scale = "piper.state.k"
    with opening(dag_page("zb-v", steps), width=900) as seen:
        seen.press("e", "e", "e", "e")
        assert "All groups are open." in seen.text("#note")
        assert len(seen.ask("piper.shown()")) == len(lowered.dag.nodes)
        assert seen.ask(scale) < 0.4, "too small to read"
        named = seen.page.locator("#after .large-name:visible")
        assert {"PP 0", "PP 1", "PP 2", "PP 3"} < set(named.all_text_contents())
        before = seen.ask(scale)
        named.filter(has_text="PP 1").click()
        assert seen.ask(scale) > 1.5 * before
        assert all(name.startswith(("MB", "PP")) for name in named.all_text_contents())
        seen.press("0")
        seen.page.locator("#after .item.node").first.dispatch_event("click")
        assert seen.ask(scale) >= 0.8, "large enough to read"
        assert not named.count()
        assert "Node #" in seen.text("#details")
        seen.press("0", "x", "/")
        seen.page.keyboard.type("nothing has this name")
        assert seen.page.locator(".dim").count() == 0, "only matches dim the rest"


@browses
def test_the_figures_of_a_graph_agree_and_end_visibly(opening: Open) -> None:
    steps, _ = real()
    names = tuple(structs.replace(n, stream=f"stream-{i}") for i, n in enumerate(steps[0][1].nodes))
    many = replace(steps[0][1], nodes=names)
    with opening(dag_page("zb-v", steps)) as seen:
        assert seen.text("#where") == f"Step {len(steps) - 1} of {len(steps) - 1}"
        assert "Steps" not in seen.text("#facts")
    with opening(dag_page("streams", [("build", many)])) as seen:
        details = seen.text("#details")
        assert f"and {len(names) - 12} more" in details.replace("\u00a0", " ")
        lines = "(span) => [...span.getClientRects()].length"
        parts = seen.page.locator("#details .whole").all()
        assert {part.evaluate(lines) for part in parts} == {1}, "no figure is cut by a line's end"
        seen.page.select_option("#levels", "5")
        assert seen.ask("piper.state.levels") == ["stage", "region", "pass", "microbatch"]


@browses
def test_steps_say_what_each_directive_did(opening: Open) -> None:
    steps, _ = real()
    with opening(dag_page("zb-v", steps)) as seen:
        found = seen.ask("piper.steps()")
        assert [step["label"] for step in found] == [label for label, _ in steps]
        assert [step["size"] for step in found] == [len(dag.nodes) for _, dag in steps]
        for step, before in zip(found[1:], found[:-1], strict=True):
            counts = step["counts"]
            assert before["size"] + counts["added"] - counts["removed"] == step["size"]
        size = found[0]["size"]
        assert found[1]["counts"] == {"added": 0, "removed": 0, "changed": size}, "partition: tags"
        assert found[2]["counts"] == {"added": 3 * size, "removed": 0, "changed": size}, "split"
        places = [s["counts"]["changed"] for s in found if s["label"].startswith("place")]
        assert sum(places) == 4 * size, "every node is placed once"
        replicated = next(s for s in found if s["label"].startswith("replicate"))
        assert replicated["notes"] == [f"replicated, ZeRO 0: {len(chain(4).chunks)} chunks"]
        orders = [s["counts"] for s in found if s["label"].startswith("order")]
        assert all(counts["changed"] or counts["added"] for counts in orders)
        seen.page.get_by_role("button", name="2 split").click()
        assert "Step 2 of" in seen.text("nav")
        assert f"Added {3 * size}" in " ".join(seen.text("#facts").split())
        seen.press("[")
        assert "Step 1 of" in seen.text("nav")


@browses
def test_before_and_after_stand_side_by_side(opening: Open) -> None:
    steps, _ = real()
    with opening(dag_page("zb-v", steps)) as seen:
        seen.ask("piper.go(2)")
        seen.press("v")
        before, after = shown(seen, "before"), shown(seen)
        assert list(before) == list(after)
        assert all(after[label] == 4 * n for label, n in before.items())
        box = seen.page.locator("#after").get_by_role("button", name="PP 0, ")
        n = before["PP 0"]
        assert f"+{3 * n} ±{n}" in box.text_content()
        assert (
            f"±{n}"
            in seen.page.locator("#before").get_by_role("button", name="PP 0, ").text_content()
        )
        seen.ask("piper.go(0)")
        assert not seen.page.locator("#before").is_visible(), "nothing is before the first step"


@pytest.mark.slow
@browses
def test_a_node_says_what_is_known_of_it(opening: Open) -> None:
    steps, lowered = real()
    with opening(dag_page("zb-v", steps), width=1500) as seen:
        number = next(i for i, n in enumerate(lowered.dag.nodes) if n.after and n.tags["PP"] == 2)
        seen.press("/")
        seen.page.keyboard.type(f"#{number}")
        seen.press("Enter")
        details = " ".join(seen.text("#details").split())
        node = lowered.dag.nodes[number]
        assert f"Node #{number}" in details
        assert f"Devices {node.devices[0]}" in details
        assert "layer 2" in details
        assert "1.00 KiB from" in details or "1.00 KiB to" in details
        assert "Ordered after" in details
        assert f"#{node.after[0]} " in details
        assert "Made by" in details
        link = seen.page.locator("#details button.link").first
        target = link.inner_text().split()[0]
        link.click()
        assert f"Node {target}" in seen.text("#details")
        assert f"#{number}" in seen.text("#details"), "and back"


@pytest.mark.slow
@browses
def test_the_dag_can_be_walked_with_keys(opening: Open) -> None:
    steps, _ = real()
    with opening(dag_page("zb-v", steps)) as seen:
        seen.page.locator("#after .item").first.focus()
        seen.press("Enter")
        assert "/PP 0" in seen.ask("[...piper.state.open]")
        assert seen.ask("document.activeElement.getAttribute('aria-expanded')") == "true"
        seen.press("Enter")
        assert seen.ask("[...piper.state.open]") == []
        seen.press("t")
        assert seen.ask("document.documentElement.dataset.theme") == "dark"
        seen.press("?")
        assert seen.page.locator("dialog").is_visible()


@pytest.mark.slow
@browses
def test_names_in_a_dag_are_text_and_nothing_else(opening: Open) -> None:
    steps, _ = real()
    first = steps[0][1]
    nodes = tuple(
        structs.replace(n, tags={HOSTILE: 0, **n.tags}, stream=HOSTILE) for n in first.nodes
    )
    values = tuple(replace(v, name=HOSTILE) for v in first.model.values)
    bad = replace(first, nodes=nodes, history=(HOSTILE,), model=replace(first.model, values=values))
    with opening(dag_page(HOSTILE, [(HOSTILE, bad), (HOSTILE, bad)], stages=[HOSTILE])) as seen:
        seen.press("e", "e", "e", "v")
        seen.page.locator("#after .item.node").first.click()
        assert HOSTILE in seen.page.locator("#details").text_content()
        assert seen.ask("window.hurt") is None
        assert seen.ask("document.querySelectorAll('img').length") == 0


@pytest.mark.slow
@browses
def test_twenty_thousand_nodes_open_a_few_at_a_time(opening: Open) -> None:
    model = replace(chain(14), batch=640)
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=4),
            piper.split(parts=640),
            *(piper.place({"PP": i}, devices=[i]) for i in range(4)),
        ]
    )
    first = build(model)
    steps = [("build", first), *((d.history[-1], d) for d in strategy.steps(first))]
    size = len(steps[-1][1].nodes)
    assert size >= 20_000
    with opening(dag_page("large", steps)) as seen:
        assert f"The {size:,} nodes are in closed groups" in seen.text("#note")
        stages = [f"PP {i}" for i in range(4)]
        assert list(shown(seen)) == stages
        seen.press("e")
        assert len(seen.ask("piper.shown()")) == 4 * 40
        seen.press("e")
        assert "The next level has 2,560 boxes, and at most 600 are shown" in seen.text("#note")
        opened = seen.ask("piper.shown()")
        assert [box["label"] for box in opened[:2]] == ["MB 0 … MB 15", "MB 16 … MB 31"]
        assert len(opened) == 4 * 40
        assert sum(box["nodes"] for box in opened) == size
        seen.ask("piper.state.most = 170")
        seen.page.locator("#after .item.group").first.focus()
        seen.press("Enter")
        assert "close other groups first" in seen.text("#note")
        assert len(seen.ask("piper.shown()")) == 4 * 40
        seen.press("x")
        assert list(shown(seen)) == stages
