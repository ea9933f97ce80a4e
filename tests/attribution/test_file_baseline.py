"""Once a replay has searched its file, its baseline is that of the whole file."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.engine.simulation.step_time import StepShape, StepTime
from stepscope.recordings.attribution.baseline import Baseline, StepWork
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import explain_recording
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.history.history import History
from stepscope.recordings.replay import file_index
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.replayed import replayed
from tests.support.sessions.seek_sessions import busy, record
from tests.support.sessions.slow_step_sessions import (
    NoisyCost,
    once_beside_a_prompt,
    session,
    slow_pieces,
)

Numbered = list[tuple[int, Telemetry]]
LATE = SLO(ttft_ms=60_000, itl_ms=200)
MIXED = Knobs(max_num_batched_tokens=256, max_num_seqs=16)


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 30_000)


@pytest.fixture
def slow() -> tuple[Numbered, int]:
    """A session and its slow step, one of the first."""
    cost = NoisyCost(holds=once_beside_a_prompt(20))
    messages = session(cost, knobs=MIXED)
    (step,) = cost.slow
    return messages, step


@pytest.fixture
def replay(tmp_path: Path, slow: tuple[Numbered, int]) -> Iterator[ReplaySource]:
    """A replay of the slow session, with few steps in memory."""
    path = record(tmp_path / "held.mcap", slow[0])
    with replayed(path, History(LATE, max_steps=30)) as source:
        yield source


def learnt_of(recording: Recording) -> list[tuple[StepWork, int]]:
    noting = Noting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_index, "Baseline", lambda: noting)
        found = FileIndex(recording.path)
    found.start()
    assert found.wait(30)
    return sorted(noting.added)


class Noting(Baseline):
    """A baseline that notes the steps added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[StepWork, int]] = []

    def add(self, work: StepWork, ns: int) -> None:
        self.added.append((work, ns))


def told(messages: Numbered) -> list[tuple[StepWork, int]]:
    """The steps of all messages, one message after another."""
    return sorted(learnt(messages, Noting()).added)


def learnt(messages: Numbered, baseline: Any) -> Any:
    explainer = Explainer(math.inf, math.inf, learns=baseline)
    for _, message in messages:
        explainer.take(message)
    return baseline


def test_the_file_search_and_explain_learn_the_same_baseline(tmp_path: Path) -> None:
    for seed, overlap in ((1, False), (2, True)):
        messages = session(NoisyCost(), knobs=MIXED, seed=seed, overlap=overlap)
        with Recording(record(tmp_path / f"{seed}.mcap", messages)) as recording:
            assert recording.num_chunks > 5
            assert learnt_of(recording) == told(messages)
    messages = list(enumerate(busy(3, 900)))
    with Recording(record(tmp_path / "busy.mcap", messages)) as recording:
        assert learnt_of(recording) == told(messages)


def test_the_baseline_covers_nearly_every_step_despite_lost_messages(tmp_path: Path) -> None:
    messages = list(enumerate(busy(4, 900)))
    del messages[300:310], messages[600:603]
    with Recording(record(tmp_path / "lost.mcap", messages)) as recording:
        found, expected = learnt_of(recording), told(messages)
        assert len(expected) - 2 * recording.num_chunks <= len(found) <= len(expected)
        # Lost messages add nothing: both take the step after the gap alike.
        assert set(found) <= set(expected)


def test_a_replay_explains_like_explain(replay: ReplaySource, slow: tuple[Numbered, int]) -> None:
    _, step = slow
    with Recording(replay.recording.path) as recording:
        found = [w for w in explain_recording(recording, LATE).late if w.step == step]
    assert {late.cause for late in found} == {"held_up"}
    assert replay.file_index.wait(30)
    replay.seek(step + 2)
    assert replay.wait(30)
    assert replay.history.num_steps < 60
    for late in found:
        assert replay.history.wait(step, late.request_id) == late


def test_waits_are_explained_again_by_the_baseline_of_all(slow: tuple[Numbered, int]) -> None:
    messages, step = slow
    at = next(n for n, m in messages if isinstance(m, StepRecord) and m.step == step + 2)
    history = history_of([each for each in messages if each[0] <= at], LATE)
    baseline = learnt(messages, Baseline())
    first = history.stall(step)
    assert "held_up" not in {piece.cause for piece in first.pieces}  # too few steps are in memory
    view, version = history.state.requests[first.request_id], history.version
    history.lives.life(view)
    history.know_baseline(baseline)
    assert history.version > version  # so that it is drawn anew
    second, life = history.stall(step), history.lives.life(view)
    assert len(slow_pieces([second])) == 1
    assert [wait.pieces for wait in life.waits if wait.step == step] == [second.pieces]


def test_a_baseline_from_fewer_steps_than_are_in_memory_is_not_used() -> None:
    cost = NoisyCost(holds=once_beside_a_prompt(600))
    history = history_of(session(cost, knobs=MIXED), LATE)
    history.know_baseline(Baseline())
    (step,) = cost.slow
    assert history.stall(step).cause == "held_up"


@pytest.mark.parametrize(("enough", "num_known"), [(16_384, 900), (100, 100)])
def test_a_file_search_tells_the_baseline_once_when_enough_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int, num_known: int
) -> None:
    monkeypatch.setattr(file_index, "ENOUGH_STEPS", enough)
    path = record(tmp_path / "a.mcap", list(enumerate(busy(5, 900))))
    given: list[tuple[Baseline, int]] = []
    latency = FileIndex(path, learnt=lambda learnt: given.append((learnt, learnt.num_steps)))
    latency.start()
    assert latency.wait(30)
    latency.stop()
    ((baseline, num_steps),) = given
    assert num_known <= num_steps == baseline.num_steps


SLOW = {600: 4.0, 601: 2.5, 602: 2.6, 603: 2.4, 604: 1.5, 605: 2.5}


class SlowForAWhile(NoisyCost):
    """Costs of steps, some of which in a row take `factor` times as long."""

    def step_time(self, shape: StepShape) -> StepTime:
        times = SLOW.get(self.step, 1.0)
        time = super().step_time(shape)
        return time._replace(device_s=time.device_s * times)


def test_slow_steps_in_a_row_are_one_event_with_waits_explained_as_by_explain() -> None:
    messages = session(SlowForAWhile(noise=0.02), knobs=MIXED)
    baseline = learnt(messages, Baseline())
    telling, history = Explainer(-1, -1, baseline=baseline), history_of(messages, LATE)
    for _, message in messages:
        telling.take(message)
    history.know_baseline(baseline)
    slow = {piece.step for piece in slow_pieces(w for w in telling.late if w.token_idx)}
    assert slow == {600, 601, 602, 603}  # what is as slow later is not of this stretch
    waits = [late for late in telling.late if 598 <= late.step <= 606]
    assert len(waits) > 10
    for late in waits:
        assert history.wait(late.step, late.request_id).pieces == late.pieces
