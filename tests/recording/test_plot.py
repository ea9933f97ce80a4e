"""Plots of recordings: what each pixel column holds, and the file that is written."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineStatus, Mark, StepRecord
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.plot.figure import figure
from stepscope.recordings.plot.series import read_series
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.recordings.export import plot_file
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from tests.support.sessions.received import busy_messages

Call = Callable[..., Any]

BOUNDS = SLO(ttft_ms=500.0, itl_ms=30.0)
NUM_STEPS = 500
MARK_AT = 100
PAUSE_AT, PAUSE_NS = 200, 3_000_000_000
LOST = range(300, 310)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, recorded_to: Call) -> tuple[History, Path]:
    """A busy session and its recording: a knob change, a mark, a pause, lost messages."""
    path = tmp_path_factory.mktemp("plot") / "busy.mcap"
    sequence = later_ns = 0
    with recorded_to(path, BOUNDS) as source:
        for _, message in busy_messages(NUM_STEPS, 400):
            sequence += 1
            if isinstance(message, StepRecord) and message.step == PAUSE_AT:
                later_ns = PAUSE_NS
                state = source.history.state
                names = ("step", "time_ns", "num_running", "num_waiting")
                counts = {name: getattr(state, name) for name in names}
                source.take(sequence, EngineStatus(state="paused", **counts))
                sequence += 1
            if later_ns:
                message = later(message, later_ns)
            if not isinstance(message, StepRecord) or message.step not in LOST:
                source.take(sequence, message)
            if isinstance(message, StepRecord) and message.step == MARK_AT:
                mark = Mark(step=MARK_AT, time_ns=message.tokens_ns, text="of $x$ _y_", who="ops")
                source.take(sequence, mark)
    return source.history, path


def later(message: wire.Telemetry, later_ns: int) -> wire.Telemetry:
    """The same messages, moved in time."""
    times = {
        name: value + later_ns
        for name in message.__struct_fields__
        if name in ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns", "time_ns")
        and (value := getattr(message, name)) is not None
    }
    return msgspec.structs.replace(message, **times)


def read(path: Path, num_columns: int, first: int | None = None, last: int | None = None) -> Any:
    with Recording(path) as recording:
        return read_series(recording, StepRange(first, last), BOUNDS, num_columns, lambda _: None)


@pytest.mark.parametrize("num_columns", [1, 7, 40, 1400])
def test_a_column_shows_the_worst_step(session: tuple[History, Path], num_columns: int) -> None:
    history, path = session
    series = read(path, num_columns)
    summaries = [*filter(None, history.summaries(history.first_step, history.last_step))]
    width_ns = series.duration_ns / num_columns
    for summary in summaries:
        place = min(int((summary.tokens_ns - series.start_ns) / width_ns), num_columns - 1)
        assert series.steps[place].largest >= summary.duration_ns
        assert series.most["num_spent_tokens"][place] >= summary.num_spent_tokens
        assert series.most["num_waiting"][place] >= (summary.num_waiting or 0)
        assert series.budget[place] <= (summary.token_budget or 0)
        assert series.itls[place].largest >= (summary.max_itl_ns or 0)
        if summary.max_ttft_ns is not None:
            assert series.ttft_ns[place] >= summary.max_ttft_ns
    # ... and invents nothing.
    most, num_preempted = series.most["num_spent_tokens"], sum(series.num_preempted)
    assert max(each for each in most if each >= 0) == max(s.num_spent_tokens for s in summaries)
    assert num_preempted == sum(s.num_preempted or 0 for s in summaries) > 0
    # A step fills every column that it covers, so that a stall is as wide as it took.
    longest = max(summaries, key=lambda summary: summary.duration_ns)
    covered = [each for each in series.steps if each.largest == longest.duration_ns]
    assert len(covered) >= int(longest.duration_ns / width_ns) - 1


def test_plotted_events_are_in_order_and_only_from_the_range(session: tuple[History, Path]) -> None:
    _, path = session
    series = read(path, 100)
    in_order = sorted(series.events, key=lambda event: event.time_ns)
    assert [(event.kind, event.text) for event in in_order] == [
        ("mark", "of $x$ _y_"),
        ("pause", "engine paused for 3.0 s"),
        ("lost", "10 messages lost after step 299"),
        ("knobs", "max_num_batched_tokens 1024→512"),
    ]
    part = read(path, 100, 150, 250)
    assert (part.first_step, part.last_step, part.sums.num_records) == (150, 250, 101)
    assert [event.kind for event in part.events] == ["pause"]


def test_a_plot_embeds_its_data_and_is_the_same_every_time(
    session: tuple[History, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "a $ sign.mcap", tmp_path / "a.svg"
    shutil.copy(session[1], path)
    drawn = []
    for _ in range(2):
        plot_file(str(path), output=str(file), flags={"slo_itl_ms": "30ms", "slo_ttft_ms": "0.5s"})
        drawn.append(file.read_bytes())
    first = drawn[0]
    assert drawn[1] == first
    assert first.startswith(b"<?xml")
    series = read(path, 60)
    for target, begins, theme in (("pdf", b"%PDF", "light"), ("png", b"\x89PNG", "dark")):
        drawn = [figure(series, "heading", ["details"], target, (7, 7), theme) for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert drawn[0].startswith(begins)
    # Text is drawn as shapes, with its words in a comment.
    said = re.findall(r"<!-- (.*?) -->", first.decode())
    texts = (
        *("a $ sign", "Tokens", "budget", "Step time", "Inter-token latency (ITL)", "SLO 30 ms"),
        *("Time to first token (TTFT)", "Requests", "KV cache", "preemption", "s since step 0"),
        *("step", "▼ of $x$ _y_", "◆ max_num_batched_tokens 1024→512", "‖ engine paused for 3.0 s"),
    )
    assert {*texts} <= {*said}
    assert "a.svg: steps " in capsys.readouterr().out
    # An existing file is replaced, completely or not at all.
    plot_file(str(path), output=str(file), first=10, last=20, flags={})
    assert file.read_bytes() != first
    assert sorted(tmp_path.iterdir()) == sorted([file, path])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output": "figure.gif"}, "ends in .svg, .png or .pdf"),
        ({"output": "no/such/folder/f.svg"}, "is not a folder"),
        ({"first": 9, "last": 3}, "--from 9 is after --until 3"),
    ],
)
def test_an_impossible_plot_gives_a_one_line_error_and_no_file(
    session: tuple[History, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"file": str(session[1]), "output": "f.svg"}
    with pytest.raises((WrongUsage, CommandFailed), match=re.escape(words)):
        plot_file(**{**arguments, **change}, flags={})
    assert list(tmp_path.iterdir()) == []


def test_a_mark_that_the_font_cannot_draw_gives_no_warning(
    session: tuple[History, Path], recwarn: pytest.WarningsRecorder
) -> None:
    figure(read(session[1], 60), "heading \u6d4b", ["details"], "png", (7, 7), "light")
    assert [str(each.message) for each in recwarn if "Glyph" in str(each.message)] == []


def test_without_matplotlib_the_plot_command_names_the_extra(
    session: tuple[History, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Call
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = stepscope("plot", str(session[1]), "-o", f"{tmp_path}/a.png", "--until", "20")
    assert done.exit_code == 1
    assert "pip install 'stepscope[export]'" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
