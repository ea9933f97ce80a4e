"""The state after each message: one reducer serves live view, replay and exports."""

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Admitted, BatchRow, Finished
from stepscope.recordings.state.requests import KEEP_FINISHED_STEPS
from stepscope.recordings.state.session import SessionState
from tests.support.sessions.crowded import crowded
from tests.support.sessions.history_steps import (
    DECODE,
    FIRST,
    LAST,
    MS,
    PREFILL,
    RECOMPUTE,
    arrived,
    info,
    step,
)

MESSAGES = crowded(3, 700, rate=30.0, changes={200: {"max_num_batched_tokens": 256}})


def reduced(messages: list[wire.Telemetry]) -> SessionState:
    state = SessionState()
    for message in messages:
        state.apply(message)
    return state


def test_a_request_is_followed_from_arrival_to_its_last_token() -> None:
    events = [arrived(7, time_ns=MS), Admitted(7, 4)]
    state = reduced([info(), step(0, [BatchRow(7, PREFILL, 4, 10, 4, 1, 0)], events=events)])
    view = state.requests[7]
    assert (view.status, view.num_computed_tokens, view.num_output_tokens) == ("running", 14, 0)
    assert (view.num_cached_tokens, view.num_blocks, view.first_token_ns) == (4, 1, None)

    state.apply(step(1, [BatchRow(7, PREFILL, 14, 6, 0, 2, FIRST)], events=[wire.FirstToken(7)]))
    state.apply(step(2, [BatchRow(7, DECODE, 20, 1, 0, 2, LAST)]))
    view = state.requests[7]
    assert (view.num_computed_tokens, view.num_output_tokens) == (21, 2)
    assert (view.first_token_ns, view.last_token_ns) == (20 * MS, 30 * MS)

    ended = Finished(7, "length", 3)
    state.apply(step(3, [BatchRow(7, DECODE, 21, 1, 0, 2, LAST)], events=[ended]))
    view = state.requests[7]
    assert (view.status, view.finish_reason, view.num_output_tokens) == ("finished", "length", 3)
    assert (view.finish_step, view.finish_ns, view.num_blocks) == (3, 40 * MS, 0)
    assert view.arrival_ns == MS


def test_a_preempted_request_frees_its_blocks_and_keeps_its_output_count() -> None:
    events = [arrived(1), Admitted(1, 0)]
    state = reduced(
        [
            step(0, [BatchRow(1, PREFILL, 0, 20, 0, 2, FIRST)], events=events),
            step(1, [BatchRow(1, DECODE, 20, 1, 0, 2, LAST)]),
            step(2, [], events=[wire.Preempted(1, 2, "KV full")]),
        ]
    )
    view = state.requests[1]
    assert (view.status, view.num_blocks, view.num_computed_tokens) == ("preempted", 0, 0)
    state.apply(step(3, [BatchRow(1, RECOMPUTE, 0, 22, 0, 2, LAST)], events=[Admitted(1, 0)]))
    view = state.requests[1]
    assert (view.status, view.num_output_tokens, view.num_preemptions) == ("running", 3, 1)
    assert (view.first_token_ns, view.last_token_ns) == (10 * MS, 40 * MS)


def test_an_abort_between_steps_ends_the_request() -> None:
    state = reduced([step(0, [BatchRow(1, PREFILL, 0, 8, 0, 1, 0)], events=[arrived(1)])])
    told = {"num_running": 0, "num_waiting": 0, "events": [wire.Aborted(1, "client gone")]}
    state.apply(wire.EngineStatus(time_ns=11 * MS, state="idle", step=0, **told))
    view = state.requests[1]
    assert (view.status, view.finish_reason, view.finish_step) == ("finished", "abort", 0)
    assert (state.state, state.num_running, state.time_ns) == ("idle", 0, 11 * MS)


