"""A server's log is a session of totals: what its lines say, read from a file or as it grows."""

import os
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineStatus, StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import moments
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.importing.imported import FORMATS, imported
from stepscope.recordings.importing.log_source import LogPipe, LogSource
from stepscope.recordings.importing.source import ForeignFile, ForeignSession
from tests.support.screens.terminal import Terminal
from tests.support.waiting import wait_for

SAMPLES = Path(__file__).parent / "samples"
_TEN_S = (
    "(APIServer pid=1) INFO {at} [loggers.py:271] Engine {rank}: Avg prompt throughput: {prompt} "
    "tokens/s, Avg generation throughput: {output} tokens/s, Running: {run} reqs, Waiting: {wait} "
    "reqs, GPU KV cache usage: {kv}%, Prefix cache hit rate: 0.0%\n"
)
# As vLLM 0.32 prints it (`LoggingStatLogger._log_iteration_details`).
_ITERATION = (
    "(APIServer pid=1) INFO {at} [loggers.py:199] Engine 000: Iteration({n}): 1 context requests, "
    "{prompt} context tokens, 2 generation requests, {output} generation tokens, iteration elapsed "
    "time: {ms:.2f} ms{dummy}, GPU KV cache usage: 1.5%\n"
)


def session(path: Path) -> ForeignSession:
    return next(found for read in FORMATS if (found := read(ForeignFile(path))) is not None)


def records(path: Path) -> list[Any]:
    return [each for each in session(path).messages if isinstance(each, StepRecord)]


def ten_s(at: str, rank: str = "000", **figures: object) -> str:
    told: dict[str, object] = {"prompt": "0.0", "output": "0.0", "run": 1, "wait": 0, "kv": "0.0"}
    return _TEN_S.format(at=at, rank=rank, **(told | figures))


def log(tmp_path: Path, text: str, written: str | None = None) -> Path:
    path = tmp_path / "server.log"
    path.write_text(text, "utf-8")
    if written is not None:
        at_s = time.mktime(time.strptime(written, "%Y-%m-%d %H:%M:%S"))
        os.utime(path, (at_s, at_s))
    return path


def test_vllms_lines_tell_load_kv_cache_and_tokens_of_one_rank() -> None:
    found = records(SAMPLES / "vllm.log")
    load = [(each.num_running, each.num_waiting) for each in found]
    assert load == [(51, 117), (1, 0), (0, 0), (1, 0), (1, 14)]
    assert [each.totals.kv_used for each in found] == [1.0, 0.01, 0.0, 0.001, 0.765]
    # 16.5 and 1157.2 tokens a second, for the ten seconds that such a line sums up.
    told = wire.Totals(num_prompt_tokens=165, num_output_tokens=11572, kv_used=1.0)
    assert found[0].totals == told  # the rest is unknown
    assert found[0].tokens_ns - found[0].schedule_start_ns == 10_000_000_000
    assert session(SAMPLES / "vllm.log").note == (
        "vllm.log: it is the log of 2 ranks: engine 0 is read, not engine 1; "
        "'stepscope top - < vllm.log' shows all side by side"
    )
    assert "TP0 is read, not DP6 TP6 EP6" in (session(SAMPLES / "sglang.log").note or "")


