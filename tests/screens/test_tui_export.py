"""`E` exports a recording to a file of another format, completely or not at all."""

import csv
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.export.export import FORMATS
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.samples import shipped
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.cli.__main__ import main
from stepscope.tui.screens.handlers.opening import folder_for
from stepscope.tui.screens.overlays.export_chooser import ExportChooser
from stepscope.tui.session.file_jobs import FORMAT_CHOICES, ExportOrder, FileJobs, RangeChoice
from stepscope.tui.settings.actions import with_keys
from tests.support.engines.simulated_run import simulate
from tests.support.screens.screen_text import screen_text
from tests.support.waiting import until

AT = 300


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[ReplaySource]:
    """A replay of a file in its own folder, at step 300."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    path = shutil.copy(shipped()["freeze"], folder / "session.mcap")
    source = ReplaySource(Recording(path), History(SLO()), playing=False)
    source.start()
    source.seek(AT)
    assert source.wait()
    yield source
    source.stop()


def dashboard(source: Any, **options: Any) -> Dashboard:
    return Dashboard(source, source.history, any_terminal=True, fps=20.0, **options)


def notice(app: Dashboard) -> str:
    (line,) = app.main.canvas.text_of("notice")
    return line


async def told(app: Dashboard, words: str) -> None:
    await until(lambda: words in notice(app), lambda: f"{words!r} is not in {notice(app)!r}")


def steps_of(path: Path) -> list[int]:
    with path.open(newline="") as stream:
        return [int(row["step"]) for row in csv.DictReader(stream)]


def order(path: Path, steps: RangeChoice, engine_id: str | None) -> ExportOrder:
    found = next(each for each in FORMAT_CHOICES if each.name == "csv")
    return ExportOrder(path, found, "steps", steps, path.parent, engine_id)


def test_every_export_format_is_offered_under_its_own_name() -> None:
    assert tuple(each.name for each in FORMAT_CHOICES) == FORMATS
    assert len({each.suffix for each in FORMAT_CHOICES}) == len(FORMATS)


async def test_a_replayed_file_is_exported_beside_it_whole_or_only_the_visible_steps(
    replay: ReplaySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = replay.recording.path.parent
    app = dashboard(replay, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("left", "left", "left", "M", *"odd", "enter", "right", "right", "E")
        text = screen_text(app)
        assert "export session.mcap" in text
        assert all(each.opens in text for each in FORMAT_CHOICES)
        assert "the whole recording, steps 0 to 453" in text
        await pilot.press("j", "j", "tab", "tab")
        assert "session-requests.csv  in " in screen_text(app)
        await pilot.press("enter")
        assert app.screen is app.main
        path = folder / "session-requests.csv"
        await told(app, "exported session-requests.csv, ")
        size = path.stat().st_size
        assert f", {size / 1000:.0f}kB, " in notice(app)

        # The last choice is offered again; here for the visible steps, and from the mark.
        columns = [each for each in app.main.frame.columns if each is not None]
        first, last = columns[0].first, columns[-1].last
        await pilot.press("E", "shift+tab", "shift+tab", "right")
        assert f"what is on the screen, steps {first} to {last}" in screen_text(app)
        await pilot.press("enter")
        await told(app, f"exported session-{first}-{last}-steps.csv")
        assert steps_of(folder / f"session-{first}-{last}-steps.csv") == [*range(first, last + 1)]
        await pilot.press("E", "h")
        assert "from mark 'odd' to the cursor, steps 297 to 299" in screen_text(app)
        await pilot.press("enter")
        await told(app, "exported session-297-299-steps.csv, ")
        await pilot.press("E", "h", "enter")
        await told(app, "exported session-297-299-steps-2.csv, ")
        assert steps_of(folder / "session-297-299-steps-2.csv") == [297, 298, 299]
    app.close()

    monkeypatch.setattr(sys, "argv", ["stepscope", *_same_by_command(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert (folder / "command.csv").read_bytes() == path.read_bytes()


def _same_by_command(folder: Path) -> list[str]:
    arguments = ["export", f"{folder}/session.mcap", "--format", "csv", "--table", "requests"]
    return [*arguments, "-o", f"{folder}/command.csv"]


async def test_the_export_chooser_works_by_mouse_and_names_a_missing_package(
    replay: ReplaySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    app = dashboard(replay, ascii_only=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("E")
        chooser = app.screen
        assert isinstance(chooser, ExportChooser)
        assert screen_text(app).isascii()

        async def click(kind: str, value: object = "") -> None:
            box = chooser._box
            width, height = box.outer_size
            cells = ((x, y) for y in range(height) for x in range(width))
            place = next(cell for cell in cells if box.spot_at(*cell) == (kind, str(value)))
            await pilot.click("#overlay", offset=place)

        assert "pip install 'stepscope[export]' (or pyarrow)" in screen_text(app)
        await click("format", 1)
        await click("begin")
        assert app.screen is chooser
        assert "parquet needs the package pyarrow: pip install" in screen_text(app)
        await click("format", 2)
        await click("table")
        await click("range")
        assert (chooser.order.choice.name, chooser.order.table) == ("csv", "rows")
        assert chooser.order.steps.text.startswith("what is on the screen")
        await pilot._post_mouse_events([_wheel_down()], "#overlay", offset=(5, 5))
        await pilot.pause()
        assert chooser.order.choice.name == "jsonl"
        for size in ((30, 7), (10, 3), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert app.screen is chooser
            if size >= (10, 3):
                assert "jsonl" in screen_text(app), size
        await click("begin")
        await told(app, "exported session-")
        await pilot.press("E")
        await pilot.click(offset=(1, 0))  # beside it
        assert app.screen is app.main
    app.close()


def _wheel_down() -> Any:
    from textual import events

    return events.MouseScrollDown


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


async def test_a_live_dashboard_exports_current_and_finished_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 0.02)
    source = Feed()
    keys = with_keys({"record": ("ctrl+r",), "export": ("X",)})
    app = dashboard(source, readonly=True, actions=keys)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("X")
        assert "nothing is recorded yet: ^r records, then X exports it" in notice(app)
        await pilot.press("ctrl+r")
        first = (source.history.last_step or 0) + 1
        source.more(30)
        last = source.history.last_step or 0
        assert last > first
        switch = app.session.record_switch
        assert switch is not None
        assert switch.path is not None
        name = switch.path.stem
        await until(lambda: switch._recorder._writer.num_safe_steps > 0, lambda: "not flushed")
        await pilot.press("X", "down", "down")
        assert "the whole recording so far" in screen_text(app)
        await pilot.press("enter")
        await told(app, f"exported {name}-steps.csv, ")
        assert switch.active
        assert steps_of(tmp_path / f"{name}-steps.csv") == [*range(first, last + 1)]

        # The visible steps began before the recording.
        await pilot.press("X", "right", "enter")
        await told(app, f"exported {name}-{first}-{last}-steps.csv, ")
        source.more(30)
        await pilot.press("ctrl+r")
        await until((tmp_path / f"{name}.mcap").exists, lambda: "not finished")
        await pilot.press("X", "enter")
        await told(app, f"exported {name}-steps-2.csv, ")
        assert steps_of(tmp_path / f"{name}-steps-2.csv")[-1] == source.history.last_step
    app.close()


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


async def test_sessions_before_the_last_engine_restart_but_one_are_reported_as_not_kept() -> None:
    source = Feed()
    history = source.history
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        for restart in range(2):
            history.append(0, msgspec.structs.replace(history.info, engine_id=f"again {restart}"))
            shown = "p shows the session before the engine restarted"
            lost = "; 1 earlier session not kept" if restart else ""
            await told(app, f"{shown}{lost} ")
            if not restart:
                source.more(20)
        await pilot.press("p")
        assert f"the session before the restart{lost}; p or L goes back" in notice(app)
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


def test_an_export_range_from_before_an_engine_restart_is_not_in_the_recording(
    tmp_path: Path,
) -> None:
    path = Path(shutil.copy(shipped()["freeze"], tmp_path / "a.mcap"))
    with Recording(path) as recording:
        own = recording.info.engine_id
    for engine_id, steps, words in (
        ("another", RangeChoice("", 10, 20), "was recorded before the engine restarted"),
        (own, RangeChoice("", 9_000, 9_010), "none of 9,000 to 9,010"),
        ("another", RangeChoice(""), "exported a-steps.csv"),
        (own, RangeChoice("", 450, 9_010), "exported a-450-453-steps.csv"),
    ):
        jobs = FileJobs()
        jobs.begin(order(path, steps, engine_id))
        jobs.begin(order(path, steps, engine_id))  # nothing happens: one is running already
        assert jobs._job is not None
        jobs._job.wait(10.0)
        said = jobs.news()
        assert said is not None
        assert words in said[0]
        assert jobs.news() is None
        assert not jobs.cancel()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a-450-453-steps.csv",
        "a-steps.csv",
        "a.mcap",
    ]


def test_exports_of_a_shipped_sample_go_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_for(shipped()["freeze"]) == tmp_path
    assert folder_for(Path("b.mcap")) == tmp_path
    assert folder_for(tmp_path / "c" / "d.mcap") == tmp_path
    (tmp_path / "c").mkdir()
    assert folder_for(tmp_path / "c" / "d.mcap") == tmp_path / "c"
