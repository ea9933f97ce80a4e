"""A clock that jumps falsifies no latency, no window and no time of day."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Arrived, EngineInfo, EngineStatus, StepRecord, Telemetry
from stepscope.engine.telemetry.heartbeat import anchored
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.screens.screen_text import main_text
from tests.support.screens.still_dashboard import dashboard
from tests.support.sessions.history_steps import history_of

HOUR_NS = 3600 * 10**9
NUM_STEPS, JUMP_AT = 300, 200


def session(base_ns: int, jump_ns: int) -> list[tuple[int, Telemetry]]:
    """A simulated session whose clock jumps before the step `JUMP_AT`."""
    found = []
    jumped = False
    for sequence, message in simulate(
        seed=3,
        num_steps=NUM_STEPS,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=32),
        workload=SimulatedWorkload(rate=9.0, document_share=0.1, document_tokens=1500),
        num_blocks=512,
    ):
        jumped = jumped or (isinstance(message, StepRecord) and message.step >= JUMP_AT)
        found.append((sequence, _moved(message, base_ns + (jump_ns if jumped else 0))))
    return found


def _moved(message: Any, by_ns: int) -> Any:
    replace, names = msgspec.structs.replace, ["schedule_start_ns", "schedule_end_ns", "launch_ns"]
    known = {
        name: getattr(message, name, None)
        for name in [*names, "tokens_ns", "time_ns", "monotonic_ns"]
    }
    times = {name: ns + by_ns for name, ns in known.items() if ns is not None}
    if isinstance(message, StepRecord | EngineStatus):
        times["events"] = [
            replace(event, time_ns=event.time_ns + by_ns) if isinstance(event, Arrived) else event
            for event in message.events
        ]
    return replace(message, **times)


@pytest.mark.parametrize("back_ns", [5 * 10**9, HOUR_NS])
def test_a_clock_set_back_begins_a_new_history_with_unchanged_latencies(back_ns: int) -> None:
    steady, jumped = (history_of(session(2 * HOUR_NS, jump)) for jump in (0, -back_ns))
    assert jumped.last_step == NUM_STEPS - 1
    assert jumped.first_step == JUMP_AT
    assert (jumped.previous.first_step, jumped.previous.last_step) == (0, JUMP_AT - 1)
    assert any("clock went back" in event.text for event in jumped.events())
    # The same requests in the same state, and the same latencies except the one that was cut.
    assert jumped.state.requests.keys() == steady.state.requests.keys()
    end_ns = steady.state.time_ns
    window_s = (end_ns - steady.summary(JUMP_AT).tokens_ns) / 1e9  # type: ignore[union-attr]
    before, after = (each.windows.latency(None, window_s - 0.001) for each in (steady, jumped))
    for kind in ("ttft", "itl", "step"):
        mine, others = getattr(after, kind), getattr(before, kind)
        assert mine.num_samples == pytest.approx(others.num_samples, abs=12)
        assert mine.p50_ms == pytest.approx(others.p50_ms, rel=0.05)
        assert 0 <= mine.max_ms < 60_000
    before, after = (each.windows.sums(None, 10.0).steps_per_s for each in (steady, jumped))
    assert after == pytest.approx(before, rel=0.05)


def test_times_of_day_stay_monotonic_when_the_engine_clock_is_set_back() -> None:
    messages = session(2 * HOUR_NS, -HOUR_NS)
    history = history_of(messages)
    before_ns = history.previous.wall_ns(history.previous.summary(JUMP_AT - 1).tokens_ns)
    after_ns = history.wall_ns(history.summary(JUMP_AT).tokens_ns)
    assert 0 <= after_ns - before_ns < 10**9


def test_a_clock_that_jumps_forward_shows_as_one_long_itl_and_nothing_else() -> None:
    history, steady = (history_of(session(0, jump_ns)) for jump_ns in (HOUR_NS, 0))
    assert (history.previous, history.num_steps) == (None, NUM_STEPS)
    usual_ms = steady.windows.latency(None, 1).itl.p50_ms
    assert history.windows.latency().itl.p50_ms == pytest.approx(usual_ms, rel=1)
    assert history.summary(JUMP_AT).max_itl_ns > HOUR_NS * 0.9


def test_small_backward_clock_steps_are_jitter_and_give_no_negative_wait() -> None:
    history = history_of(session(0, -200_000_000))
    assert history.previous is None
    report = history.windows.latency(None, None)
    for kind in (report.ttft, report.itl, report.tpot):
        assert (kind.p50_ms or 0) >= 0


def test_after_the_machine_slept_the_time_of_day_is_correct() -> None:
    messages = session(0, 0)
    info = next(message for _, message in messages if isinstance(message, EngineInfo))
    history = history_of(messages)
    last = history.summary(NUM_STEPS - 1)
    before_ns = history.wall_ns(last.tokens_ns)
    slept = msgspec.structs.replace(
        info,
        monotonic_ns=last.tokens_ns + 10**9,
        wall_ns=info.wall_ns + last.tokens_ns + 10**9 - info.monotonic_ns + HOUR_NS,
    )
    history.append(history.last_sequence + 1, slept)
    assert history.wall_ns(last.tokens_ns) == before_ns  # the shown session stays
    later_ns = history.wall_ns(last.tokens_ns + 2 * 10**9)
    assert later_ns == before_ns + 2 * 10**9 + HOUR_NS


def test_the_engine_publishes_its_wall_time_again_after_a_clock_change() -> None:
    info = next(message for _, message in session(0, 0) if isinstance(message, EngineInfo))
    now = msgspec.structs.replace(info, monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns())
    assert anchored(now) is now
    old = msgspec.structs.replace(now, wall_ns=now.wall_ns - HOUR_NS)
    told = anchored(old)
    moved_ns = (told.wall_ns - told.monotonic_ns) - (now.wall_ns - now.monotonic_ns)
    assert abs(moved_ns) < HOUR_NS // 2


async def test_the_dashboard_reports_a_clock_change(still_source: Callable[..., Any]) -> None:
    source = still_source(10)
    messages = session(2 * HOUR_NS, -HOUR_NS)
    source.history = history_of(messages[: len(messages) * 2 // 3 - 40])
    app = dashboard(source)
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.press("left", "left")
        for sequence, message in messages[len(messages) * 2 // 3 - 40 :]:
            source.history.append(sequence, message)
        for page in "123456":
            await pilot.press(page, "L", "left")
            assert "failed" not in main_text(app)
        await pilot.press("1", "t", "L")
        shown = main_text(app)
        assert "clock went back" in shown
        assert f"step {NUM_STEPS - 1}" in shown
        await pilot.press("p")
        assert "▐BEFORE THE RESTART▌" in main_text(app)
