"""A session in memory: any step is restored exactly, losses are visible, readers run beside it."""

import contextlib
import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Admitted, BatchRow, Finished
from stepscope.recordings.history.history import History
from stepscope.recordings.state.lanes import Cell
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.sessions.copied import copied
from tests.support.sessions.crowded import crowded
from tests.support.sessions.history_steps import (
    DECODE,
    FIRST,
    LAST,
    MS,
    PREFILL,
    RECOMPUTE,
    arrived,
    history_of,
    info,
    step,
)
from tests.support.sessions.lanes_of import lanes_of

MESSAGES = crowded(
    5,
    1200,
    rate=30.0,
    changes={300: {"max_num_batched_tokens": 256}, 700: {"max_num_batched_tokens": 512}},
)


@cache
def sequence_of() -> dict[int, int]:
    """The sequence number of each step of `MESSAGES`."""
    return {m.step: number for number, m in MESSAGES if isinstance(m, wire.StepRecord)}


def fed(messages: Iterable[tuple[int, wire.Telemetry]], **limits: Any) -> History:
    history = History(**limits)
    for sequence, message in messages:
        history.append(sequence, message)
    return history


@copied
def whole_session() -> History:
    return fed(MESSAGES)


@pytest.fixture(scope="module")
def history() -> History:
    return whole_session()


@pytest.fixture(scope="module")
def states() -> dict[int, SessionState]:
    """The state after each step, computed in one pass from the first message on."""
    state = SessionState()
    states = {}
    for _, message in MESSAGES:
        state.apply(message)
        if isinstance(message, wire.StepRecord):
            states[message.step] = state.copy()
    return states


def status(step: int, **changes: Any) -> wire.EngineStatus:
    fields = {"time_ns": step * 10 * MS + 11 * MS, "state": "idle", "step": step}
    return wire.EngineStatus(num_running=0, num_waiting=0, **(fields | changes))


# Any step again


def test_any_state_is_restored_exactly(history: History, states: dict[int, SessionState]) -> None:
    steps = [0, 1, 255, 256, 257, 1199, *random.Random(0).sample(range(1200), 30)]
    for number in [*steps, *range(500, 530), *range(530, 505, -1)]:
        assert history.state_at(number) == states[number], number


def test_step_summaries_agree_with_their_records(history: History) -> None:
    for number in range(0, 1200, 37):
        record, summary = history.record(number), history.summary(number)
        assert record == dict(MESSAGES)[sequence_of()[number]]
        assert summary.tokens_ns == record.tokens_ns
        assert summary.num_rows == len(record.batch)
        assert summary.num_tokens == sum(row.num_tokens for row in record.batch)
        assert summary.num_output_tokens == sum(bool(row.flags & LAST) for row in record.batch)
        assert summary.num_preempted == sum(isinstance(e, wire.Preempted) for e in record.events)
        assert summary.sequence == sequence_of()[number]
    assert history.record(1200) is None
    assert history.summaries(1199, 1200)[1] is None


def test_a_span_has_the_worst_of_its_steps_and_hides_no_preemption(history: History) -> None:
    for first, last in ((0, 0), (3, 51), (290, 310), (600, 1199), (1190, 1500)):
        span = history.span(first, last)
        steps = [s for s in history.summaries(first, last) if s is not None]
        assert span.start_ns == steps[0].schedule_start_ns
        assert span.max_prefill_tokens == max(s.num_prefill_tokens for s in steps)
        assert span.max_decode_tokens == max(s.num_decode_tokens for s in steps)
        assert span.token_budget == steps[-1].token_budget
        assert span.has_preemption == any(s.num_preempted for s in steps)
        assert span.has_knob_change == any(s.has_knob_change for s in steps)
        assert (span.max_itl_ns or 0) == max(s.max_itl_ns or 0 for s in steps)
    assert any(history.span(s, s + 9).has_preemption for s in range(0, 1200, 10))  # type: ignore[union-attr]
    assert history.span(1200, 1300) is None


def test_the_newest_state_is_the_same_object_until_a_message_arrives() -> None:
    history = fed(MESSAGES[:50])
    state = history.state
    assert history.state is state
    version = history.version
    history.append(*MESSAGES[50])
    assert history.version > version
    assert history.state is not state
    assert history.state_at(state.step).step == state.step


