"""The waits of a session are the same for everybody who asks, and each sums to its pieces."""

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.engine.protocol.wire import Admitted, Arrived, Snapshot, StepRecord
from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import Explanation, explain_recording
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.compare.recording_feed import RecordingFeed
from stepscope.recordings.compare.side import Side
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.samples import shipped
from stepscope.recordings.state.latency import SLO, LatencyKind
from stepscope.recordings.state.session import SessionState
from tests.session.test_one_sum import (
    ALL,
    LEVELS,
    WHOLE,
    Session,
    figures_of_side,
    history_of,
    history_of_replay,
    in_memory,
    of_a_client,
    of_totals,
    preempting,
)
from tests.support.sessions.by_hand import Messages, waits_by_hand
from tests.support.sessions.seek_sessions import record

KINDS: tuple[LatencyKind, LatencyKind] = ("itl", "ttft")
STEPS = [each for each in ALL if each is not of_totals]


def explained(path: Path) -> Explanation:
    with Recording(path) as recording:
        return explain_recording(recording, LEVELS)


def side_of(path: Path) -> Side:
    feed = RecordingFeed(Recording(path), "a", LEVELS, StepRange())
    figures_of_side(feed)
    return feed.side


def counts_of_history(history: History) -> dict[str, tuple[int, int]]:
    """Number of waits of each kind, and how many of them were late."""
    found = {}
    for kind, bound_ms in (("itl", LEVELS.itl_ms), ("ttft", LEVELS.ttft_ms)):
        samples = list(history.windows.samples(kind, None, None))
        late = sum(weight for _, ns, weight in samples if ns > bound_ms * 1e6)
        found[kind] = sum(weight for _, _, weight in samples), late
    return found


def counts_explained(found: Explanation) -> dict[str, tuple[int, int]]:
    return {kind: (getattr(found, kind).num_waits, getattr(found, kind).num_late) for kind in KINDS}


def assert_all_agree(path: Path, history: History) -> None:
    """Check that memory, the file, its explanation and its sums tell of the same waits."""
    counts, found, side = counts_of_history(history), explained(path), side_of(path)
    assert counts_explained(found) == counts
    late = [each for each in found.late if not each.is_excused]
    for kind in KINDS:
        mine = [each for each in late if each.kind.lower() == kind]
        assert len(mine) == counts[kind][1]
        assert sum(n for key, n in side.num_late.items() if key[0].lower() == kind) == len(mine)
        waits = side.totals.waits.of[kind]
        assert (waits.count, waits.count - waits.num_within) == counts[kind]
    spent = sum(piece.ns for each in late for piece in each.pieces)
    assert sum(side.cause_ns.values()) == spent == sum(each.gap_ns for each in late)
    assert sum(side.num_late.values()) == history.windows.late(None).num_tokens
    breaches = history.windows.breaches(None, 10**6)
    assert sum(each.num_tokens for each in breaches) == len(late)
    longest: dict[tuple[str, int], int] = {}
    for each in late:
        key = each.kind, each.step
        longest[key] = max(longest.get(key, 0), each.gap_ns - each.paused_ns)
    assert {(each.kind, each.step): each.ns for each in breaches} == longest


@pytest.mark.parametrize("session", STEPS)
def test_all_tell_of_the_same_waits(session: Session, tmp_path: Path) -> None:
    messages = session()
    path = record(tmp_path / "a.mcap", messages)
    assert_all_agree(path, history_of(messages))
    assert counts_of_history(history_of_replay(path)) == counts_of_history(history_of(messages))


@pytest.mark.parametrize("name", ["freeze", "chunked", "speculation", "vllm"])
def test_all_tell_of_the_same_waits_of_a_sample(name: str) -> None:
    with Recording(shipped()[name]) as recording:
        assert_all_agree(recording.path, in_memory(recording))


def every_wait(messages: Messages) -> list[Late]:
    explainer, last = Explainer(-1, -1), messages[0][0] - 1
    for number, message in messages:
        lost = number > last + 1 and not isinstance(message, Snapshot)
        explainer.take(message, lost)
        last = number
    return explainer.late


