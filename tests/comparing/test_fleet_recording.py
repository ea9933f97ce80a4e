"""The fleet screen records any of its engines, whether it was opened or not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard
from tests.support.screens.live_dashboard import press
from tests.support.screens.screen_text import main_text
from tests.support.waiting import until, wait_for


@pytest.fixture
def busy(live_engine: Any) -> Iterator[Subscriber]:
    """A busy engine that is in the fleet but not open."""
    subscriber = Subscriber(live_engine.endpoint)
    subscriber.start()
    with ControlClient(live_engine.endpoint) as client:
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        for number in range(60):  # more than a test can take
            client.ask(Submit(prompt_token_ids=[number] * 100, sampling=sampling, stream=False))
        wait_for(lambda: (subscriber.history.last_step or 0) >= 5, "steps")
        yield subscriber  # requests end with the client that asked for them
    subscriber.stop()


def row_of(app: Dashboard, name: str) -> str:
    return next(line for line in main_text(app).splitlines()[3:] if name in line[:24])


@pytest.fixture
def app(
    busy: Subscriber,
    still_source: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Dashboard:
    """The dashboard of two engines, `still` and `busy`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    still = still_source(12)
    still.name, busy.name = "still", "busy"
    return Dashboard(still, still.history, any_terminal=True, fleet=Fleet([still, busy]))


async def test_an_engine_that_was_never_opened_can_be_recorded(
    app: Dashboard, busy: Subscriber, tmp_path: Path
) -> None:
    async with app.run_test(size=(120, 40)):
        await press(app, "home", "down")
        assert app.session.fleet_view.selected == "still"  # in the order of names
        await press(app, "up", "R")
        await until(lambda: "busy: recording to " in main_text(app), "what is recorded")
        await until(lambda: "● REC 1" in main_text(app), "that one is recorded")
        assert "busy ●" in row_of(app, "busy")
        assert "●" not in row_of(app, "still")
        begun = busy.history.last_step or 0
        await until(lambda: (busy.history.last_step or 0) > begun + 20, "steps")
        await press(app, "enter")
        await until(lambda: "● REC 00:" in main_text(app), "the same recording on its own screen")
        await press(app, "escape", "R")
        await until(lambda: "busy: recording ended: " in main_text(app), "its end")
        await until(lambda: "● REC" not in main_text(app), "that none is recorded")
    app.close()
    (told,) = app.last_words()
    (path,) = tmp_path.glob("stepscope-busy-*.mcap")
    assert str(path) in told
    with Recording(path) as recording:
        assert recording.last_step - recording.first_step >= 20
        assert not recording.truncated


async def test_leaving_the_dashboard_ends_the_recordings_of_all_engines(
    app: Dashboard, tmp_path: Path
) -> None:
    async with app.run_test(size=(120, 40)):
        await press(app, "R", "up", "R")
        await until(lambda: "● REC 2" in main_text(app), "that both are recorded")
    app.close()
    told = app.last_words()
    assert len(told) == 2
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.glob("*.mcap"))) == 2


async def test_an_engine_that_cannot_be_recorded_is_named(
    still_source: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    sources = [still_source(12), still_source(12)]
    for number, source in enumerate(sources):
        source.name = f"engine-{number}"
    sources[1].status = "down"
    app = Dashboard(sources[0], sources[0].history, any_terminal=True, fleet=Fleet(sources))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("down", "R")
        assert "engine-1: no engine answers, so nothing can be recorded" in main_text(app)
        folder.rmdir()
        folder.touch()  # no folder can be there
        await pilot.press("up", "R")
        assert "engine-0: cannot record: cannot write " in main_text(app)
        assert "● REC" not in main_text(app)
    app.close()
    assert app.last_words() == []
