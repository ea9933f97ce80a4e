"""A hanging step is visible while it hangs, to every observer, whenever it joined."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineStatus, Phase, StepInFlight, StepRecord, Telemetry
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.telemetry import step_watcher
from stepscope.engine.telemetry.step_watcher import RunningRow, StepUnderWay, StepWatcher
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.check.verify import verify
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.audit_text import in_flight_text, work_text
from stepscope.recordings.state.session import SessionState
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.fake_engine import step
from tests.support.engines.live_engine import LiveEngine
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.following import following
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.replayed import replayed, seek
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

S = 1_000_000_000


def message(step: int = 7, time_ns: int = 3 * S, num_decodes: int = 2) -> StepInFlight:
    rows = [RunningRow(3, Phase.PREFILL, 0, 500), RunningRow(4, Phase.RECOMPUTE, 0, 900)]
    rows += [RunningRow(10 + i, Phase.DECODE, 50, 1) for i in range(num_decodes)]
    return StepUnderWay(step, S, rows, 2048).message(time_ns)


# The message


def test_a_step_in_flight_names_its_prompts_and_counts_its_decodes() -> None:
    said = message()
    assert (said.num_prefill_tokens, said.num_decode_tokens, said.num_decodes) == (1400, 2, 2)
    assert [part.request_id for part in said.prefills] == [4, 3]  # the largest first
    assert (
        in_flight_text(said)
        == "step 7 in flight 2.0 s: 1,400 prefill of r4 and r3 beside 2 decodes"
    )
    assert work_text(message(num_decodes=0)) == "1,400 prefill of r4 and r3"


def test_a_step_in_flight_is_published_after_a_second() -> None:
    step = StepUnderWay(5, 0, [RunningRow(1, Phase.DECODE, 9, 1)], None)
    for took_ns, is_published in ((S - 1, False), (S, True)):
        published: list[StepInFlight] = []
        watched: Any = SimpleNamespace(step_under_way=step)
        StepWatcher(watched, published.append, Mock(return_value=took_ns)).look()
        assert bool(published) == is_published


# The state of a session


def test_a_step_record_ends_the_step_in_flight_and_late_messages_change_nothing() -> None:
    state = SessionState()
    state.apply(message(step=7))
    assert state.in_flight is not None
    assert state.time_ns == 3 * S
    state.apply(step(7))
    assert state.in_flight is None
    state.apply(message(step=7))
    assert state.in_flight is None
    for newer_ns, is_over in ((S // 2, False), (3 * S // 2, True)):  # a heartbeat may end it too
        state.apply(message(step=8, time_ns=5 * S))
        more = {"state": "running", "num_running": 1, "num_waiting": 0}
        state.apply(EngineStatus(time_ns=5 * S + newer_ns, step=7, **more))
        assert (state.in_flight is None) == is_over


# An engine whose runner blocks


@contextmanager
def hanging(engine: LiveEngine) -> Iterator[threading.Event]:
    """Let the engine's steps hang from now on until the event is set."""
    release, execute = threading.Event(), engine.core.runner.execute

    def hang(step: ScheduledStep) -> StepResult:
        release.wait()
        return execute(step)

    engine.core.runner.execute = hang  # type: ignore[method-assign]
    watcher = StepWatcher(engine.core, engine.publisher.publish_aside, clock=engine.core.clock)
    watcher.start()
    try:
        yield release
    finally:
        release.set()
        watcher.close()


@contextmanager
def asking(endpoint: Endpoint) -> Iterator[None]:
    """A client that waits for four tokens after a prompt of 300."""
    with ControlClient(endpoint) as client:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        client.send(Submit(client_id="a", prompt_token_ids=[5] * 300, sampling=sampling))
        yield


def sees_it(subscriber: Subscriber) -> Callable[[], bool]:
    return lambda: subscriber.history.state.in_flight is not None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watcher, "LOOK_S", 0.02)
    monkeypatch.setattr(step_watcher, "LONG_NS", 50_000_000)


