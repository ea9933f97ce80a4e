"""Overlap: what clients and operators see of steps prepared while the last one still runs."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.bench.measured_run import measure
from stepscope.engine.control.intake import Intake
from stepscope.engine.loop import pipeline
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import commands, wire
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.replies import AnyReply, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.step import (
    DeviceLostError,
    DeviceMemoryError,
    InFlight,
    ScheduledStep,
    StepResult,
)
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.check.verify import verify
from stepscope.recordings.state.session import SessionState
from tests.support.engines.core_ends import Client
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.engines.whole_core import WholeCore
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import record

LIMITS = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256)
BUSY = SimulatedWorkload(rate=20.0, output_tokens=80)


class Engine(WholeCore):
    def __init__(self, runner: SimulatedRunner | None = None, **options: Any) -> None:
        super().__init__(LIMITS, runner, overlap=True, **options)

    def submit(  # type: ignore[override]
        self, max_tokens: int, num_prompt: int = 40, first: int = 0, **sampling: object
    ) -> Client:
        prompt = list(range(first, first + num_prompt))
        return super().submit(prompt, max_tokens=max_tokens, **sampling)


def test_with_overlap_the_host_works_while_the_device_runs() -> None:
    """Shown by the order of events: a step ends once it is waited for, and not before."""
    log: list[str] = []

    class Logged(SimulatedRunner):
        def launch(self, step: ScheduledStep) -> Any:  # type: ignore[override]
            log.append(f"launch {step.step}")
            result = super().launch(step).collect()

            def collect() -> StepResult:
                log.append(f"end {step.step}")
                return result

            return SimpleNamespace(collect=collect)

    engine = Engine(Logged(CostModel()))
    client = engine.submit(6)
    publish = engine.sink.publish

    def noted(message: wire.Telemetry) -> None:
        if isinstance(message, StepDraft):
            log.append(f"tell {message.step}")
        publish(message)

    engine.sink.publish = noted  # type: ignore[method-assign]
    engine.run()
    assert len(client.tokens) == 6
    for step in range(5):
        assert log.index(f"launch {step + 1}") < log.index(f"end {step}")
        assert log.index(f"end {step}") < log.index(f"tell {step}") < log.index(f"end {step + 1}")
    assert [record.hidden_ns is not None for record in engine.sink.records] == [False] + [True] * 5


def test_with_overlap_host_time_is_hidden_and_counted_once() -> None:
    def spent(overlap: bool) -> tuple[int, list[wire.StepRecord]]:
        messages = simulate(seed=1, num_steps=300, workload=BUSY, overlap=overlap)
        steps = [m for _, m in messages if isinstance(m, wire.StepRecord)]
        return sum(s.tokens_ns - s.schedule_start_ns for s in steps), steps

    _, serial = spent(overlap=False)
    busy_ns, steps = spent(overlap=True)
    assert all(step.hidden_ns is None and step.num_wasted_tokens is None for step in serial)
    hidden = [step for step in steps if step.hidden_ns is not None]
    assert len(hidden) > 0.9 * len(steps)
    assert {step.hidden_ns for step in hidden} == {round(CostModel().host_ms * 1e6)}
    # The device pauses only where nothing was prepared: each step's own time is the cost model's.
    cost = CostModel()
    for step in hidden:
        tokens = step.num_prefill_tokens + step.num_decode_tokens
        assert step.tokens_ns - step.schedule_start_ns >= cost.floor_ms * 1e6 + tokens * 40_000
    for before, after in itertools.pairwise(steps):
        assert before.tokens_ns <= after.schedule_start_ns
    assert busy_ns <= steps[-1].tokens_ns - steps[0].schedule_start_ns


def test_with_overlap_recordings_pass_verify_and_time_shares_stay_within_bounds(
    tmp_path: Path,
) -> None:
    messages = simulate(seed=2, num_steps=400, workload=BUSY, num_blocks=600, overlap=True)
    history = history_of(messages)
    explainer = Explainer(0, 0)
    for _, message in messages:
        explainer.take(message)
    report = verify(record(tmp_path / "overlap.mcap", messages), lambda share: None)
    assert [check.problems for check in report.checks if not check.is_good] == []
    assert report.num_steps == 400
    sums = history.windows.sums(history.state.time_ns, 10.0)
    assert sums.model_ns is not None
    assert sums.schedule_ns is not None
    assert sums.busy_ns is not None
    assert 0 <= sums.model_ns + sums.schedule_ns <= sums.busy_ns <= sums.span_ns
    for late in explainer.late:
        assert sum(piece.ns for piece in late.pieces) == late.end_ns - late.start_ns
        assert all(piece.ns >= 0 for piece in late.pieces)
        assert all(piece.cause != "unknown" for piece in late.pieces)


def test_a_request_that_ends_without_finite_logits_counts_as_running_in_no_later_record() -> None:
    class Unsound(SimulatedRunner):
        def launch(self, step: ScheduledStep) -> InFlight:
            result = super().launch(step).collect()
            rows = [i for i, row in enumerate(step.rows) if row.request.num_output_tokens > 3]
            found = replace(result, unsound_rows=tuple(i for i in rows if i == 0))
            return SimpleNamespace(collect=lambda: found)

    engine = Engine(Unsound(CostModel()))
    clients = [engine.submit(20, first=first) for first in (0, 50)]
    engine.run()
    state = SessionState()
    for message in engine.sink.messages:
        state.apply(message)
        if isinstance(message, wire.StepRecord):
            running = [view for view in state.requests.values() if view.status == "running"]
            assert message.num_running == len(running), f"step {message.step}"
    assert {client.outputs[-1].finish_reason for client in clients} == {"abort"}
    assert engine.core.scheduler.kv.counts().used == 0


@pytest.mark.parametrize("early_ms", [0, 2, 7])
def test_the_wait_of_a_request_that_arrived_during_a_step_is_fully_explained(early_ms: int) -> None:
    """The device runs on in virtual time; its step has ended before anything waits for it."""
    runner = SimulatedRunner(CostModel())
    engine = Engine(runner)
    engine.submit(60)
    for _ in range(5):
        engine.core.step()
    arrivals_ns = []
    for first in (100, 200):  # published with the step after, then with the step itself
        assert engine.core.has_step_in_flight
        runner.advance_to(runner.clock() + early_ms * 1_000_000)
        arrivals_ns.append(runner.clock())
        engine.submit(10, first=first)
        if first == 200:
            engine.ask(commands.SetKnobs(changes={"max_num_batched_tokens": 77}))
        for _ in range(4):
            engine.core.step()
    engine.run()
    records = engine.sink.records
    told_in = [record for r in (1, 2) for record in records if r in _arrived(record)]
    assert [
        arrival < record.schedule_start_ns
        for arrival, record in zip(arrivals_ns, told_in, strict=True)
    ] == [True, False]
    explainers = [Explainer(0, 0), *(Explainer(0, 0, only=request_id) for request_id in (1, 2))]
    for message in engine.sink.messages:
        for explainer in explainers:
            explainer.take(message)
    firsts = {late.request_id: late for late in explainers[0].late if not late.token_idx}
    for request_id, arrival_ns in zip((1, 2), arrivals_ns, strict=True):
        late = firsts[request_id]
        assert late.start_ns == arrival_ns
        assert [piece.cause for piece in late.pieces] == ["queued", "prompt"]
        assert "for the step under way to end" in late.pieces[0].text
        alone = explainers[request_id]
        assert alone.waits.life[0].start_ns == arrival_ns
        assert alone.late[0] == late
    for explainer in explainers:
        assert all(piece.cause != "unknown" for late in explainer.late for piece in late.pieces)
        for late in explainer.late:
            assert sum(piece.ns for piece in late.pieces) == late.gap_ns


def _arrived(record: wire.StepRecord) -> list[int]:
    return [event.request_id for event in record.events if isinstance(event, wire.Arrived)]


def test_a_token_computed_after_its_request_ended_is_counted_as_wasted() -> None:
    # The simulated tokens are a request's own: find the one at which the second request stops.
    other = Engine()
    other.submit(8)
    second = other.submit(8)
    other.run()
    engine = Engine()
    beside = engine.submit(12)
    stopped = engine.submit(8, stop_token_ids=(second.tokens[3],))
    engine.run()
    assert stopped.tokens == second.tokens[:4]
    assert stopped.outputs[-1].finish_reason == "stop"
    assert len(beside.tokens) == 12
    records = engine.sink.records
    at = next(
        i for i, r in enumerate(records) if any(isinstance(e, wire.Finished) for e in r.events)
    )
    assert len(records[at].batch or ()) == 2
    assert records[at + 1].num_wasted_tokens == 1
    assert [row.request_id for row in records[at + 1].batch or ()] == [0]
    assert records[at + 1].num_decode_tokens == 1
    assert sum(record.num_wasted_tokens or 0 for record in records) == 1


def test_with_overlap_a_knob_change_takes_effect_at_the_step_in_its_ack() -> None:
    engine = Engine()
    engine.submit(200)
    for _ in range(5):
        engine.core.step()
    assert engine.core.has_step_in_flight
    answer = engine.ask(commands.SetKnobs(changes={"max_num_batched_tokens": 77})).replies
    for _ in range(3):
        engine.core.step()
    (ack,) = answer
    budgets = {record.step: record.token_budget for record in engine.sink.records}
    assert budgets[ack.effective_step - 1] == Knobs().max_num_batched_tokens
    assert budgets[ack.effective_step] == 77
    records = engine.sink.records
    # Nothing was prepared before the change that holds after it; the next ones are again.
    assert [r.hidden_ns is None for r in records if r.step >= ack.effective_step][:2] == [
        True,
        False,
    ]


def test_a_stopping_engine_finishes_the_step_in_flight() -> None:
    engine = Engine()
    client = engine.submit(50)
    stopper = threading.Thread(target=engine.core.run)

    class StopAt(Client):
        def reply(self, message: AnyReply) -> None:
            client.reply(message)
            if isinstance(message, Output) and message.num_output_tokens == 20:
                engine.core.stop()  # as a measured run does, while the next step runs

    engine.core.inbox.get_nowait()
    engine.core.inbox.put(
        Call(commands.Submit(sampling=SamplingParams(max_tokens=50)), StopAt(), list(range(40)))
    )
    stopper.start()
    stopper.join(60)
    assert not stopper.is_alive()
    assert not engine.core.has_step_in_flight
    assert client.outputs[-1].finish_reason == "abort"
    assert len(client.tokens) == 21  # that of the step in flight, too
    last = engine.sink.messages[-1]
    assert last.state == "stopped"
    assert last.step == engine.sink.records[-1].step


def test_drain_and_shutdown_leave_no_step_in_flight() -> None:
    engine = Engine()
    client = engine.submit(20)
    for _ in range(3):
        engine.core.step()
    engine.ask(commands.Drain())
    late = engine.submit(5)
    engine.run()
    assert len(client.tokens) == 20
    assert not late.outputs
    engine.ask(commands.Shutdown())
    engine.core.run()
    assert engine.scheduler.kv.counts().used == 0


def test_tokens_and_texts_in_telemetry_belong_to_the_published_rows() -> None:
    probe = Engine()
    probe.submit(8)
    wanted = probe.submit(8)
    probe.run()
    engine = Engine(token_publisher=TokenPublisher(None))
    clients = [engine.submit(12), engine.submit(8, stop_token_ids=(wanted.tokens[2],))]
    engine.run()
    told: dict[int, list[int]] = {0: [], 1: []}
    for step in engine.sink.records:
        for row, token in zip(step.batch or (), step.token_ids, strict=True):
            if token is not None:
                told[row.request_id].append(token)
    assert [told[0], told[1]] == [client.tokens for client in clients]


class NoMemory(SimulatedRunner):
    """Runs at most `room` tokens at once."""

    def __init__(self, room: int) -> None:
        super().__init__(CostModel())
        self.room = room
        self.num_failed = 0

    def launch(self, step: ScheduledStep) -> InFlight:  # type: ignore[override]
        if sum(row.num_tokens for row in step.rows) > self.room:
            self.num_failed += 1
            raise DeviceMemoryError
        return super().launch(step)


def test_after_the_device_ran_out_of_memory_steps_stay_small_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "SMALL_STEPS", 50)
    runner = NoMemory(32)
    engine = Engine(runner)
    clients = [engine.submit(150, first=50 * i) for i in range(3)]
    engine.run()
    assert all(len(client.tokens) == 150 for client in clients)
    records = engine.sink.records
    assert runner.num_failed == 2, "each step ran out of memory again"  # with 120 tokens, then 60
    limited = [record for record in records if record.token_limit is not None]
    assert limited == records[: len(limited)]
    assert [(r.token_limit, r.token_budget) for r in limited] == [(30, 30)] * len(limited)
    assert 50 <= len(limited) <= 52
    engine.submit(2, num_prompt=50, first=600)  # as large a step is tried again
    engine.run()
    assert runner.num_failed == 3
    assert engine.sink.records[-1].token_limit == 25


def test_a_request_that_device_memory_cannot_hold_is_ended_with_the_reason() -> None:
    knobs = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    engine = Engine(NoMemory(32), knobs=knobs)
    clients = [engine.submit(20, num_prompt=60), engine.submit(20, num_prompt=30, first=60)]
    engine.run()
    assert [client.outputs[-1].finish_reason for client in clients] == ["abort", "length"]
    events = [event for m in engine.sink.messages for event in getattr(m, "events", [])]
    (aborted,) = (event for event in events if isinstance(event, wire.Aborted))
    assert "no memory" in aborted.reason
    assert engine.scheduler.kv.counts().used == 0
    none_at_all = Engine(NoMemory(0))
    client = none_at_all.submit(20)
    none_at_all.run()
    assert client.outputs[-1].finish_reason == "abort"


def test_the_throughput_bench_with_overlap_counts_every_step_and_time_once() -> None:
    engine = Engine()
    prompt = list(range(40))
    submits = [
        commands.Submit(
            prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=20, ignore_eos=True)
        )
        for _ in range(6)
    ]
    result, requests = measure(
        engine.core, Intake(None, 4096, LIMITS.max_model_len), submits, warmup=submits[:2]
    )
    assert (result.num_finished, result.num_failed) == (6, 0)
    assert [request.num_output_tokens for request in requests] == [20] * 6
    warmup = sum(
        1 for r in engine.sink.records if {row.request_id for row in r.batch or ()} & {0, 1}
    )
    assert result.steps.num_steps == len(engine.sink.records) - warmup
    shares = result.steps.shares
    parts = (shares.schedule, shares.prepare, shares.model, shares.finish)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(1)
    total_ms = result.steps.step_ms.mean * result.steps.num_steps
    assert total_ms <= result.seconds * 1e3 + 1


@pytest.mark.parametrize(
    ("setting", "launch_blocks", "expected"),
    [("auto", False, True), ("auto", True, False), ("on", False, True), ("off", False, False)],
)
def test_overlap_is_used_only_for_asynchronous_devices(
    setting: str, launch_blocks: bool, expected: bool
) -> None:
    config = EngineConfig(overlap=setting)  # type: ignore[arg-type]
    assert config.overlaps(launch_blocks=launch_blocks) is expected


class Breaking(SimulatedRunner):
    """The device fails in a step after `num_good` ones, and then for good."""

    def __init__(self, num_good: int) -> None:
        super().__init__(CostModel())
        self.num_good = num_good
        self.is_lost = False

    def launch(self, step: ScheduledStep) -> Any:  # type: ignore[override]
        if self.is_lost:
            raise DeviceLostError("device_lost", "the GPU runs no step any more")
        self.is_lost = step.step == self.num_good
        return self if self.is_lost else super().launch(step)

    def collect(self) -> StepResult:
        raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize("num_good", [0, 1, 7])
def test_an_engine_whose_device_failed_for_good_ends_every_request_and_then_itself(
    num_good: int,
) -> None:
    engine = Engine(Breaking(num_good))
    clients = [engine.submit(20, first=50 * i) for i in range(20)]  # at most 8 run at once
    with pytest.raises(DeviceLostError):
        engine.core.run()
    assert [client.outputs[-1].finish_reason for client in clients] == ["abort"] * 20
    events = [event for m in engine.sink.messages for event in getattr(m, "events", [])]
    aborted = [event for event in events if isinstance(event, wire.Aborted)]
    assert "the GPU runs no step any more" in {event.reason for event in aborted}
    assert engine.sink.messages[-1].state == "stopped"
    assert engine.scheduler.kv.counts().used == 0
