"""The rooms (subpackages) of piper, as CONTRIBUTING.md lists them: imports go downward without
cycles, no import is inside a function, no folder is crowded, no name occurs twice, and the map
lists every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "piper"
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map of the house")[2]
ROOMS = re.findall(r"^(\w+)  ", MAP.split("```")[1], re.M)
"""From highest to lowest: a room imports only rooms after it."""
FACES = ("api", "callbacks", "models")
"""Modules that only re-export names for users."""
FILES = sorted(HOUSE.rglob("*.py"))
MOST = 12


def module(file: Path) -> str:
    """The module name of a file."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file): file for file in FILES}


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules of Piper that a file imports, and whether the import is nested."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in full]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] == "piper":
                yield name, node not in tree.body


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_folder_is_a_room_of_the_map() -> None:
    assert {path.parent.name for path in HOUSE.glob("*/__init__.py")} == set(ROOMS)
    assert len(ROOMS) == 12
    loose = {path.stem for path in HOUSE.glob("*.py")}
    assert loose == {"__init__", "__main__", *FACES}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_below_it(name: str) -> None:
    above = [*FACES, *ROOMS[: ROOMS.index(name)]]
    upward = [
        f"{file.relative_to(ROOT)} imports {other}"
        for file in sorted((HOUSE / name).rglob("*.py"))
        for other, _ in imports(file)
        if room(other) in above
    ]
    assert not upward


def test_no_files_import_each_other() -> None:
    graph = {name: {other for other, _ in imports(file)} for name, file in MODULES.items()}
    while free := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, "these are in a circle of imports, or import one"


def test_no_import_hides_inside_a_function() -> None:
    """Except in commands, so that help and completion do not wait for torch."""
    files = [file for file in FILES if HOUSE / "cli" not in file.parents]
    hidden = [(str(f.relative_to(ROOT)), name) for f in files for name, deep in imports(f) if deep]
    assert hidden == [("piper/__init__.py", "piper.api")]


def test_no_folder_is_crowded() -> None:
    files = Counter(file.parent.relative_to(ROOT) for file in FILES)
    assert {str(folder): count for folder, count in files.items() if count > MOST} == {}


def test_no_file_name_occurs_twice() -> None:
    names = Counter(file.name for file in FILES)
    twice = {name for name, count in names.items() if count > 1}
    assert twice <= {"__init__.py"}


def test_no_public_name_has_two_meanings() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in MODULES.items():
        for node in ast.parse(file.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            made = [target.id for target in targets if isinstance(target, ast.Name)]
            made += [node.name] if isinstance(node, ast.ClassDef) else []
            for one in made:
                if one[0].isupper() and not one.isupper() and len(one) > 1:
                    homes[one].append(name)
    assert {one: where for one, where in homes.items() if len(where) > 1} == {}


def test_the_map_has_every_file() -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", MAP))
    by_folder = ("piper/strategies/directives", "piper/strategies/schedules", "piper/cli", "piper")
    expected = {
        file.name
        for file in FILES
        if file.name != "__init__.py" and str(file.parent.relative_to(ROOT)) not in by_folder
    }
    pages = {"inline.py", "dag_page.py", "timeline_page.py", "tuning_page.py", "demo.py"}
    assert expected - named - pages == set()
    rooms = ("piper", "tests", "bench", "docs", "examples")
    assert named - {file.name for room in rooms for file in (ROOT / room).rglob("*.py")} == set()


def test_users_find_every_public_name() -> None:
    """In a fresh process: imports of other tests would hide one that is missing."""
    code = (
        "import piper; assert all(hasattr(piper, name) for name in piper.__all__); "
        "piper.callbacks.TensorBoard, piper.strategies.mesh, piper.MemoryKind; "
        "import piper.models, piper.callbacks, piper.strategies"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
