"""If an engine dies while a change is typed, the editor says so and applies nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.session.control.engine_link import KnobChange
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.screen_text import main_text, screen_text
from tests.support.waiting import until, wait_for

BUDGET = "max_num_batched_tokens"
GONE = "no engine answers"

# Keys that open an editor and type into it, what it then shows, and the engine's answer.
EDITORS = pytest.mark.parametrize(
    ("opened", "typed", "shown", "applied"),
    [
        (["B"], [*"512"], "512_", f"{BUDGET} 2048→512 applied"),
        (["K", "enter"], [*"512"], "512_", f"{BUDGET} 2048→512 applied"),
        (["W"], [*"off"], "off_", "stop the workload: done"),
    ],
    ids=["budget", "knobs", "workload"],
)
SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])


class Watched(Subscriber):
    """A source whose engine the test can mark as down."""

    said: SourceStatus | None = None

    @property
    def status(self) -> Any:
        return self.said or self._status

    @status.setter
    def status(self, status: Any) -> None:
        self._status = status


@pytest.fixture
def source(live_engine: Any) -> Iterator[Watched]:
    subscriber = Watched(live_engine.endpoint)
    subscriber.start()
    wait_for(lambda: subscriber.status == "live", "the engine answers")
    yield subscriber
    subscriber.stop()


async def replace_engine(live_engine: Any, source: Subscriber, **changed: object) -> None:
    """Let another engine answer at the same address from now on."""
    live_engine.becomes(engine_id="another", **changed)

    def is_known() -> bool:
        info: EngineInfo | None = source.history.state.info
        return info is not None and info.engine_id == "another" and bool(source.history.state.knobs)

    await until(is_known, "the other engine is known")


@SIZES
@EDITORS
async def test_an_open_editor_keeps_its_input_until_the_engine_answers_again(
    source: Watched,
    opened: list[str],
    typed: list[str],
    shown: str,
    applied: str,
    size: tuple[int, int],
) -> None:
    app = dashboard(source)
    async with app.run_test(size=size):
        await press(app, *opened, *typed[:1])
        assert GONE not in screen_text(app)
        source.said = "down"
        await until(lambda: GONE in screen_text(app), "that nobody answers")
        await press(app, *typed[1:], "enter", "enter")
        assert app.screen is not app.main  # the next keys must not reach the screen below
        assert shown in screen_text(app)
        assert not app.main.operator.pending
        source.said = None
        await until(lambda: GONE not in screen_text(app), "that it answers")
        await press(app, "enter")
        await until(lambda: applied in main_text(app), "the answer")
    app.close()


@SIZES
@EDITORS
async def test_input_typed_for_the_previous_engine_needs_a_second_enter(
    source: Watched,
    live_engine: Any,
    opened: list[str],
    typed: list[str],
    shown: str,
    applied: str,
    size: tuple[int, int],
) -> None:
    app = dashboard(source)
    async with app.run_test(size=size):
        await press(app, *opened, *typed)
        await replace_engine(live_engine, source)
        await until(lambda: "another engine" in screen_text(app), "that it is another")
        assert "Enter twice" in screen_text(app)
        await press(app, "enter")
        assert "Enter again" in screen_text(app)
        assert shown in screen_text(app)
        assert not app.main.operator.pending
        await press(app, "enter")
        await until(lambda: applied in main_text(app), "the answer")
    app.close()


async def test_after_an_engine_is_replaced_the_editor_shows_the_new_engines_knobs(
    source: Watched, live_engine: Any
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "K", "enter", *"512")
        rest = tuple(spec for spec in live_engine.core.info.knobs if spec.name != BUDGET)
        await replace_engine(live_engine, source, knobs=rest)
        await until(lambda: BUDGET not in screen_text(app), "the knobs of the other one")
        assert "512" not in screen_text(app)
        await press(app, "enter", *"16", "enter")  # begun for this one
        await until(lambda: source.history.state.knobs["max_num_seqs"] == 16, "the change")
    app.close()


async def test_a_change_by_another_client_at_the_new_engine_is_shown_before_it_is_overwritten(
    source: Watched, live_engine: Any
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        await press(app, "B", *"512")
        await replace_engine(live_engine, source)
        await until(lambda: "another engine" in screen_text(app), "that it is another")
        await press(app, "enter")
        app.main.operator.who = "anna"
        app.main.operator.set_knob(KnobChange(BUDGET, 1024, 0), "budget")
        await until(lambda: source.history.state.knobs[BUDGET] == 1024, "what anna did")
        await until(lambda: "→1024 by anna" in screen_text(app), "that anna was first")
        await press(app, "enter")
        assert source.history.state.knobs[BUDGET] == 1024
        await press(app, "enter")
        await until(lambda: "1024→512 applied" in main_text(app), "the answer")
    app.close()
