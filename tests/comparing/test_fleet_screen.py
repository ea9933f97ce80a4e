"""The fleet screen: a line for each engine, its findings, and how to open one and come back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.fleets.fleet import LOOK_S, Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.views.frame.fleet_view import SORTS, natural, state_text
from stepscope.tui.views.framed_panels import sparkline
from stepscope.tui.views.lines import spot_of
from tests.support.screens.clicks import click
from tests.support.screens.live_dashboard import press
from tests.support.screens.screen_text import main_text, screen_text
from tests.support.waiting import until, wait_for

Call = Callable[..., Any]

SIZES = [(80, 20), (80, 24), (120, 40), (200, 60)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def sources(still_source: Call) -> list[Any]:
    """Two similar engines, one with hardly any load, and one that does not answer."""
    made = [still_source(), still_source(), still_source(12), still_source(2)]
    for number, source in enumerate(made):
        source.name = f"engine-{number}"
    made[3].history = History(SLO())
    made[3].status, made[3].error = "down", "no engine answers at engine-3"
    return made


def dashboard(sources: list[Any], looks: int = 20, **options: Any) -> Dashboard:
    clock = Clock()
    fleet = Fleet(sources, clock, lambda: 1_700_000_000 + clock.now_s)
    for _ in range(looks):
        clock.now_s += LOOK_S
        fleet.look()
    options |= {"any_terminal": True, "fps": 1.0, "clock": clock, "fleet": fleet}
    return Dashboard(sources[0], **options)


def row_of(app: Dashboard, name: str) -> str:
    lines = screen_text(app).splitlines()
    return next(line for line in lines[2:12] if name in line[:24])


def order(app: Dashboard) -> list[str]:
    return [line.figures.name for line in app.main.frame.fleet.lines]


async def test_several_engines_open_the_fleet_screen_with_their_states(sources: list[Any]) -> None:
    app = dashboard(sources)
    async with app.run_test(size=(120, 40)):
        text = screen_text(app)
        assert "▐FLEET▌ 3/4 up  1 DOWN" in text.splitlines()[0]
        assert "engine-3 DOWN" in text
        assert "no engine answers at engine-3" in text
        row = row_of(app, "engine-3")
        assert row.split()[2:5] == ["DOWN", "10s", "-"]
        assert not any(digit in row.split("10s")[1] for digit in "0123456789")
        busy = app.main.frame.fleet.engines[0]
        assert f"{busy.num_running}/32" in row_of(app, "engine-0")
        assert "LIVE" in row_of(app, "engine-0")


async def test_what_stands_out_is_named_with_reason_and_since_when(sources: list[Any]) -> None:
    app = dashboard(sources)
    async with app.run_test(size=(120, 40)):
        text = screen_text(app)
        assert "what stands out" in text
        waiting = sources[0].history.state.num_waiting
        assert waiting > 4, "the recipe of the session has changed"
        assert "engine-2 since" in text
        assert f"has room: {sources[2].history.state.num_running} of 32 seats" in text
        assert f"{2 * waiting} wait elsewhere" in text


async def test_enter_opens_an_engine_and_escape_comes_back_to_its_line(sources: list[Any]) -> None:
    app = dashboard(sources)
    async with app.run_test(size=(120, 40)) as pilot:
        first = app.main
        await pilot.press("down", "enter")
        assert app.main.session.source is sources[1]
        assert "engine-1" in screen_text(app).splitlines()[0]
        assert "requests × steps" in screen_text(app)
        assert "one of 4 engines; Esc goes back" in screen_text(app)
        await pilot.press("left", "left")
        cursor = app.main.view.cursor
        await pilot.press("8")
        assert "▶engine-1" in screen_text(app)
        await pilot.press("up", "5")  # a screen of the chosen engine at once
        assert app.main is first
        assert "breaches (" in screen_text(app)
        await pilot.press("escape", "down", "enter")
        assert app.main.session.source is sources[1]
        assert app.main.view.cursor == cursor  # as it was left
        await pilot.press("up", "escape", "escape")  # first lets go of the lane
        assert "▐FLEET▌" in screen_text(app)
        await pilot.press("down", "enter", "2", "escape", "escape", "down", "enter")
        assert app.main.session.source is sources[3]
        assert "▐DOWN▌" in screen_text(app)
        assert "drawing failed" not in screen_text(app)
        await pilot.press("v", "escape", "home", "enter")
        assert app.main.skin.ascii_only  # looks are those of the whole dashboard


async def test_lines_sort_by_any_column_and_the_selection_stays(sources: list[Any]) -> None:
    app = dashboard(sources)
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.press("down", "down")
        assert app.session.fleet_view.selected == "engine-2"
        seen = []
        columns = [each for each in SORTS if each != "ranks"]  # no engine here has several
        for _ in columns:
            seen.append(app.session.fleet_view.sort)
            assert sorted(order(app)) == [f"engine-{n}" for n in range(4)]
            assert "▶engine-2" in screen_text(app)
            await pilot.press("right")
        assert seen == columns
        assert app.session.fleet_view.sort == "engine"
        await pilot.press("i")
        assert order(app)[0] == "engine-3"
        await pilot.press("o", "left", "left", "left")
        app.session.fleet_view.sort, app.session.fleet_view.is_reversed = "wait", False
        app.main.draw()
        assert order(app)[2:] == ["engine-2", "engine-3"]  # what is unknown comes last
        await pilot.press("i")
        assert order(app)[0] == "engine-2"
        assert order(app)[3] == "engine-3"


async def test_the_mouse_selects_and_opens_engines(sources: list[Any]) -> None:
    app = dashboard(sources)
    async with app.run_test(size=(120, 40)) as pilot:
        await click(pilot, "page", (5, 3))
        assert app.session.fleet_view.selected == order(app)[1]
        await click(pilot, "page", (5, 3), times=2)
        assert app.main.view.page == "live"
        assert app.main.session.source.name == "engine-1"


async def test_no_key_changes_an_engine_on_the_fleet_screen(sources: list[Any]) -> None:
    app = dashboard(sources, control_endpoint="ipc:///nobody/here")
    async with app.run_test(size=(120, 40)) as pilot:
        for action in ACTIONS:
            if action.changes_engine or action.id in ("mark", "pause", "goto"):
                assert "fleet" not in action.pages, action.id
                await pilot.press(action.keys[0])
                assert app.main.operator.pending == ""
                assert app.main.view.cursor is None
                assert "does nothing here" in screen_text(app), action.id


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_fleet_screen_fills_every_terminal(sources: list[Any], ascii_only: bool) -> None:
    app = dashboard(sources, ascii_only=ascii_only)
    async with app.run_test(size=SIZES[0]) as pilot:
        for size in SIZES:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            lines = screen_text(app).splitlines()
            assert [cell_len(line) for line in lines] == [size[0]] * size[1]
            if ascii_only:
                assert "\n".join(lines).isascii()
            assert "3/4 up" in lines[0]
            assert any("what stands out" in line for line in lines)
        for smaller in [(60, 15), (1, 1), (20, 3), (300, 90)]:
            await pilot.resize_terminal(*smaller)
            await pilot.pause()
            assert "drawing failed" not in screen_text(app)
            if smaller == (60, 15):
                assert "stepscope needs 80x20" in screen_text(app)


async def test_more_engines_than_rows_scroll_with_the_selection(still_source: Call) -> None:
    made = [still_source(12) for _ in range(40)]
    for number, source in enumerate(made):
        source.name = f"e{number:02}"
    app = dashboard(made)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "of 40" in screen_text(app)
        await pilot.press(*["down"] * 39)
        assert "▶e39" in screen_text(app)
        assert "40/40 up" in screen_text(app)
        y = next(n for n, line in enumerate(screen_text(app).splitlines()) if "▶e39" in line)
        assert spot_of(app.main.canvas.content("page", y - 1), 4) == ("row", "39")


async def test_the_fleet_screen_of_one_engine_says_how_to_add_more(still_source: Call) -> None:
    source = still_source()
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        assert "▐FLEET▌" not in screen_text(app)
        await pilot.press("8")
        text = screen_text(app)
        assert "1/1 up" in text
        assert "▶still" in text
        assert "stepscope top engine-0 engine-1" in text
        assert '[fleet] engines = ["engine-0"' in text
        await pilot.press("escape")
        assert app.main.view.page == "live"
        await pilot.press("escape", "escape")
        assert app.main.view.page == "live"


def test_engine_states_and_figures_differ_without_colour(sources: list[Any]) -> None:
    app = dashboard(sources, looks=3)
    (live, *_rest, down) = app.session.fleet_view.page(None, SLO()).lines
    assert state_text(live)[0] == "LIVE"
    assert state_text(down)[0].startswith("DOWN ")
    changed = live.figures._replace
    for line, text in (
        (live._replace(figures=changed(status="stale"), silent_s=3.2), "STALE 3.2s"),
        (live._replace(figures=changed(state="paused")), "PAUSED"),
        (live._replace(new_s=12.0), "LIVE new 12s"),
        (live._replace(figures=changed(state="idle")), "LIVE idle"),
    ):
        assert state_text(line)[0] == text


def test_sparklines_may_share_a_scale_and_no_load_differs_from_unknown_load() -> None:
    load = (None, 0, 1, 8, 16, 16)
    assert sparkline(load, 6) == sparkline(load, 6, 16) == " ▁▁▄▇▇"
    assert sparkline(load, 6, 160) == " ▁▁▁▁▁"
    assert sparkline((1, 9, 1, 1), 2) == "▇▁"


def test_numbers_in_engine_names_sort_numerically() -> None:
    names = ["engine-10", "engine-2", "10.0.0.12:5555", "10.0.0.9:5555"]
    ordered = ["10.0.0.9:5555", "10.0.0.12:5555", "engine-2", "engine-10"]
    assert sorted(names, key=natural) == ordered


@pytest.fixture
def busy(live_engine: Any) -> Iterator[Subscriber]:
    """A busy engine that is in the fleet but not open."""
    subscriber = Subscriber(live_engine.endpoint)
    subscriber.start()
    with ControlClient(live_engine.endpoint) as client:
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        for number in range(60):  # more than a test can take
            client.ask(Submit(prompt_token_ids=[number] * 100, sampling=sampling, stream=False))
        wait_for(lambda: (subscriber.history.last_step or 0) >= 5, "steps")
        yield subscriber  # requests end with the client that asked for them
    subscriber.stop()


def fleet_row(app: Dashboard, name: str) -> str:
    return next(line for line in main_text(app).splitlines()[3:] if name in line[:24])


@pytest.fixture
def app(
    busy: Subscriber, still_source: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Dashboard:
    """The dashboard of two engines, `still` and `busy`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    still = still_source(12)
    still.name, busy.name = "still", "busy"
    return Dashboard(still, any_terminal=True, fleet=Fleet([still, busy]))


