"""A step is told by its draft: what readers get is the `StepRecord` they know."""

import msgspec
import pytest

from stepscope.engine import wire
from stepscope.engine.step_draft import StepDraft
from stepscope.engine.wire import KVCounts, StepRecord

UNTIL_THE_END = {"tokens_ns"}  # has a value that is never sent


def draft() -> StepDraft:
    return StepDraft(
        step=7, schedule_start_ns=1, schedule_end_ns=2, knobs_version=0, token_budget=64,
        max_num_seqs=8, num_prefill_tokens=5, num_decode_tokens=3, num_padded_tokens=0,
        batch=msgspec.Raw(msgspec.msgpack.encode([(1, 0, 0, 5, 0, 1, 1), (2, 1, 9, 3, 0, 1, 1)])),
        num_running=2, num_waiting=0, waiting_reasons={},
    )  # fmt: skip


def test_a_draft_has_the_fields_of_a_record_in_the_same_order() -> None:
    ours, theirs = msgspec.structs.fields(StepDraft), msgspec.structs.fields(StepRecord)
    assert [field.name for field in ours] == [field.name for field in theirs]
    assert StepDraft.topic == StepRecord.topic


def test_what_a_draft_leaves_out_a_record_takes_for_the_same() -> None:
    missing = msgspec.NODEFAULT
    by_name = {field.name: field for field in msgspec.structs.fields(StepRecord)}
    for field in msgspec.structs.fields(StepDraft):
        if field.required or field.name in UNTIL_THE_END:
            continue
        record = by_name[field.name]
        is_list = field.default_factory is not missing
        assert is_list == (record.default_factory is not missing)
        if is_list:
            assert field.default_factory() == record.default_factory() == []
        else:
            assert field.default == record.default


def test_an_ended_draft_is_received_as_its_record() -> None:
    ended = draft()
    ended.tokens_ns = 0  # as at the start of a clock: it is sent all the same
    ended.kv = KVCounts(2, 0, 8, 0)
    received = wire.decode(wire.encode(ended))
    assert isinstance(received, StepRecord)
    assert (received.step, received.tokens_ns, received.kv) == (7, 0, ended.kv)
    assert [row.request_id for row in received.batch or ()] == [1, 2]
    assert wire.encode(received) == wire.encode(ended)


def test_a_draft_that_has_not_ended_is_no_message() -> None:
    with pytest.raises(msgspec.ValidationError, match="tokens_ns"):
        wire.decode(wire.encode(draft()))


def test_rows_that_are_dropped_are_in_no_count() -> None:
    cut = draft()
    cut.drop_rows([1], num_prefill_tokens=5, num_decode_tokens=0)
    assert (cut.num_prefill_tokens, cut.num_decode_tokens) == (0, 3)
    assert [row[0] for row in msgspec.msgpack.decode(cut.batch)] == [2]
