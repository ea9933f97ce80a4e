"""Backfill: earlier steps that an engine keeps are prepended to memory; nothing else changes."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import AnyCommand, GetKeptSnapshot, ReplayFrom, Submit
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot
from stepscope.engine.telemetry import kept_snapshots
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import add_mark
from stepscope.recordings.live import backfill
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.session import SessionState
from stepscope.tui.views import format as fmt
from tests.support.engines.fake_engine import FakeEngine, info, step
from tests.support.screens.live_dashboard import dashboard, press
from tests.support.screens.screen_text import main_text
from tests.support.sessions.following import joined
from tests.support.sessions.lanes_of import lanes_of
from tests.support.waiting import until, wait_for


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is kept at every heartbeat."""
    monkeypatch.setattr(kept_snapshots, "INTERVAL_NS", 1)


def asked(source: Subscriber) -> None:
    """Start a backfill and wait for its end."""
    source.backfill.ask()
    wait_for(lambda: not source.backfill.is_active, "the end of it")


def load(client: ControlClient, max_tokens: int = 900) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    client.send(Submit(prompt_token_ids=[1] * 40, sampling=sampling))


# An engine at work


@pytest.mark.usefixtures("often")
def test_a_backfill_prepends_all_kept_steps_while_new_ones_are_recorded(
    live_engine: Any, tmp_path: Path
) -> None:
    first = joined(live_engine.endpoint)
    with ControlClient(live_engine.endpoint) as client:
        load(client)
        load(client)
        wait_for(lambda: (first.history.last_step or 0) > 200, "200 steps")
        client.set_knobs({"max_num_seqs": 7}, "somebody")
        wait_for(lambda: (first.history.last_step or 0) > 300, "300 steps")
        late = joined(live_engine.endpoint)
        load(client)  # the engine may have been quicker than this thread
        wait_for(lambda: late.history.num_steps > 30, "some steps")
        tapped: list[int] = []
        late.tap.attach(lambda topic, sequence, payload: tapped.append(sequence))
        recorder = Recorder(late, tmp_path / "a.mcap")
        mark = add_mark(late, "here", "me")
        old_first = late.history.first_step
        follower = late.history.follow()
        num_read = len(follower.read_payloads(10_000))
        assert old_first is not None
        assert old_first > 300
        asked(late)
        assert late.backfill.state == "done", late.backfill.note
        assert late.history.first_step == 0
        assert late.backfill.num_steps == old_first
        last = first.history.last_step or 0
        load(client)
        wait_for(lambda: (late.history.last_step or 0) > last + 50, "steps that come afterwards")
        recorder.stop()
        last = late.history.last_step or 0
        wait_for(lambda: (first.history.last_step or 0) >= last, "the same for the other")
        asked(late)
        assert late.backfill.note == "this is already the engine's first step"
    assert late.history.marks == [mark]
    assert late.history.num_lost == late.num_recovered == 0
    assert lanes_of(late.history, 0, last) == lanes_of(first.history, 0, last)
    assert (
        late.history.summaries(0, last)[:old_first] == first.history.summaries(0, last)[:old_first]
    )
    assert late.history.knob_changes == first.history.knob_changes
    assert late.history.record(100) == first.history.record(100)
    # Listeners, followers and recorders get the new messages, once and in order.
    assert tapped == sorted(set(tapped))
    first_kept = late.history.summary(old_first)
    assert first_kept is not None
    assert min(tapped) > first_kept.sequence
    num_read += len(follower.read_payloads(10_000))
    assert num_read <= len(late.history.follow(old_first).read_payloads(10_000)) + 20
    assert verify(tmp_path / "a.mcap", lambda share: None).is_good
    with Recording(tmp_path / "a.mcap") as recording:
        assert (recording.first_step or 0) >= old_first
    for source in (first, late):
        source.stop()


