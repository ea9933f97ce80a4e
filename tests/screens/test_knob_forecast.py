"""The forecast of a knob change, shown before it is made."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.session.what_if import KnobForecast
from tests.support.engines.simulated_run import simulate
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.screen_text import screen_text
from tests.support.waiting import until, wait_for

BUDGET = "max_num_batched_tokens"


@pytest.fixture
def source(live_engine: Any) -> Iterator[Subscriber]:
    subscriber = Subscriber(live_engine.endpoint)
    subscriber.start()
    wait_for(lambda: subscriber.status == "live", "the engine answers")
    yield subscriber
    subscriber.stop()


def test_a_forecast_names_current_and_predicted_figures() -> None:
    history = History()
    for sequence, message in simulate(3, 600):
        history.append(sequence, wire.encode(message))
    forecast = KnobForecast(history, BUDGET, 512)
    wait_for(lambda: "simulating" not in forecast.text, "the forecast")
    figure = r"[\d,]+ → [\d,]+ ms \([\d,]+ to [\d,]+\)"
    assert re.fullmatch(
        rf"what if {BUDGET}=512: TTFT p99 {figure}   ITL p99 {figure}", forecast.text
    )


async def test_the_knob_editor_says_why_there_is_no_forecast(source: Subscriber) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "enter")
        assert "w what if" not in screen_text(app)  # nothing is typed yet
        await press(app, *"512")
        assert "w what if" in screen_text(app)
        await press(app, "w")
        said = f"what if {BUDGET}=512: there is no step in memory"
        await until(lambda: said in screen_text(app), "the answer")
        await press(app, "backspace")
        assert "what if max" not in screen_text(app)
        assert source.history.state.knobs[BUDGET] == 2048
    app.close()
