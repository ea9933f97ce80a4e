"""The knob editor shows what others set, and overwrites none of their changes unnoticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.screen_text import main_text, screen_text
from tests.support.waiting import until, wait_for


@pytest.fixture
def source(live_engine: Any) -> Iterator[Subscriber]:
    subscriber = Subscriber(live_engine.endpoint)
    subscriber.start()
    wait_for(lambda: subscriber.status == "live", "the engine answers")
    yield subscriber
    subscriber.stop()


@pytest.fixture
def anna(live_engine: Any) -> Iterator[ControlClient]:
    """Another operator of the same engine."""
    with ControlClient(live_engine.endpoint) as client:
        yield client


def row_of(app: Dashboard, name: str) -> str:
    """The line of a knob; empty while the editor is not drawn yet."""
    return next((line for line in screen_text(app).splitlines() if f" {name} " in line), "")


async def test_a_value_typed_before_another_clients_change_is_refused_and_can_be_typed_again(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(160, 40)):
        await press(app, "K", "down", "enter", *"16")
        anna.set_knobs({"max_num_seqs": 8}, who="anna")
        await press(app, "enter")
        said = "not changed: anna set max_num_seqs to 8 meanwhile; K again"
        refused = "max_num_seqs 64→8"  # said by the engine, where telemetry is not there yet
        await until(lambda: said in main_text(app) or refused in main_text(app), "the refusal")
        state = source.history.state
        await until(lambda: any("anna" in each.who for each in state.audit), "what anna did")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 8, "the value")
        await press(app, "K", "down", "enter", *"16", "enter")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 16, "the change")
        assert [each.who for each in source.history.knob_changes][:1] == ["anna"]
    app.close()


async def test_a_value_typed_for_an_engine_is_refused_by_the_one_that_replaced_it(
    source: Subscriber, live_engine: Any
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(160, 40)):
        await press(app, "B", *"512")
        live_engine.becomes(engine_id="another")
        await press(app, "enter")
        said = "the engine was restarted meanwhile; nothing was changed"
        await until(lambda: said in main_text(app), "the refusal")
        assert not source.history.knob_changes
    app.close()


async def test_an_open_editor_shows_the_values_that_others_set_and_escape_keeps_them(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    shown = "max_num_batched_tokens"
    async with app.run_test(size=(120, 40)):
        await press(app, "K")
        anna.set_knobs({shown: 1024}, who="anna")
        await until(lambda: " 1024 " in row_of(app, shown), "what anna did")
        await press(app, "enter", *"512", "enter")
        await until(lambda: source.history.state.knobs[shown] == 512, "the change")
        await press(app, "K", "enter", *"256", "escape")
        await until(lambda: app.screen is app.main, "closed")
        assert len(source.history.knob_changes) == 2
    app.close()


@pytest.mark.parametrize("status", ["down", "starting", "connecting"])
@pytest.mark.parametrize("key", ["B", "K", "W"])
async def test_no_knob_editor_opens_for_an_engine_that_does_not_answer(
    still_source: Callable[..., Any], key: str, status: str
) -> None:
    source = still_source()
    app = Dashboard(source, source.history, control_endpoint="ipc:///no", any_terminal=True)
    async with app.run_test(size=(120, 40)) as pilot:
        source.status = status
        await pilot.press(key)
        assert app.screen is app.main
        assert "no engine answers, so nothing can be changed" in main_text(app)
        source.status = "live"
        await pilot.press(key)
        assert app.screen is not app.main
    app.close()
