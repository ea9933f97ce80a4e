"""The dashboard draws at every terminal size and never fails at any."""

from pathlib import Path
from typing import Any

import pytest
from textual.geometry import Region

from stepscope.recordings.history.history import History
from stepscope.tui.screens import canvas
from stepscope.tui.views import layout
from stepscope.tui.views.framed_panels import Column, Rows, table
from tests.support.screens.running import running
from tests.support.screens.screen_text import screen_text
from tests.support.screens.still_dashboard import dashboard
from tests.support.sessions.received import Received

SIZES = [(120, 40), (200, 60), (90, 24), (100, 20), (160, 45), (159, 50), (80, 20), (300, 100)]
OF_MORE = ("tour", "header", "knobs", "notice", "footer", "page", "too_small")  # than the frame
TINY = [(79, 24), (80, 19), (40, 10), (10, 3), (5, 1), (1, 5), (2, 2), (1, 1)]


@pytest.mark.parametrize("size", [*SIZES, *TINY])
def test_the_views_share_the_screen_without_overlap(size: tuple[int, int]) -> None:
    places = layout.plan(*size)
    screen = Region(0, 0, *size)
    covered = 0
    for name, region in places.items():
        assert name in (*canvas._VIEWS, *OF_MORE)
        assert screen.contains_region(region), name
        covered += region.area
        for other_name, other in places.items():
            assert other_name == name or not region.overlaps(other), (name, other_name)
    assert covered == screen.area


@pytest.mark.parametrize("size", TINY)
async def test_a_terminal_below_80x20_has_a_notice(
    still_source: Any, size: tuple[int, int]
) -> None:
    async with running(dashboard(still_source()), size) as (app, pilot):
        await pilot.press("space", "left", "question_mark", "escape", "g", "escape", "S-x")
        lines = screen_text(app).splitlines()
        assert len(lines) == size[1]
        has = f"needs 80x20, has {size[0]}x{size[1]}"
        wanted = (f"stepscope {has}", has, "needs 80x20", "80x20", "!")
        whole = next(text for text in wanted if len(text) <= size[0])
        assert whole in map(str.strip, lines), lines


async def test_a_screen_too_small_to_draw_ignores_all_but_help_and_quit(
    still_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(dashboard(still_source()), (40, 10)) as (app, pilot):
        view = app.main.view
        before = view.page, view.live, view.cursor, view.right, view.row
        for key in ("w", "S", "D", "M", "g", "5", "left", "space", "enter", "ctrl+p"):
            await pilot.press(key)
            assert app.screen is app.main, key
            assert (view.page, view.live, view.cursor, view.right, view.row) == before, key
            assert " needs a larger screen" in screen_text(app), key
        assert list(tmp_path.iterdir()) == []
        await pilot.press("question_mark")
        assert app.screen is not app.main
        await pilot.press("escape")
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        await pilot.press("5")
        assert view.page == "latency"
        await pilot.resize_terminal(40, 10)
        await pilot.pause()
        await pilot.press("q")
    assert not app.is_running


async def test_overlays_survive_a_shrinking_terminal(still_source: Any) -> None:
    app = dashboard(still_source(), control_endpoint="ipc:///nobody/engine-0")
    async with app.run_test(size=(120, 40)) as pilot:
        for key in ("question_mark", "K", "B", "g", "M"):
            await pilot.press(key)
            for size in [(60, 10), (1, 1), (200, 60)]:
                await pilot.resize_terminal(*size)
            assert app.screen is not app.main, key
            await pilot.press("escape")
            assert app.screen is app.main, key
            await pilot.resize_terminal(120, 40)


async def test_an_engine_without_a_step_yet_is_drawn() -> None:
    source = Received(History())
    source.status = "connecting"
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("space", "left", "right", "home", "end", "left_square_bracket", "B", "K")
        await pilot.press("escape", "U", "M", "escape", "enter", "apostrophe", "comma", "z", "t")
        assert "▐CONNECTING▌" in screen_text(app)
        assert "no step yet" in screen_text(app)


COLUMNS = (Column("step", 6, True), Column("what", 0))


@pytest.mark.parametrize(
    ("selected", "first_row", "first"), [(None, 0, 0), (None, 4_000, 4_000), (2_500, 0, 2_496)]
)
def test_only_visible_rows_of_a_long_list_are_built(
    selected: int | None, first_row: int, first: int
) -> None:
    made: list[int] = []

    def row(at: int) -> list[tuple[str, str]]:
        made.append(at)
        return [(f"{at}", "text"), ("a change", "text")]

    lines = table(COLUMNS, Rows(5_000, row), 40, 10, selected, 7, first_row)
    assert made == list(range(first, first + 9))
    every = [[(f"{at}", "text"), ("a change", "text")] for at in range(5_000)]
    assert lines == table(COLUMNS, every, 40, 10, selected, 7, first_row)
