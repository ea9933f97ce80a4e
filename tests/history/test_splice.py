"""Prepending earlier steps to memory gives the history that reading from the start would give."""

import random

import pytest

from stepscope.engine.protocol.wire import Aborted, EngineStatus, Mark, StepRecord, Telemetry
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.copied import copied
from tests.support.sessions.lanes_of import lanes_of
from tests.support.sessions.later import Later

_SLO = SLO(ttft_ms=700, itl_ms=70)


def told() -> list[Telemetry]:
    """All sorts of messages: knob changes, preemptions, a pause, a status between two steps."""
    run = simulate(seed=5, num_steps=900, num_blocks=512, changes={300: {"max_num_seqs": 5}})
    messages = [message for _, message in run]
    at = next(n for n, each in enumerate(messages) if isinstance(each, StepRecord)) + 400
    before = next(each for each in reversed(messages[:at]) if isinstance(each, StepRecord))
    paused = EngineStatus(
        step=before.step,
        time_ns=before.tokens_ns + 1_000,
        state="paused",
        num_running=before.num_running,
        num_waiting=before.num_waiting,
        kv=before.kv,
    )
    return [*messages[:at], paused, *messages[at:]]


MESSAGES = Later(told)


@copied
def from_message(number: int, end: int | None = None, **kept: int) -> History:
    """A history that begins with a snapshot of the state after a message."""
    state = SessionState()
    for message in MESSAGES[: number + 1]:
        state.apply(message)
    snapshot = state.snapshot(number)
    assert snapshot is not None
    history = History(_SLO, **kept)
    history.reset(snapshot)
    fill(history, number + 1, end)
    return history


def fill(history: History, begin: int, end: int | None = None, lost: range = range(0)) -> None:
    for number, message in enumerate(MESSAGES[begin:end], start=begin):
        if number not in lost:
            history.append(number, message)


def steps_of(history: History) -> range:
    assert history.first_step is not None
    assert history.last_step is not None
    return range(history.first_step, history.last_step + 1)


def assert_like(history: History, whole: History, steps: range | None = None) -> None:
    steps = steps or steps_of(whole)
    first, last = steps[0], steps[-1]
    assert steps_of(history) == steps
    assert history.summaries(first, last) == whole.summaries(first, last)
    assert lanes_of(history, first, last) == lanes_of(whole, first, last)
    assert history.windows.latency(None, None) == whole.windows.latency(None, None)
    assert history.windows.rates(None, None) == whole.windows.rates(None, None)
    assert history.knob_changes == whole.knob_changes
    assert history.windows.breaches(None, 10_000) == whole.windows.breaches(None, 10_000)
    rare = frozenset({"preempt", "finish", "abort", "knobs", "engine", "gap", "mark"})
    assert history.events(None, 10_000, rare) == whole.events(None, 10_000, rare)
    for step in random.Random(0).sample(steps, 60):
        assert history.record(step) == whole.record(step)
        found, expected = history.state_at(step), whole.state_at(step)
        assert found.requests == expected.requests
        assert (found.kv, found.knobs, found.block_owner) == (
            expected.kv, expected.knobs, expected.block_owner,
        )  # fmt: skip
        assert history.wall_ns(found.time_ns) == whole.wall_ns(expected.time_ns)
        summary = whole.summary(step)
        if summary is not None and summary.max_itl_request_id is not None:
            request_id = summary.max_itl_request_id
            assert history.wait(step, request_id) == whole.wait(step, request_id)


@pytest.mark.parametrize(("begin", "cut"), [(1, 40), (1, 402), (30, 403), (200, 404), (300, 880)])
def test_a_history_with_prepended_steps_equals_one_from_the_start(begin: int, cut: int) -> None:
    later = from_message(cut)
    assert later.prepend(from_message(begin, cut + 1))
    assert_like(later, from_message(begin))


def test_messages_that_arrive_after_prepending_are_appended() -> None:
    later = from_message(500, 600)
    assert later.prepend(from_message(100, 501))
    fill(later, 600)
    assert_like(later, from_message(100))


def test_a_reader_gets_every_message_once_while_earlier_steps_are_prepended() -> None:
    later = from_message(500, 700)
    follower = later.follow()
    read = follower.read_payloads(150)
    assert later.prepend(from_message(100, 501))
    fill(later, 700)
    while payloads := follower.read_payloads(64):
        read += payloads
    assert read == from_message(500).follow().read_payloads(10_000)
    assert follower.num_forgotten == 0
    assert later.is_followed_by(follower)


