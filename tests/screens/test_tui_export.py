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
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.samples import shipped
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.cli.__main__ import main
from stepscope.tui.screens.handlers.opening import folder_for
from stepscope.tui.session.file_jobs import SUFFIXES, ExportOrder, FileJobs, file_name, typed_order
from stepscope.tui.settings.actions import with_keys
from tests.support.engines.simulated_run import simulate
from tests.support.screens.screen_text import screen_text
from tests.support.sessions.still_source import StillSource
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


def test_every_export_format_has_a_suffix_of_its_own() -> None:
    assert tuple(SUFFIXES) == FORMATS
    assert len(set(SUFFIXES.values())) == len(FORMATS)


ALL = ExportOrder(Path("a.mcap.part"), Path(), "perfetto")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("perfetto", "a.pftrace"),
        (" csv ", "a-steps.csv"),
        ("requests parquet", "a-requests.parquet"),
        ("csv screen rows", "a-5-9-rows.csv"),
        ("jsonl 100-200", "a-100-200.jsonl"),
        ("mooncake", "a.mooncake.jsonl"),
    ],
)
def test_a_typed_export_names_format_table_and_steps(typed: str, name: str) -> None:
    assert file_name(typed_order(typed, ALL, StepRange(5, 9))) == name


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "name one of perfetto, parquet, csv, jsonl, mooncake"),
        ("csv jsonl", "name one of"),
        ("xlsx", "name one of"),
        ("jsonl rows", "'rows': after jsonl may stand 100-200 or screen"),
        ("csv 100", "'100': after csv may stand steps, rows, requests, 100-200 or screen"),
    ],
)
def test_an_export_that_means_nothing_is_explained(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        typed_order(typed, ALL, StepRange())


async def test_a_replayed_file_is_exported_beside_it_whole_or_only_the_visible_steps(
    replay: ReplaySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = replay.recording.path.parent
    app = dashboard(replay, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("E")
        shown = screen_text(app)
        assert "export as: perfetto" in shown
        assert all(each in shown for each in FORMATS)
        await pilot.press(*"xlsx", "enter")
        assert "name one of perfetto, " in screen_text(app)
        await pilot.press("ctrl+u", *"csv requests", "enter")
        assert app.screen is app.main
        path = folder / "session-requests.csv"
        await told(app, "exported session-requests.csv, ")
        size = path.stat().st_size
        assert f", {size / 1000:.0f}kB, " in notice(app)

        # What was typed last is offered again; here twice, for the visible steps.
        columns = [each for each in app.main.frame.columns if each is not None]
        first, last = columns[0].first, columns[-1].last
        await pilot.press("E")
        assert "export as: csv requests" in screen_text(app)
        await pilot.press(*"csv screen", "enter")
        await told(app, f"exported session-{first}-{last}-steps.csv")
        assert steps_of(folder / f"session-{first}-{last}-steps.csv") == [*range(first, last + 1)]
        await pilot.press("E", "enter")
        await told(app, f"exported session-{first}-{last}-steps-2.csv")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        await pilot.press("E", *"parquet", "enter")
        await told(app, "no export: parquet needs the package pyarrow: pip install")
    app.close()

    monkeypatch.setattr(sys, "argv", ["stepscope", *_same_by_command(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert (folder / "command.csv").read_bytes() == path.read_bytes()


def _same_by_command(folder: Path) -> list[str]:
    arguments = ["export", f"{folder}/session.mcap", "--format", "csv", "--table", "requests"]
    return [*arguments, "-o", f"{folder}/command.csv"]


class Feed(StillSource):
    """A live source that delivers messages when the test asks."""

    name = "feed"

    def __init__(self) -> None:
        super().__init__(History(SLO()))
        self._messages = iter(simulate(seed=3, num_steps=90))
        self.more(30)

    def more(self, num_messages: int) -> None:
        for _, (sequence, message) in zip(range(num_messages), self._messages, strict=False):
            self.history.append(sequence, message)
            self.tap.send(wire.TOPICS[type(message)], sequence, wire.encode(message))


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
        await pilot.press("X", *"csv", "enter")
        await told(app, f"exported {name}-steps.csv, ")
        assert switch.active
        assert steps_of(tmp_path / f"{name}-steps.csv") == [*range(first, last + 1)]

        # The visible steps began before the recording.
        await pilot.press("X", *"csv screen", "enter")
        await told(app, f"-{last}-steps.csv, ")
        (path,) = tmp_path.glob(f"{name}-*-{last}-steps.csv")
        assert steps_of(path) == [*range(first, last + 1)]
        source.more(30)
        await pilot.press("ctrl+r")
        await until((tmp_path / f"{name}.mcap").exists, lambda: "not finished")
        await pilot.press("X", *"csv", "enter")
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


def test_an_export_range_from_before_an_engine_restart_is_not_in_the_recording(
    tmp_path: Path,
) -> None:
    path = Path(shutil.copy(shipped()["freeze"], tmp_path / "a.mcap"))
    with Recording(path) as recording:
        own = recording.info.engine_id
    for engine_id, steps, words in (
        ("another", StepRange(10, 20), "was recorded before the engine restarted"),
        (own, StepRange(9_000, 9_010), "none of 9,000 to 9,010"),
        ("another", StepRange(), "exported a-steps.csv"),
        (own, StepRange(450, 9_010), "exported a-450-9010-steps.csv"),
    ):
        jobs = FileJobs()
        order = ExportOrder(path, tmp_path, "csv", "steps", steps, engine_id)
        jobs.begin(order)
        jobs.begin(order)  # nothing happens: one is running already
        assert jobs._job is not None
        jobs._job.wait(10.0)
        said = jobs.news()
        assert said is not None
        assert words in said[0]
        assert jobs.news() is None
        assert not jobs.cancel()
    assert len(list(tmp_path.glob("*.csv"))) == 2


def test_exports_of_a_shipped_sample_go_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_for(shipped()["freeze"]) == tmp_path
    assert folder_for(Path("b.mcap")) == tmp_path
    assert folder_for(tmp_path / "c" / "d.mcap") == tmp_path
    (tmp_path / "c").mkdir()
    assert folder_for(tmp_path / "c" / "d.mcap") == tmp_path / "c"
