"""An observer that joins after an incident sees what led to it, as far as the engine keeps it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.protocol.commands import (
    MAX_PAST_S,
    AnyCommand,
    GetKeptSnapshot,
    ReplayFrom,
    SetKnobs,
    Submit,
)
from stepscope.engine.protocol.replies import AnyReply, Error, Replayed, ReplayedFrame
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.telemetry import kept_snapshots
from stepscope.engine.telemetry.kept_snapshots import INTERVAL_NS, MAX_KEPT, KeptSnapshots
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.live.gap_recovery import ask_for_earlier
from stepscope.recordings.state.session import SessionState
from tests.support.engines.fake_engine import FakeEngine, info, step
from tests.support.sessions.following import joined
from tests.support.sessions.lanes_of import lanes_of
from tests.support.waiting import wait_for

SECOND = 1_000_000_000


def snapshot(sequence: int, time_ns: int) -> Snapshot:
    return SessionState(info=info(), time_ns=time_ns, step=sequence).snapshot(sequence)


def kept(*times_s: float, messages_a_second: int = 10) -> KeptSnapshots:
    """Snapshots kept at these times."""
    snapshots = KeptSnapshots()
    for time_s in times_s:
        number, time_ns = round(time_s * messages_a_second), round(time_s * SECOND)
        keep(snapshots, number, time_ns)
    return snapshots


def keep(snapshots: KeptSnapshots, step: int, time_ns: int, took_ns: int = 0) -> bool:
    """Keep a snapshot that takes `took_ns` to make; False: none was due."""
    made: list[Snapshot] = []

    def make() -> Snapshot:
        made.append(snapshot(step, time_ns))
        return made[0]

    snapshots.keep(step, time_ns, make, lambda: time_ns + took_ns)
    return bool(made)


def sequence_before(
    snapshots: KeptSnapshots, past_s: float, now_s: float, oldest: int = 0, step: int = 1_000_000
) -> int | None:
    end = round(now_s * 10)
    found = snapshots.before(round(past_s * SECOND), round(now_s * SECOND), step, oldest, end)
    return None if found is None else msgspec.msgpack.decode(found, type=Snapshot).sequence


# Which snapshots are kept


def test_snapshots_are_kept_in_intervals_while_steps_run_and_rarer_if_they_take_long() -> None:
    snapshots = KeptSnapshots()
    assert keep(snapshots, -1, 0)
    assert not keep(snapshots, -1, 100 * INTERVAL_NS)  # nothing ran
    assert not keep(snapshots, 4, INTERVAL_NS - 1)
    # After one that took so long, the next comes no later than after one that took no time.
    assert keep(snapshots, 4, INTERVAL_NS, took_ns=SECOND // 100)
    assert not keep(snapshots, 5, 2 * INTERVAL_NS - 1)
    assert keep(snapshots, 5, 2 * INTERVAL_NS, took_ns=SECOND // 20)
    assert not keep(snapshots, 6, 2 * INTERVAL_NS + 50 * SECOND - 1)
    assert keep(snapshots, 6, 2 * INTERVAL_NS + 50 * SECOND)


def test_the_oldest_snapshot_is_dropped_if_there_are_too_many_or_too_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots = kept(*range(0, 10 * (MAX_KEPT + 2), 10))
    assert sequence_before(snapshots, 1000, 400) == 200
    monkeypatch.setattr(kept_snapshots, "MAX_BYTES", 1)
    assert keep(snapshots, 4000, 400 * SECOND)
    assert sequence_before(snapshots, 1000, 400) == 4000  # the newest is kept, however large


# Which snapshot is sent


@pytest.mark.parametrize(
    ("past_s", "now_s", "more", "expected"),
    [
        # the newest that is old enough, or else the oldest
        *((past_s, 35, {}, found) for past_s, found in ((14, 200), (15, 200), (16, 100))),
        *((600, 35, {}, 0), (0, 35, {}, 300)),
        (15, 3600, {}, 200),  # idle time does not age it
        (0, 3600, {"step": 300}, 200),  # the last one may have been taken after the last step
        (15, 3600, {"step": 300}, 100),
        *((600, 35, {"oldest": each}, 200) for each in (101, 190)),  # later messages are forgotten
        (600, 35, {"oldest": 195}, 300),  # dropped while answering
        (600, 35, {"oldest": 320}, None),
    ],
)
def test_the_snapshot_sent_is_old_enough_and_what_came_after_it_is_kept(
    past_s: float, now_s: float, more: dict[str, int], expected: int | None
) -> None:
    assert sequence_before(kept(0, 10, 20, 30), past_s, now_s, **more) == expected
    assert sequence_before(KeptSnapshots(), past_s, now_s, **more) is None


# An engine that runs


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is kept at every heartbeat, however busy the machine is."""
    monkeypatch.setattr(kept_snapshots, "INTERVAL_NS", 1)
    monkeypatch.setattr(kept_snapshots, "SHARE", 1.0)


