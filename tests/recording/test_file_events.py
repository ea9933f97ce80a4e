"""Events of a whole file are found without playing it, and keys of a replay go to them."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.events import EventLog, SessionEvent
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.frame.frame import NOTABLE
from stepscope.tui.views.pages.page_views import targets
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.screens.screen_text import main_text
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.replayed import replayed
from tests.support.sessions.seek_sessions import busy, record
from tests.support.waiting import until

Call = Callable[..., Any]

TIMED = {"slo", "gap"}  # see test_file_index.py
ABORTED, PAUSED, REFUSED = 400, 500, 600


@pytest.fixture(scope="module")
def messages() -> list[wire.Telemetry]:
    """A session with preemptions, a knob change, and operator actions done and refused."""
    messages: list[wire.Telemetry] = []
    for message in busy(seed=4, num_steps=800):
        if isinstance(message, wire.StepRecord) and message.step == ABORTED:
            gone = wire.Aborted(message.batch[0].request_id, "asked for")
            message = msgspec.structs.replace(message, events=[*message.events, gone])
        messages.append(message)
        if isinstance(message, wire.KnobsChanged) and message.new:
            told = {"who": message.who, "old": message.old, "new": message.new}
            step, version = message.effective_step, message.version
            messages.append(_audited(message.time_ns, "SetKnobs", step, version=version, **told))
        if isinstance(message, wire.StepRecord) and message.step == PAUSED:
            messages.append(_audited(message.tokens_ns, "Pause", PAUSED + 1))
        if isinstance(message, wire.StepRecord) and message.step == REFUSED:
            refused = {"code": "bounds", "detail": "too much"}
            messages.append(_audited(message.tokens_ns, "SetKnobs", None, **refused))
    return messages


def _audited(time_ns: int, command: str, step: int | None, **more: object) -> wire.Audited:
    given = {"number": 1, "who": "ops", **more}
    return wire.Audited(command=command, time_ns=time_ns, effective_step=step, **given)


@pytest.fixture(scope="module")
def file(messages: list[wire.Telemetry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "session.mcap"
    return record(path, enumerate(messages))


@pytest.fixture
def found(file: Path) -> Iterator[FileIndex]:
    events = FileIndex(file)
    events.start()
    assert events.wait(30)
    yield events
    events.stop()


@pytest.fixture
def source(file: Path) -> Iterator[ReplaySource]:
    with replayed(file) as replay:
        assert replay.file_index.wait(30)
        yield replay


@pytest.mark.parametrize("kind", sorted(NOTABLE - TIMED))
@pytest.mark.parametrize("direction", [1, -1])
def test_a_file_search_finds_every_event_that_playing_the_file_shows(
    found: FileIndex, messages: list[wire.Telemetry], kind: str, direction: int
) -> None:
    history = history_of(enumerate(messages))
    expected = sorted({each.step for each in history.events(limit=10**6, kinds=frozenset({kind}))})
    steps, at = [], -1 if direction > 0 else 10**6
    while (event := found.next(at, direction, {kind}, SLO())) is not None:
        assert event.kind == kind
        steps.append(event.step)
        at = event.step
    assert steps[::direction] == expected
    if kind in ("preempt", "abort", "reject"):  # in the same words as once it is in memory
        texts = {each.text for each in history.events(limit=10**6, kinds=frozenset({kind}))}
        assert {found.next(step - 1, 1, {kind}, SLO()).text for step in expected} <= texts
    assert len(steps) >= {"preempt": 20, "knobs": 1, "abort": 1, "engine": 2}.get(kind, 0)


def test_preemptions_of_a_file_are_shown_on_a_scrub_bar_of_any_width(found: FileIndex) -> None:
    log = EventLog()
    for step in range(0, 100_000, 7):
        log.add(SessionEvent(step, step * 10, "preempt", "", step % 5))
    few = log.spread(100)
    assert len(few) == 100
    apart = {after.step - before.step for before, after in pairwise(few)}
    assert 990 <= min(apart) <= max(apart) <= 1010
    assert all(each.step % 7 == 0 and each.request_id == each.step % 5 for each in few)
    assert len(log.spread()) == len(log) == 14_286
    assert EventLog().spread(10) == []
    assert {each.kind for each in found.landmarks()} == {"knobs", "preempt"}


def test_the_next_event_is_the_nearest_of_all_kinds(found: FileIndex) -> None:
    kinds = NOTABLE - TIMED
    at, seen = -1, []
    while (event := found.next(at, 1, kinds, SLO())) is not None:
        nearest = [found.next(at, 1, {kind}, SLO()) for kind in kinds]
        assert event.step == min(each.step for each in nearest if each is not None)
        seen.append(event.kind)
        at = event.step
    assert {"preempt", "knobs", "engine"} <= set(seen)


async def test_the_next_preemption_is_found_far_outside_memory(source: ReplaySource) -> None:
    app = Dashboard(source, any_terminal=True, fps=20.0)
    async with app.run_test(size=(120, 40)) as pilot:
        assert source.history.num_steps == 1
        assert "✗" in main_text(app).splitlines()[-3], "not on the scrub bar"
        at = 0
        for _ in range(3):
            expected = source.file_index.next(at, 1, {"preempt"}, SLO())
            await pilot.press("right_curly_bracket")
            step = expected.step
            await until(lambda: app.main.new_frame().cursor == step, f"not at {step}")  # noqa: B023
            record = app.main.new_frame().record
            assert any(type(each).__name__ == "Preempted" for each in record.events)
            at = step
        app.main.draw()
        assert expected.text in main_text(app)
        app.main.navigator.go(source.recording.last_step)
        last = source.recording.last_step
        await until(lambda: app.main.new_frame().cursor == last, "not at the end")
        await pilot.press("right_curly_bracket")
        said = f"no preemption after step {last:,}, the last of the file"
        await until(lambda: said in main_text(app), "it is not said that there is none")


async def test_knob_changes_ahead_are_listed_and_enter_goes_to_them(source: ReplaySource) -> None:
    (change,) = source.file_index.changes
    app = Dashboard(source, any_terminal=True, fps=20.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6")
        assert "; 3 ahead (])" in main_text(app)
        refused, paused, line = (line for line in main_text(app).splitlines() if "ahead: " in line)
        assert f" {REFUSED:,} " in refused
        assert f" {PAUSED + 1:,} " in paused
        assert f" {change.effective_step:,} " in line
        assert "max_num_batched_tokens 512→128" in line
        while app.main.view.row < len(source.history.info.knobs) + 2:
            await pilot.press("down")
        await pilot.press("enter")
        step = change.effective_step
        await until(lambda: app.main.new_frame().cursor == step, "not at the change")
        assert app.main.view.page == "live"
        await pilot.press("6")
        assert "; 2 ahead (])" in main_text(app)
        assert "max_num_batched_tokens 512→128" in main_text(app)
        app.main.navigator.go(step - 1)
        await until(lambda: app.main.new_frame().cursor == step - 1, "not before the change")
        app.main.draw()
        assert "; 3 ahead (])" in main_text(app)
        app.main.navigator.go(REFUSED + 10)
        await until(lambda: app.main.new_frame().cursor == REFUSED + 10, "not behind all of them")
        app.main.draw()
        assert "ahead" not in main_text(app)


async def test_a_selected_breach_stays_selected_while_others_appear(still_source: Call) -> None:
    history = History(SLO(ttft_ms=30.0, itl_ms=8.0), max_steps=200)
    messages = simulate(seed=3, num_steps=600, workload=SimulatedWorkload(rate=9.0))
    for sequence, message in messages[:300]:
        history.append(sequence, message)
    source = type(still_source(2))(history)
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5", "j", "j")
        chosen = targets(app.main.frame)[app.main.view.row]
        assert (app.main.view.row, chosen) == (2, targets(app.main.frame)[2])
        for sequence, message in messages[300:340]:
            history.append(sequence, message)
        app.main.draw()
        assert targets(app.main.frame)[2] != chosen
        assert targets(app.main.frame)[app.main.view.row] == chosen
        lines = [strip.text for strip in app.main._compositor.render_strips()]
        assert any(f"▶ {chosen.step:>8,}" in line for line in lines), "\n".join(lines)
        for sequence, message in messages[340:]:
            history.append(sequence, message)
        app.main.draw()  # forgotten meanwhile
        assert chosen not in targets(app.main.frame)
        assert (app.main.view.row, app.main.view.entry) == (0, None)


async def test_the_first_steps_are_on_the_scrub_bar_at_once(still_source: Call) -> None:
    now_s = 0.0
    history = History()
    messages = simulate(seed=3, num_steps=60)
    source = type(still_source(2))(history)
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: now_s)
    async with app.run_test(size=(120, 40)):
        app.main.draw_if_changed()
        for sequence, message in messages:
            history.append(sequence, message)
        now_s = 0.1
        app.main.draw_if_changed()
        shown = main_text(app)
    assert "no step in memory" not in shown
    assert "60 steps in memory" in shown
