"""The open knob editor shows changes by others, and overwrites none of them unnoticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.wire import Telemetry
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


class SlowTelemetry:
    """A telemetry sink that holds everything back until released."""

    def __init__(self, sink: Any) -> None:
        self.is_let_go = False
        self._sink = sink
        self._held: list[Telemetry] = []

    def publish(self, message: Telemetry) -> None:
        """Publish on the engine's thread, to which the sink belongs."""
        self._held.append(message)
        while self.is_let_go and self._held:
            self._sink.publish(self._held.pop(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


def row_of(app: Dashboard, name: str) -> str:
    """The line of a knob; empty while the editor is not drawn yet."""
    return next((line for line in screen_text(app).splitlines() if f" {name} " in line), "")


async def test_the_knob_editor_shows_changes_by_others_and_keeps_its_input(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "enter", *"512")
        anna.set_knobs({"max_num_batched_tokens": 1024}, who="anna")
        said = "changed meanwhile: max_num_batched_tokens 2048→1024 by anna"
        await until(lambda: said in screen_text(app), "what anna did")
        assert "512_" in row_of(app, "max_num_batched_tokens")
        assert "2048→1024 by anna" in row_of(app, "max_num_batched_tokens")
        assert "Enter twice applies it anyway" in screen_text(app)
        await press(app, "enter")  # noticed
        assert "Enter again applies it anyway" in screen_text(app)
        assert source.history.state.knobs["max_num_batched_tokens"] == 1024
        await press(app, "enter")
        await until(lambda: len(source.history.knob_changes) == 2, "a change")
        change = source.history.knob_changes[-1]
        assert (change.old, change.new) == (
            {"max_num_batched_tokens": 1024},
            {"max_num_batched_tokens": 512},
        )
        said = "max_num_batched_tokens 1024→512 applied at step"
        await until(lambda: said in main_text(app), "the answer")
    app.close()


async def test_every_knob_change_by_others_during_typing_needs_a_second_enter(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(80, 24)):
        await press(app, "K", "down", "enter", *"16")
        anna.set_knobs({"reserve": "none"}, who="anna")
        said = "changed meanwhile: reserve prompt→none by anna"
        await until(lambda: said in screen_text(app), "what anna did")
        await press(app, "enter")
        anna.set_knobs({"max_num_seqs": 8}, who="anna")
        said = "changed meanwhile: max_num_seqs 64→8 by anna"  # the knob being edited comes first
        await until(lambda: said in screen_text(app), "what anna did then")
        assert "Enter twice applies it anyway" in screen_text(app)
        assert "16_" in row_of(app, "max_num_seqs")
        await press(app, "enter", "enter")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 16, "the change")
    app.close()


async def test_knob_changes_seen_before_typing_began_need_no_second_enter(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "K")
        anna.set_knobs({"max_num_batched_tokens": 1024}, who="anna")
        shown = "max_num_batched_tokens"
        await until(lambda: "2048→1024 by anna" in row_of(app, shown), "what anna did")
        assert "1024 " in row_of(app, shown).split(shown)[1].split("2048→1024")[0]
        await press(app, "enter", *"512", "enter")
        await until(lambda: source.history.state.knobs[shown] == 512, "the change")
    app.close()


async def test_cancelling_the_editor_keeps_another_clients_values(
    source: Subscriber, anna: ControlClient
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "enter", *"512")
        anna.set_knobs({"max_num_batched_tokens": 1024}, who="anna")
        await until(lambda: "2048→1024 by anna" in screen_text(app), "what anna did")
        await press(app, "escape")
        await until(lambda: app.screen is app.main, "closed")
        assert [each.who for each in source.history.knob_changes] == ["anna"]
    app.close()


async def test_editor_input_is_kept_if_another_clients_change_came_first(
    source: Subscriber, anna: ControlClient, live_engine: Any
) -> None:
    app = dashboard(source)
    telemetry = SlowTelemetry(live_engine.core.sink)
    live_engine.core.publish_to(telemetry)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "down", "enter", *"16")
        anna.set_knobs({"max_num_seqs": 8}, who="anna")
        await press(app, "enter")
        await until(lambda: "max_num_seqs 64→8" in main_text(app), "the refusal")
        assert source.history.state.knobs_version == 0
        telemetry.is_let_go = True
        await until(lambda: source.history.state.knobs_version == 1, "what anna did")
        await press(app, "K")
        await until(lambda: "16_" in row_of(app, "max_num_seqs"), "what was typed")
        assert "changed meanwhile: max_num_seqs 64→8 by anna" in screen_text(app)
        assert "Enter twice applies it anyway" in screen_text(app)
        await press(app, "enter", "enter")
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 16, "the change")
        await press(app, "K")
        await until(lambda: row_of(app, "max_num_seqs") != "", "the editor")
        assert "_" not in row_of(app, "max_num_seqs").replace("max_num_seqs", "")
    app.close()


async def test_escape_discards_a_value_offered_again_after_a_refusal(
    source: Subscriber, anna: ControlClient, live_engine: Any
) -> None:
    app = dashboard(source)
    telemetry = SlowTelemetry(live_engine.core.sink)
    live_engine.core.publish_to(telemetry)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "down", "down", "enter", "right")
        anna.set_knobs({"max_num_seqs": 8}, who="anna")
        await until(lambda: "◀ off ▶" in row_of(app, "enable_chunked_prefill"), "the choice")
        await press(app, "enter")
        await until(lambda: "max_num_seqs 64→8" in main_text(app), "the refusal")
        await press(app, "K")
        # The same for a choice, before telemetry reports anna's change.
        await until(lambda: "◀ off ▶" in row_of(app, "enable_chunked_prefill"), "the choice again")
        await press(app, "escape", "K")
        await until(lambda: row_of(app, "enable_chunked_prefill") != "", "the editor")
        assert "◀" not in screen_text(app)
        telemetry.is_let_go = True
        await until(lambda: source.history.state.knobs_version == 1, "what anna did")
        assert [each.who for each in source.history.knob_changes] == ["anna"]
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