@pytest.mark.usefixtures("quick")
def test_every_subscriber_and_a_recording_gets_the_step_in_flight(
    live_engine: LiveEngine, tmp_path: Path
) -> None:
    with following(live_engine.endpoint) as first:
        recorder = Recorder(first, tmp_path / "hang.mcap")
        with hanging(live_engine) as release, asking(live_engine.endpoint):
            wait_for(sees_it(first), "the step in flight is seen")
            flying = first.history.state.in_flight
            assert (flying.step, flying.num_prefill_tokens) == (0, 300)
            with following(live_engine.endpoint) as late:  # while the engine answers nothing
                wait_for(sees_it(late), "who comes during it sees it")
                assert late.status == "live"
                release.set()
                wait_for(lambda: late.history.last_step == 3, "the session goes on")
                assert late.history.state.in_flight is None
                assert late.history.num_lost == 0
            wait_for(lambda: first.history.last_step == 3, "the session goes on")
        told = [e.text for e in first.history.events(None, 50, frozenset({"engine"}))]
        assert sum("in flight" in text for text in told) == 1  # once, however long it took
        assert first.history.num_lost == 0
        recorder.stop()
    assert verify(tmp_path / "hang.mcap", lambda share: None).is_good
    with Recording(tmp_path / "hang.mcap") as recording:
        topics = [frame.topic for frame, _ in recording.frames()]
    assert b"in_flight" in topics


class Deferred:
    """A launched step that ends once its gate is open."""

    def __init__(
        self, step: ScheduledStep, gate: threading.Event, clock: Callable[[], int]
    ) -> None:
        self._step, self._gate, self._clock = step, gate, clock

    def collect(self) -> StepResult:
        self._gate.wait()
        now_ns = self._clock()
        return StepResult([7 if row.samples else None for row in self._step.rows], now_ns, now_ns)


@pytest.mark.parametrize("live_engine", [{"overlap": True}], indirect=True)
def test_with_overlap_the_step_in_flight_is_the_one_awaited_or_launched(
    live_engine: LiveEngine,
) -> None:
    launches, collects = threading.Event(), threading.Event()

    def launch(step: ScheduledStep) -> Deferred:
        if step.step == 2:
            launches.wait()
        return Deferred(step, collects, core.clock)

    def is_at(number: int) -> bool:
        step = core.step_under_way
        return step is not None and step.step == number

    core = live_engine.core
    core.runner.launch = launch  # type: ignore[method-assign]
    with asking(live_engine.endpoint):
        wait_for(lambda: is_at(0) and core.next_step == 2, "step 0 is waited for, 1 is launched")
        assert [row.num_tokens for row in core.step_under_way.rows] == [300]
        collects.set()
        wait_for(lambda: is_at(2), "step 2 is launched")
        launches.set()
        wait_for(lambda: core.last_step >= 3 and core.step_under_way is None, "all have ended")


# An engine that is killed, or stopped


@pytest.mark.slow
def test_a_killed_or_stopped_engine_is_distinguished_from_a_hanging_step(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    with (
        EngineProcess(f"{tmp_path}/engine", "", "", str(hang)) as engine,
        following(engine.endpoint) as source,
    ):
        hang.touch()
        with asking(engine.endpoint):
            wait_for(sees_it(source), "the step in flight is seen")
            assert source.status == "live"
            engine.send(signal.SIGSTOP)  # none of its threads runs any more
            wait_for(lambda: source.status == "down", "it is silent")
            assert "stopped or cut off" in str(source.error)
            assert source.history.state.in_flight is not None  # the step it was in
            engine.send(signal.SIGCONT)
            wait_for(lambda: source.status == "live", "it is heard again")
            engine.kill()
            wait_for(lambda: source.status == "down", "it is gone")
            assert source.history.state.in_flight.step == 0


# A replay


def test_steps_in_flight_in_a_recording_do_not_change_its_replay(tmp_path: Path) -> None:
    messages: list[tuple[int, Telemetry]] = []
    for _, each in simulate(seed=5, num_steps=600):
        if isinstance(each, StepRecord) and each.step % 97 == 96:
            start_ns = each.schedule_start_ns
            flying = StepUnderWay(each.step, start_ns, [RunningRow(1, 1, 9, 1)], 512)
            messages.append((len(messages), flying.message(start_ns + 1)))
        messages.append((len(messages), each))
    path, live = record(tmp_path / "flying.mcap", messages), history_of(messages)
    assert verify(path, lambda share: None).is_good
    with replayed(path) as replay:
        seek(replay, 599)
        assert replay.history.state == live.state
    kinds = frozenset({"engine"})
    told = [event.text for event in live.events(None, 99, kinds) if "in flight" in event.text]
    assert len(told) == 6
