"""If the engine, a thread or a view fails, a line says so; each state is drawn once."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual import events

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.history.history import History
from stepscope.recordings.live.forward_passes import ForwardPassAddress, ForwardPassSource
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard
from stepscope.tui.app.run import shown_thread_errors
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.settings.action_table import PAGES
from stepscope.tui.views.charts import lanes
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import kv_page
from stepscope.tui.views.view import View
from tests.support import waiting
from tests.support.engines.engine_process import EngineProcess
from tests.support.screens import live_dashboard
from tests.support.screens.clicks import click
from tests.support.screens.live_dashboard import press
from tests.support.screens.running import running
from tests.support.screens.screen_text import screen_text
from tests.support.screens.still_dashboard import dashboard
from tests.support.sessions import history_steps


@pytest.fixture
def engine(runtime_folder: Path) -> Iterator[EngineProcess]:
    with EngineProcess(f"{runtime_folder}/engine") as process:
        process.work()
        yield process


async def until(app: Dashboard, words: str) -> None:
    await waiting.until(
        lambda: words in screen_text(app), lambda: f"{words!r}:\n{screen_text(app)[:500]}"
    )


@pytest.mark.slow
async def test_every_screen_follows_an_engine_that_stalls_dies_and_restarts(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody will answer the pause below.
    monkeypatch.setattr(ControlClient.__init__, "__defaults__", (2.0,))
    source = Subscriber(engine.endpoint, stale_s=0.3, retry_s=0.1)
    source.start()
    app = live_dashboard.dashboard(source)
    try:
        async with app.run_test(size=(120, 40)):
            await until(app, "▐LIVE▌")
            await until(app, "RUN ")

            # The engine stalls, then continues.
            engine.send(signal.SIGSTOP)
            await until(app, "▐DOWN▌")
            assert "— steps/s" in screen_text(app)
            step = source.history.last_step
            await press(app, "left", "left")  # time travel does not need an engine
            assert "▐PAUSED" in screen_text(app)
            await press(app, "L")
            engine.send(signal.SIGCONT)
            await until(app, "▐LIVE▌")
            await waiting.until(lambda: source.history.last_step != step, "no further step")
            assert source.history.num_lost == 0  # gap recovery has fetched the missed steps

            # The engine dies; every screen still draws.
            engine.kill()
            await until(app, "▐DOWN▌")
            await until(app, "is gone: killed or crashed")
            for number, page in enumerate(PAGES[:6], 1):
                await press(app, str(number))
                assert app.main.view.page == page
                assert "failed" not in screen_text(app)
            await press(app, "1", "P")  # the screen says that nobody answers
            await until(app, "pause the engine: ")

            # Another engine takes its place and counts its steps from 0.
            before = source.history.last_step
            engine.start()
            await until(app, "▐LIVE idle▌")
            engine.work()
            await waiting.until(lambda: (source.history.last_step or 0) >= 3, "no steps")
            assert source.history.previous.last_step == before
            events = source.history.events(None, 10_000, frozenset({"engine"}))
            assert any("restarted" in event.text for event in events)
            await press(app, "p")
            await until(app, "▐BEFORE THE RESTART▌")
            await press(app, "L")
            await until(app, "▐LIVE▌")
    finally:
        app.close()
        source.stop()


async def test_garbage_on_the_wire_is_counted_on_the_screen(runtime_folder: Path) -> None:
    """Any process that binds the telemetry address may send any bytes."""
    source = Subscriber(Endpoint.parse(f"{runtime_folder}/engine"))
    app = Dashboard(source, any_terminal=True, fps=20.0)
    async with app.run_test(size=(160, 40)):
        source.history.append(0, history_steps.info())
        for frames in (
            [b"step"],
            [b"step", b"short", b"x"],
            [b"step", wire.sequence_frame(1), os.urandom(64)],
            [b"step", wire.sequence_frame(2), b"\x81" * 5000],
            [b"info", wire.sequence_frame(3), wire.encode(history_steps.info())[:-3]],
        ):
            assert source._read(frames) is None
        await until(app, "5 messages could not be read, the last one: ")
        await press(app, "2", "4", "1")
        assert "failed" not in screen_text(app)


async def test_lost_messages_are_drawn_as_a_gap(still_source: Any) -> None:
    source = still_source(60)
    history = source.history
    record = history.record(59)
    later = msgspec.structs.replace(
        record,
        step=70,
        schedule_start_ns=record.tokens_ns + 10**8,
        tokens_ns=record.tokens_ns + 2 * 10**8,
        events=[],
    )
    history.append(history.last_sequence + 11, later)
    async with running(dashboard(source), (160, 45)) as (app, pilot):
        shown = screen_text(app)
        assert "gap 10" in shown
        assert "10 messages lost after step 59" in shown
        assert "??????????" in shown  # ten columns of unknown lanes
        await pilot.press("2")
        assert "records before this step are missing" in screen_text(app)
        await pilot.press(*["left"] * 4)
        assert "failed" not in screen_text(app)


@pytest.mark.parametrize(("module", "keys"), [(lanes, []), (kv_page, ["4"])], ids=["panel", "page"])
async def test_a_failing_view_shows_an_error_line_and_the_others_keep_drawing(
    still_source: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    keys: list[str],
) -> None:
    monkeypatch.setattr(module, "framed", lambda *_: 1 / 0)
    async with running(dashboard(still_source(60)), (160, 45)) as (app, pilot):
        await pilot.press(*keys)
        assert "drawing failed, see the log: ZeroDivisionError" in screen_text(app)
        assert sum("drawing failed" in record.message for record in caplog.records) == 1
        monkeypatch.undo()
        await pilot.press("5")
        assert "drawing failed" not in screen_text(app)


async def test_a_failing_key_or_mouse_handler_shows_an_error_line(
    still_source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(dashboard(still_source(60)), (160, 45)) as (app, pilot):
        handlers = dict(app.main.by_action)
        app.main.by_action = handlers | {"axis": lambda: 1 / 0}
        await pilot.press("t")
        assert "Axis failed, see the log: ZeroDivisionError" in screen_text(app)
        app.main.navigator.of_column = lambda x: 1 / 0
        await click(pilot, "chart", (60, 3))
        assert "the click failed, see the log" in screen_text(app)
        assert len(caplog.records) == 2
        await pilot.press("z", "2")
        assert app.main.view.page == "step"


async def test_a_failing_overlay_closes_and_leaves_the_dashboard_running(
    still_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(dashboard(still_source(60)), (160, 45)) as (app, pilot):
        await pilot.press("question_mark")
        assert isinstance(app.screen, Overlay)
        monkeypatch.setattr(type(app.screen), "pressed", lambda *_: 1 / 0)
        await pilot.press("down")
        assert app.screen is app.main


async def test_a_dead_thread_of_a_source_is_named_in_words(
    still_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForwardPassSource, "_run", lambda source: 1 / 0)
    dying = ForwardPassSource(ForwardPassAddress.parse("ipc:///tmp/none"), History())
    source = still_source(60)
    app = Dashboard(source, any_terminal=True, fps=20.0)
    with shown_thread_errors(app):
        async with app.run_test(size=(160, 45)):
            dying.start()
            dying.stop()
            await until(app, "forward passes died, see the log: ZeroDivisionError")


async def test_a_dead_thread_or_task_shows_an_error_line_until_a_key(still_source: Any) -> None:
    source = still_source(60)
    app = Dashboard(source, any_terminal=True, fps=20.0)
    with shown_thread_errors(app):
        async with app.run_test(size=(160, 45)):
            thread = threading.Thread(target=lambda: 1 / 0, name="recorder")
            thread.start()
            thread.join()
            await until(app, "recorder died, see the log: ZeroDivisionError")
            await press(app, "escape")
            assert "recorder died" not in screen_text(app)
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "a task failed", "exception": ValueError(7)})
            await until(app, "a task failed, see the log: ValueError(7)")


async def test_keys_and_clicks_during_the_exit_do_nothing(still_source: Any) -> None:
    async with running(dashboard(still_source(60))) as (app, pilot):
        await pilot.press("q")
        stack = app._screen_stacks[app._current_mode]
        screens = list(stack)
        stack.clear()
        try:
            await app.on_event(events.Key("left", None))
            await app.on_event(events.MouseMove(None, 1, 1, 0, 0, 0, False, False, False))
        finally:
            stack.extend(screens)


class Drawings:
    """Counts the drawings of a dashboard."""

    def __init__(self, app: Dashboard) -> None:
        self.number = 0
        self._draw = app.main.canvas.draw
        app.main.canvas.draw = self._count

    def _count(self, *args: Any) -> None:
        self.number += 1
        self._draw(*args)


async def test_a_screen_drawn_for_a_key_is_not_drawn_in_the_next_frame(still_source: Any) -> None:
    source, now_s = still_source(), [100.0]
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: now_s[0])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("space")
        drawings = Drawings(app)
        await pilot.press("left")
        assert drawings.number == 1
        for _ in range(3):
            now_s[0] += 0.1
            app.main.draw_if_changed()
        assert drawings.number == 1
        app.main.view.change_zoom(1)  # whichever it is that changes
        app.main.draw_if_changed()
        assert drawings.number == 2


async def test_figures_skipped_in_a_frame_are_refreshed_without_steps(still_source: Any) -> None:
    history, now_s = still_source().history, [100.0]
    builder, view = FrameBuilder(history, clock=lambda: now_s[0]), View()
    before = builder.build(view, 80, 10, 8)
    assert not builder.is_behind
    history.rewind(history.last_step - 100)
    now_s[0] += 0.1
    frame = builder.build(view, 80, 10, 8)
    assert frame.last_step == before.last_step - 100
    assert (frame.latency, frame.events) == (before.latency, before.events)  # for now
    assert not builder.is_behind, "it cannot be taken yet: no reason to draw"
    now_s[0] += 1.0
    assert builder.is_behind
    frame = builder.build(view, 80, 10, 8)
    assert frame.latency == history.windows.latency(None, 60.0)
    assert frame.events[-1].step <= frame.last_step
    assert not builder.is_behind
    now_s[0] += 5.0
    assert not builder.is_behind


async def test_an_idle_dashboard_redraws_almost_nothing(still_source: Any) -> None:
    source, now_s = still_source(), [100.0]
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: now_s[0])
    async with app.run_test(size=(120, 40)):
        app.main.draw()
        drawings = Drawings(app)
        for _ in range(100):  # ten seconds at ten frames a second
            now_s[0] += 0.1
            app.main.draw_if_changed()
        assert drawings.number <= 8  # ages change every four seconds