def test_old_steps_are_forgotten_by_number_and_by_bytes(states: dict[int, SessionState]) -> None:
    by_number = fed(MESSAGES, max_steps=400)
    assert 400 <= by_number.num_steps < 700
    by_bytes = fed(MESSAGES, max_bytes=200_000)
    for history in (by_number, by_bytes):
        first = history.first_step
        assert first > 0
        assert history.last_step == 1199
        for number in (first, first + 100, 1199):
            assert history.state_at(number) == states[number]
        assert history.record(first - 1) is None
        assert all(event.step >= first for event in history.events(limit=10_000))
        assert history.windows.latency(window_s=None).step.num_samples == history.num_steps
        assert not any(Cell.UNKNOWN in lane.cells for lane in lanes_of(history, first - 50, 1199))
        assert lanes_of(history, first, 1199) == lanes_of(whole_session(), first, 1199)


def test_steps_whose_messages_are_all_forgotten_are_forgotten_too() -> None:
    """A segment may begin with a message that is no step, and all steps before it be forgotten."""
    history, state = History(max_bytes=1), SessionState()
    messages = list[wire.Telemetry]()
    for _, message in MESSAGES[:400]:
        state.apply(message)
        messages += [message, status(state.step, time_ns=state.time_ns, state="running")]
    for sequence, message in enumerate(messages):
        history.append(sequence, message)
        first, last = history.first_step, history.last_step
        assert history.num_steps <= 128
        if first is not None and last is not None:
            assert history.record(first) is not None
            assert history.record(last) is not None


def test_memory_never_begins_at_a_state_made_wrong_by_loss(states: dict[int, SessionState]) -> None:
    """The snapshot that corrects the state comes 60 messages later, in the next segment."""
    for lost_at in range(180, 400, 50):
        history, state, checked = fed(MESSAGES[:150], max_steps=200), SessionState(), set()
        for _, message in MESSAGES[:150]:
            state.apply(message)
        for number, message in MESSAGES[150:]:
            state.apply(message)
            if not lost_at <= number < lost_at + 8:
                history.append(number, message)
            if number == lost_at + 60:
                snapshot = state.snapshot(number)
                history.append(number, snapshot)
            if (first := history.first_step or 0) not in checked:
                checked.add(first)
                before = history.follow().state
                assert before.requests == (states[first - 1].requests if first else {})
                assert history.state_at(first).requests == states[first].requests
        assert len(checked) > 2


def test_a_rewound_history_equals_one_without_the_later_steps() -> None:
    history = whole_session()
    for number in (1100, 620, 299):
        assert history.rewind(number)
        expected = fed([m for m in MESSAGES if m[0] <= sequence_of()[number]])
        assert history.state == expected.state
        assert history.last_step == number
        assert history.last_sequence == expected.last_sequence
        assert history.windows.latency(window_s=None) == expected.windows.latency(window_s=None)
        assert history.knob_changes == expected.knob_changes
        assert history.last_stall() == expected.last_stall()
        assert lanes_of(history, number - 99, number) == lanes_of(expected, number - 99, number)
    for sequence, message in MESSAGES[sequence_of()[299] + 1 :]:
        history.append(sequence, message)
    expected = whole_session()
    assert history.state == expected.state
    assert history.summaries(0, 1199) == expected.summaries(0, 1199)
    assert lanes_of(history, 0, 1199) == lanes_of(expected, 0, 1199)
    assert not history.rewind(5000)


# What is missing


def test_lost_messages_are_a_gap_with_the_steps_around_it() -> None:
    lost = range(sequence_of()[100], sequence_of()[103])
    history = fed([m for m in MESSAGES[:400] if m[0] not in lost])
    (gap,) = history.gaps
    assert (gap.first_sequence, gap.last_sequence) == (lost[0], lost[-1])
    assert (gap.after_step, gap.before_step) == (99, 103)
    assert history.num_lost == gap.num_messages == len(lost)
    assert history.needs_snapshot
    assert history.record(101) is None
    assert history.summary(102) is None
    assert history.summary(103).after_gap
    assert [e.kind for e in history.events(102, 1, frozenset({"gap"}))] == ["gap"]
    for lane in lanes_of(history, 100, 102):
        assert set(lane.cells) <= {Cell.UNKNOWN, Cell.ABSENT}
    assert history.state_at(101) == history.state_at(99)


