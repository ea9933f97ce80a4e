"""Exports, read back with the libraries of their formats, hold what the recording holds."""

import csv
import json
import os
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.export import FORMATS, Format, export
from stepscope.recordings.export.tables import Table
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.samples import shipped
from stepscope.tui.cli.__main__ import main
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.later import Later
from tests.support.sessions.seek_sessions import record

Call = Callable[..., Any]

NUM_STEPS = 900
MESSAGES = Later(
    lambda: simulate(
        seed=3,
        num_steps=NUM_STEPS,
        num_blocks=700,
        max_model_len=4096,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=32, reserve="none"),
        workload=SimulatedWorkload(
            rate=6.0, document_share=0.2, chat_tokens=1500, output_tokens=90, shared_tokens=1100
        ),
        changes={400: {"max_num_batched_tokens": 512}},
    )
)
STEPS = Later(lambda: [message for _, message in MESSAGES if isinstance(message, wire.StepRecord)])
EVENTS = Later(
    lambda: [
        event
        for _, message in MESSAGES
        if isinstance(message, wire.StepRecord | wire.EngineStatus)
        for event in message.events
    ]
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "session.mcap", MESSAGES)


@pytest.fixture
def exported(recorded: Path, tmp_path: Path) -> Call:
    def make(
        target: Format, first: int | None = None, last: int | None = None, table: Table = "steps"
    ) -> Path:
        output = tmp_path / f"{target}-{table}-{first}-{last}"
        shares: list[float] = []
        with Recording(recorded) as recording:
            export(recording, output, target, StepRange(first, last), table, shares.append)
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        return output

    return make


# Tables


def test_exported_parquet_has_a_row_for_each_recorded_step(exported: Call) -> None:
    table = pyarrow.parquet.read_table(exported("parquet"))
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [step.step for step in STEPS]
    for row, step in zip(rows, STEPS, strict=True):
        assert row["num_prefill_tokens"] == step.num_prefill_tokens
        assert row["kv_used"] == step.kv.used
        assert row["tokens_ns"] == step.tokens_ns
        assert row["num_rows"] == len(step.batch)
        assert row["device_ns"] is None
    num_preempted = sum(isinstance(event, wire.Preempted) for event in EVENTS)
    assert sum(row["num_preempted"] for row in rows) == num_preempted


def test_exported_columns_are_unknown_where_an_engine_tells_nothing(tmp_path: Path) -> None:
    told: dict[str, Any] = {"hidden_ns": 20, "num_wasted_tokens": 1, "token_limit": 512}
    told["cuda_graph"] = "full"
    drafts: dict[int, list[wire.DraftRow]] = {}
    messages = []
    for sequence, message in MESSAGES[:200]:
        if isinstance(message, wire.StepRecord) and message.batch and message.step % 2:
            rows = [wire.DraftRow(row.request_id, 5, 2) for row in message.batch[:2]]
            drafts[message.step] = rows
            message = msgspec.structs.replace(message, drafts=rows, **told)
        messages.append((sequence, message))
    names = ("num_drafted_tokens", "num_accepted_tokens")
    with Recording(record(tmp_path / "guessed.mcap", messages)) as recording:
        for table in ("steps", "rows"):
            export(recording, tmp_path / table, "parquet", StepRange(None, None), table, print)
    for row in pyarrow.parquet.read_table(tmp_path / "steps").to_pylist():
        count = len(drafts.get(row["step"], ()))
        assert [row[name] for name in names] == ([5 * count, 2 * count] if count else [None] * 2)
        assert {name: row[name] for name in told} == (told if count else dict.fromkeys(told))
    for row in pyarrow.parquet.read_table(tmp_path / "rows").to_pylist():
        has_draft = row["request_id"] in {each.request_id for each in drafts.get(row["step"], ())}
        assert [row[name] for name in names] == ([5, 2] if has_draft else [None, None])


