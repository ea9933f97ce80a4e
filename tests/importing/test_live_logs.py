"""A log that another program passes on is drawn as it grows, as it would be read from a file."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.history import History
from stepscope.recordings.importing.imported import FORMATS
from stepscope.recordings.importing.log_source import LogPipe, LogSource
from stepscope.recordings.importing.source import ForeignFile
from tests.importing.test_logs import SAMPLES, ten_s
from tests.support.screens.terminal import Terminal
from tests.support.waiting import wait_for


def piped() -> tuple[IO[str], IO[str]]:
    """The end from which a log is read, and the one into which it is written."""
    reading, writing = os.pipe()
    return open(reading, encoding="utf-8"), open(writing, "w", encoding="utf-8", buffering=1)


def whole(source: LogSource) -> list[StepRecord | None]:
    """The records of a source whose log has ended."""
    wait_for(lambda: source.status == "ended")
    history = source.history
    first, last = history.first_step, history.last_step
    assert first is not None
    assert last is not None
    return [history.record(step) for step in range(first, last + 1)]


@pytest.mark.parametrize("name", ["vllm.log", "sglang.log", "trtllm.log"])
def test_the_records_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    text = (SAMPLES / name).read_text("utf-8")
    path = tmp_path / name
    path.write_text(text, "utf-8")
    session = next(found for read in FORMATS if (found := read(ForeignFile(path))) is not None)
    of_file = [each for each in session.messages if isinstance(each, StepRecord)]
    stream, log = piped()
    log.write(text)
    log.close()
    source, *others = LogPipe(stream, History).begin()
    assert len(others) == {"vllm.log": 1, "sglang.log": 2, "trtllm.log": 0}[name]
    source.start()
    assert whole(source) == of_file
    assert source.error == "the log has ended"


def test_a_line_is_drawn_though_no_other_follows_and_a_new_rank_is_a_new_engine() -> None:
    stream, log = piped()
    log.write("INFO starting\n" + ten_s("05-30 08:00:00", run=3))
    pipe = LogPipe(stream, History)
    (source,) = pipe.begin()
    source.start()
    wait_for(lambda: source.history.state.num_running == 3)
    assert source.status == "live"
    log.write(ten_s("05-30 08:00:10", run=5) + ten_s("05-30 08:00:10", rank="001", run=7))
    wait_for(lambda: source.history.state.num_running == 5)
    found: list[LogSource] = []
    wait_for(lambda: bool(found.extend(pipe.newcomers()) or found))
    assert found[0].name == "vllm engine 1"
    found[0].start()
    log.close()
    assert [each and each.num_running for each in whole(found[0])] == [7]
    assert [each and each.num_running for each in whole(source)] == [3, 5]
    found[0].stop()
    source.stop()


def test_a_bad_line_is_told_and_left_out() -> None:
    stream, log = piped()
    bad = ten_s("05-30 08:00:10", run="many").replace("many", "7.5")
    log.write(ten_s("05-30 08:00:00") + bad + ten_s("05-30 08:00:20", run=4))
    pipe = LogPipe(stream, History)
    (source,) = pipe.begin()
    assert "standard input, line 2, Running: expected `int`" in (source.error or "")
    log.close()
    source.start()
    assert [each and each.num_running for each in whole(source)] == [1, 4]


def test_a_pipe_without_a_servers_lines_is_refused() -> None:
    stream, log = piped()
    log.write("what is this\n" * 3)
    log.close()
    with pytest.raises(RecordingError, match="expected the log of vLLM, SGLang or TensorRT-LLM"):
        LogPipe(stream, History).begin()


def test_the_dashboard_draws_a_pipe_takes_keys_and_stays_after_its_end(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = f"cat {pipe} | {sys.executable} -m stepscope.tui.cli top -"
    screen = terminal("/bin/sh", "-c", command)
    with pipe.open("w", encoding="utf-8", buffering=1) as log:
        log.write(ten_s("05-30 08:00:00", run=3, wait=2, output="50.0"))
        screen.wait_for(r"LIVE.*vllm engine 0")
        screen.wait_for(r"RUN 3 +WAIT 2")
        log.write(ten_s("05-30 08:00:10", run=6, wait=1, output="60.0"))
        screen.wait_for(r"RUN 6 +WAIT 1")
        screen.send("?")
        screen.wait_for("Help|Keys|keys")
        screen.send("\x1b")
    screen.wait_for("LOG END")
    screen.wait_for("the log has ended")
    assert "RUN 6" in screen.text()
    screen.send("q")
    assert screen.wait_for_exit() == 0
