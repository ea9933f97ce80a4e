"""Encoding and decoding, with readers of other versions and faulty senders."""

import msgspec
import pytest

from stepscope.engine.protocol import commands, wire
from stepscope.engine.protocol.commands import SetKnobs, Submit

RECORD = wire.StepRecord(
    step=7,
    schedule_start_ns=1,
    tokens_ns=9,
    num_prefill_tokens=3,
    num_decode_tokens=1,
    batch=[wire.BatchRow(4, 0, 0, 3, 16, 1, 3)],
    kv=wire.KVCounts(used=1, cached=2, empty=3, evicted=0),
    moves=[wire.BlockMove(5, 4, 1)],
    num_running=1,
    num_waiting=0,
    events=[
        wire.Arrived(
            request_id=4, client_id="c", num_prompt_tokens=3, max_tokens=2, priority=0, time_ns=1
        ),
        wire.Preempted(request_id=2, num_blocks=9, reason="kv_blocks"),
    ],
)


def test_a_record_survives_encoding_and_decoding() -> None:
    assert wire.decode(wire.encode(RECORD)) == RECORD


def test_fields_and_columns_from_a_later_version_are_skipped() -> None:
    fields = msgspec.msgpack.decode(wire.encode(RECORD))
    fields["invented_later"] = {"x": [1, 2]}
    fields["batch"][0].append("a later column")
    fields["kv"]["quantised"] = 3
    assert wire.decode(msgspec.msgpack.encode(fields)) == RECORD


def test_fields_that_an_engine_does_not_publish_are_none_and_not_zero() -> None:
    fields = {
        "type": "StepRecord",
        "step": 1,
        "schedule_start_ns": 1,
        "tokens_ns": 2,
        "num_prefill_tokens": 0,
        "num_decode_tokens": 5,
        "num_running": 5,
        "num_waiting": 0,
    }
    record = wire.decode(msgspec.msgpack.encode(fields))
    assert isinstance(record, wire.StepRecord)
    assert record.kv is None
    assert record.batch is None
    assert record.device_ns is None
    assert record.num_padded_tokens is None


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


def test_a_command_with_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        commands.decode_command(
            msgspec.msgpack.encode({"type": "Submit", "prompt": "x", "sampling": {"best_of": 1.0}})
        )


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"seed": -5},
    ],
)
def test_sampling_values_out_of_bounds_are_refused(sampling: dict[str, object]) -> None:
    fields = {"type": "Submit", "prompt": "x", "sampling": sampling}
    with pytest.raises(msgspec.ValidationError):
        commands.decode_command(msgspec.msgpack.encode(fields))


def test_a_command_larger_than_the_limit_is_refused_before_it_is_decoded() -> None:
    payload = commands.encode(Submit(prompt="x" * commands.MAX_COMMAND_BYTES))
    with pytest.raises(msgspec.ValidationError, match="bytes"):
        commands.decode_command(payload)


def test_commands_keep_the_types_of_knob_values() -> None:
    command = SetKnobs(changes={"a": True, "b": 1, "c": 0.5, "d": "x"})
    decoded = commands.decode_command(commands.encode(command))
    assert isinstance(decoded, SetKnobs)
    assert [type(v) for v in decoded.changes.values()] == [bool, int, float, str]


def test_a_heartbeat_without_optional_parts_is_small() -> None:
    status = wire.EngineStatus(time_ns=1, state="idle", step=0, num_running=0, num_waiting=0)
    assert len(wire.encode(status)) < 100