def test_repeated_and_old_messages_are_ignored() -> None:
    history = fed(MESSAGES[:300])
    expected = history.state
    for sequence, message in MESSAGES[250:300]:
        history.append(sequence, message)
    assert history.state == expected
    assert history.num_lost == 0
    assert history.num_steps == fed(MESSAGES[:300]).num_steps


def test_a_snapshot_corrects_the_state_after_lost_messages_and_otherwise_changes_nothing() -> None:
    whole = fed(MESSAGES[:400])
    redundant = whole.snapshot()
    whole.append(redundant.sequence, redundant)
    assert whole.num_lost == 0
    lossy = fed([*MESSAGES[:200], *MESSAGES[260:400]])
    assert lossy.state != whole.state
    lossy.append(redundant.sequence, redundant)
    assert lossy.state.blocks == whole.state.blocks
    assert not lossy.needs_snapshot
    assert lossy.num_lost == 60
    for sequence, message in MESSAGES[400:]:
        lossy.append(sequence, message)
    states = lossy.state, whole_session().state
    live = [[v for v in s.requests.values() if v.status != "finished"] for s in states]
    assert live[0] == live[1]


def test_messages_of_unknown_kind_do_not_count_as_missing() -> None:
    history = fed(MESSAGES[:20])
    history.skip(20)
    history.append(21, status(900))
    assert history.num_lost == 0


def test_a_broken_message_changes_nothing() -> None:
    history = fed(MESSAGES[:20])
    with pytest.raises(msgspec.DecodeError):
        history.append(20, b"\x93nonsense")
    assert history.last_sequence == 19
    history.append(*MESSAGES[20])
    assert history.num_lost == 0


def test_a_restarted_engine_begins_a_new_history_and_the_old_one_is_kept() -> None:
    messages = [info("one"), step(0, []), step(1, [])]
    history = fed([*enumerate(messages), *enumerate([info("two"), step(0, [])])])
    assert (history.last_step, history.num_lost, history.info.engine_id) == (0, 0, "two")
    assert [event.kind for event in history.events()] == ["engine"]
    assert history.previous.last_step == 1
    assert history.previous.state_at(0).info == info("one")


def test_an_engine_that_dies_without_a_step_does_not_displace_the_last_session() -> None:
    history = fed(enumerate([info("one"), step(0, []), step(1, [])]))
    for engine_id in ("two", "three", "four"):
        history.append(0, info(engine_id))
    assert history.num_steps == 0
    assert history.previous.info == info("one")
    assert history.previous.num_steps == 2


# What happened


def test_a_knob_change_is_found_at_the_step_where_it_took_effect(history: History) -> None:
    assert [change.effective_step for change in history.knob_changes] == [300, 700]
    flagged = [s.step for s in history.summaries(0, 1199) if s is not None and s.has_knob_change]
    assert flagged == [300, 700]
    first = history.next_event(0, 1, frozenset({"knobs"}))
    assert first.step == 300
    assert first.text == "max_num_batched_tokens 512→256 by simulated, from step 300"
    assert [history.summary(at).token_budget for at in (299, 300)] == [512, 256]


def test_events_name_the_request_and_can_be_stepped_through() -> None:
    rejected, values = wire.Rejected(9, "ops", "too long"), {"old": {"a": 1}, "new": {"a": 2}}
    messages = [
        info(),
        step(0, [BatchRow(1, PREFILL, 0, 20, 0, 2, FIRST)], events=[arrived(1), Admitted(1, 0)]),
        step(1, [BatchRow(1, DECODE, 20, 1, 0, 2, LAST)], events=[rejected]),
        step(2, [], events=[wire.Preempted(1, 2, "KV full")]),
        wire.KnobsChanged(version=1, effective_step=3, who="ops", time_ns=0, **values),
        step(3, [BatchRow(1, RECOMPUTE, 0, 22, 0, 2, LAST)], events=[Finished(1, "length", 3)]),
        status(3, events=[arrived(2), wire.Aborted(2, "client gone")]),
    ]
    history = history_of(enumerate(messages), SLO(ttft_ms=500, itl_ms=15))
    history.add_mark(wire.Mark(step=1, time_ns=20 * MS, text="look", who="me"))
    assert [(e.step, e.kind, e.text) for e in history.events()] == [
        (1, "reject", "rejected ops: too long"),
        (1, "mark", "look (me)"),
        (2, "preempt", "preempt r1 (KV full, 2 blocks freed)"),
        (3, "knobs", "a 1→2 by ops, from step 3"),
        (3, "finish", "r1 done (length), 3 tok in 0.0 s"),
        (3, "abort", "r2 aborted: client gone"),
        (3, "slo", "ITL 20 ms > 15 ms (r1)"),
    ]
    assert [event.kind for event in history.events(2, 2)] == ["mark", "preempt"]
    assert history.next_event(1, 1).kind == "preempt"
    assert history.next_event(3, -1, frozenset({"mark"})).step == 1
    assert history.next_event(3, 1) is None


