"""Every folder states correctly what it may import, and no folder has too many files.

Which folder may import which is held by the contracts in pyproject.toml (`make lint`). After a
change, `make rooms` writes the lines `May import: ...` anew; read what it changed.
"""

import ast
import re
import textwrap
from collections import defaultdict
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("kernels", "engine", "recordings", "tui")  # from below
MOST_FILES = 15
MOST_FILES_OF_A_FLOOR = 10
MOST_LINES = 15
# Not a package of ours by itself: transformers probes for a package of this name.
WITHOUT_INIT = "kernels"


def rooms() -> list[str]:
    """Every folder with code in it, from the root: `recordings/file/mcap`."""
    found = {path.parent for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    return sorted(str(folder.relative_to(ROOT)) for folder in found)


@cache
def imported() -> dict[str, set[str]]:
    """The rooms that each room imports from, found in the imports of its files."""
    graph = grimp.build_graph(*(f"stepscope.{floor}" for floor in FLOORS), cache_dir=None)
    arrows = defaultdict(set)
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            if room_of(other) != room_of(module):
                arrows[room_of(module)].add(room_of(other))
    return arrows


def room_of(module: str) -> str:
    path = "/".join(module.split(".")[1:])
    return path if (ROOT / path).is_dir() else str(Path(path).parent)


def docstring(room: str) -> str:
    source = (ROOT / room / "__init__.py").read_text("utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def import_line(room: str) -> str:
    """The line that the room's docstring must have: `May import: engine.protocol, engine.text.`"""
    by_floor = sorted(imported()[room], key=lambda name: (FLOORS.index(name.split("/")[0]), name))
    names = ", ".join(name.replace("/", ".") for name in by_floor) or "nothing of ours"
    return textwrap.fill(f"May import: {names}.", 96, subsequent_indent="  ")


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            for name in re.findall(r"^ *class (\w+)[(:]", path.read_text("utf-8"), re.M):
                places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("room", [room for room in rooms() if room != WITHOUT_INIT])
def test_every_package_docstring_names_the_packages_it_imports(room: str) -> None:
    text = docstring(room)
    assert import_line(room) in text, "run `make rooms`"
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("room", rooms())
def test_no_package_has_too_many_files(room: str) -> None:
    files = [path for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= (MOST_FILES_OF_A_FLOOR if room in FLOORS else MOST_FILES)


def write_import_lines() -> None:
    for room in rooms():
        if room != WITHOUT_INIT:
            path = ROOT / room / "__init__.py"
            text = path.read_text("utf-8")
            line = re.compile(r"^May import: .*(?:\n  .*)*", re.MULTILINE)
            path.write_text(line.sub(lambda _, room=room: import_line(room), text), "utf-8")


if __name__ == "__main__":
    write_import_lines()
