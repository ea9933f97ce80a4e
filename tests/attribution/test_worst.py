"""After an incident one key (w) goes to the worst stall; the screens name it without a key."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope.recordings.samples
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.format import clock, with_ms
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import latency_page
from stepscope.tui.views.pages.page_views import targets
from stepscope.tui.views.panels import latency_panel
from stepscope.tui.views.view import View
from tests.support.screens.keys import press_keys
from tests.support.screens.screen_text import line_texts, main_text
from tests.support.screens.still_dashboard import dashboard
from tests.support.sessions.replayed import replayed, seek

Call = Callable[..., Any]

SAMPLE = Path(stepscope.recordings.samples.__file__).parent / "freeze.mcap"


@pytest.fixture
def source(still_source: Call) -> Any:
    """A source whose last stall is not its worst."""
    source = still_source(400)
    source.history.set_slo(SLO(500.0, 15.0))
    return source


@pytest.fixture
def replay() -> Iterator[ReplaySource]:
    """A replay that stands at the end of its file."""
    with replayed(SAMPLE) as source:
        seek(source, 453)
        yield source


def notice(app: Dashboard) -> str:
    is_empty = "1 Live" in app.main.canvas.text_of("notice")[0]
    return "" if is_empty else app.main.canvas.text_of("notice")[0].strip()


async def worst(app: Dashboard, replay: ReplaySource) -> None:
    """Press the key, and draw once the replay has come to the stall."""
    await press_keys(app, ["w"])
    assert replay.wait(30)
    app.main.draw()


def frame_of(history: History, **view: Any) -> Frame:
    return FrameBuilder(history, clock=lambda: 0.0).build(View(**view), 80, 10, 8)


# The key


async def test_the_worst_stall_key_goes_to_each_in_turn_and_describes_it(source: Any) -> None:
    history = source.history
    stalls = history.windows.stalls(1000).longest
    steps = [each.step for each in stalls]
    assert len(steps) > 3
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("w")
        assert app.main.view.cursor == steps[0]
        worst = stalls[0]
        when = clock(history.wall_ns(worst.time_ns))
        assert notice(app) == (
            f"worst of {len(steps)} seconds with a stall: {with_ms(worst.ns / 1e6)} at {when}; "
            f"held up {worst.num_tokens} streams (w: the next)"
        )
        for rank, step in ((2, steps[1]), (3, steps[2])):
            await pilot.press("w")
            assert app.main.view.cursor == step
            assert notice(app).startswith(f"number {rank} of {len(steps)} seconds")


async def test_after_another_move_the_worst_stall_key_begins_with_the_longest(source: Any) -> None:
    steps = [each.step for each in source.history.windows.stalls(1000).longest]
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        for away in ("left", "L", "left_curly_bracket"):
            await pilot.press("w", "w")
            assert app.main.view.cursor == steps[1]
            await pilot.press(away, "w")
            assert app.main.view.cursor == steps[0], away
            await pilot.press("L")


async def test_the_worst_stall_key_uses_the_current_service_levels(source: Any) -> None:
    history = source.history
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        history.set_slo(SLO(500.0, 60_000.0))
        worst = max(history.summaries(0, 399), key=lambda each: each.max_ttft_ns or 0)
        await pilot.press("w")
        assert app.main.view.cursor == worst.step
        assert re.search(rf"a late first token: .+; r{worst.max_ttft_request_id} \(w", notice(app))
        await pilot.press("L")
        history.set_slo(SLO(60_000.0, 60_000.0))
        await pilot.press("w")
        assert notice(app) == "no token came later than TTFT 60000 ms, ITL 60000 ms (b)"
        assert app.main.view.live


async def test_the_worst_stall_key_covers_memory_until_a_file_is_read(replay: ReplaySource) -> None:
    searched, replay.file_index = replay.file_index, FileIndex(SAMPLE)
    app = dashboard(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await worst(app, replay)
        assert app.main.frame.cursor == 302
        said = r"worst of 7 seconds with a stall: 837 ms at .+; held up 12 streams"
        assert re.match(said, notice(app))
        await worst(app, replay)
        assert app.main.frame.cursor == 123
        replay.seek(200)
        assert replay.wait()
        await pilot.press("1")
        await worst(app, replay)
        assert app.main.frame.cursor == 123
        assert notice(app).startswith("worst of 3 seconds with a stall in memory: 832 ms")
        replay.file_index = searched
        assert searched.wait(30)
        app.main.navigator.go(150)
        await worst(app, replay)
        said = r"worst of 7 seconds with a stall: 837 ms at .+; 12 streams waited so long \(w: "
        assert re.match(said, notice(app))
        assert replay.wait()
        assert replay.history.last_step == 302
        await worst(app, replay)
        assert notice(app).startswith("number 2 of 7 seconds with a stall: 832 ms")
        assert app.main.new_frame().cursor == 123
        replay.history.set_slo(SLO(500.0, 10_000.0))
        app.main.navigator.go(130)
        await worst(app, replay)
        assert re.match(r"worst of \d+ seconds? with a late first token", notice(app))
        replay.history.set_slo(SLO(1e9, 1e9))
        await worst(app, replay)
        assert notice(app).startswith("no token came later than")


@pytest.mark.parametrize("width", [80, 120])
async def test_before_the_file_is_searched_the_worst_stall_key_never_says_no_token_was_late(
    replay: ReplaySource, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, replay.file_index = replay.file_index, FileIndex(SAMPLE)
    replay.seek(8)
    assert replay.wait()
    app = dashboard(replay)
    async with app.run_test(size=(width, 30)):
        await worst(app, replay)
        assert "the file is still searched" in notice(app)
        assert notice(app).endswith("w again in a moment")
        assert searched.wait(30)
        replay.file_index = searched
        await worst(app, replay)
        assert app.main.new_frame().cursor == 302


# The panel of the main screen


@pytest.mark.parametrize("width", [50, 60, 100])
def test_the_latency_panel_names_the_worst_stall_beside_the_last(source: Any, width: int) -> None:
    history = source.history
    stalls = history.windows.stalls(1000)
    worst, frame = stalls.longest[0], frame_of(history)
    assert frame.stall.step != worst.step
    lines = line_texts(latency_panel.draw(frame, width, 10, 14))
    assert {len(line) for line in lines} == {width}
    last, named = lines[-3:-1]
    assert "last stall: " in last
    assert "ITL" in last
    how_long = with_ms(worst.ns / 1e6)
    assert re.search(rf"worst.*: {how_long} at .+{worst.num_tokens} str", named)
    assert "(w" in named


def test_the_last_stall_is_marked_as_the_worst_if_it_is(source: Any) -> None:
    history = source.history
    worst = history.windows.stalls().longest[0]
    frame = frame_of(history, cursor=worst.step)
    shown = "\n".join(line_texts(latency_panel.draw(frame, 60, 10, 14)))
    assert "the worst in memory" in shown
    history.set_slo(SLO(1e9, worst.ns / 1e6 - 0.001))
    shown = "\n".join(line_texts(latency_panel.draw(frame_of(history), 60, 10, 14)))
    assert "last stall" in shown
    assert "worst in memory" not in shown


# The list of breaches


async def test_breaches_sorted_by_length_are_all_breaches_not_just_the_newest(source: Any) -> None:
    history = source.history
    history.set_slo(SLO(500.0, 5.0))
    breaches = history.windows.breaches(None, 10_000)
    assert len(breaches) > latency_page.MAX_BREACHES
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5")
        assert "newest first (i: longest)" in main_text(app)
        await pilot.press("i")
        assert "longest ITL first (i: newest)" in main_text(app)
        itl = [each for each in breaches if each.kind == "ITL"]
        in_order = sorted(itl, key=lambda each: (-each.ns, each.step))[: latency_page.MAX_BREACHES]
        assert [each.step for each in targets(app.main.frame)] == [each.step for each in in_order]
        await pilot.press("o")  # the other kind of latency
        assert "longest TTFT first (i: newest)" in main_text(app)
        longest = max((b for b in breaches if b.kind == "TTFT"), key=lambda each: each.ns)
        assert targets(app.main.frame)[0].step == longest.step


def test_the_heading_of_the_breaches_says_when_they_are_a_part(replay: ReplaySource) -> None:
    def said(extent: tuple[int, int], **view: Any) -> str:
        builder = FrameBuilder(replay.history, extent, lambda: 0.0)
        frame = builder.build(View(page="latency", **view), 80, 10, 8)
        return "".join(run for run, _ in latency_page.heading(frame, 114))

    replay.history.set_slo(SLO(100.0, 15.0))
    first, last = replay.history.first_step, replay.history.last_step
    assert re.fullmatch(r"breaches \([\d,]+ tokens late in \d+ steps\) .*", said((first, last)))
    cursor = (first + last) // 2
    assert "steps up to the cursor) " in said((first, last), cursor=cursor)
    assert re.search(r"late.* in memory\) ", said((first - 1, last)))
    assert re.search(r"late.* in memory up to the cursor\) ", said((first - 1, last + 1)))
    longest = said((first - 1, last), cursor=cursor, longest_first=True)
    assert re.search(r"late.* in memory up to (the cursor|here)\)  longest ITL first", longest)
    assert len(longest) <= 114


async def test_a_selected_breach_stays_selected_in_another_order_and_opens(source: Any) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5", "j", "j")
        chosen = targets(app.main.frame)[2]
        await pilot.press("i")
        assert targets(app.main.frame)[app.main.view.row] == chosen
        await pilot.press("1", "5")
        assert "longest ITL first" in main_text(app), "as it was left"
        assert app.main.view.row == 0
        worst = source.history.windows.stalls().longest[0]
        await pilot.press("enter")
        assert (app.main.view.page, app.main.view.cursor) == ("step", worst.step)
