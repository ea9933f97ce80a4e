"""`D` writes the steps in memory to a recording, completely or not at all."""

from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from tests.support.engines.simulated_run import simulate
from tests.support.waiting import until


def dashboard(source: Any, **options: Any) -> Dashboard:
    return Dashboard(source, source.history, any_terminal=True, fps=20.0, **options)


def notice(app: Dashboard) -> str:
    (line,) = app.main.canvas.text_of("notice")
    return line


async def told(app: Dashboard, words: str) -> None:
    await until(lambda: words in notice(app), lambda: f"{words!r} is not in {notice(app)!r}")


class Feed:
    """A live source that delivers messages when the test asks; implements `Source`."""

    is_live = True
    name = "feed"
    status = "live"
    error = None

    def __init__(self) -> None:
        from stepscope.recordings.history.source import FrameTap

        self.history = History(SLO())
        self.tap = FrameTap()
        self._messages = iter(simulate(seed=3, num_steps=90))
        self.more(30)

    def more(self, num_messages: int) -> None:
        for _, (sequence, message) in zip(range(num_messages), self._messages, strict=False):
            self.history.append(sequence, message)
            self.tap.send(wire.TOPICS[type(message)], sequence, wire.encode(message))

    def start(self) -> None:
        return

    def stop(self) -> None:
        return


async def test_memory_can_be_saved_as_a_recording_even_after_the_engine_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "first-of-the-folders-on-a-long-way" / "second" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    source = Feed()
    app = dashboard(source, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        source.status = "down"
        await pilot.press("D")
        await told(app, "wrote stepscope-")
        (path,) = folder.glob("*.mcap")
        first, last = source.history.first_step, source.history.last_step
        with Recording(path) as recording:
            assert (recording.first_step, recording.last_step) == (first, last)
        assert f"{source.history.num_steps} steps, in …/" in notice(app)
        assert path.parent.name in notice(app)  # the folder, where the way to it has no room
        await pilot.press("D")  # the next one does not take its place
        await until(lambda: len(list(folder.glob("*.mcap"))) == 2, "the second")
    app.close()


async def test_steps_of_an_engine_that_died_during_recording_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Feed()
    app = dashboard(source)
    async with app.run_test(size=(160, 40)) as pilot:
        source.status, source.error = "down", "feed is gone"
        await told(app, "feed is gone; D saves the steps in memory ")
        source.status, source.error = "live", None
        await pilot.press("R")
        source.status, source.error = "down", "feed is gone"
        app.main.notices.dismiss()
        await told(
            app, "feed is gone; D saves the steps in memory, also those from before the recording"
        )
    app.close()


async def test_before_the_first_step_there_is_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Feed()
    source.history = History(SLO())
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("D")
        assert "there is no step in memory yet" in notice(app)
    app.close()
    assert list(tmp_path.iterdir()) == []
