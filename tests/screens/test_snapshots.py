"""Every screen equals its last reviewed picture: its text, and for some of them the colours.

The pictures are files under `tests/snapshots`: the characters of the screen as they are, and below
them, where colours are checked too, a letter for the style of each cell, with a key. They come
from a seeded simulated session and a frozen clock, so they are the same on any machine. Plain text
because a change of a screen is reviewed as a diff; SVG would repeat a template of Textual's in
every file, and change with it.

`make snapshots` rewrites them; review the diff before committing it.
"""

import asyncio
import difflib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import pytest
from rich.style import Style

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, Mark
from stepscope.recordings.file.overview import Overview
from stepscope.recordings.fleets.fleet import LOOK_S, Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.start import StartApp
from stepscope.tui.views.frame.compare_choices import Origin
from stepscope.tui.views.pages.start_page import File
from stepscope.tui.views.theme import ColourMode, Skin, styles
from tests.support.screens.screen_text import Cells, cells
from tests.support.sessions.received import Received, busy_messages
from tests.support.waiting import until

FOLDER = Path(__file__).parents[1] / "snapshots"
LETTERS = " abcdefghijklmnopqrstuvwxyzαβγδεζηθικλμ"  # of styles in the order of the theme's table
NUM_STEPS = 400
BOUNDS = SLO(ttft_ms=500.0, itl_ms=30.0)
AT = "250"  # a step with a long queue, preemptions around it and prefills in it

Size = tuple[int, int]
SMALL, NARROW, NORMAL, WIDE = (60, 15), (80, 24), (120, 40), (200, 60)

# Screen -> what is opened, and the keys that lead there.
SCREENS: Mapping[str, tuple[str, ...]] = {
    "live": ("session",),
    "paused": ("session", "space", "g", *AT, "enter"),
    "step": ("session", "g", *AT, "enter", "2"),
    "request": ("session", "g", *AT, "enter", "down", "down", "3"),
    "kv": ("session", "4"),
    "kv-owners": ("session", "4", "o"),
    "latency": ("session", "5"),
    "knobs": ("session", "6"),
    "help": ("session", "question_mark"),
    "glossary": ("session", "question_mark", "g"),
    "budget": ("session", "B", "right"),
    "compare": ("compare",),
    "fleet": ("fleet", "down"),
    "start": ("start", "down"),
}


class Look(NamedTuple):
    """How a screen is painted."""

    mode: ColourMode = "dark"
    is_ascii: bool = False
    has_styles: bool = False  # these sizes are checked too

    @property
    def name(self) -> str:
        return "ascii" if self.is_ascii else self.mode


TEXT, COLOURS = Look(), Look(has_styles=True)
PICTURES: tuple[tuple[str, Size, Look], ...] = (
    *((screen, size, TEXT) for screen in SCREENS for size in (NARROW, WIDE)),
    *((screen, NORMAL, COLOURS) for screen in SCREENS),
    *((screen, SMALL, TEXT) for screen in ("live", "help", "budget", "start")),
    ("paused", NARROW, Look("ansi", has_styles=True)),
    ("latency", NARROW, Look("ansi", has_styles=True)),
    ("paused", NARROW, Look("none", has_styles=True)),
    ("request", NARROW, Look("none", has_styles=True)),
    ("paused", NARROW, Look("light", has_styles=True)),
    *((screen, NARROW, Look(is_ascii=True)) for screen in ("paused", "step", "request", "kv")),
)


def file_of(screen: str, size: Size, look: Look) -> Path:
    name = f"{screen}-{size[0]}x{size[1]}"
    return FOLDER / (f"{name}.txt" if look in (TEXT, COLOURS) else f"{name}-{look.name}.txt")