def test_prepending_earlier_steps_keeps_gaps_marks_and_breaches() -> None:
    later = from_message(500, 520)
    fill(later, 520, lost=range(530, 540))
    mark = Mark(step=steps_of(later)[7], time_ns=0, text="here", who="me")
    later.add_mark(mark)
    before = later.events(None, 10_000)
    gaps, num_lost = later.gaps, later.num_lost
    assert gaps
    assert later.prepend(from_message(100, 501))
    assert (later.gaps, later.num_lost, later.marks) == (gaps, num_lost, [mark])
    assert [each for each in later.events(None, 10_000) if each in before] == before


def test_after_prepending_a_full_memory_forgets_its_oldest_steps_first() -> None:
    later = from_message(600, 620, max_steps=300)
    assert later.prepend(from_message(100, 601))
    fill(later, 620)
    whole = from_message(100)
    first, last = steps_of(later)[0], steps_of(later)[-1]
    assert first > steps_of(whole)[0]
    assert later.num_steps <= 300 + 128
    assert lanes_of(later, first, last) == lanes_of(whole, first, last)
    assert later.state_at(first).requests == whole.state_at(first).requests
    assert later.windows.latency(None, 1.0) == whole.windows.latency(None, 1.0)


def test_changed_service_levels_apply_to_prepended_steps() -> None:
    later, earlier, whole = from_message(500), from_message(100, 501), from_message(100)
    for history in (later, whole):
        history.set_slo(SLO(ttft_ms=700, itl_ms=12))
    assert later.prepend(earlier)
    assert_like(later, whole)
    assert not any(later.last_stall(step) != whole.last_stall(step) for step in range(100, 500, 7))


def test_a_request_aborted_before_the_first_step_in_memory_has_a_lane_that_shows_the_abort() -> (
    None
):
    cut = 500
    state = SessionState()
    for message in MESSAGES[: cut + 1]:
        state.apply(message)
    request_id = next(each for each, view in state.requests.items() if view.status == "running")
    snapshot = state.snapshot(cut)
    assert snapshot is not None
    aborted = EngineStatus(
        step=state.step,
        time_ns=state.time_ns + 1_000,
        state="running",
        num_running=0,
        num_waiting=0,
        events=[Aborted(request_id=request_id, reason="asked for")],
    )
    later, whole = History(_SLO), from_message(100, cut + 1)
    later.reset(snapshot)
    for history in (later, whole):
        history.append(cut + 1, aborted)
        for number, message in enumerate(MESSAGES[cut + 1 : cut + 40], start=cut + 2):
            if not isinstance(message, StepRecord) or request_id not in {
                row.request_id for row in message.batch or ()
            }:
                history.append(number, message)
    assert later.prepend(from_message(100, cut + 1))
    steps = steps_of(whole)
    assert lanes_of(later, steps[0], steps[-1]) == lanes_of(whole, steps[0], steps[-1])


@pytest.mark.parametrize("cut", [99, 101])
def test_steps_are_prepended_only_if_they_join_the_steps_in_memory(cut: int) -> None:
    later = from_message(100)
    before = steps_of(later), later.version
    assert not later.prepend(from_message(20, cut + 1))
    assert (steps_of(later), later.version) == before
    assert_like(later, from_message(100))


# The first step of a full memory


def test_a_full_memory_never_begins_at_a_state_made_wrong_by_lost_messages() -> None:
    """The snapshot that corrects the state comes 60 messages later, in the next segment."""
    whole = from_message(0)
    for lost_at in range(180, 400, 50):
        history, state, checked = from_message(0, 150, max_steps=200), SessionState(), set()
        for message in MESSAGES[:150]:
            state.apply(message)
        for number, message in enumerate(MESSAGES[150:], start=150):
            state.apply(message)
            if not lost_at <= number < lost_at + 8:
                history.append(number, message)
            if number == lost_at + 60:
                snapshot = state.snapshot(number)
                assert snapshot is not None
                history.append(number, snapshot)
            first, true_after = steps_of(history)[0], history.begins_after
            if first not in checked:
                checked.add(first)
                assert true_after is not None
                assert history.follow().state.step == whole_step(true_after)
                assert history.state_at(first).requests == whole.state_at(first).requests
        assert len(checked) > 2


def whole_step(number: int) -> int:
    steps = [each.step for each in MESSAGES[: number + 1] if isinstance(each, StepRecord)]
    return steps[-1] if steps else -1
