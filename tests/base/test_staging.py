"""Staged files replace a folder's earlier files together, however the save ends; others stay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from piper import PiperError
from piper.base import atomic as staging
from piper.base.atomic import FileKind, Staged, stage

TEXTS = FileKind(
    "text", re.compile(r"(?P<stem>part)(-(?P<number>\d+))?-of-\d\.txt"), ("all.txt",), b"texts:"
)


def write(target: Path, texts: list[str]) -> None:
    staged = stage(target, TEXTS)
    with staged.failing():
        names = [f"part-of-{i}.txt" for i in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            (staged.folder / name).write_text(text)
        (staged.folder / "all.txt").write_text(" ".join(["texts:", *map(staged.named, names)]))
        staged.commit()


def read(target: Path) -> list[str]:
    _, *names = (target / "all.txt").read_text().split()
    return [(target / name).read_text() for name in names]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    pass


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill the process before its ``number``-th rename or unlink, so that nothing is cleaned up."""
    left = iter(range(number))

    def dying(usual: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return usual(*given, **options)

        return act

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "unlink"):
            patched.setattr(os, name, dying(getattr(os, name)))
        patched.setattr(Staged, "discard", lambda self: None)
        try:
            yield
        except Killed:
            return
        raise AssertionError("it was not killed")


@pytest.mark.parametrize("texts", [["C"], ["C", "D"], ["C", "D", "E"]])
def test_whatever_ends_a_save_the_folder_has_the_earlier_files_or_the_new_ones(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = set()
    moves = len(texts) + 1 + 2  # parts, the marker, and two earlier parts
    for number in range(moves):
        target = tmp_path / f"in {number}"
        write(target, ["A", "B"])
        (target / "note").write_text("mine")
        with killed_at(number, monkeypatch):
            write(target, texts)
        states.add("".join(read(target)))
        write(target, ["F"])
        assert read(target) == ["F"]
        shown = [name for name in names(target) if not name.startswith(".")]
        assert len(shown) == 3, shown
        assert (target / "note").read_text() == "mine"
    assert states == {"AB", "".join(texts)}


def test_a_new_folder_appears_by_one_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(0, monkeypatch):
        write(tmp_path / "new", ["A"])
    assert not (tmp_path / "new").exists()
    write(tmp_path / "new", ["A"])
    assert names(tmp_path / "new") == ["all.txt", "part-of-0.txt"]


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", ["A", "B"])
    before = names(tmp_path / "in")
    usual = os.replace

    def full(source: Path, to: Path) -> None:
        if Path(to).name == "all.txt":
            raise OSError("no space")
        usual(source, to)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        PiperError, match=r"the text cannot be saved to .*: no space; what was ther"
    ):
        write(tmp_path / "in", ["C", "D"])
    assert names(tmp_path / "in") == before
    assert read(tmp_path / "in") == ["A", "B"]


def test_parents_are_made_and_files_of_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c"
    write(target, ["A"])
    (target / "part-of-x.txt").touch()
    (target / "sub").mkdir()
    write(target, ["B"])
    assert read(target) == ["B"]
    assert names(target) == ["all.txt", "part-1-of-0.txt", "part-of-x.txt", "sub"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "part-of-0.txt").write_text("mine")  # no save came before
    write(tmp_path / "own", ["A"])
    assert (tmp_path / "own" / "part-of-0.txt").read_text() == "mine"


def test_a_folder_disappears_by_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write(tmp_path / "in", ["A", "B"])
        with killed_at(number, monkeypatch):
            TEXTS.remove(tmp_path / "in")
        assert (tmp_path / "in").exists() == (number == 0)
    assert all(name.startswith(".in.saving-") for name in names(tmp_path))


def test_a_marker_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("shopping")
    with pytest.raises(PiperError, match=r"there is a file all\.txt that Piper did not write"):
        write(tmp_path, ["A"])
    TEXTS.remove(tmp_path)
    assert names(tmp_path) == ["all.txt"]
    (tmp_path / "part-of-0.txt").touch()  # a damaged part of ours
    write(tmp_path, ["A"])
    assert read(tmp_path) == ["A"]
    with pytest.raises(PiperError, match="there is a file: a text is a folder"):
        write(tmp_path / "all.txt", ["A"])


def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_what_the_dead_have_left_is_removed(tmp_path: Path) -> None:
    here, other = staging._machine(), "0" * 8
    left = {
        "dead": f".x1.saving-{here}-{ended()}-{'1' * 8}",
        "alive": f".x1.saving-{here}-{os.getpid()}-{'2' * 8}",
        "elsewhere": f".x1.saving-{other}-{ended()}-{'3' * 8}",
        "elsewhere, long ago": f".x1.saving-{other}-{os.getpid()}-{'4' * 8}",
        "not ours": ".x1.saving",
    }
    for who, name in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-of-0.txt").touch()
        if "ago" in who:
            for path in (tmp_path / name, tmp_path / name / "part-of-0.txt"):
                os.utime(path, (0, 0))
    write(tmp_path / "x2", ["A"])
    kept = {who for who, name in left.items() if (tmp_path / name).exists()}
    assert kept == {"alive", "elsewhere", "not ours"}


def test_saves_side_by_side(tmp_path: Path) -> None:
    first, second, third = (stage(tmp_path / name, TEXTS) for name in ("x1", "x2", "x2"))
    for staged in (first, second, third):
        (staged.folder / "part-of-0.txt").write_text(staged.folder.name)
        (staged.folder / "all.txt").write_text("texts: part-of-0.txt")
    first.commit()
    second.commit()
    with pytest.raises(PiperError, match="the text cannot be saved to"), third.failing():
        third.commit()
    for staged in (first, second):
        assert read(staged.target) == [staged.folder.name]
    assert names(tmp_path) == ["x1", "x2"]