def ask(client: ControlClient, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    client.send(Submit(prompt_token_ids=[1] * 40, sampling=sampling))


@pytest.mark.usefixtures("often")
def test_a_late_observer_that_fetches_past_steps_has_the_same_steps_as_an_early_one(
    live_engine: Any,
) -> None:
    first = joined(live_engine.endpoint)
    with ControlClient(live_engine.endpoint) as client:
        ask(client, 900)
        ask(client, 1)
        wait_for(lambda: (first.history.last_step or 0) > 200, "200 steps")
        client.set_knobs({"max_num_seqs": 7}, "somebody")
        wait_for(lambda: (first.history.last_step or 0) > 300, "300 steps")
        late = joined(live_engine.endpoint, past_s=3600.0)
        from_now = joined(live_engine.endpoint)
        ask(client, 20)  # the first may have ended while a busy machine joined
        last = first.history.last_step or 0
        wait_for(
            lambda: min(each.history.last_step or 0 for each in (late, from_now)) >= last,
            "all of it",
        )
        ends = [source.history.first_step for source in (first, late, from_now)]
        assert ends[0] == ends[1] == 0
        assert (ends[2] or 0) > 300
        assert lanes_of(late.history, 0, last) == lanes_of(first.history, 0, last)
        changes = [event.text for event in first.history.events(kinds=frozenset({"knobs"}))]
        assert changes
        assert changes == [event.text for event in late.history.events(kinds=frozenset({"knobs"}))]
        assert late.history.num_lost == 0
    for source in (first, late, from_now):
        source.stop()


@pytest.mark.usefixtures("often")
def test_the_kept_snapshot_sent_is_about_as_old_as_asked_for(live_engine: Any) -> None:
    with ControlClient(live_engine.endpoint) as client:
        ask(client, 980)
        newest = None
        deadline_s = time.monotonic() + 20
        while newest is None or newest.step < 500:
            newest = client.kept_snapshot(0)
            time.sleep(0.1)  # a client that asks more often has to wait
            assert time.monotonic() < deadline_s
        oldest = client.kept_snapshot(MAX_PAST_S)
        assert oldest.step == -1
        assert oldest.sequence < newest.sequence


def test_a_request_for_past_steps_beyond_the_bound_is_refused_naming_its_field(
    live_engine: Any,
) -> None:
    with ControlClient(live_engine.endpoint) as client:
        for past_s in (-1.0, MAX_PAST_S + 1, float("nan")):
            with pytest.raises(CommandRefused, match="past_s"):
                client.ask(GetKeptSnapshot(past_s=past_s))


class PastThatIsNotToBeHad(FakeEngine):
    """An engine that keeps no past, refuses to send it, or loses what came after the snapshot."""

    def __init__(self, folder: Path, *, keeps: bool, is_refused: bool) -> None:
        super().__init__(folder, info(keeps_snapshots=keeps))
        self.largest_replay = 0
        self.num_asked = 0
        self._is_refused = is_refused

    def _answer(self, command: AnyCommand) -> AnyReply:
        if not isinstance(command, GetKeptSnapshot):
            return super()._answer(command)
        self.num_asked += 1
        return Error(code="rate_limited", message="no") if self._is_refused else snapshot(0, 0)


@pytest.mark.parametrize(("keeps", "is_refused"), [(False, True), (True, True), (True, False)])
def test_past_steps_that_cannot_be_fetched_do_not_delay_live_steps(
    keeps: bool, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.recordings.live.subscriber.ASK_TIMEOUT_S", 0.3)
    engine = PastThatIsNotToBeHad(tmp_path, keeps=keeps, is_refused=is_refused)
    for number in range(5):
        engine.publish(step(number))
    source = joined(engine.endpoint, past_s=60.0)
    assert engine.num_asked == keeps  # an engine of an earlier version knows no such command
    engine.publish(step(5))
    wait_for(lambda: source.history.last_step == 5, "the step")
    assert source.history.num_lost == source.num_bad == 0
    source.stop()
    engine.close()


def test_a_knob_change_among_fetched_past_steps_is_shown_once(live_engine: Any) -> None:
    with ControlClient(live_engine.endpoint) as client:
        client.ask(SetKnobs(changes={"max_num_seqs": 5}, who="somebody"))
        late = joined(live_engine.endpoint, past_s=3600.0)
        assert [entry.who for entry in late.history.state.audit] == ["somebody"]
        late.stop()


class SlowWay:
    """A client with its own clock, of an engine that has kept a snapshot every second."""

    def __init__(self, ms_a_message: float) -> None:
        self.now_s = 0.0
        self.asked_s: list[float] = []
        self._ms_a_message = ms_a_message

    def kept_snapshot(self, past_s: float) -> Snapshot:
        self.asked_s.append(past_s)
        return snapshot(10_000 - round(50 * past_s), 0)

    def ask(self, command: ReplayFrom) -> Replayed:
        self.now_s += command.limit * self._ms_a_message / 1000
        frame = ReplayedFrame(b"step", command.sequence, b"")
        return Replayed(frames=[frame] * command.limit, oldest_sequence=0, next_sequence=10_001)


@pytest.mark.parametrize(
    ("ms_a_message", "asked_s"),
    [(0.5, [60]), (1.3, [60]), (2.0, [60, 30]), (10.0, [60, 30, 15, 7.5]), (200.0, None)],
)
def test_on_a_slow_link_fewer_past_steps_are_requested_so_that_live_steps_arrive_soon(
    ms_a_message: float, asked_s: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = SlowWay(ms_a_message)
    monkeypatch.setattr("stepscope.recordings.live.gap_recovery.time.monotonic", lambda: way.now_s)
    now = msgspec.structs.replace(snapshot(10_000, 0), info=info(keeps_snapshots=True))
    earlier = ask_for_earlier(way, now, 60.0, threading.Event())  # type: ignore[arg-type]
    if asked_s is None:
        assert earlier is None
        assert way.asked_s == [60, 30, 15, 7.5, 3.75, 1.875]
    else:
        assert way.asked_s == asked_s
        assert earlier.sequence == 10_000 - round(50 * asked_s[-1])


# Commands


def test_record_with_option_past_includes_steps_from_before_it_started(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "incident.mcap"
    with ControlClient(live_engine.endpoint) as client:
        ask(client, 300)
        core = live_engine.core
        wait_for(lambda: core.next_step >= 300 and not core.scheduler.requests, "the end of it")
    done = stepscope(
        "record", live_engine.endpoint.control, "-o", str(path), "--past", "60", "--seconds", "0.3"
    )
    assert done.exit_code == 0, done.stderr
    assert "0 messages lost" in done.stdout
    assert verify(path, lambda share: None).is_good
    with Recording(path) as recording:
        assert recording.first_step == 0
        assert (recording.last_step or 0) >= 299
