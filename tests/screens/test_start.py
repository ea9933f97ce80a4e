"""`stepscope` alone: the start screen, what it lists, and that it survives every error."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from stepscope.recordings import samples
from stepscope.recordings.file.overview import Overview, overview, recordings_in
from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.fleets.fleet import EngineLine
from stepscope.tui.cli.dashboards import demo
from stepscope.tui.cli.dashboards import start as start_command
from stepscope.tui.screens.help import HelpPage
from stepscope.tui.screens.overlay import Overlay, Prompt
from stepscope.tui.screens.start import StartApp
from stepscope.tui.session.start_finder import Finder
from stepscope.tui.settings.actions import remapped
from stepscope.tui.views.pages import start_page
from stepscope.tui.views.pages.start_page import File, StartChoice
from tests.support.screens.palette import offered_in_palette
from tests.support.screens.screen_text import screen_text
from tests.support.waiting import until, wait_for

NOW_S = 1_700_000_000.0
SAMPLE = samples.shipped()["freeze"]


# What is listed


def test_a_recordings_overview_says_what_it_holds_or_what_is_wrong_with_it(tmp_path: Path) -> None:
    assert set(samples.shipped()) == set(samples.SHOWS)
    seen = overview(SAMPLE)
    assert (seen.engine, seen.model, seen.is_cut, seen.error) == ("freeze", "demo", False, None)
    assert seen.num_steps == 454
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(SAMPLE.read_bytes()[:20_000])
    assert overview(cut).is_cut
    junk = tmp_path / "junk.mcap.part"
    junk.write_text("hi")
    assert "not a stepscope recording" in (overview(junk).error or "")
    assert "cannot read" in (overview(tmp_path / "none.mcap").error or "")
    (tmp_path / "folder.mcap").mkdir()
    assert recordings_in(tmp_path) == [cut, junk]
    assert recordings_in(tmp_path / "nowhere") == []


def test_all_local_engines_and_the_configured_fleet_are_offered() -> None:
    lines = [
        (f"ipc:///{name}", EngineLine(EngineFigures(name, "live"), (), 0.0, None, None))
        for name in "ab"
    ]
    entries = start_page.engines_section(lines, ("x", "y"), False).entries
    assert [text for text, _ in entries[0].cells] == ["LIVE", *"----"]  # without figures
    both = ("ipc:///a", "ipc:///b")
    assert [entry.choice.names for entry in entries] == [both[:1], both[1:], both, ("x", "y")]


# The screen


def found(*files: File) -> Any:
    """A `Finder` that has found one engine and these files, without a search."""
    figures = EngineFigures("engine-0", "live", state="running", num_running=4, num_waiting=1)
    engine = ("ipc:///run/engine-0", EngineLine(figures, (), 0.0, 0.0, None))
    done = {"look": lambda: None, "stop": lambda: None}
    return SimpleNamespace(engines=lambda: [engine], files=files, **done)


FOUND = found(
    File(Path("/data/week.mcap"), 38_000_000, NOW_S, Overview(761.0, 41_000, "engine-0", "qwen")),
    File(Path("/data/bad.mcap"), 3, NOW_S - 1e6, Overview(error="is not a recording")),
    File(Path("/data/new.mcap"), 3_000, NOW_S - 2e6, None),
)


class Checks:
    """Remembers the choices it was asked to check; refuses those in `wrong`."""

    def __init__(self, **wrong: str) -> None:
        self.asked: list[StartChoice] = []
        self.wrong = wrong

    def __call__(self, choice: StartChoice) -> str | None:
        self.asked.append(choice)
        if "boom" in choice.names:
            raise RuntimeError("boom")
        return self.wrong.get(choice.kind)


def start_app(check: Checks | None = None, **options: Any) -> StartApp:
    return StartApp(
        check or Checks(), lambda: FOUND, any_terminal=True, wall_clock=lambda: NOW_S, **options
    )


@asynccontextmanager
async def shown(app: StartApp, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Pilot[Any]]:
    """The start screen once it has listed what there is."""
    async with app.run_test(size=size) as pilot:
        await says(app, "engine-0")
        yield pilot


async def says(app: StartApp, words: str) -> None:
    await until(lambda: words in screen_text(app), lambda: f"{words}:\n{screen_text(app)}")


async def chosen(app: StartApp) -> StartChoice:
    await until(lambda: app.return_value is not None, "nothing is chosen")
    return app.return_value


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        (["enter"], StartChoice("engines", ("ipc:///run/engine-0",))),
        (["j", "j", "j", "k", "enter"], StartChoice("file", ("/data/bad.mcap",))),
        (["end", "up", "enter"], StartChoice("demo")),
        (["end", "up", "up", "enter"], StartChoice("tour")),
        (["e", *"tcp://h:5555 b", "enter"], StartChoice("engines", ("tcp://h:5555", "b"))),
        (["end", "enter", *"/x/a.mcap", "enter"], StartChoice("file", ("/x/a.mcap",))),
    ],
)
async def test_keys_on_the_start_screen_choose_a_line(keys: list[str], choice: StartChoice) -> None:
    check = Checks()
    app = start_app(check)
    async with shown(app) as pilot:
        await pilot.press(*keys)
        assert await chosen(app) == choice
    assert check.asked == [choice]


async def test_the_start_screen_follows_the_key_table_and_remapped_keys() -> None:
    """Keys remapped in the config file work there, too."""
    actions = remapped(
        {"lane_down": "n", "inspect": "f5", "endpoint": "9", "quit": "Q", "theme": [], "help": "f2"}
    )
    app = start_app(Checks(file="damaged"), actions=actions)
    async with shown(app) as pilot:
        footer = screen_text(app).splitlines()[-1]
        for entry in ("F5 Open", "9 Address", "L End", "F2 Help", "^p Palette", "Q Quit"):
            assert f" {entry} " in footer
        assert "9  address or file" in screen_text(app)
        await pilot.press("j", "enter", "T", "q")  # these do nothing any more
        assert (app.skin.mode, app.is_running) == ("dark", True)
        await pilot.press("n", "f5")
        await says(app, "damaged")
        await pilot.press("9")
        assert isinstance(app.screen, Prompt)
        await pilot.press("escape", "f2")
        assert isinstance(app.screen, HelpPage)
        assert "This is the start screen" in screen_text(app)
        await pilot.press("escape", "ctrl+p", *"dark or")
        await says(app, "Theme")
        await offered_in_palette(app)
        await pilot.press("enter")
        await until(lambda: app.skin.mode == "light", "the theme does not change")
        await pilot.click("#start", offset=(footer.index("Address"), 39))
        assert isinstance(app.screen, Prompt)
        await pilot.press("escape")
        await pilot.click("#start", offset=(117, 39))
        assert not isinstance(app.screen, Overlay)
        await pilot.press("Q")
    assert app.return_value is None


async def test_a_key_that_does_nothing_on_the_start_screen_says_so() -> None:
    app = start_app()
    async with shown(app) as pilot:
        await pilot.press("5")
        await says(app, "5 does nothing here; Enter opens a line")
        await pilot.press("U")
        await says(app, "U does nothing here; Enter opens a line")
        await pilot.press("e", "5")  # typed into the prompt
        await pilot.press("escape")
        assert "5 does nothing" not in screen_text(app)


async def test_a_click_on_the_start_screen_opens_a_line(tmp_path: Path) -> None:
    app = start_app()
    async with shown(app) as pilot:
        y = next(n for n, line in enumerate(screen_text(app).splitlines()) if "chunked" in line)
        await pilot.click("#start", offset=(10, 0))  # nothing is there
        await pilot.click("#start", offset=(10, y))
        assert await chosen(app) == StartChoice("file", ("chunked",))


async def test_an_error_while_opening_is_shown_and_the_start_screen_stays() -> None:
    app = start_app(Checks(file="week.mcap is damaged", engines="no engine answers"))
    async with shown(app) as pilot:
        await pilot.press("down", "enter")
        await says(app, "week.mcap is damaged")
        await pilot.press("up", "enter")
        await says(app, "no engine answers")
        assert "damaged" not in screen_text(app)
        await pilot.press("e", *"udp://x", "enter")
        assert isinstance(app.screen, Overlay)
        assert "'udp://x' is not ipc://PATH" in screen_text(app)
        await pilot.press("escape", "e", *"boom", "enter")
        await says(app, "RuntimeError")
        assert app.is_running
        await pilot.press("escape", "q")
    assert app.return_value is None


async def test_a_failing_search_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no luck")

    app = start_app()
    async with shown(app) as pilot:
        with monkeypatch.context() as patch:
            patch.setattr(FOUND, "look", fail)
            app._tick()
        app._tick()
        await pilot.pause()
        assert "no luck" in screen_text(app)
        assert "week.mcap" in screen_text(app)


# What is found


def test_the_recordings_of_the_folder_are_listed_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_folder: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    (tmp_path / "a.mcap").write_bytes(SAMPLE.read_bytes())
    (tmp_path / "c.mcap").write_text("hi")
    for name, written_s in (("a.mcap", NOW_S), ("c.mcap", NOW_S - 5)):
        os.utime(tmp_path / name, (written_s, written_s))
    finder = Finder(tmp_path)
    try:
        wait_for(lambda: [file.overview is None for file in finder.files] == [False] * 2)
        found = finder.files
        seen = [(file.path.name, file.written_s, file.overview.num_steps) for file in found]
        assert seen == [("a.mcap", NOW_S, 454), ("c.mcap", NOW_S - 5, None)]
        finder.look()
        assert finder.engines() == []
    finally:
        finder.stop()


def open_line(screen: Any, name: str) -> None:
    """Go from the selected line to one of the same section, and open it."""
    lines = screen.text().splitlines()
    at, wanted = (next(n for n, line in enumerate(lines) if part in line) for part in ("▶", name))
    screen.send("j" * (wanted - at) + "k" * (at - wanted) + "\r")


@pytest.mark.slow
def test_quitting_a_recording_leads_back_to_the_start_screen(
    terminal: Any, tmp_path: Path, runtime_folder: Path
) -> None:
    (tmp_path / "mine.mcap").write_bytes(SAMPLE.read_bytes())
    (tmp_path / "broken.mcap").write_text("nothing")
    screen = terminal(
        *(sys.executable, "-m", "stepscope.tui.cli"),
        cwd=str(tmp_path),
        STEPSCOPE_CONFIG="none",
        XDG_RUNTIME_DIR=str(runtime_folder),
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    screen.wait_for("none runs here; 'stepscope serve --model demo' starts one")
    screen.wait_for("broken.mcap .*not readable")
    screen.wait_for("mine.mcap .* 454 ")
    open_line(screen, "broken.mcap")
    screen.wait_for("broken.mcap is not a stepscope recording")
    open_line(screen, "mine.mcap")
    screen.wait_for("▐REPLAY")
    screen.wait_for("454 steps in memory")
    screen.send("q")
    screen.wait_for(r"▶mine.mcap .*today")
    screen.send("e")
    screen.wait_for("endpoint .*_")
    screen.send("nobody-here\r")
    screen.wait_for("no engine at .*nobody-here")
    screen.wait_for("nobody-here_")
    screen.send("\x1b")
    screen.wait_for(r"(?s)\A(?!.*nobody-here_)")
    screen.send("q")
    assert screen.wait_for_exit() == 0


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_start_screen_opens_a_simulated_demo_where_torch_is_missing(
    has_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    asked: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda *, gpu, flags: asked.append(gpu))
    assert start_command.check(StartChoice("demo")) is None
    assert start_command.open_choice(StartChoice("demo"), {}) is None
    assert asked == [None if has_torch else "h100"]
    entries = start_page.samples_section([], has_torch=has_torch).entries
    (about,) = (entry.about for entry in entries if entry.choice.kind == "demo")
    assert ("simulated" in about) == (not has_torch)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_terminal_stepscope_alone_prints_its_help(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "stepscope.tui.cli", *arguments]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == (0 if arguments else 2)
    assert "Watch and steer" in done.stdout


@pytest.mark.parametrize(
    "error", ["no engine answers", f"no socket at {'long/' * 20}engine-0; none runs here"]
)
async def test_an_address_without_an_engine_can_be_corrected_in_the_input_line(error: str) -> None:
    check = Checks(engines=error)
    app = start_app(check)
    async with shown(app, (80, 24)) as pilot:
        await pilot.press("e", *"tcp://h:2", "enter")
        await says(app, error[-12:])
        text = screen_text(app)
        assert "tcp://h:2_" in text
        assert "".join(error.split()) in "".join(text.split())
        assert "q Quit" in text.splitlines()[-1]
        await pilot.press("1", "backspace", "backspace", "1")  # not lines of the list
        assert "tcp://h:1_" in screen_text(app)
        assert error[-12:] not in screen_text(app)
        check.wrong.clear()
        await pilot.press("enter")
        assert await chosen(app) == StartChoice("engines", ("tcp://h:1",))
    assert check.asked == [StartChoice("engines", (f"tcp://h:{n}",)) for n in (2, 1)]
