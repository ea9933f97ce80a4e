"""The compare screen: its verdicts, one cursor through both runs, and how to open each."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from stepscope.recordings import samples
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load import LoadDifference
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import add_mark
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.frame.compare_choices import ComparePage, file_origin, session_origin
from stepscope.tui.views.frame.compare_text import outcome, sizes, unclear, verdict
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import compare_page
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import View
from tests.support.screens.clicks import click
from tests.support.screens.screen_text import line_texts, screen_text
from tests.support.screens.still_dashboard import dashboard

Call = Callable[..., Any]

SAMPLES = Path(samples.__file__).parent
SIZES = [(80, 20), (80, 24), (120, 40), (200, 60), (60, 15), (30, 5), (1, 1), (300, 90)]


def page_of(app: Dashboard) -> ComparePage:
    return app.main.frame.compare


def shown_page(app: Dashboard) -> list[str]:
    return app.main.canvas.text_of("page")


async def read_all(app: Dashboard, pilot: Pilot[None]) -> None:
    """Wait until both sides are read and shown."""
    comparer = app.main.session.compare.comparer
    for _ in range(600):
        await asyncio.sleep(0.02)
        if comparer.comparison is not None and not comparer.is_reading:
            break
    app.main.draw()
    await pilot.pause()


@asynccontextmanager
async def samples_compared(
    size: tuple[int, int] = (120, 40), **options: Any
) -> AsyncIterator[tuple[Dashboard, Pilot[None]]]:
    """`stepscope compare freeze chunked`, once both files are read."""
    history = History(SLO(ttft_ms=500.0, itl_ms=50.0))
    source = ReplaySource(Recording(SAMPLES / "freeze.mcap"), history, playing=False)
    source.start()
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: 0.0, **options)
    session = session_origin(source)
    app.compare(session, file_origin(SAMPLES / "chunked.mcap", session), "time")
    try:
        async with app.run_test(size=size) as pilot:
            await read_all(app, pilot)
            yield app, pilot
    finally:
        app.close()
        source.stop()


async def test_comparing_the_samples_shows_verdicts_figures_and_knobs() -> None:
    async with samples_compared() as (app, pilot):
        shown = screen_text(app)
        assert "▐COMPARE▌  A freeze  B chunked  by time" in shown
        best = "B is better than A in ITL p99 766→90.1 ms (8.5x), worse in ITL p95 8.0→62.8 ms"
        assert best in shown.splitlines()[2]
        assert "B better ITL p99 766→90.1 ms (8.5x, at least 4x)" in shown
        assert "A better ITL p95 8.0→62.8 ms (7.8x, at least 3.4x)" in shown
        assert "max_num_batched_tokens 8192 | 256; enable_chunked_prefill off | on" in shown
        late = "80 late, 63.3 s: shared a step with a prefill 99.9% │ TTFT: 7 late, 5.5 s: "
        assert late in shown
        assert "685 late, 44.6 s: shared a step with a prefill 98.9% │ TTFT: 7 late" in shown
        assert "not sure TTFT p50, p95, p99 (of 19)" in shown
        assert "A 19 requests in 7.9 s, B 19 requests in 7.8 s" in shown
        # A has seven freezes, B none.
        lines = shown.splitlines()
        top = next(line for line in lines if "837 ms │" in line)
        assert len(re.findall("[▅▆▇█]+", top.split("│")[2])) == 7
        bottom = [line for line in lines if "837 ms │" in line][1]
        assert not re.search("[▀█]", bottom.split("│")[2])
        for size in [*SIZES, (120, 40)]:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert "drawing failed" not in screen_text(app), size
            frame = app.main.frame
            if size[0] >= 80 and size[1] >= 20:
                body = line_texts(compare_page.draw(frame, size[0], size[1] - 3))
                assert {len(line) for line in body} == {size[0]}
                assert len(body) == size[1] - 3
                assert "B better" in "\n".join(body)


async def test_one_cursor_moves_through_both_compared_runs() -> None:
    async with samples_compared() as (app, pilot):
        await pilot.press("right", "right", "right")
        by_time = page_of(app)
        assert by_time.cursor == 3 * by_time.width
        for point in by_time.points:
            assert point.start_ns < by_time.cursor + by_time.width
            assert point.end_ns > by_time.cursor
        await pilot.press("right_square_bracket")
        late = page_of(app)
        assert late.points[0].longest_us == pytest.approx(814_000, rel=0.01)
        assert "wait 814 ms!" in screen_text(app)
        await pilot.press("o")
        assert page_of(app).align == "step"
        await pilot.press("shift+right", "z", "z", "z", "z")
        by_step = page_of(app)
        assert by_step.width == 1
        assert [p.first for p in by_step.points if p is not None] == [by_step.cursor] * 2
        await pilot.press("end")
        a, b = page_of(app).points
        assert a is None  # B has more steps
        assert b.last == 472
        assert "no step here" in screen_text(app)
        # The mouse does the same.
        place = app.main.canvas.places["page"]
        at = next(y for y, line in enumerate(shown_page(app)) if "A decode" in line)
        await click(pilot, "page", (12 + 40, at))
        assert page_of(app).cursor_column == 40
        assert place.height > at
        await pilot.press("home", "x", "x", "x", "x", "x", "left")
        assert page_of(app).cursor == 0
        await pilot.press("left_curly_bracket")
        assert "no preemption before the cursor" in screen_text(app)


async def test_a_request_is_shown_in_both_compared_runs_and_can_be_opened_in_either() -> None:
    async with samples_compared((200, 60)) as (app, pilot):
        home = app.main
        await pilot.press("o", "o", "down", "down")
        page = page_of(app)
        assert page.pair.name == "chat-2"
        assert "aligned by request chat-2" in screen_text(app)
        assert "A request" in screen_text(app)
        await pilot.press("o")
        row = next(y for y, line in enumerate(shown_page(app)) if "document-0" in line)
        await click(pilot, "page", (20, row))  # and is aligned by it at once
        assert "aligned by request document-0" in screen_text(app)
        await click(pilot, "page", (20, row - 10))
        assert "aligned by request chat-2" in screen_text(app)
        await pilot.press("s", "enter")
        assert app.main is not home
        await pilot.pause()
        shown = screen_text(app)
        assert "chunked.mcap" in shown.splitlines()[0]
        assert "request r2  chat-2" in shown
        assert "step 104" in shown.splitlines()[0]  # where its longest wait ended
        await pilot.press("left")  # time travel in that recording
        await asyncio.sleep(0.1)
        await pilot.press("escape")
        assert app.main is home
        assert "by request" in screen_text(app).splitlines()[0]
        await pilot.press("s", "enter")
        await pilot.pause()
        assert "freeze.mcap" in screen_text(app).splitlines()[0]
        assert "request r2  chat-2" in screen_text(app)
        await pilot.press("7", "o", "enter")  # by time: the step at the cursor
        assert home.view.page == "step"
        await pilot.press("escape")
        assert home.view.page == "compare"
        await pilot.press("escape")
        assert home.view.page == "live"


async def test_prompts_of_nearly_one_length_can_be_told_apart() -> None:
    async with samples_compared((200, 60)) as (app, _):
        pairs = app.main.session.compare.comparer.comparison.requests.pairs
        pair = next(each for each in pairs if each.name == "document-0")
        for length, said in ((4_120, " 4096→4120 "), (12_288, " 4.1k→12k ")):
            pair.b.num_prompt_tokens = length
            app.main.draw()
            (line,) = (each for each in shown_page(app) if "document-0" in each)
            assert said in line


async def test_an_uncertain_difference_is_shown_with_its_number_of_requests() -> None:
    async with samples_compared() as (app, _):
        found = page_of(app).comparison
    told = (22.6, 484.0, "lower", "unclear", 39, 78, "ttft", 50)
    first = ComparedFigure("ttft_p50", "TTFT p50", "ms", *told)
    second = first._replace(key="ttft_p95", label="TTFT p95", b=25.0, rank=95)
    found = found._replace(figures=[first, second])
    assert outcome(found, "a") == ("A better", ["nothing for sure"])
    assert unclear(found) == ["TTFT p50, p95 (of 39 and 78)"]
    assert [verdict(each) for each in found.figures] == ["may be chance"] * 2
    # Under different loads, more requests would not help either.
    load = LoadDifference(False, "twice the work", is_chance=False, more_a=1.0, more_b=2.0)
    assert unclear(found._replace(load=load)) == ["TTFT p50, p95"]
    assert outcome(found._replace(load=load), "a") == ("A lower", ["in no latency"])
    assert sizes(found, 27) == "A 19, B 19 requests"


@pytest.mark.parametrize("theme", ["dark", "light"])
async def test_without_colour_compared_runs_and_the_winner_can_be_told_apart(theme: Any) -> None:
    async with samples_compared((200, 60), theme=theme, ascii_only=True) as (app, _):
        shown = screen_text(app)
        assert shown.isascii()
        assert "B better" in shown
        assert "766>90.1 B  8.5x" in shown
        plain = Skin("none")
        page = app.main.canvas.places["page"]
        for line in compare_page.draw(app.main.frame, page.width, page.height):
            for run, style in line:
                if not run:
                    continue  # where a click leads
                assert plain.styles[style].color is None, run


# What to compare with


async def test_the_comparison_chooser_offers_parts_of_the_session_and_recordings(
    still_source: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.mcap").write_bytes((SAMPLES / "freeze.mcap").read_bytes())
    (tmp_path / "broken.mcap").write_bytes(b"not a recording")
    source = still_source(400)
    add_mark(source, "before lunch", "me", 100)
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("7")
        choices = page_of(app).choices
        kinds = [choice.kind for choice in choices]
        shipped = ["sample"] * len(samples.SHOWS)
        assert kinds == ["knobs", "mark", "recording", "recording", *shipped, "file"]
        names = [choice.name for choice in choices]
        assert names[:2] == ["max_num_batched_tokens=512", "before lunch"]
        assert "mine.mcap" in screen_text(app)
        for _ in range(names.index("broken.mcap")):
            await pilot.press("down")
        await pilot.press("enter")
        assert "is not a stepscope recording" in screen_text(app)
        for _ in range(names.index("broken.mcap") - 1):
            await pilot.press("up")
        await pilot.press("enter")
        await read_all(app, pilot)
        shown = screen_text(app)
        assert "A before  B after  before lunch" in shown
        origins = app.main.session.compare.origins
        assert [origin.stretch for origin in origins] == [StepRange(None, 99), StepRange(100, 339)]
        assert "B until the change at step 340" in shown
        first = page_of(app).comparison
        assert first.works[0].num_steps == 100
        # What is not comparable is said first, whole, in the narrowest of terminals too; then
        # nobody is called better.
        for width, height in ((120, 37), (80, 21)):
            frame = app.main.frame
            body = line_texts(compare_page.draw(frame, width, height))
            last = next(n for n, line in enumerate(body) if "B lower" in line)
            told = " ".join(line.strip("│ ") for line in body[1:last])
            told = told.removeprefix("not to be judged: the work differs ")
            judged = "! work   loads differ; only more work may win: "
            assert told == judged + first.load.other_work
            assert "better" not in "\n".join(body[1:])
        # The end of a session goes on while one looks at it.
        await pilot.press("c")
        assert page_of(app).choices is not None
        await pilot.press("escape")
        assert page_of(app).comparison is first
        await pilot.press("enter")
        assert app.main.view.page == "step"
        assert app.main.view.cursor == 0
    app.close()


async def test_escape_stops_reading_and_keeps_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.recordings.compare import comparison

    monkeypatch.setattr(comparison, "_SLICE_S", 0.001)
    monkeypatch.setattr(comparison, "_REST_S", 0.02)
    monkeypatch.setattr(comparison, "_RENEW_S", 0.0)
    history = History()
    source = ReplaySource(Recording(SAMPLES / "freeze.mcap"), history, playing=False)
    source.start()
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: 0.0)
    session = session_origin(source)
    app.compare(session, file_origin(SAMPLES / "chunked.mcap", session), "step")
    async with app.run_test(size=(120, 40)) as pilot:
        reading = app.main.session.compare.comparer
        await pilot.press("escape")
        app.main.draw()
        assert app.main.view.page == "compare"
        for _ in range(100):
            if not reading.is_reading:
                break
            await asyncio.sleep(0.02)
        await pilot.press("right")
        assert reading.was_cancelled
        assert "reading was stopped" in screen_text(app)
        await pilot.press("escape")
        assert app.main.view.page == "live"
    app.close()
    source.stop()


def test_the_compare_screen_is_drawn_before_anything_is_chosen_or_read(still_source: Call) -> None:
    source = still_source(50)
    builder = FrameBuilder(source.history, clock=lambda: 0.0)
    frame = builder.build(View(page="compare"), 80, 0, 8)
    assert compare_page.targets(frame) == []
    assert len(compare_page.draw(frame, 80, 21)) == 21
    state = Dashboard(source, any_terminal=True).main.session.compare
    state.watch(True, source)
    frame.compare = state.page(60)
    assert "what is B?" in "\n".join(line_texts(compare_page.draw(frame, 80, 21)))
    assert len(compare_page.targets(frame)) == len(state.chooser.choices or [])
