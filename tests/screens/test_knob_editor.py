"""The knob editor shows what others set, and overwrites none of their changes unnoticed."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard
from stepscope.tui.session.what_if import KnobForecast
from tests.support.engines.simulated_run import simulate
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.running import running
from tests.support.screens.screen_text import main_text, screen_text
from tests.support.sessions.following import following
from tests.support.sessions.history_steps import history_of
from tests.support.waiting import until, wait_for

BUDGET = "max_num_batched_tokens"


@pytest.fixture
def source(live_engine: Any) -> Iterator[Subscriber]:
    with following(live_engine.endpoint) as subscriber:
        yield subscriber


def row_of(app: Dashboard, name: str) -> str:
    """The line of a knob; empty while the editor is not drawn yet."""
    return next((line for line in screen_text(app).splitlines() if f" {name} " in line), "")


async def test_a_value_typed_before_another_clients_change_is_refused_and_can_be_typed_again(
    source: Subscriber, client: ControlClient
) -> None:
    async with running(dashboard(source), (160, 40)) as (app, _):
        await press(app, "K", "down", "enter", *"16")
        client.set_knobs({"max_num_seqs": 8}, who="anna")
        await press(app, "enter")
        refused = ("another client made a change first", "another client changed knobs meanwhile")
        await until(lambda: any(said in main_text(app) for said in refused), "the refusal")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 8, "the value")
        await press(app, "K", "down", "enter", *"16", "enter")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 16, "the change")
        assert source.history.knob_changes[0].who == "anna"


async def test_a_value_typed_for_an_engine_is_refused_by_the_one_that_replaced_it(
    source: Subscriber, live_engine: Any
) -> None:
    async with running(dashboard(source), (160, 40)) as (app, _):
        await press(app, "B", *"512")
        live_engine.becomes(engine_id="another")
        await press(app, "enter")
        said = "the engine was restarted meanwhile; nothing was changed"
        await until(lambda: said in main_text(app), "the refusal")
        assert not source.history.knob_changes


async def test_an_open_editor_shows_the_values_that_others_set_and_escape_keeps_them(
    source: Subscriber, client: ControlClient
) -> None:
    async with running(dashboard(source)) as (app, _):
        await press(app, "K")
        client.set_knobs({BUDGET: 1024}, who="anna")
        await until(lambda: " 1024 " in row_of(app, BUDGET), "what anna did")
        await press(app, "enter", *"512", "enter")
        await until(lambda: source.history.state.knobs[BUDGET] == 512, "the change")
        await press(app, "K", "enter", *"256", "escape")
        await until(lambda: app.screen is app.main, "closed")
        assert len(source.history.knob_changes) == 2


@pytest.mark.parametrize("status", ["down", "starting", "connecting"])
@pytest.mark.parametrize("key", ["B", "K", "W"])
async def test_no_editor_opens_for_a_silent_engine(
    still_source: Any, key: str, status: str
) -> None:
    source = still_source()
    app = Dashboard(source, control_endpoint="ipc:///no", any_terminal=True)
    async with app.run_test(size=(120, 40)) as pilot:
        source.status = status
        await pilot.press(key)
        assert app.screen is app.main
        assert "no engine answers, so nothing can be changed" in main_text(app)
        source.status = "live"
        await pilot.press(key)
        assert app.screen is not app.main
    app.close()


def test_a_forecast_names_current_and_predicted_figures() -> None:
    forecast = KnobForecast(history_of(simulate(3, 600)), BUDGET, 512)
    wait_for(lambda: "simulating" not in forecast.text, "the forecast")
    figure = r"[\d,]+ → [\d,]+ ms \([\d,]+ to [\d,]+\)"
    said = rf"what if {BUDGET}=512: TTFT p99 {figure}   ITL p99 {figure}"
    assert re.fullmatch(said, forecast.text)


async def test_the_knob_editor_says_why_there_is_no_forecast(source: Subscriber) -> None:
    async with running(dashboard(source)) as (app, _):
        await press(app, "K", "enter")
        assert "w what if" not in screen_text(app)  # nothing is typed yet
        await press(app, *"512")
        assert "w what if" in screen_text(app)
        await press(app, "w")
        said = "no forecast: there is no step in memory"
        await until(lambda: said in screen_text(app), "the answer")
        await press(app, "backspace")
        assert "what if max" not in screen_text(app)
        assert source.history.state.knobs[BUDGET] == 2048
