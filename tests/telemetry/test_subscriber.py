"""The live source over real sockets: every loss is shown, and no message breaks it."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.rate_limit import RateLimiter
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.session import SessionState
from tests.support.engines.fake_engine import FakeEngine, Session, info, step
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.following import joined
from tests.support.sessions.lanes_of import lanes_of
from tests.support.sessions.later import Later
from tests.support.waiting import wait_for

MESSAGES = Later(lambda: [message for _, message in simulate(seed=11, num_steps=400)])


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    wait_for(session.has_caught_up, "caught up")
    yield session
    session.subscriber.stop()
    session.engine.close()


def settled(session: Session, num_steps: int) -> None:
    """Run steps, and wait until the subscriber has all that was published."""
    session.run(num_steps)
    wait_for(session.has_caught_up)


# Joining


def test_a_late_joiner_has_the_same_state_as_a_subscriber_from_the_start(tmp_path: Path) -> None:
    engine_info = next(m for m in MESSAGES if isinstance(m, EngineInfo))
    engine = FakeEngine(tmp_path, engine_info)
    whole = History()
    for message in MESSAGES[:200]:
        whole.append(engine.next_sequence, message)
        engine.publish(message)
    subscriber = joined(engine.endpoint)
    for message in MESSAGES[200:]:
        whole.append(engine.next_sequence, message)
        engine.publish(message)
    engine.publish(engine_info)  # lets the subscriber notice missed messages before it, if any
    wait_for(lambda: subscriber.history.last_sequence == engine.next_sequence - 1)
    subscriber.stop()
    engine.close()
    assert subscriber.history.num_lost == 0
    assert subscriber.history.state == whole.state
    last = whole.last_step or 0
    assert lanes_of(subscriber.history, last - 50, last) == lanes_of(whole, last - 50, last)


def test_a_missing_engine_is_reported_soon_and_joined_once_it_starts(tmp_path: Path) -> None:
    subscriber = Subscriber(f"{tmp_path}/fake", retry_s=0.05)
    subscriber.start()
    wait_for(lambda: subscriber.error is not None)
    assert subscriber.status == "connecting"
    assert "no engine" in str(subscriber.error)
    engine = FakeEngine(tmp_path, info())
    wait_for(lambda: subscriber.status == "live")
    assert subscriber.error is None
    subscriber.stop()
    engine.close()


def test_an_engine_of_a_later_schema_is_refused_with_a_remedy(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, info(schema_version=9, software_version="7.0"))
    subscriber = Subscriber(engine.endpoint, retry_s=0.05)
    subscriber.start()
    wait_for(lambda: subscriber.error is not None)
    assert "schema 9" in str(subscriber.error)
    assert "install a newer one" in str(subscriber.error)
    subscriber.stop()
    engine.close()


# Losing and healing


def test_messages_the_engine_forgot_are_a_visible_gap_and_the_state_is_corrected(
    session: Session,
) -> None:
    settled(session, 3)
    first_lost = session.next_step
    session.run(4, lost=True, forgotten=True)
    session.run(2)
    wait_for(lambda: session.has_caught_up() and not session.history.needs_snapshot)
    (gap,) = session.history.gaps
    assert gap.num_messages == session.history.num_lost == 4
    assert (gap.after_step, gap.before_step) == (first_lost - 1, first_lost + 4)
    settled(session, 2)
    assert session.subscriber.status == "live"


def test_an_engine_that_cannot_replay_loses_only_the_gap(session: Session) -> None:
    session.engine.refuses_replay = True
    session.run(2, lost=True)
    session.run(1)
    wait_for(lambda: session.history.num_lost == 2 and not session.history.needs_snapshot)


def test_a_lost_gap_recovery_reply_is_requested_again(session: Session) -> None:
    settled(session, 2)
    session.engine.num_unanswered = 3
    session.run(4, lost=True)
    settled(session, 1)
    assert session.history.num_lost == 0
    assert session.subscriber.status == "live"
    session.engine.num_unanswered = 1  # and so is a snapshot
    joined(session.engine.endpoint).stop()


def test_on_a_slow_link_gap_recovery_requests_less_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.recordings.live.subscriber.ASK_TIMEOUT_S", 0.2)
    session = Session(tmp_path)
    session.engine.largest_replay = 150
    session.run(1200, lost=True)
    settled(session, 1)
    assert session.history.num_lost == 0
    session.subscriber.stop()
    session.engine.close()


def test_gap_recovery_never_mixes_messages_of_a_replaced_engine(session: Session) -> None:
    settled(session, 3)
    last = session.next_step - 1
    session.engine.successor = info("two")
    session.run(4, lost=True, forgotten=True)
    session.run(20)  # the first makes it ask for a snapshot, the others wait in the socket
    wait_for(lambda: (i := session.history.info) is not None and i.engine_id == "two")
    time.sleep(0.2)
    assert session.history.num_steps == session.history.num_lost == 0
    previous = session.history.previous
    assert previous.num_lost == 4
    assert [(gap.after_step, gap.before_step) for gap in previous.gaps] == [(last, last + 5)]


# Nonsense


def test_garbage_in_telemetry_is_counted_and_changes_nothing(session: Session) -> None:
    session.run(2)
    good = wire.encode(step(0))
    number = wire.sequence_frame(session.engine.next_sequence)
    garbage = [
        (b"step",),
        (b"step", number),
        (b"step", b"short", good),
        (b"step", number, b"\xc1"),
        (b"step", number, wire.encode(step(0))[:-3]),
        (b"step", number, b"\x82\xa4type\xaaStepRecord\xa4step\xa3abc"),
        (b"step", wire.sequence_frame(2**64 - 1), b"nonsense"),
        (b"step", number, good, b"more"),
    ]
    for frames in garbage:
        session.engine.send_raw(*frames)
    settled(session, 3)
    assert session.subscriber.num_bad == len(garbage)
    assert session.subscriber.status == "live"
    assert str(len(garbage)) in str(session.subscriber.error)
    assert session.history.num_lost == 0


def test_after_an_absurd_sequence_number_a_subscriber_rejoins_and_loses_no_step(
    session: Session,
) -> None:
    settled(session, 2)
    session.engine.send_raw(b"step", wire.sequence_frame(2**50), wire.encode(step(10**6)))
    session.engine.send_raw(b"step", wire.sequence_frame(2**64 - 1), wire.encode(step(10**7)))

    def has_recovered() -> bool:
        session.run(1)
        time.sleep(0.02)
        return session.history.last_step == session.next_step - 1

    wait_for(has_recovered)
    assert session.subscriber.status == "live"
    assert session.history.num_lost == 0


def test_messages_of_an_unknown_kind_are_skipped(session: Session) -> None:
    session.run(1)
    with session.engine._lock:
        number = session.engine.next_sequence
        session.engine.next_sequence += 1
        session.engine.kept[number] = (b"weather", b"\x80")
    session.engine.send_raw(b"weather", wire.sequence_frame(number), b"\x80")
    settled(session, 1)
    assert session.history.num_lost == 0
    assert session.subscriber.num_bad == 0


# Engines that go and come


def test_an_engine_is_stale_when_silent_down_without_reply_and_live_on_a_heartbeat(
    session: Session,
) -> None:
    wait_for(lambda: session.subscriber.status == "stale")
    assert "nothing came" in str(session.subscriber.error)
    session.engine.is_silent = True
    wait_for(lambda: session.subscriber.status == "down")
    assert "fake answers nothing: stopped or cut off" in str(session.subscriber.error)
    session.engine.is_silent = False
    num_steps, num_run = session.history.num_steps, 0

    def is_live() -> bool:
        """Publishes a step each time: one may be stale again before the status is checked."""
        nonlocal num_run
        session.run(1)
        num_run += 1
        return session.subscriber.status == "live"

    wait_for(is_live)
    wait_for(lambda: session.history.num_steps == num_steps + num_run)
    assert session.history.num_lost == 0


@pytest.mark.parametrize("first_sequence", [0, 1000], ids=["numbers start anew", "higher numbers"])
def test_a_restarted_engine_is_joined_and_its_last_session_is_kept(
    session: Session, first_sequence: int
) -> None:
    settled(session, 5)
    before = session.steps()
    session.restart("two", first_sequence)
    session.engine.publish(info("two"))

    def joined() -> bool:
        session.run(1)
        time.sleep(0.02)
        now = session.history.info
        return now is not None and now.engine_id == "two" and session.history.num_steps > 3

    wait_for(joined)
    wait_for(session.has_caught_up)
    assert session.history.num_lost == 0
    previous = session.history.previous
    assert [previous.first_step, previous.last_step] == [before[0], before[-1]]
    assert session.history.events()[0].kind == "engine"


def test_a_restarted_engine_is_detected_even_if_its_sequence_numbers_continue(
    session: Session,
) -> None:
    session.subscriber._stale_s = 60.0  # silence must not reveal the restart
    settled(session, 5)
    session.restart("two", session.engine.next_sequence)  # without publishing its identity
    time.sleep(0.5)  # until the subscriber has connected to it
    session.run(5)
    wait_for(lambda: (i := session.history.info) is not None and i.engine_id == "two")


# The real engine


def test_following_a_real_engine_gives_its_state_and_recording(
    live_engine: Any, tmp_path: Path
) -> None:
    subscriber = joined(live_engine.endpoint)
    history = subscriber.history
    with ControlClient(live_engine.endpoint) as client:
        submit(client, range(10))
        wait_for(lambda: history.num_steps > 10)
        recorder = Recorder(subscriber, tmp_path / "live.mcap")
        ack = client.set_knobs({"max_num_batched_tokens": 64}, who="test")
        submit(client, range(10, 40))
        client.ask(SetKnobs(changes={"max_num_seqs": 4}, who="test"))
        wait_for(lambda: len(history.knob_changes) == 2)
        wait_for(lambda: history.windows.figures(None, None)["finished"] == 40)
        wait_for(lambda: history.state.state == "idle")
        engine_says = SessionState.from_snapshot(client.snapshot())
    wait_for(lambda: history.state.time_ns >= engine_says.time_ns)
    state = history.state
    assert not any(view.status != "finished" for view in state.requests.values())
    for part in ("blocks", "kv", "knobs"):
        assert getattr(state, part) == getattr(engine_says, part)
    assert history.num_lost == subscriber.num_bad == 0
    change = history.knob_changes[0]
    new = {"max_num_batched_tokens": 64}
    assert (change.effective_step, change.new) == (ack.effective_step, new)
    assert history.summary(ack.effective_step).token_budget == 64
    recorder.stop()
    subscriber.stop()
    with Recording(tmp_path / "live.mcap") as recording:
        assert recording.last_step == history.last_step
        assert recording.message is None


def test_a_snapshot_taken_while_running_equals_the_followed_state(live_engine: Any) -> None:
    subscriber = joined(live_engine.endpoint)
    followed: dict[int, SessionState] = {}

    def remember(topic: bytes, sequence: int, payload: bytes) -> None:
        followed[sequence] = subscriber.history.state

    subscriber.tap.attach(remember)
    with ControlClient(live_engine.endpoint) as client:
        submit(client, range(30))
        snapshots = []
        for _ in range(10):
            snapshots.append(client.snapshot())
            time.sleep(0.02)
    wait_for(lambda: snapshots[-1].sequence in followed)
    subscriber.stop()
    for snapshot in snapshots:
        engine_says = SessionState.from_snapshot(snapshot)
        seen = followed[snapshot.sequence]
        live = {i: v for i, v in seen.requests.items() if v.status != "finished"}
        assert live == engine_says.requests
        for part in ("blocks", "num_running", "num_waiting"):
            assert getattr(seen, part) == getattr(engine_says, part)


def submit(client: ControlClient, numbers: range) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    for number in numbers:
        prompt = [number] * 40 + list(range(number, number + 10 * (number % 7)))
        client.send(Submit(prompt_token_ids=prompt, sampling=sampling))


# Many small gaps


ARRIVES_S = 0.3  # what was published is in the subscriber's socket by then


class Recorded:
    """A recorder of a session, and the content of its file after `stop`."""

    def __init__(self, session: Session, path: Path) -> None:
        self._path = path
        self._source = session.subscriber
        self._first = session.engine.next_sequence
        self._recorder = Recorder(self._source, path)
        self.numbers: list[int] = []
        self.num_lost = 0

    def stop(self) -> None:
        """Stop as `stepscope record` does."""
        self._source.stop()
        self._recorder.stop()
        with Recording(self._path) as recording:
            frames = [frame for frame, _ in recording.frames() if frame.topic != b"keyframe"]
        self.numbers = [each.sequence for each in frames if each.sequence >= self._first]
        self.num_lost = verify(self._path, lambda share: None).num_lost_messages


# Healing


def test_many_gaps_close_together_are_recovered_with_few_queries(session: Session) -> None:
    session.engine.asked.clear()
    session.engine.replays.clear()
    session.run_with_gaps(1_000)
    time.sleep(ARRIVES_S)
    session.engine.replays.set()
    wait_for(session.has_caught_up, "caught up")
    assert session.history.num_lost == 0
    questions = sorted(set(session.engine.asked), key=lambda asked: asked.start)
    assert len(questions) < 10
    assert all(one.stop <= other.start for one, other in pairwise(questions))


def test_a_gap_recovery_query_covers_only_the_missing_messages(session: Session) -> None:
    session.engine.asked.clear()
    first = session.engine.next_sequence
    session.run(7, lost=True)
    settled(session, 200)
    assert set(session.engine.asked) == {range(first, first + 7)}


def test_exactly_the_forgotten_messages_among_recovered_gaps_are_lost(session: Session) -> None:
    session.engine.replays.clear()
    session.run_with_gaps(20)
    session.run(3, lost=True, forgotten=True)
    session.run_with_gaps(20)
    time.sleep(ARRIVES_S)
    session.engine.replays.set()
    wait_for(session.has_caught_up, "caught up")
    assert session.history.num_lost == 3


def test_gap_recovery_alone_never_reaches_the_rate_limit(session: Session) -> None:
    session.engine.limiter = RateLimiter()
    for _ in range(100):
        session.run_with_gaps(20)
        time.sleep(0.02)
    wait_for(session.has_caught_up, "caught up")
    assert session.engine.num_limited == 0
    assert session.history.num_lost == 0
    steps = session.steps()
    assert steps == list(range(steps[0], session.next_step))


# Stopping


def test_a_subscriber_stopped_during_gap_recovery_still_gets_all_messages(
    session: Session, tmp_path: Path
) -> None:
    recorded = Recorded(session, tmp_path / "healed.mcap")
    first = session.engine.next_sequence
    session.engine.asked.clear()
    session.engine.replays.clear()
    session.run_with_gaps(800)
    wait_for(lambda: bool(session.engine.asked), "asked")
    time.sleep(ARRIVES_S)
    stopping = threading.Thread(target=recorded.stop)
    stopping.start()
    wait_for(session.subscriber._stopping.is_set, "told to stop")
    session.engine.replays.set()
    stopping.join()
    assert recorded.numbers == list(range(first, first + 800))
    assert recorded.num_lost == session.history.num_lost == 0


def test_an_observer_that_stops_without_a_reply_counts_the_gap_as_lost(
    session: Session, tmp_path: Path
) -> None:
    recorded = Recorded(session, tmp_path / "gaps.mcap")
    session.engine.is_silent = True
    arrived = session.run_with_gaps(800)
    wait_for(lambda: session.engine.num_silenced > 0, "asked")
    time.sleep(ARRIVES_S)
    recorded.stop()
    assert recorded.numbers == arrived
    assert recorded.num_lost == session.history.num_lost == 400


def test_messages_from_before_an_engine_fell_silent_are_kept_when_stopping_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.recordings.live.subscriber.ASK_TIMEOUT_S", 0.2)
    session = Session(tmp_path)
    wait_for(session.has_caught_up, "caught up")
    recorded = Recorded(session, tmp_path / "silent.mcap")
    session.engine.is_silent = True
    session.run(3, lost=True)
    last = session.engine.next_sequence
    session.run(1)
    wait_for(lambda: session.subscriber.status == "down", "found out")
    recorded.stop()
    assert recorded.numbers == [last]
    assert recorded.num_lost == session.history.num_lost == 3
    session.engine.close()