def test_an_idle_server_prints_nothing_and_its_silence_is_no_record(tmp_path: Path) -> None:
    text = ten_s("05-30 08:00:00", output="10.0") + ten_s("05-30 08:00:10", output="20.0")
    text += ten_s("05-30 08:00:20", run=0) + ten_s("05-30 09:00:00", output="30.0")
    path = log(tmp_path, text)
    found = records(path)
    assert [each.num_decode_tokens for each in found] == [100, 200, 0, 300]
    assert [(e.tokens_ns - e.schedule_start_ns) // 10**9 for e in found] == [10, 10, 10, 10]
    states = [each.state for each in session(path).messages if isinstance(each, EngineStatus)]
    assert states == ["idle"]


def test_colours_and_fields_of_newer_releases_do_not_matter(tmp_path: Path) -> None:
    newer = ten_s("05-30 08:00:00", run=7, wait=3).replace(
        "GPU KV cache", "Deferred: 2 reqs, Preemptions: 4, Warp cores: 9 units, TPU KV cache"
    )
    (found,) = records(log(tmp_path, f"\x1b[0;36m{newer}\x1b[0;0m"))
    assert (found.num_running, found.num_waiting) == (7, 3)
    assert (found.totals.num_preempted, found.totals.kv_used) == (4, 0.0)


def test_iteration_details_make_a_step_of_each_line(tmp_path: Path) -> None:
    at = "05-30 08:00:00"
    told = ((30, 2, ""), (30, 2, " (dummy)"), (30, 2, ""), (0, 3, ""))
    lines = [
        _ITERATION.format(at=at, n=n, prompt=prompt, output=output, ms=4.0 + n, dummy=dummy)
        for n, (prompt, output, dummy) in enumerate(told)
    ]
    path = log(tmp_path, "".join([*lines[:3], ten_s(at, run=3, wait=5), lines[3]]))
    found = records(path)
    assert session(path).info.totals_every_s is None
    assert [(e.tokens_ns - e.schedule_start_ns) / 1e6 for e in found] == [4, 6, 7]
    tokens = [(each.num_prefill_tokens, each.num_decode_tokens) for each in found]
    assert tokens == [(30, 2), (30, 2), (0, 3)]
    assert [each.totals.is_load_known for each in found] == [False, False, True]
    assert (found[2].num_running, found[2].num_waiting) == (3, 5)


def test_sglangs_lines_are_read_in_all_their_spellings(tmp_path: Path) -> None:
    # Each line alone, as if a server had printed no other.
    seen = []
    for line in (SAMPLES / "sglang.log").read_text("utf-8").splitlines():
        (record,) = records(log(tmp_path, line + "\n"))
        totals = record.totals
        load = (record.num_running, record.num_waiting) if totals.is_load_known else None
        seen.append((load, totals.kv_used, totals.num_prompt_tokens, totals.num_cached_tokens))
    assert seen == [
        ((1, 38), 0.04, 8192 + 291, 291),
        ((6, 5), 0.94, None, None),
        ((78, 0), 0.27, None, None),
        ((251, 655), 1.0, None, None),
        ((1, 0), 0.0, None, None),
        (None, 0.92, None, None),  # it does not tell how many wait
        ((1, 0), 0.03, None, None),
        ((0, 0), 0.0, 1, 0),
        ((2, 1), 0.12, None, None),
    ]


def test_sglangs_throughput_counts_since_the_decode_line_before(tmp_path: Path) -> None:
    decode = (
        "[2026-05-30 08:00:{at:02}] Decode batch, #running-req: 6, #token: 1920, token usage: "
        "0.94, cuda graph: {graph}, gen throughput (token/s): {rate}, #queue-req: 0\n"
    )
    prefill = (
        "[2026-05-30 08:00:{at:02}] Prefill batch, #new-seq: 4, #new-token: 300, #cached-token: "
        "100, token usage: 0.04, #running-req: 1, #queue-req: 38\n"
    )
    text = decode.format(at=0, rate="446.45", graph=True) + prefill.format(at=2) * 2
    text += decode.format(at=4, rate="100.00", graph=False)
    found = records(log(tmp_path, text))
    told = [each.totals for each in found]
    # Since when the first line counts, the log does not tell.
    assert [each.num_output_tokens for each in told] == [None, None, 400]
    assert [each.num_queried_tokens for each in told] == [None, 800, None]
    assert [each.num_cached_tokens for each in told] == [None, 200, None]
    assert [each.cuda_graph for each in found] == ["full", None, "none"]


def test_tensorrt_llms_lines_make_a_step_each() -> None:
    (found,) = records(SAMPLES / "trtllm.log")
    assert found.tokens_ns - found.schedule_start_ns == 4_080_000
    assert (found.num_prefill_tokens, found.num_decode_tokens) == (4, 2)
    assert found.totals.kv_used == 0.112
    assert not found.totals.is_load_known


def test_a_missing_year_or_day_is_the_one_before_the_file_was_written(tmp_path: Path) -> None:
    decode = "[{}] Decode batch, #running-req: 1, token usage: 0.1, #queue-req: 0\n"
    for text in (
        ten_s("12-31 23:59:55") + ten_s("01-01 00:00:05"),
        decode.format("23:59:55") + decode.format("00:00:05"),
    ):
        found = records(log(tmp_path, text, "2026-01-01 00:01:00"))
        times = [time.localtime(each.tokens_ns / 1e9) for each in found]
        said = [time.strftime("%Y-%m-%d %H:%M:%S", each) for each in times]
        assert said == ["2025-12-31 23:59:55", "2026-01-01 00:00:05"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (ten_s("05-30 08:00:00", run="1.2.3"), "line 2, Running: expected an integer"),
        (ten_s("13-45 08:00:00"), "line 2, time: expected a date and a time, got 13-45"),
        (ten_s("05-30 08:00:00", kv="9" * 400), "line 2, KV cache usage: number out of range"),
        ("[08:00:00] Decode batch, #running-req: many, #queue-req: 0\n", "line 2, #running-req"),
        (ten_s("08:00:00"), "line 2, time: expected a date and a time, got"),
    ],
)  # fmt: skip
def test_a_bad_figure_is_named_by_line_and_field(tmp_path: Path, line: str, said: str) -> None:
    path = log(tmp_path, "the server begins\n" + line)
    with pytest.raises(RecordingError, match=rf"\A[^\n]*{re.escape(said)}[^\n]*\Z"):
        list(session(path).messages)