def test_a_mark_added_twice_is_kept_once_and_survives_rewind_and_reset() -> None:
    history = fed(MESSAGES[:300])
    mark = wire.Mark(step=150, time_ns=0, text="here", who="me")
    history.add_mark(mark)
    history.add_mark(mark)
    history.rewind(100)
    assert history.marks == [mark]
    snapshot = history.snapshot()
    history.reset(snapshot)
    assert history.marks == [mark]
    assert history.num_steps == 0


def test_steps_are_found_by_time_and_by_distance_from_a_step_across_gaps() -> None:
    history = History()
    for sequence, number in enumerate([0, 1, 2, 6, 7]):
        history.append(sequence * 2, step(number, []))
    assert history.step_at(75 * MS) == 6
    assert history.step_at(0) == 0
    assert history.neighbour(2, 1) == 6
    assert history.neighbour(6, -2) == 1
    assert history.neighbour(4, 1) == 6
    assert history.neighbour(4, -1) == 2
    assert history.neighbour(7, 5) == 7


# Lanes


def cells(text: str) -> bytes:
    names = ["ABSENT", "UNKNOWN", "WAITING", "IDLE", "CACHED", "DECODE", "PREFILL", "PREFILL_ALT"]
    names += ["RECOMPUTE", "RECOMPUTE_ALT", "FINISHED", "ABORTED", "PREEMPTED"]
    letters = dict(zip(" ?.-:=#%rRo0X", names, strict=True))
    return bytes(Cell[letters[letter]] for letter in text)


def test_lanes_show_what_each_request_did_in_every_step() -> None:
    ended = Finished(1, "stop", 4)
    messages = [
        step(0, [BatchRow(1, PREFILL, 0, 8, 0, 1, 0)], events=[arrived(1), Admitted(1, 0)]),
        step(1, [BatchRow(1, PREFILL, 8, 12, 0, 2, FIRST)], events=[arrived(2)]),
        step(2, [BatchRow(1, DECODE, 20, 1, 0, 2, LAST)]),
        status(2, events=[arrived(3)]),
        step(3, [BatchRow(2, PREFILL, 16, 4, 16, 2, FIRST)], events=[Admitted(2, 16)]),
        step(4, [BatchRow(1, DECODE, 21, 1, 0, 2, LAST)], events=[wire.Preempted(2, 2, "KV full")]),
        step(5, [BatchRow(2, RECOMPUTE, 0, 21, 0, 2, LAST)], events=[Admitted(2, 0)]),
        status(5, events=[wire.Aborted(3, "client gone")]),
        step(6, [BatchRow(r, DECODE, 23 - r, 1, 0, 2, LAST) for r in (1, 2)], events=[ended]),
        step(9, [BatchRow(2, DECODE, 24, 1, 0, 2, LAST)]),
    ]
    history = fed(enumerate(messages))
    lanes = {lane.request_id: lane for lane in lanes_of(history, 0, 10)}
    assert lanes[1].client_id == "chat-1"
    assert lanes[1].cells == cells("#%=-=-o    ")
    assert lanes[2].cells == cells(" ..:XR=??= ")
    assert lanes[3].cells == cells("   ..0     ")
    assert [lane.request_id for lane in lanes_of(history, 0, 2)] == [1, 2]
    assert lanes_of(history, 20, 30) == []


def test_request_lanes_extended_step_by_step_equal_lanes_made_at_once() -> None:
    growing = History()
    for sequence, message in MESSAGES:
        growing.append(sequence, message)
        if isinstance(message, wire.StepRecord) and message.step % 7 == 0:
            lanes_of(growing, max(0, message.step - 120), message.step)
    at_once = whole_session()
    assert lanes_of(growing, 1080, 1199) == lanes_of(at_once, 1080, 1199)
    for first in (900, 300, 301, 600, 0):
        assert lanes_of(growing, first, first + 80) == lanes_of(whole_session(), first, first + 80)


