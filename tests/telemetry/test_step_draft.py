"""The engine publishes a step's draft; readers receive it as the usual `StepRecord`."""

from collections.abc import Sequence

import msgspec
import pytest

from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Pause, Resume, StepOnce
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KVCounts, StepRecord
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import StepResult
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.engine.text.tokenizer import TextStream
from stepscope.recordings.state.session import SessionState
from tests.support.engines.core_ends import Client
from tests.support.engines.whole_core import WholeCore

UNTIL_THE_END = {"tokens_ns"}  # its value is never sent


def draft() -> StepDraft:
    return StepDraft(
        step=7, schedule_start_ns=1, schedule_end_ns=2, knobs_version=0, token_budget=64,
        max_num_seqs=8, num_prefill_tokens=5, num_decode_tokens=3, num_padded_tokens=0,
        batch=msgspec.Raw(msgspec.msgpack.encode([(1, 0, 0, 5, 0, 1, 1), (2, 1, 9, 3, 0, 1, 1)])),
        num_running=2, num_waiting=0, waiting_reasons={},
    )  # fmt: skip


def test_a_step_draft_has_the_fields_of_a_record_in_the_same_order() -> None:
    ours, theirs = msgspec.structs.fields(StepDraft), msgspec.structs.fields(StepRecord)
    assert [field.name for field in ours] == [field.name for field in theirs]
    assert StepDraft.topic == StepRecord.topic


def test_fields_that_a_step_draft_omits_have_their_default_in_the_record() -> None:
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


def test_a_step_draft_is_received_as_a_record_once_it_is_finished() -> None:
    ended = draft()
    with pytest.raises(msgspec.ValidationError, match="tokens_ns"):
        wire.decode(wire.encode(ended))
    ended.tokens_ns = 0  # as at the start of a clock: a zero is sent all the same
    ended.kv = KVCounts(2, 0, 8, 0)
    received = wire.decode(wire.encode(ended))
    assert isinstance(received, StepRecord)
    assert (received.step, received.tokens_ns, received.kv) == (7, 0, ended.kv)
    assert [row.request_id for row in received.batch or ()] == [1, 2]
    assert wire.encode(received) == wire.encode(ended)


def test_ending_a_step_draft_adds_times_padding_and_block_moves() -> None:
    kv, ended = KVCacheManager(8, 16), draft()
    request = Request(3, [1] * 20, SamplingParams(max_tokens=1), arrival_ns=0)
    kv.admit(request, kv.lookup(request), 20)
    result = StepResult(
        [7, 8], launch_ns=5, tokens_ns=9, device_ns=3, num_padded_tokens=6, cuda_graph="piecewise"
    )
    ended.num_padded_tokens = 2  # those that were scheduled
    ended.end(result, kv)
    told = wire.decode(wire.encode(ended))
    assert (told.launch_ns, told.tokens_ns, told.device_ns) == (5, 9, 3)
    assert (told.num_padded_tokens, told.num_graph_padding) == (2, 6)
    assert told.kv == KVCounts(2, 0, 6, 0, queried_tokens=20)
    assert [(move.owner, move.ref_count) for move in told.moves] == [(3, 1)] * 2
    following = draft()
    following.end(result, kv)
    assert following.moves == []  # nothing is published twice


def test_dropped_rows_are_in_no_count_of_a_step_draft() -> None:
    cut = draft()
    cut.drop_rows([1], num_prefill_tokens=5, num_decode_tokens=0)
    assert (cut.num_prefill_tokens, cut.num_decode_tokens) == (0, 3)
    assert [row[0] for row in msgspec.msgpack.decode(cut.batch)] == [2]


LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)


def test_engine_and_observers_count_the_same_pauses_between_single_steps() -> None:
    asked = (Pause(), StepOnce(n=1), StepOnce(n=2), Resume(), Pause(), Resume())
    engine, state = WholeCore(LIMITS), SessionState()
    core, runner, sink = engine.core, engine.runner, engine.sink
    engine.submit([1, 2, 3], max_tokens=50)
    num_seen = 0
    for command in asked:
        core.step()
        core.inbox.put(Call(command, Client(), None))
        for _ in range(4):
            runner.advance_to(runner.clock() + 100_000_000)
            core.step()
            core.publish_heartbeat(idle=core.pipeline.steps_allowed == 0)
            for message in sink.messages[num_seen:]:
                state.apply(message)
            num_seen = len(sink.messages)
            told = state.pauses
            assert core.outlet.pauses == told._replace(spans=told.spans or ())
    # Before the first single step, until the next ones, until it went on; and a whole one.
    assert len(core.outlet.pauses.spans or ()) == 4
    assert core.outlet.pauses.since_ns is None


def test_texts_of_running_requests_include_tokens_of_unpublished_steps() -> None:
    publisher = TokenPublisher(lambda: TextStream(letters))
    engine = WholeCore(LIMITS, token_publisher=publisher)
    for max_tokens in (2, 5):
        engine.submit([1, 2, 3], max_tokens=max_tokens)
    for _ in range(3):
        engine.core.step()
    (told,) = publisher.transcripts()  # the other request has ended
    assert (told.request_id, told.output_text) == (1, "xxx")


def letters(token_ids: Sequence[int]) -> str:
    return "x" * len(token_ids)