def test_other_files_are_left_to_who_opens_them(tmp_path: Path) -> None:
    for text in ("a line\nof some other log\n", "", "\0Avg prompt throughput: "):
        assert imported(log(tmp_path, text)) is None
    assert imported(tmp_path) is imported(tmp_path / "missing") is None


def test_the_recording_of_a_log_holds_its_records() -> None:
    path = SAMPLES / "vllm.log"
    found: Any = imported(path)
    assert found[0].name == "vllm.log"
    with Recording(found[0]) as recording:
        assert recording.info.imported == "a log of vllm"
        told = [each.message for each in moments(recording, StepRange(), lambda share: None)]
    assert [each for each in told if isinstance(each, StepRecord)] == records(path)


def piped() -> tuple[IO[str], IO[str]]:
    """The end from which a log is read, and the one into which it is written."""
    reading, writing = os.pipe()
    return open(reading, encoding="utf-8"), open(writing, "w", encoding="utf-8", buffering=1)


def whole(source: LogSource) -> list[Any]:
    """The records of a source whose log has ended."""
    wait_for(lambda: source.status == "ended")
    history: Any = source.history
    return [*map(history.record, range(history.first_step, history.last_step + 1))]


@pytest.mark.parametrize("name", ["vllm.log", "sglang.log", "trtllm.log"])
def test_records_of_a_pipe_are_those_of_the_file_without_overlap(tmp_path: Path, name: str) -> None:
    text = (SAMPLES / name).read_text("utf-8")
    path = tmp_path / name
    path.write_text(text, "utf-8")
    of_file = records(path)
    for before, after in pairwise(of_file):
        assert before.tokens_ns <= after.schedule_start_ns <= after.tokens_ns
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
    assert [each.num_running for each in whole(found[0])] == [7]
    assert [each.num_running for each in whole(source)] == [3, 5]
    found[0].stop()
    source.stop()


def test_a_bad_line_is_left_out_and_a_pipe_without_a_servers_lines_refused() -> None:
    stream, log = piped()
    bad = ten_s("05-30 08:00:10", run="7.5")
    log.write(ten_s("05-30 08:00:00") + bad + ten_s("05-30 08:00:20", run=4))
    (source,) = LogPipe(stream, History).begin()
    assert "standard input, line 2, Running: expected an integer" in (source.error or "")
    log.close()
    source.start()
    assert [each.num_running for each in whole(source)] == [1, 4]
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