@pytest.mark.parametrize("max_steps", [10_000, 400])
def test_lane_ids_are_exactly_those_of_requests_with_a_visible_cell(max_steps: int) -> None:
    lost = range(sequence_of()[700], sequence_of()[703])
    history = History(max_steps=max_steps)
    ids: set[int] = set()
    rng = random.Random(1)
    for sequence, message in MESSAGES:
        if sequence in lost:
            continue
        history.append(sequence, message)
        ids |= {event.request_id for event in getattr(message, "events", ())}
        if sequence % 60:
            continue
        for _ in range(3):
            first = rng.randrange(1200)
            last = first + rng.choice([0, 1, 30, 400])
            shown = history.lane_ids(first, last)
            assert [name.request_id for name in history.lane_names(shown)] == shown
            in_order = sorted(ids)
            cells = history.lane_cells(in_order, first, last)
            assert shown == [each for each, of in zip(in_order, cells, strict=True) if any(of)]
            assert {len(each) for each in cells} <= {last + 1 - first}
    assert history.lane_cells([10**9], 5, 9) == [bytes(5)]


# Valid messages without sense

number = st.one_of(st.integers(-2, 40), st.sampled_from([-(2**63), 2**62, 2**63, 2**64 - 1]))
count = st.one_of(st.none(), number)
events = st.one_of(
    st.builds(wire.Arrived, number, st.just("x"), number, number, number, number),
    st.builds(Admitted, number, number),
    st.builds(Finished, number, st.just("stop"), number),
    st.builds(wire.Preempted, number, number, st.just("why")),
    st.builds(wire.Aborted, number, st.just("why")),
)
rows = st.builds(BatchRow, number, st.integers(0, 3), number, number, number, number, number)
strange_steps = st.builds(
    wire.StepRecord,
    step=st.one_of(st.integers(0, 60), number),
    schedule_start_ns=st.one_of(st.integers(0, 2**40), number),
    tokens_ns=st.one_of(st.integers(0, 2**40), number),
    launch_ns=count,
    token_budget=count,
    num_prefill_tokens=number,
    num_decode_tokens=number,
    batch=st.none() | st.lists(rows, max_size=4),
    kv=st.none()
    | st.builds(wire.KVCounts, st.integers(0, 9), st.integers(0, 9), st.just(1), number),
    moves=st.lists(st.builds(wire.BlockMove, number, number, number), max_size=3),
    num_running=number,
    num_waiting=number,
    events=st.lists(events, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(strange_steps, min_size=1, max_size=12))
def test_valid_but_senseless_messages_break_nothing(messages: list[wire.StepRecord]) -> None:
    history = History()
    for sequence, message in enumerate(messages):
        with contextlib.suppress(msgspec.DecodeError):
            history.append(sequence, wire.encode(message))
    last = history.last_step
    if last is None:
        return
    assert history.state_at(last) == history.state
    history.summaries(max(0, last - 50), last)
    lanes_of(history, max(0, last - 50), last)
    history.windows.latency(window_s=None)
    history.windows.sums(None, None)
    history.last_stall()
    history.events()


# Readers beside the writer


def test_readers_never_see_a_half_written_state_while_messages_arrive() -> None:
    history = History(max_steps=300)
    done = threading.Event()

    def read(seed: int) -> int:
        rng = random.Random(seed)
        num_rounds = 0
        while not done.is_set():
            last = history.last_step
            if last is None:
                continue
            assert history.state.step >= last
            first = history.first_step
            number = rng.randrange(first, last + 1)
            # A step read a moment ago may be forgotten by now, but never differs.
            assert history.state_at(number).step >= first
            record = history.record(number)
            assert record is None or record.step == number
            lanes_of(history, last - 50, last)
            history.windows.latency()
            history.windows.sums(None, 10.0)
            history.events(limit=20)
            history.last_stall()
            num_rounds += 1
        return num_rounds

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, seed) for seed in range(3)]
        try:
            for sequence, message in MESSAGES:
                history.append(sequence, wire.encode(message))
        finally:
            done.set()
        assert sum(reader.result() for reader in readers) > 0
