"""The schema stays compatible: golden files fix its encoding, and later files are still readable.

    python tests/telemetry/test_schema.py        (or: make schema)

rewrites the golden files after a field was *added*. Whatever else changes an encoding (a field
renamed, removed, of another type, a column not at the end) needs a new SCHEMA_VERSION: then the
files of the old version stay, and are still read.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import commands, wire
from stepscope.recordings.check.verify import verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import TOPICS
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.seek_sessions import record

FOLDER = Path(__file__).parents[1] / "schema"

TOTALS = wire.Totals(
    num_steps=40, num_prompt_tokens=900, num_output_tokens=300, num_cached_tokens=200,
    num_queried_tokens=900, num_preempted=1, num_finished=2, is_load_known=False, kv_used=0.5,
    ttft=[wire.LatencyEstimate(75.0, 2)], itl=[wire.LatencyEstimate(12.5, 290)],
    tpot=[wire.LatencyEstimate(15.0, 2)],
)  # fmt: skip
INFO = wire.EngineInfo(
    engine_id="engine-1", name="alpha", schema_version=1, software_version="0.1.0", pid=4711,
    model="demo", architecture="Qwen3ForCausalLM", dtype="bfloat16", kv_cache_dtype="float8_e4m3fn",
    device="cpu", implementation="own", attention_backend="reference", num_layers=2, num_kv_heads=4,
    head_dim=64, num_parameters=1_000_000, weight_bytes=2_000_000, flops_per_token=2_000_000,
    block_size=16, num_blocks=1024, max_model_len=4096, max_num_batched_tokens=2048,
    max_num_seqs=64, chars_per_token=4.25,
    knobs=(
        wire.KnobSpec(
            name="watermark", kind="float", default=0.01, low=0.0, high=0.5, choices=("a", "b"),
            help="blocks that admission leaves free",
        ),
    ),
    telemetry_endpoint="ipc:///run/alpha.telemetry", control_endpoint="ipc:///run/alpha.control",
    http_endpoint="127.0.0.1:8000", monotonic_ns=1_000_000_000_000,
    wall_ns=1_700_000_000_000_000_000, with_tokens=True, config_hash="0123abcd", overlap=True,
    step_costs=wire.StepCosts(
        num_streams=8, decode_ms=2.5, num_prefill_tokens=400, prefill_ms=39.25, stream_ms=1.25,
    ),
    bundles=True, keeps_snapshots=True, engine="vllm", engine_version="0.32.0",
    data_parallel_rank=1, data_parallel_size=2, tensor_parallel_size=4, role="prefill",
    decode_engine="beta", kv_layout="9f3a", simulated="llama-3.1-8b on H100 SXM, by roofline",
    totals_every_s=1.0, slo_ttft_ms=3000.0, slo_itl_ms=150.0, imported="a log of vllm",
    kv_groups=(
        wire.KVGroup("full attention", 10, 16), wire.KVGroup("sliding window", 52, 16, 1024, 6),
    ),
    kv_tokens=65_536, pipeline_parallel_size=2, max_graph_tokens=512,
)  # fmt: skip
KV = wire.KVCounts(used=3, cached=2, empty=1019, evicted=1, queried_tokens=700, hit_tokens=64)
ORIGIN = wire.RequestOrigin(
    "beta", 12, 1, 1_000_000_100_000, 1_000_000_100_000, 1_000_000_100_500, 10**12
)
MOVE_GROUPS = bytes(3)  # one for each of MOVES
TRANSFERS = wire.KVTransfers(12, 10**12, 3, 10**12 + 5)
FRONT = wire.FrontEnd(
    1, 10**12, [wire.TakenRow(7, 10**12, 10**12 + 5, True), wire.TakenRow(8, None, 10**12, False)],
    [7, 8], [0, 2], [1, 1], [(7, "stop")],
)  # fmt: skip
MISSES = wire.PrefixMisses(128, 76, 32, 64, 3, 2, 10**12, 5_000_000_000)
EVENTS: list[wire.RequestEvent] = [
    wire.Arrived(7, "chat-7", 300, 60, 2, 1_000_000_000_100, prefix_hashes=[1 << 63, 9]),
    wire.Admitted(7, 64, misses=MISSES), wire.FirstToken(7), wire.Finished(6, "length", 60, [12]),
    wire.Preempted(5, 12, "no free block"), wire.Aborted(4, "client"),
    wire.Rejected(3, "chat-3", "too long"),
    wire.Arrived(8, "chat-8", 3, 60, 2, 1_000_000_000_200, [17, 4, 99], "Why?"),
    wire.Finished(8, "handed_over", 1, handed_to="beta"),
    wire.Arrived(9, "chat-9", 300, 60, 0, 1_000_000_000_300, origin=ORIGIN, elsewhere="cmpl-0"),
    wire.Admitted(9, 0, 300, 1_500_000, is_loaded_early=True),
]  # fmt: skip
MOVES = [
    wire.BlockMove(0, 7, 1), wire.BlockMove(1, wire.CACHED, 0), wire.BlockMove(2, wire.EMPTY, 0),
]  # fmt: skip
VIEW = wire.RequestView(
    request_id=7, client_id="chat-7", status="finished", arrival_ns=1_000_000_000_100,
    num_prompt_tokens=300, max_tokens=60, priority=2, num_computed_tokens=310, num_output_tokens=11,
    num_cached_tokens=64, num_blocks=20, num_preemptions=1, first_token_ns=1_000_000_100_000,
    last_token_ns=1_000_000_200_000, finish_reason="stop", finish_step=41,
    finish_ns=1_000_000_200_000, is_partial=True, origin=ORIGIN, handed_to="beta", high_water=290,
    held="lora: a",
    front=wire.FrontTimes(1, 10**12, 10**12 + 5, True, 10**12 + 7, 10**12 + 8, 10**12 + 9, 3, 1),
    misses=MISSES, elsewhere="cmpl-0",
)  # fmt: skip
IN_FLIGHT = wire.StepInFlight(
    step=41, since_ns=1_000_000_300_000, time_ns=1_001_000_300_000, num_prefill_tokens=512,
    num_decode_tokens=3, num_decodes=3, prefills=[wire.PrefillPart(17, 1024, 512)],
    token_budget=2048,
)  # fmt: skip
LEASED = wire.LeasedKnobs("autopilot", {"max_num_batched_tokens": 512})
AUDITED = wire.Audited(
    number=12, command="SetKnobs", who="me@laptop", time_ns=1_000_000_300_000, key="alice",
    effective_step=42, version=4, old={"max_num_seqs": 64}, new={"max_num_seqs": 32},
    detail="as it was", code="conflict", count=3,
)  # fmt: skip
_STEP = {
    "step": 41, "schedule_start_ns": 1_000_000_100_000, "tokens_ns": 1_000_000_200_000,
    "num_prefill_tokens": 236, "num_decode_tokens": 1, "num_running": 2, "num_waiting": 1,
}  # fmt: skip
_STATUS = {"time_ns": 1_000_000_300_000, "step": 41, "num_running": 2, "num_waiting": 1}
_SNAPSHOT = {"sequence": 2**33, "step": 41, "time_ns": 1_000_000_300_000, "knobs_version": 3}

# One message with every field, and one with the required fields only.
MESSAGES: dict[str, wire.Telemetry] = {
    "EngineInfo.full": INFO,
    "EngineInfo.least": wire.EngineInfo(
        engine_id="e", name="n", software_version="0", model="m", monotonic_ns=1, wall_ns=2,
    ),
    "KnobsChanged.full": wire.KnobsChanged(
        version=4, effective_step=42, who="operator",
        old={"order": "arrival", "watermark": 0.01, "max_num_seqs": 64, "pause": False},
        new={"order": "decode_first", "watermark": 0.02, "max_num_seqs": 32, "pause": True},
        time_ns=1_000_000_300_000,
    ),
    "StepRecord.full": wire.StepRecord(
        **_STEP, schedule_end_ns=1_000_000_110_000, launch_ns=1_000_000_120_000, device_ns=70_000,
        knobs_version=3, token_budget=2048, max_num_seqs=64, num_padded_tokens=11,
        batch=[
            wire.BatchRow(
                7, wire.Phase.PREFILL, 64, 236, 64, 20,
                wire.RowFlag.LAST_CHUNK | wire.RowFlag.FIRST_TOKEN,
            ),
            wire.BatchRow(5, wire.Phase.DECODE, 400, 1, 0, 26, wire.RowFlag.LAST_CHUNK),
        ],
        drafts=[wire.DraftRow(5, 3, 1, [12])], kv=KV, moves=MOVES, waiting_reasons={"seats": 1},
        events=EVENTS, num_dropped=9, token_ids=[12, None], texts=["Be", None], hidden_ns=30_000,
        num_wasted_tokens=2, token_limit=1024, cuda_graph="full", num_graph_padding=6,
        held_prefills=True,
        held=[wire.HeldRow(7, "lora: a"), wire.HeldRow(8, ""), wire.HeldRow(9, "remote_kv", 12)],
        front=[FRONT], kv_groups=[wire.GroupCounts(2, 1), wire.GroupCounts(1, 1)],
        move_groups=MOVE_GROUPS, kv_transfers=TRANSFERS,
        hold_ups=[
            wire.HoldUp("stopped", 900_000, 2_000_000_000), wire.HoldUp("jit", 7, 9, "kernel"),
        ],
        ranks=[
            wire.RankTimes(0, 12_100_000, 6_300_000, 900_000),
            wire.RankTimes(1, 18_400_000, None, None),
        ],
        totals=TOTALS,
    ),
    "StepRecord.least": wire.StepRecord(**_STEP),
    "EngineStatus.full": wire.EngineStatus(
        **_STATUS, state="paused", kv=KV, moves=MOVES, events=EVENTS, num_dropped=9,
        workload="mixed", control=wire.ControlCounts(bad=1, limited=2, denied=3, keyless=4),
        workload_spec={"rate": 2.5, "output_tokens": 64}, leased=LEASED,
        totals=wire.Totals(kv_used=0.5), held=[wire.HeldRow(8, "grammar")], front=[FRONT],
        kv_groups=[wire.GroupCounts(2, 1), wire.GroupCounts(1, 1)], move_groups=MOVE_GROUPS,
        kv_transfers=TRANSFERS,
    ),
    "EngineStatus.least": wire.EngineStatus(**_STATUS, state="idle"),
    "Snapshot.full": wire.Snapshot(
        **_SNAPSHOT, info=INFO, knobs={"max_num_seqs": 64}, state="running", requests=[VIEW],
        blocks=[
            wire.BlockRun(1, 7, 1), wire.BlockRun(1, wire.CACHED, 0),
            wire.BlockRun(1022, wire.EMPTY, 0),
        ],
        kv=KV, num_dropped=9, workload="mixed", num_running=2, num_waiting=1,
        waiting_reasons={"seats": 1},
        transcripts=[
            wire.Transcript(
                request_id=7, prompt_token_ids=[17, 4, 99], prompt_text="Why?",
                output_token_ids=[12], output_text="Be",
            ),
        ],
        control=wire.ControlCounts(bad=1, limited=2, denied=3, keyless=4), audit=[AUDITED],
        pauses=[wire.PauseSpan(3, 5), wire.PauseSpan(8)], in_flight=IN_FLIGHT,
        workload_spec={"rate": 2.5, "output_tokens": 64}, totals=TOTALS, leased=LEASED,
        kv_groups=[wire.GroupCounts(1, 0), wire.GroupCounts(0, 1)], block_groups=bytes(1024),
        kv_transfers=TRANSFERS,
    ),
    "Snapshot.least": wire.Snapshot(
        **_SNAPSHOT, info=INFO, knobs={}, state="draining", requests=[], blocks=None, kv=None,
    ),
    "Audited.full": AUDITED,
    "Audited.least": wire.Audited(number=1, command="Pause", who="me", time_ns=2),
    "StepInFlight.full": IN_FLIGHT,
    "StepInFlight.least": wire.StepInFlight(
        step=41, since_ns=1, time_ns=2, num_prefill_tokens=0, num_decode_tokens=1, num_decodes=1,
    ),
    "Mark.full": wire.Mark(step=41, time_ns=1_000_000_300_000, text="look", who="me"),
}  # fmt: skip


def golden(name: str, version: int = wire.SCHEMA_VERSION) -> Path:
    return FOLDER / f"v{version}" / f"{name}.msgpack"


@pytest.mark.parametrize("name", MESSAGES)
def test_the_encoding_of_every_message_equals_its_golden_file(name: str) -> None:
    assert wire.encode(MESSAGES[name]) == golden(name).read_bytes(), (
        f"the encoding of {name} has changed: 'make schema' if a field was added, else a new "
        "SCHEMA_VERSION"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.msgpack")), ids=lambda path: path.stem)
def test_every_golden_file_of_every_version_is_still_read(path: Path) -> None:
    message = wire.decode(path.read_bytes())
    assert type(message).__name__ == path.stem.split(".")[0]
    if path.parent.name == f"v{wire.SCHEMA_VERSION}":
        assert message == MESSAGES[path.stem]


def test_every_message_and_every_field_is_in_a_golden_file() -> None:
    assert {type(message) for message in MESSAGES.values()} == set(wire.TOPICS)
    seen: dict[type, set[str]] = {}
    for struct in structs_in(list(MESSAGES.values())):
        fields = seen.setdefault(type(struct), set())
        for field in msgspec.structs.fields(struct):
            # Fields omitted at their default must occur with another value.
            value = getattr(struct, field.name)
            if field.required or value not in (field.default, None, [], (), ""):
                fields.add(field.name)
    for kind, fields in seen.items():
        assert fields | {"schema_version"} >= {f.name for f in msgspec.structs.fields(kind)}, kind
    structs = {
        kind
        for kind in vars(wire).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind not in (msgspec.Struct, wire.Telemetry, wire.Event)
    }
    assert set(seen) == structs


def test_every_message_has_a_recording_channel_with_a_fixed_number() -> None:
    before = ("info", "knobs", "step", "status", "keyframe", "mark", "packed_step", "audit")
    assert TOPICS[: len(before)] == before
    assert {topic.decode() for topic in wire.TOPICS.values()} <= set(TOPICS)


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, list | tuple):
        for each in value:
            yield from structs_in(each)


# Files of other versions


def later(payload: bytes) -> bytes:
    """The message as a later writer of the same schema version might send it."""
    message = msgspec.msgpack.decode(payload)
    message["mood"] = {"of": ["a", "later", "version"]}
    for row in message.get("batch") or ():
        row += [99, "later"]
    for key in ("events", "requests", "knobs"):
        entries = message.get(key)
        for each in entries if isinstance(entries, list) else ():
            each["mood"] = 1
    if isinstance(message.get("kv"), dict):
        message["kv"]["pinned"] = 3
    absent = ("waiting_reasons", "num_padded_tokens", "num_dropped", "device", "schema_version")
    for missing in absent:
        message.pop(missing, None)
    return msgspec.msgpack.encode(message)


def test_unknown_fields_are_skipped_but_kept_and_missing_fields_are_unknown(tmp_path: Path) -> None:
    sent = [
        (sequence, wire.TOPICS[type(message)], later(wire.encode(message)))
        for sequence, message in simulate(seed=2, num_steps=300)
    ]
    writer = RecordingWriter(tmp_path / "later.mcap")
    writer.start()
    for sequence, topic, payload in sent:
        writer.on_frame(topic, sequence, payload)
    writer.close()
    assert writer.error is None
    report = verify(tmp_path / "later.mcap", lambda share: None)
    assert [check.problems for check in report.checks if not check.is_good] == []
    history = History()
    with Recording(tmp_path / "later.mcap") as recording:
        frames = [frame for frame, _ in recording.frames() if frame.topic != b"keyframe"]
        # Byte for byte, so that a later reader finds the fields unknown to this one.
        assert [(f.sequence, f.topic, f.payload) for f in frames] == sent
        for frame in frames:
            history.append(frame.sequence, frame.payload)
    assert history.num_lost == 0
    assert history.last_step == 299
    summary = history.summary(150)
    assert summary.num_padded_tokens is None
    assert summary.kv_used is not None


@pytest.mark.parametrize("what", ["schema", "format"])
def test_a_recording_of_a_newer_schema_names_the_version_to_install(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "newer.mcap"
    monkeypatch.setattr(
        "stepscope.recordings.file.writing.recording_file.version", lambda name: "3.4.0"
    )
    if what == "format":
        monkeypatch.setattr("stepscope.recordings.file.writing.recording_file.FORMAT_VERSION", 7)
    (number, info), *rest = simulate(seed=2, num_steps=20)
    if what == "schema":
        info = msgspec.structs.replace(info, schema_version=7)
    record(path, [(number, info), *rest])
    for read in (Recording, lambda path: verify(path, lambda share: None)):
        with pytest.raises(RecordingError) as caught:
            read(path)
        said = str(caught.value)
        assert f"has {what} 7" in said
        assert "install 3.4.0 or later" in said
        assert "\n" not in said


def only_adds(old: Any, new: Any) -> bool:
    """Whether everything in the old encoding is unchanged in the new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and only_adds(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list) and len(new) >= len(old):
        return all(only_adds(a, b) for a, b in zip(old, new, strict=False))
    return bool(old == new and type(old) is type(new))


def write_golden_files() -> int:
    for name, message in MESSAGES.items():
        path, payload = golden(name), wire.encode(message)
        if path.exists() and not only_adds(
            msgspec.msgpack.decode(path.read_bytes()), msgspec.msgpack.decode(payload)
        ):
            print(f"{name}: more than new fields: raise SCHEMA_VERSION in protocol/wire.py first")
            return 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)
    print(f"{len(MESSAGES)} messages in {golden('x').parent}")
    return 0


# What faulty senders send


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "StepRecord", "step": "seven"}),
        b"\x91" * 5_000,
    ],
)
def test_malformed_payloads_raise_only_decode_errors(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode(payload)
    with pytest.raises(msgspec.DecodeError):
        commands.decode_command(payload)


def test_commands_keep_the_types_of_knob_values() -> None:
    command = commands.SetKnobs(changes={"a": True, "b": 1, "c": 0.5, "d": "x"})
    decoded = commands.decode_command(commands.encode(command))
    assert [type(v) for v in decoded.changes.values()] == [bool, int, float, str]


if __name__ == "__main__":
    sys.exit(write_golden_files())
