"""Many small gaps: few queries recover them, and stopping meanwhile loses nothing unreported."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope.engine.transport.rate_limit import RateLimiter
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.live.recorder import Recorder
from tests.support.engines.fake_engine import Session
from tests.support.waiting import wait_for

ARRIVES_S = 0.3  # what was published is in the subscriber's socket by then


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    yield session
    session.subscriber.stop()
    session.engine.close()


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
    wait_for(session.has_caught_up, "caught up")
    session.engine.asked.clear()
    session.engine.replays.clear()
    session.run_with_gaps(1_000)
    time.sleep(ARRIVES_S)
    session.engine.replays.set()
    wait_for(session.has_caught_up, "caught up")
    assert session.history.num_lost == 0
    assert session.subscriber.num_recovered == 500
    questions = sorted(set(session.engine.asked), key=lambda asked: asked.start)
    assert len(questions) < 10
    assert all(one.stop <= other.start for one, other in pairwise(questions))


def test_a_gap_recovery_query_covers_only_the_missing_messages(session: Session) -> None:
    wait_for(session.has_caught_up, "caught up")
    session.engine.asked.clear()
    first = session.engine.next_sequence
    session.run(7, lost=True)
    session.run(200)
    wait_for(session.has_caught_up, "caught up")
    assert set(session.engine.asked) == {range(first, first + 7)}


def test_exactly_the_forgotten_messages_among_recovered_gaps_are_lost(session: Session) -> None:
    wait_for(session.has_caught_up, "caught up")
    session.engine.replays.clear()
    session.run_with_gaps(20)
    session.run(3, lost=True, forgotten=True)
    session.run_with_gaps(20)
    time.sleep(ARRIVES_S)
    session.engine.replays.set()
    wait_for(session.has_caught_up, "caught up")
    assert session.history.num_lost == 3
    assert session.subscriber.num_recovered == 20


def test_gap_recovery_alone_never_reaches_the_rate_limit(session: Session) -> None:
    wait_for(session.has_caught_up, "caught up")
    limiter = session.engine.limiter = RateLimiter()
    for _ in range(100):
        session.run_with_gaps(20)
        time.sleep(0.02)
    wait_for(session.has_caught_up, "caught up")
    assert limiter.num_limited == 0
    assert session.history.num_lost == 0
    steps = session.steps()
    assert steps == list(range(steps[0], session.next_step))


# Stopping


def test_a_subscriber_stopped_during_gap_recovery_still_gets_all_messages(
    session: Session, tmp_path: Path
) -> None:
    wait_for(session.has_caught_up, "caught up")
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
    wait_for(session.has_caught_up, "caught up")
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
