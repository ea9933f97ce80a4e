"""The figures of an idle engine that has run steps before are still shown."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.wire import EngineStatus, KnobsChanged
from stepscope.recordings.history.history import History
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.panels import header
from tests.support.screens.screen_text import main_text


async def screen_of(source: Any) -> str:
    app = Dashboard(source, control_endpoint="ipc:///nobody", any_terminal=True, fps=10.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        text = main_text(app)
    app.close()
    return text


async def test_an_idle_engine_shows_its_last_step_its_max_num_seqs_and_its_budget(
    still_source: Callable[..., Any],
) -> None:
    busy = still_source()
    history = History()
    knobs = {"max_num_batched_tokens": 512, "max_num_seqs": 32}
    idle = {"knobs": knobs, "state": "idle", "num_running": 0, "num_waiting": 0, "requests": []}
    history.reset(msgspec.structs.replace(busy.history.snapshot(), **idle))
    text = await screen_of(type(busy)(history))
    for part in ("step 399", "RUN 0/32", "BUDGET —/512", "idle since step 399; 'stepscope load'"):
        assert part in text, part


@pytest.mark.parametrize(
    ("state", "status", "said", "not_said"),
    [
        ("running", "live", ["▐LIVE▌", "{spent}/512", "·········· │"], ["idle", "last step"]),
        ("idle", "live", ["▐LIVE idle▌", "BUDGET   0/512   0% idle"], ["{spent}/512", "last"]),
        ("paused", "live", ["▐LIVE engine paused▌", "{spent}/512", "last step", "RUN 2/"], []),
        ("running", "stale", ["▐STALE▌", "{spent}/512", "last step", "RUN —/", "WAIT —"], []),
        ("running", "down", ["▐DOWN▌", "last step", "RUN —/", "WAIT —", "● REC waits"], ["00:08"]),
    ],
)
async def test_an_engine_without_new_steps_does_not_look_busy(
    still_source: Callable[..., Any], state: str, status: str, said: list[str], not_said: list[str]
) -> None:
    source = still_source()
    history = source.history
    last = history.record(399)
    time_ns = last.tokens_ns + 10**9
    status_now = {"state": state, "num_running": 2, "num_waiting": 0, "events": []}
    message = EngineStatus(step=399, time_ns=time_ns, **status_now)
    history.append(history.last_sequence + 1, message)
    source.status = status
    app = Dashboard(source, any_terminal=True, fps=1.0, clock=lambda: 0.0)
    async with app.run_test(size=(140, 40)):
        frame = app.main.new_frame()
        connection = header.SourceState("ipc", status, 10.0, recording=(8.0, 100))
        lines = [*header.draw(frame, connection, 140), *header.key_figures(frame, 140, 1, 14)]
    app.close()
    shown = "\n".join("".join(text for text, _ in line) for line in lines)
    spent = last.num_prefill_tokens + last.num_decode_tokens
    for part in said:
        assert part.format(spent=spent) in shown, shown
    for part in not_said:
        assert part.format(spent=spent) not in shown, shown


async def test_a_budget_and_max_num_seqs_set_while_the_engine_is_idle_are_shown_at_once(
    still_source: Callable[..., Any],
) -> None:
    source = still_source()
    history = source.history
    last = history.record(399)
    time_ns = last.tokens_ns + 10**9
    knobs: dict[str, Any] = {"max_num_batched_tokens": 300, "max_num_seqs": 7}
    for message in (
        EngineStatus(state="idle", step=399, time_ns=time_ns, num_running=0, num_waiting=0),
        KnobsChanged(
            version=9, effective_step=400, who="anna", old={}, new=knobs, time_ns=time_ns + 1
        ),
    ):
        history.append(history.last_sequence + 1, message)
    text = await screen_of(source)
    assert "BUDGET   0/300" in text
    assert "RUN 0/7" in text