def test_the_rows_of_all_batches_can_be_exported_as_a_table(exported: Call) -> None:
    found = pyarrow.parquet.read_table(exported("parquet", table="rows")).to_pylist()
    expected = [(step.step, row) for step in STEPS for row in step.batch or ()]
    assert len(found) == len(expected)
    for given, (step, row) in zip(found, expected, strict=True):
        assert (given["step"], given["request_id"]) == (step, row.request_id)
        assert given["start"] == row.start
        assert given["first_token"] == bool(row.flags & wire.RowFlag.FIRST_TOKEN)


def test_exported_csv_and_parquet_hold_the_same_requests(exported: Call) -> None:
    columns = pyarrow.parquet.read_table(exported("parquet", table="requests")).to_pylist()
    with open(exported("csv", table="requests"), newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in columns] == lines
    finished = {event.request_id: event for event in EVENTS if isinstance(event, wire.Finished)}
    arrived = {event.request_id: event for event in EVENTS if isinstance(event, wire.Arrived)}
    assert {row["request_id"] for row in columns} == set(arrived)
    for row in columns:
        assert row["num_prompt_tokens"] == arrived[row["request_id"]].num_prompt_tokens
        if row["request_id"] in finished:
            assert row["num_output_tokens"] == finished[row["request_id"]].num_output_tokens
            assert row["ttft_ms"] > 0


@pytest.mark.parametrize("table", ["steps", "rows", "requests"])
@pytest.mark.parametrize("simulated", [None, "an H100"])
def test_each_exported_row_says_whether_it_is_simulated(
    tmp_path: Path, table: Table, simulated: str | None
) -> None:
    (sequence, info), *rest = MESSAGES[:100]
    assert isinstance(info, wire.EngineInfo)
    told = (sequence, msgspec.structs.replace(info, simulated=simulated))
    with Recording(record(tmp_path / "session.mcap", [told, *rest])) as recording:
        export(recording, tmp_path / "table", "csv", StepRange(), table, lambda share: None)
    with open(tmp_path / "table", newline="") as stream:
        said = {row["simulated"] for row in csv.DictReader(stream)}
    assert said == {str(simulated is not None)}


def test_the_longest_gap_of_a_request_is_between_two_of_its_tokens(exported: Call) -> None:
    times_ns: dict[int, list[int]] = defaultdict(list)
    for step in STEPS[200:]:
        for row in step.batch or ():
            if row.phase == wire.Phase.DECODE or row.flags & wire.RowFlag.LAST_CHUNK:
                times_ns[row.request_id].append(step.tokens_ns)
    begun = {row.request_id for step in STEPS[:200] for row in step.batch or ()}
    found = pyarrow.parquet.read_table(exported("parquet", 200, table="requests")).to_pylist()
    assert any(row["request_id"] in begun for row in found)
    for row in found:
        gaps_ns = [b - a for a, b in pairwise(times_ns[row["request_id"]])]
        if row["request_id"] not in begun:
            expected = max(gaps_ns) / 1e6 if gaps_ns else None
            assert row["itl_max_ms"] == expected
        elif row["first_token_ns"] and row["first_token_ns"] < STEPS[200].tokens_ns:
            assert row["itl_max_ms"] is None


def test_exported_json_lines_hold_every_message(exported: Call) -> None:
    lines = [json.loads(line) for line in exported("jsonl").read_text().splitlines()]
    assert [line["sequence"] for line in lines] == [sequence for sequence, _ in MESSAGES]
    topics = [wire.TOPICS[type(message)] for _, message in MESSAGES]
    assert [line["topic"].encode() for line in lines] == topics
    steps = [line["message"] for line in lines if line["topic"] == "step"]
    assert steps[100]["batch"][0][0] == STEPS[100].batch[0].request_id  # type: ignore[index]


# Traces