async def test_any_engine_can_be_recorded(app: Dashboard, busy: Subscriber, tmp_path: Path) -> None:
    async with app.run_test(size=(120, 40)):
        await press(app, "home", "down")
        assert app.session.fleet_view.selected == "still"  # in the order of names
        await press(app, "up", "R")
        await until(lambda: "busy: recording to " in main_text(app), "what is recorded")
        await until(lambda: "● REC 1" in main_text(app), "that one is recorded")
        assert "busy ●" in fleet_row(app, "busy")
        assert "●" not in fleet_row(app, "still")
        begun = busy.history.last_step or 0
        await until(lambda: (busy.history.last_step or 0) > begun + 20, "steps")
        await press(app, "enter")
        await until(lambda: "● REC 00:" in main_text(app), "the same recording on its own screen")
        await press(app, "escape", "R")
        await until(lambda: "busy: recording ended: " in main_text(app), "its end")
        await until(lambda: "● REC" not in main_text(app), "that none is recorded")
    app.close()
    (told,) = app.last_words()
    (path,) = tmp_path.glob("stepscope-busy-*.mcap")
    assert str(path) in told
    with Recording(path) as recording:
        assert recording.last_step - recording.first_step >= 20
        assert not recording.truncated


async def test_leaving_the_dashboard_ends_all_recordings(app: Dashboard, tmp_path: Path) -> None:
    async with app.run_test(size=(120, 40)):
        await press(app, "R", "up", "R")
        await until(lambda: "● REC 2" in main_text(app), "that both are recorded")
    app.close()
    told = app.last_words()
    assert len(told) == 2
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.glob("*.mcap"))) == 2


async def test_an_engine_that_cannot_be_recorded_is_named(
    still_source: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    sources = [still_source(12), still_source(12)]
    for number, source in enumerate(sources):
        source.name = f"engine-{number}"
    sources[1].status = "down"
    app = Dashboard(sources[0], any_terminal=True, fleet=Fleet(sources))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("down", "R")
        assert "engine-1: no engine answers, so nothing can be recorded" in main_text(app)
        folder.rmdir()
        folder.touch()  # no folder can be there
        await pilot.press("up", "R")
        assert "engine-0: cannot record: cannot write " in main_text(app)
        assert "● REC" not in main_text(app)
    app.close()
    assert app.last_words() == []