@pytest.mark.usefixtures("often")
def test_a_backfill_adds_no_more_steps_than_there_is_room_for(live_engine: Any) -> None:
    first = joined(live_engine.endpoint)
    with ControlClient(live_engine.endpoint) as client:
        load(client)
        wait_for(lambda: (first.history.last_step or 0) > 600, "600 steps")
        late = joined(live_engine.endpoint, History(max_steps=300))
        wait_for(lambda: late.history.num_steps > 3, "some steps")
        old_first = late.history.first_step or 0
        asked(late)
        assert late.backfill.note == "memory is full"
        assert 0 < (late.history.first_step or 0) < old_first
        wait_for(lambda: late.history.num_steps > 300, "a full memory")
        asked(late)
        assert "the memory is full" in late.backfill.note
        num_steps = late.history.num_steps
        assert num_steps <= 300 + 128
    first.stop()
    late.stop()


# Steps that cannot be fetched


class Keeping(FakeEngine):
    """An engine that keeps a snapshot of every tenth message, and sends those from `oldest` on."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, info(**({"keeps_snapshots": True} | changes)))
        self.oldest = 0
        self.snapshots: dict[int, Snapshot] = {}
        self.on_replay: Callable[[int], None] = lambda sequence: None

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            number = self.next_sequence
            self.publish(step(number))
            if number % 10 == 0:
                snapshot = self.state.snapshot(number)
                assert snapshot is not None
                self.snapshots[number] = snapshot

    def _answer(self, command: AnyCommand) -> AnyReply:
        if isinstance(command, GetKeptSnapshot):
            wanted = self.state.time_ns - command.past_s * 1e9
            usable = [each for number, each in self.snapshots.items() if number >= self.oldest]
            if not usable:
                return Error(code="nothing_kept", message="no")
            return ([usable[0]] + [each for each in usable if each.time_ns <= wanted])[-1]
        if isinstance(command, ReplayFrom):
            self.on_replay(command.sequence)
        return super()._answer(command)


class Late:
    """An engine that has run 200 steps, and a subscriber that joined after them."""

    def __init__(self, folder: Path, history: History | None = None, **changes: Any) -> None:
        self.engine = Keeping(folder, **changes)
        self.engine.run(200)
        self.source = joined(self.engine.endpoint, history, retry_s=0.05)
        while not self.source.history.num_steps:  # a subscription takes a moment
            self.engine.run(1)
            time.sleep(0.01)
        self.first = self.source.history.first_step

    def close(self) -> None:
        self.source.stop()
        self.engine.close()


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    made = Late(tmp_path)
    yield made
    made.close()


def refused(late: Late) -> str:
    """Check that nothing was added; return why."""
    asked(late.source)
    assert late.source.backfill.state == "failed"
    assert late.source.history.first_step == late.first
    late.engine.run(1)
    last = late.engine.next_sequence - 1
    wait_for(lambda: late.source.history.last_sequence == last, "the present")
    assert late.source.history.num_lost == 0
    return late.source.backfill.note


def test_a_backfill_adds_the_steps_that_the_engine_keeps(late: Late) -> None:
    late.engine.oldest = 60
    mark = Mark(step=late.first or 0, time_ns=0, text="here", who="me")
    late.source.history.add_mark(mark)
    asked(late.source)
    assert late.source.backfill.state == "done"
    assert late.source.history.first_step == 61
    summary = late.source.history.summary(mark.step)
    assert summary is not None
    assert summary.has_mark


def test_without_older_kept_steps_a_backfill_says_how_far_back_the_engine_keeps_steps(
    late: Late,
) -> None:
    late.engine.oldest = 200
    late.engine.run(100)
    wait_for(lambda: late.source.history.last_step == late.engine.next_sequence - 1, "them")
    assert re.fullmatch(r"the engine keeps no more than its last \d s", refused(late))


def test_a_backfill_from_an_engine_that_keeps_no_steps_says_so(late: Late) -> None:
    late.engine.oldest = 10_000
    assert refused(late) == "the engine keeps no older steps"


def test_an_engine_version_without_kept_snapshots_gets_no_backfill_query(tmp_path: Path) -> None:
    made = Late(tmp_path, keeps_snapshots=False)
    assert "of an older stepscope" in refused(made)
    made.close()


def test_steps_the_engine_forgets_during_a_backfill_leave_memory_unchanged(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "_TURN", 50)

    def forget(sequence: int) -> None:
        for number in range(sequence + 20, sequence + 40):
            late.engine.kept.pop(number, None)

    late.engine.on_replay = forget
    assert refused(late) == "the engine no longer keeps these messages"


def test_missing_replies_end_a_backfill_and_live_steps_continue(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "_ANSWER_S", 0.05)
    late.engine.largest_replay = 0
    monkeypatch.setattr(backfill, "catch_up_s", lambda *_: 0.0)
    assert refused(late) == "the engine does not answer in time"


def test_on_a_slow_link_live_steps_are_read_between_two_backfill_queries(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def slow(client: ControlClient, first: int, num_messages: int) -> float:
        late.engine.run(1)
        time.sleep(0.05)  # until it has arrived
        taken.append(late.source.history.last_sequence or 0)
        return num_messages * 1.0

    monkeypatch.setattr(backfill, "catch_up_s", slow)
    monkeypatch.setattr(backfill, "MAX_FETCH_S", 1.0)
    refused(late)
    assert len(taken) > 1
    assert taken == sorted(set(taken))


def test_on_a_too_slow_link_a_backfill_fetches_less_or_nothing(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "catch_up_s", lambda client, first, number: float(number))
    monkeypatch.setattr(backfill, "MAX_FETCH_S", 1.0)
    late.engine.oldest = 0
    assert refused(late) == "the connection to the engine is too slow"
    monkeypatch.setattr(backfill, "MAX_FETCH_S", 120.0)
    asked(late.source)
    assert late.source.backfill.state == "done"
    assert 80 < (late.source.history.first_step or 0) < 150


def test_an_engine_that_restarts_during_a_backfill_is_joined_as_a_new_session(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "_TURN", 50)
    other: EngineInfo = info("two", keeps_snapshots=True)

    def restart(sequence: int) -> None:
        late.engine.info, late.engine.state = other, SessionState(info=other)

    late.engine.on_replay = restart
    asked(late.source)
    assert late.source.backfill.state == "failed"
    wait_for(lambda: late.source.history.info == other, "the other one")
    previous = late.source.history.previous
    assert previous is not None
    assert previous.first_step == late.first


def test_an_engine_that_is_gone_ends_the_backfill(late: Late) -> None:
    late.engine.close()
    wait_for(lambda: late.source.status == "down", "its end")
    asked(late.source)
    assert "the engine does not answer" in late.source.backfill.note
    late.engine = Keeping(Path(late.engine.endpoint.control.removeprefix("ipc://")).parent.parent)


# In the dashboard


def clock(late: Late, number: int) -> str:
    """The time of a step, as the screen shows it."""
    return fmt.moment(late.source.history.wall_ns(step(number).tokens_ns))


async def test_the_home_key_at_the_oldest_step_starts_a_backfill_and_goes_to_its_first_step(
    late: Late,
) -> None:
    late.engine.oldest = 60
    late.engine.run(20)
    wait_for(lambda: late.source.history.num_steps > 10, "some steps")
    first = late.first or 0
    app = dashboard(late.source)
    async with app.run_test(size=(120, 40)):
        await press(app, "home")
        assert app.main.view.cursor == first
        said = f"in memory, {clock(late, first)}; Home again: older steps from the engine"
        assert said in main_text(app)
        await press(app, "home")
        said = f"{first - 61:,} more steps, the oldest is of {clock(late, 61)}"
        await until(lambda: said in main_text(app), "it does not come")
        assert app.main.view.cursor == 61
        await press(app, "home")  # and again, to where there is nothing more
        said = f"no steps before {clock(late, 61)}: the engine keeps no more than its last"
        await until(lambda: said in main_text(app), "it does not say why")
    app.close()


async def test_a_cursor_moved_during_a_backfill_stays_at_its_step(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.engine.run(20)
    wait_for(lambda: late.source.history.num_steps > 10, "some steps")
    first = late.first or 0
    app = dashboard(late.source)
    late.engine.replays.clear()
    monkeypatch.setattr(backfill, "_ANSWER_S", 20.0)
    async with app.run_test(size=(120, 40)):
        await press(app, "home", "home")
        await until(lambda: "asking the engine for what it keeps" in main_text(app), "no word")
        await press(app, *["right"] * 5)
        late.engine.replays.set()
        said = f"from {clock(late, 1)} on; Home goes there"
        await until(lambda: said in main_text(app), "it does not come")
        assert app.main.view.cursor == first + 5
        await press(app, "home")
        assert app.main.view.cursor == 1
    app.close()