class Still(Received):
    """A source that receives nothing more; its recording lies in a folder."""

    def __init__(
        self, name: str, num_steps: int = NUM_STEPS, folder: Path | None = None, **knobs: int
    ) -> None:
        super().__init__(History(BOUNDS), name)
        recorder = None if folder is None else Recorder(self, self.recording(folder))
        knobs = {"max_num_batched_tokens": 1024, "max_num_seqs": 32, **knobs}
        for sequence, message in busy_messages(num_steps, NUM_STEPS - 60, Knobs(**knobs)):
            if isinstance(message, EngineInfo):
                message = msgspec.structs.replace(message, engine_id=name, name=name)
            self.take(sequence, message)
        if recorder is not None:
            recorder.stop()
            assert recorder.error is None, recorder.error

    def recording(self, folder: Path) -> Path:
        return folder / f"{self.name}.mcap"


class World:
    """The contents of the pictures: sessions, and a frozen clock.

    Args:
        folder: for recordings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.busy = Still("engine-0", folder=folder)
        marked_ns = self.busy.history.summary(300).tokens_ns
        mark = Mark(step=300, time_ns=marked_ns, text="rush hour", who="ops")
        self.busy.history.add_mark(mark)
        self.other = Still("engine-1", folder=folder, max_num_batched_tokens=256)
        self.idle = Still("engine-2", num_steps=12)
        self.down = Still("engine-3", num_steps=0)
        self.down.status, self.down.error = "down", "no engine answers at engine-3"
        self.now_s = 1000.0

    def clock(self) -> float:
        return self.now_s

    def wall_clock(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def fleet(self) -> Fleet:
        """The fleet of all engines, observed for a while."""
        self.now_s = 1000.0
        sources = [self.busy, self.other, self.idle, self.down]
        fleet = Fleet(sources, self.clock, self.wall_clock)
        for _ in range(20):
            self.now_s += LOOK_S
            fleet.look()
        return fleet

    def dashboard(self, fleet: Fleet | None = None) -> Dashboard:
        return Dashboard(
            self.busy,
            control_endpoint="ipc:///run/engine-0.control",
            fps=1.0,
            any_terminal=True,
            clock=self.clock,
            log_file=Path("/home/ops/dashboard.log"),
            fleet=fleet,
        )


def found(fleet: Fleet) -> Any:
    """A `Finder` that has found the engines of a fleet and some files."""
    engines = [(f"ipc:///run/{line.figures.name}", line) for line in fleet.picture.lines]
    seen = Overview(63.5, 4711, "engine-0", "demo", is_cut=False)
    files = (
        File(Path("/data/monday.mcap"), 12_345_678, 1_700_000_000.0, seen),
        File(Path("/data/cut.mcap.part"), 4_321, 1_699_990_000.0, seen._replace(is_cut=True)),
        File(Path("/data/new.mcap"), 99, 1_699_900_000.0, None),
    )
    done = {"look": lambda: None, "stop": lambda: None}
    return SimpleNamespace(engines=lambda: engines, files=files, **done)


async def taken(world: World, screen: str, size: Size, look: Look) -> list[Cells]:
    """The screen after its keys were pressed."""
    opened, *keys = SCREENS[screen]
    if opened == "start":
        # The version does not change the picture.
        with patch("stepscope.tui.screens.start.version", lambda name: "1.2.3"):
            return await _start_taken(world, keys, size, look)
    app = world.dashboard(world.fleet() if opened == "fleet" else None)
    async with app.run_test(size=size) as pilot:
        app.main.set_skin(Skin(look.mode, look.is_ascii))
        if opened == "compare":
            await _compare(world, app)
        await pilot.press(*keys)
        app.main.draw()
        await pilot.pause()
        picture = cells(app)
    app.close()
    return picture


async def _compare(world: World, app: Dashboard) -> None:
    """Compare two sessions, read to the end."""
    sources = (world.busy, world.other)
    a, b = (Origin(each.name, BOUNDS, path=each.recording(world.folder)) for each in sources)
    app.compare(a, b, "time")
    comparer = app.main.session.compare.comparer
    await until(lambda: not comparer.is_reading and comparer.comparison, "the comparison ends")


async def _start_taken(world: World, keys: list[str], size: Size, look: Look) -> list[Cells]:
    finder = found(world.fleet())
    clocks = {"clock": world.clock, "wall_clock": world.wall_clock}
    app = StartApp(lambda choice: None, lambda: finder, any_terminal=True, **clocks)
    async with app.run_test(size=size) as pilot:
        app.set_skin(Skin(look.mode, look.is_ascii))
        await until(lambda: app._finder is not None, "it looks for engines")
        await pilot.press(*keys)
        app.draw()
        await pilot.pause()
        return cells(app)


def as_text(picture: list[Cells], look: Look) -> str:
    lines = ["".join(run for run, _ in row).rstrip() for row in picture]
    if look.has_styles:
        lines += ["", *_styles(picture, look.mode)]
    return "\n".join(lines) + "\n"


def _styles(picture: list[Cells], mode: ColourMode) -> list[str]:
    """A letter for each cell, the same in every picture, and a key; ordinary text is blank."""
    skin = Skin(mode)
    letters: dict[str, tuple[str, str]] = {}
    names = list(styles(mode))
    for case, suffix in ((str, ""), (str.upper, "+cursor")):
        for letter, name in zip(LETTERS, names, strict=False):
            described = _described(skin.styles[name + suffix])
            letters.setdefault(described, (case(letter), name + suffix))
    used: dict[str, tuple[str, str]] = {}
    rows = []
    for row in picture:
        cells = ""
        for run, style in row:
            described = _described(style)
            if described not in used:
                # Styles outside the theme are Textual's own.
                unknown = str(sum(letter.isdigit() for letter, _ in used.values())), "of Textual"
                used[described] = letters.get(described, unknown)
            cells += used[described][0] * len(run)
        rows.append(cells.rstrip())
    key = sorted(f"{letter} {name}: {style}" for style, (letter, name) in used.items())
    return ["-- styles --", *rows, "-- key --", *key]


def _described(style: Style) -> str:
    names = ("bold", "dim", "underline", "reverse", "italic")
    ink, paper = (each.name if each else "default" for each in (style.color, style.bgcolor))
    return " ".join([*(name for name in names if getattr(style, name)), ink, "on", paper])


def picture_text(world: World, screen: str, size: Size, look: Look) -> str:
    text = as_text(asyncio.run(taken(world, screen, size, look)), look)
    assert "see the log" not in text, f"{screen} at {size} is broken:\n{text}"
    return text


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with surroundings():
        yield World(tmp_path_factory.mktemp("snapshots"))


@contextmanager
def surroundings() -> Iterator[None]:
    """Times of day in UTC, and colours, on any machine and terminal."""
    with patch.dict(os.environ, TZ="UTC"):
        os.environ.pop("NO_COLOR", None)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("screen", "size", "look"), PICTURES, ids=[file_of(*each).stem for each in PICTURES]
)
def test_every_screen_equals_its_snapshot(
    world: World, screen: str, size: Size, look: Look
) -> None:
    file = file_of(screen, size, look)
    expected = file.read_text("utf-8") if file.exists() else ""
    found = picture_text(world, screen, size, look)
    assert found == expected, _difference(file, expected, found)


def test_no_snapshot_is_left_of_a_removed_screen() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file_of(*each).name for each in PICTURES}


def _difference(file: Path, expected: str, found: str) -> str:
    texts = (expected.splitlines(), found.splitlines())
    lines = difflib.unified_diff(*texts, file.name, "the screen now", lineterm="", n=1)
    return "\n".join(["the screen has changed; if it is better now: make snapshots", *lines])


def main() -> None:
    """Rewrite all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        path.unlink()
    with surroundings(), TemporaryDirectory() as folder:
        world = World(Path(folder))
        for picture in PICTURES:
            file_of(*picture).write_text(picture_text(world, *picture), "utf-8")
    print(f"{len(PICTURES)} pictures in {FOLDER}")


if __name__ == "__main__":
    sys.exit(main())