def test_block_owners_are_known_from_the_first_step_and_never_guessed() -> None:
    kv = wire.KVCounts(used=2, cached=1, empty=5, evicted=0)
    moves = [wire.BlockMove(0, 1, 2), wire.BlockMove(3, wire.CACHED, 0), wire.BlockMove(99, 1, 1)]
    state = reduced([info(), step(0, [], kv=kv, moves=moves)])
    empty = wire.EMPTY
    assert list(state.block_owner) == [1, empty, empty, wire.CACHED, *[empty] * 4]
    assert list(state.blocks.refs) == [2, 0, 0, 0, 0, 0, 0, 0]

    late = reduced([info(), step(5, [], kv=kv, moves=moves)])
    assert late.block_owner is None


def test_what_an_engine_does_not_publish_stays_unknown() -> None:
    state = reduced([info(num_blocks=None), step(0, None, events=[arrived(1), wire.FirstToken(1)])])
    assert (state.kv, state.blocks) == (None, None)
    assert state.requests[1].first_token_ns == 10 * MS
    kv = wire.KVCounts(used=2, cached=1, empty=5, evicted=0)
    state.apply(step(1, [], kv=kv))
    assert (state.kv, state.block_owner) == (kv, None)  # there is no block map


def test_a_batch_row_of_an_unknown_request_makes_a_partial_request_view() -> None:
    state = reduced([step(9, [BatchRow(4, DECODE, 33, 1, 0, 3, LAST)])])
    view = state.requests[4]
    assert view.is_partial
    assert (view.status, view.num_computed_tokens, view.num_blocks) == ("running", 34, 3)
    outcome = state.apply(step(10, [BatchRow(4, DECODE, 34, 1, 0, 3, LAST)]))
    assert outcome.gaps_ns == {10 * MS: 1}
    state.apply(step(11, [], events=[Finished(4, "stop", 17)]))
    assert state.requests[4].num_output_tokens == 17


def test_after_lost_steps_counts_are_corrected_and_no_latency_is_made_up() -> None:
    events = [arrived(1), Admitted(1, 0)]
    state = reduced([step(0, [BatchRow(1, PREFILL, 0, 20, 0, 2, FIRST)], events=events)])
    outcome = state.apply(step(5, [BatchRow(1, DECODE, 24, 1, 0, 2, LAST)]))
    assert outcome.gaps_ns == {}
    assert state.requests[1].num_output_tokens == 6


def test_finished_requests_are_kept_for_a_while_and_then_forgotten() -> None:
    state = reduced([step(0, [], events=[arrived(1), Finished(1, "stop", 1)])])
    state.apply(step(KEEP_FINISHED_STEPS - 1, []))
    assert 1 in state.requests
    state.apply(step(KEEP_FINISHED_STEPS, []))
    assert not state.requests


def test_knob_changes_are_merged_and_another_engine_id_resets_the_state() -> None:
    values = {"old": {"a": 1}, "new": {"a": 2}}
    changed = wire.KnobsChanged(version=1, effective_step=3, who="ops", time_ns=0, **values)
    state = reduced([info(), step(0, [], events=[arrived(1)])])
    state.knobs = {"a": 1, "b": True}
    state.apply(changed)
    assert (state.knobs, state.knobs_version) == ({"a": 2, "b": True}, 1)
    state.apply(info("two"))
    assert not state.requests
    assert not state.knobs
    assert state.step == -1


def test_a_state_restored_from_any_snapshot_continues_like_the_original() -> None:
    state = SessionState()
    continued: SessionState | None = None
    for number, (sequence, message) in enumerate(MESSAGES):
        state.apply(message)
        if continued is not None:
            continued.apply(message)
        if number % 61 == 60:
            if continued is not None:
                assert continued == state
            snapshot = state.snapshot(sequence)
            continued = SessionState.from_snapshot(wire.decode(wire.encode(snapshot)))
            assert continued == state
            assert continued.snapshot(sequence) == snapshot
    assert any(view.num_preemptions for view in state.requests.values())