@pytest.mark.parametrize("session", STEPS)
def test_the_pieces_of_each_wait_sum_to_the_wait(session: Session) -> None:
    waits = every_wait(session())
    assert len(waits) > 1000
    for each in waits:
        assert sum(piece.ns for piece in each.pieces) == each.gap_ns


@pytest.mark.parametrize("session", WHOLE)
def test_waits_begin_and_end_as_followed_by_hand(session: Session) -> None:
    messages = session()
    found = {(w.request_id, w.step): (w.start_ns, w.end_ns) for w in every_wait(messages)}
    assert found == waits_by_hand(messages)


def test_a_wait_for_several_tokens_at_once_is_one_wait_of_the_first_of_them() -> None:
    with Recording(shipped()["speculation"]) as recording:
        found = explain_recording(recording, SLO(-1.0, -1.0))
    numbers: dict[int, list[int]] = {}
    for each in found.late:
        numbers.setdefault(each.request_id, []).append(each.token_idx)
    for mine in numbers.values():
        assert mine == sorted(set(mine))
    apart = [b - a for mine in numbers.values() for a, b in itertools.pairwise(mine)]
    assert set(apart) > {1}, "some steps bring several tokens"


@pytest.mark.slow
@pytest.mark.parametrize("session", STEPS)
def test_memory_and_file_explain_alike(session: Session, tmp_path: Path) -> None:
    messages = session()
    history, found = history_of(messages), explained(record(tmp_path / "a.mcap", messages))
    assert found.late
    for each in found.late:
        in_memory = history.wait(each.step, each.request_id)
        assert (in_memory.start_ns, in_memory.end_ns) == (each.start_ns, each.end_ns)
        assert (in_memory.token_idx, in_memory.cause) == (each.token_idx, each.cause)


@pytest.mark.parametrize("session", [each for each in STEPS if each is not of_a_client])
def test_the_reasons_of_a_wait_in_the_queue_sum_to_it(session: Session) -> None:
    messages, ledger = session(), Ledger(SessionState())
    arrived, admitted = dict[int, int](), dict[int, int]()
    last, has_hole = messages[0][0] - 1, isinstance(messages[0][1], Snapshot)
    for number, message in messages:
        ledger.take(message, number > last + 1)
        has_hole |= number > last + 1
        last = number
        for event in getattr(message, "events", ()):
            if isinstance(event, Arrived):
                arrived.setdefault(event.request_id, event.time_ns)
            elif isinstance(event, Admitted) and isinstance(message, StepRecord):
                admitted.setdefault(event.request_id, message.schedule_start_ns)
    waits = [*ledger.admitted(), *ledger.waiting()]
    assert len(waits) > 50
    for wait in waits:
        waited_ns = wait.waited_ns(ledger.state.time_ns)
        if waited_ns is not None:
            assert sum(wait.reasons.values()) == waited_ns
    assert any("" in wait.reasons for wait in waits) == has_hole
    firsts = {each.request_id: each for each in ledger.admitted() if not each.was_preempted}
    if not has_hole:
        by_hand = {each: admitted[each] - arrived[each] for each in admitted}
        assert {each: wait.waited_ns(0) for each, wait in firsts.items()} == by_hand


def test_without_rows_the_length_of_waits_is_unknown_and_not_zero(tmp_path: Path) -> None:
    told = explained(record(tmp_path / "totals.mcap", of_totals()))
    assert (told.late, told.itl.median_ms) == ([], 20.0)  # the server says how long waits were
    bare = [
        (number, replace(each, batch=None, events=[]) if isinstance(each, StepRecord) else each)
        for number, each in preempting()
    ]
    found = explained(record(tmp_path / "bare.mcap", bare))
    assert (found.itl.num_waits, found.itl.median_ms, found.ttft.median_ms) == (0, None, None)
    assert found.never_served.longest_ms is None