class Tracks:
    """Slices, counters and flows as a viewer reads them, from either format."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.slices: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.flow_starts: dict[int, tuple[str, int]] = {}
        self.flow_ends: dict[int, tuple[str, int]] = {}
        self.instants: list[str] = []
        self._open: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def begin(self, track: int, name: str, time_ns: int) -> None:
        stack = self._open[track]
        assert not stack or time_ns >= stack[-1][1]
        stack.append((name, time_ns))

    def end(self, track: int, time_ns: int) -> None:
        name, begin_ns = self._open[track].pop()
        assert time_ns >= begin_ns
        self.slices[self.names[track]].append((name, begin_ns, time_ns))

    def close(self) -> None:
        assert not any(self._open.values()), "slices that never end"


def perfetto_tracks(path: Path) -> Tracks:
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = Tracks()
    assert trace.packet[0].first_packet_on_sequence
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            tracks.names[descriptor.uuid] = descriptor.name
            assert descriptor.parent_uuid in (0, *tracks.names)
        elif packet.HasField("track_event"):
            event = packet.track_event
            track = event.track_uuid
            assert track in tracks.names
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                tracks.begin(track, event.name, packet.timestamp)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                tracks.end(track, packet.timestamp)
            elif event.type == TrackEvent.TYPE_COUNTER:
                tracks.counters[tracks.names[track]].append((packet.timestamp, event.counter_value))
            else:
                tracks.instants.append(event.name)
            for flow in event.flow_ids:
                tracks.flow_starts[flow] = (event.name, packet.timestamp)
            for flow in event.terminating_flow_ids:
                tracks.flow_ends[flow] = (tracks.names[track], packet.timestamp)
    tracks.close()
    return tracks


def test_a_trace_has_steps_counters_slots_and_arrows_to_first_tokens(exported: Call) -> None:
    tracks = perfetto_tracks(exported("perfetto"))
    steps = [each for each in tracks.slices["steps"] if each[0].startswith("step ")]
    assert steps == [(f"step {s.step}", s.schedule_start_ns, s.tokens_ns) for s in STEPS]
    used = dict(tracks.counters["KV blocks used"])
    budget = dict(tracks.counters["token budget"])
    value = None
    for step in STEPS:
        value = used.get(step.schedule_start_ns, value)
        assert value == step.kv.used
    assert list(budget.values()) == [1024, 512]
    assert {"tokens scheduled", "requests waiting"} <= set(tracks.counters)
    # A lane for each seat, without overlaps.
    lanes = [name for name in tracks.slices if name.startswith("slot")]
    assert len(lanes) == max(len(step.batch or ()) for step in STEPS)
    stays: Counter[str] = Counter()
    for lane in lanes:
        own = [each for each in tracks.slices[lane] if each[0].startswith("r")]
        own = [each for each in own if not each[0].startswith("recompute")]
        own.sort(key=lambda each: each[1])
        stays.update(name.split()[0] for name, _, _ in own)
        for (_, _, end_ns), (_, begin_ns, _) in pairwise(own):
            assert begin_ns >= end_ns
    admissions = Counter(f"r{e.request_id}" for e in EVENTS if isinstance(e, wire.Admitted))
    assert stays == admissions
    assert any("max_num_batched_tokens 1024 -> 512" in text for text in tracks.instants)
    # An arrow from each arrival to its first token.
    arrivals = {e.request_id + 1: e.time_ns for e in EVENTS if isinstance(e, wire.Arrived)}
    firsts = {
        row.request_id + 1: step.tokens_ns
        for step in STEPS
        for row in step.batch or ()
        if row.flags & wire.RowFlag.FIRST_TOKEN
    }
    assert {flow: time_ns for flow, (_, time_ns) in tracks.flow_starts.items()} == arrivals
    assert {flow: time_ns + 1000 for flow, (_, time_ns) in tracks.flow_ends.items()} == firsts
    assert all(lane.startswith("slot") for lane, _ in tracks.flow_ends.values())


# Mooncake


ENGINE = (
    *("--gpu", "h100", "--model", "llama-3.1-8b", "--num-blocks", "4096", "--block-size", "16"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", "1024", "--max-num-seqs", "32"),
)


def test_a_mooncake_trace_replays_with_its_prefix_hits(exported: Call, stepscope: Call) -> None:
    path = exported("mooncake")
    path = path.rename(path.with_suffix(".jsonl"))
    rows = read_trace(path)
    arrived = {e.request_id: e for e in EVENTS if isinstance(e, wire.Arrived)}
    tokens = Counter(row.request_id for step in STEPS for row in step.batch or () if row.flags & 1)
    expected = [
        (arrived[request_id].num_prompt_tokens, tokens[request_id])
        for request_id in arrived
        if tokens[request_id]
    ]
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == expected
    first_ns = min(event.time_ns for event in arrived.values())
    for row, event in zip(rows, (e for i, e in arrived.items() if tokens[i]), strict=True):
        assert abs(row.offset_s - (event.time_ns - first_ns) / 1e9) < 0.001
        assert len(row.hash_ids) == -(-row.num_prompt_tokens // 512)
    # Prefix cache hits have the ids of another request; documents share nothing.
    admitted: dict[int, int] = {}
    for event in EVENTS:
        if isinstance(event, wire.Admitted):
            admitted.setdefault(event.request_id, event.num_cached_tokens)
    uses = Counter(block for row in rows for block in row.hash_ids or ())
    num_hits = 0
    for event, row in zip((e for i, e in arrived.items() if tokens[i]), rows, strict=True):
        num_found = admitted[event.request_id] // 512
        num_hits += num_found > 0
        assert all(uses[block] > 1 for block in row.hash_ids[:num_found])
        first_own = 0 if event.client_id.startswith("doc") else 1100 // 512
        assert all(uses[block] == 1 for block in row.hash_ids[first_own:])
    assert num_hits > len(rows) / 3
    # Simulated, it hits whole blocks of 512 of the 1100 tokens that chats share.
    done = stepscope("simulate", str(path), *ENGINE, "--json")
    hit_share = json.loads(done.stdout)["runs"][0]["hit_share"]
    num_tokens = sum(row.num_prompt_tokens for row in rows)
    assert hit_share * num_tokens == pytest.approx(num_hits * 1024, rel=0.1)


# Ranges, memory, errors


@pytest.mark.parametrize("target", FORMATS)
def test_an_export_of_a_range_has_its_steps(exported: Call, target: Format) -> None:
    path = exported(target, 500, 599)
    if target == "parquet":
        steps = pyarrow.parquet.read_table(path).column("step").to_pylist()
    elif target == "csv":
        with open(path, newline="") as stream:
            steps = [int(row["step"]) for row in csv.DictReader(stream)]
    elif target == "jsonl":
        lines = map(json.loads, path.read_text().splitlines())
        steps = [line["message"]["step"] for line in lines if line["topic"] == "step"]
    elif target == "mooncake":
        arrived = [e for s in STEPS[500:600] for e in s.events if isinstance(e, wire.Arrived)]
        assert 0 < len(read_trace(path)) <= len(arrived)
        return
    else:
        tracks = perfetto_tracks(path)
        steps = [int(n.split()[1]) for n, _, _ in tracks.slices["steps"] if n.startswith("step ")]
    assert steps == list(range(500, 600))


def test_the_export_command_says_what_it_wrote(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stepscope", "export", str(recorded), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    out = str(tmp_path / "out")
    code, said, _ = run("--format", "mooncake", "-o", out)
    assert code == 0
    assert f"{out}: " in said
    assert "no tokens are looked at" in said
    code, _, _ = run("-o", out + ".csv", "--until", "20")
    assert code == 0
    assert (tmp_path / "out.csv").read_text().startswith("step,")
    code, _, error = run("--format", "csv", "-o", out)
    assert code == 1
    assert "is there already" in error
    for wrong in (
        ["--format", "excel", "-o", out + "2"],
        ["--format", "csv", "--table", "users", "-o", out + "2"],
        ["--format", "perfetto", "--table", "rows", "-o", out + "2"],
        ["--format", "csv", "--from", "9", "--until", "3", "-o", out + "2"],
    ):
        code, _, error = run(*wrong)
        assert code == 2
        assert error.count("\n") == 1
    code, _, error = run("--format", "csv", "--from", "5000", "-o", out + "2")
    assert code == 2
    assert "holds steps 0 to 899" in error
    for package, target in (("perfetto", "perfetto"), ("pyarrow", "parquet")):
        with monkeypatch.context() as patch:
            for name in [n for n in sys.modules if n.split(".")[0] == package]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            code, _, error = run("--format", target, "-o", out + "2")
        assert code == 1
        assert f"{target} needs the package {package}: pip install 'stepscope[export]'" in error
    assert sorted(os.listdir(tmp_path)) == ["out", "out.csv"]


def test_an_interrupted_export_leaves_no_file(recorded: Path, tmp_path: Path) -> None:
    def interrupt(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    for target in FORMATS:
        with Recording(recorded) as recording, pytest.raises(KeyboardInterrupt):
            export(recording, tmp_path / "x", target, StepRange(), "steps", interrupt)
    assert os.listdir(tmp_path) == []


def test_exporting_a_recording_without_steps_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "none.mcap", MESSAGES[:2])
    with Recording(path) as recording, pytest.raises(RecordingError, match="holds no step"):
        export(recording, tmp_path / "x", "csv", StepRange(), "steps", lambda share: None)


def test_an_export_has_the_limits_and_latencies_of_stats(tmp_path: Path, stepscope: Call) -> None:
    figures = json.loads(stepscope("stats", "vllm", "--json").stdout)["figures"]
    with Recording(shipped()["vllm"]) as recording:
        for table in ("steps", "requests"):
            export(recording, tmp_path / table, "parquet", StepRange(None, None), table, print)
    limits = pyarrow.parquet.read_table(tmp_path / "steps").column("limited_by").to_pylist()
    for limit in ("budget", "work"):
        assert limits.count(limit) / len(limits) == pytest.approx(figures[f"limit_{limit}"])
    requests = pyarrow.parquet.read_table(tmp_path / "requests").to_pylist()
    ended = sorted(row["e2e_ms"] for row in requests if row["e2e_ms"] is not None)
    assert ended[-1] == pytest.approx(figures["e2e_max"])
    assert ended[len(ended) // 2] == pytest.approx(figures["e2e_p50"], rel=0.02)
    longest = [row["itl_max_ms"] for row in requests if row["itl_max_ms"] is not None]
    assert max(longest) == pytest.approx(figures["itl_max"])


@pytest.fixture(scope="module")
def long_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2400 steps in many small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepscope.recordings.file.writing.recording_file.CHUNK_BYTES", 20_000)
        path = tmp_path_factory.mktemp("long") / "long.mcap"
        return record(path, simulate(seed=4, num_steps=2400))


@pytest.mark.parametrize("target", [each for each in FORMATS if each != "parquet"])
def test_an_export_takes_bounded_memory(long_session: Path, tmp_path: Path, target: Format) -> None:
    """Compared with a session three times as long; both exceed the size of all caches."""

    def write(last: int) -> None:
        with Recording(long_session) as recording:
            output = tmp_path / str(last)
            export(recording, output, target, StepRange(0, last), "steps", lambda share: None)
        output.unlink()

    write(700)  # fills the caches
    peaks = []
    for last in (700, 2100):
        tracemalloc.start()
        write(last)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0] + 100_000


def test_parquet_is_written_in_row_groups(exported: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.recordings.export.tables.ROW_GROUP", 200)
    table = pyarrow.parquet.ParquetFile(exported("parquet"))
    assert (table.metadata.num_rows, table.num_row_groups) == (NUM_STEPS, -(-NUM_STEPS // 200))
