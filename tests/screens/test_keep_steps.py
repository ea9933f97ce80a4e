"""`D` writes the steps in memory to a recording, completely or not at all."""

from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.tui.app.app import Dashboard
from tests.support.engines.simulated_run import simulate
from tests.support.screens.running import running
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.received import Received
from tests.support.waiting import until


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.chdir(tmp_path)
    return Received(history_of(simulate(seed=3, num_steps=30)))


def dashboard(source: Received, **options: Any) -> Dashboard:
    return Dashboard(source, any_terminal=True, fps=20.0, **options)


def notice(app: Dashboard) -> str:
    return app.main.canvas.text_of("notice")[0]


async def told(app: Dashboard, words: str) -> None:
    await until(lambda: words in notice(app), lambda: f"{words!r} is not in {notice(app)!r}")


async def test_memory_can_be_saved_as_a_recording_even_after_the_engine_is_gone(
    source: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "first-of-the-folders-on-a-long-way" / "second" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    async with running(dashboard(source, readonly=True)) as (app, pilot):
        source.status = "down"
        await pilot.press("D")
        await told(app, "wrote stepscope-")
        (path,) = folder.glob("*.mcap")
        with Recording(path) as recording:
            assert (recording.first_step, recording.last_step) == (0, 29)
        assert f"{source.history.num_steps} steps, in …/" in notice(app)
        assert path.parent.name in notice(app)  # the folder, where the way to it has no room
        await pilot.press("D")  # the next one does not take its place
        await until(lambda: len(list(folder.glob("*.mcap"))) == 2, "the second")


async def test_steps_of_an_engine_that_died_can_be_saved(source: Received, tmp_path: Path) -> None:
    app = dashboard(source)
    async with app.run_test(size=(160, 40)) as pilot:
        source.status, source.error = "down", "feed is gone"
        await told(app, "feed is gone; D saves the steps in memory ")
        source.status, source.error = "live", None
        await pilot.press("R")
        source.status, source.error = "down", "feed is gone"
        app.main.notices.dismiss()
        said = "feed is gone; D saves the steps in memory, also those from before the recording"
        await told(app, said)
    app.close()
    source.history = History()
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("D")
        assert "there is no step in memory yet" in notice(app)
    assert len(list(tmp_path.iterdir())) == 1  # what R began
