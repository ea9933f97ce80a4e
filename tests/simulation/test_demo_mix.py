"""What the first half minute of `stepscope demo` shows, on machines of any speed, in virtual time.

The scheduler is the real one; steps cost about what they cost on two CPU cores, times a factor.
"""

import re
import threading
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import msgspec
import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.process import simulated
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import GetSnapshot, SetKnobs, SetWorkload, Shutdown, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Preempted, StepCosts, StepRecord, Telemetry
from stepscope.engine.simulation.simulated import START_NS
from stepscope.engine.simulation.virtual_requests import MadeUpCodec, SimulatedRequest, of_mix
from stepscope.engine.simulation.virtual_session import SimulatedSession, SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.history.history import History
from stepscope.recordings.history.verdict import Verdict, verdict_of
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.dashboards.demo import (
    KNOBS,
    SERVICE_LEVELS,
    STALL_S,
    WORKLOAD,
    first_minute,
)
from stepscope.tui.settings.actions import BY_ID
from tests.support.engines.cost_model import CostModel

NUM_BLOCKS = 640  # of the demo model: tests/models/test_models.py
SPEEDS = [0.25, 1.0, 2.0]  # times as long as on two quiet cores
END_S = 32.0
RECHECK_NS = 50_000_000  # how soon the engine's workload sees that a request has ended


class Records:
    """A sink for the messages that the engine publishes."""

    def __init__(self) -> None:
        self.history = History(SLO(SERVICE_LEVELS["slo_ttft_ms"], SERVICE_LEVELS["slo_itl_ms"]))
        self.steps: list[StepRecord] = []
        self.verdicts: list[tuple[float, Verdict]] = []
        self.next_sequence = self.num_dropped = 0

    def publish(self, message: Telemetry) -> None:
        payload = wire.encode(message)
        self.history.append(self.next_sequence, payload)
        self.next_sequence += 1
        record = wire.decode(payload)
        if isinstance(record, StepRecord):
            self.steps.append(record)
            at_s = seconds(record.tokens_ns)
            if not self.verdicts or at_s >= self.verdicts[-1][0] + 1:  # as the screen does
                self.verdicts.append((at_s, verdict_of(self.history)))


@cache
def half_a_minute(times_slower: float) -> Records:
    """The records of the first half minute of the demo."""
    model = CostModel(
        floor_ms=5 * times_slower, token_us=250 * times_slower, context_ns=60 * times_slower
    )
    setup = SimulatedSetup(
        model=model,
        simulated="a test",
        model_name="demo",
        device="virtual",
        knobs=KNOBS,
        limits=Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192),
        num_blocks=NUM_BLOCKS,
        block_size=16,
    )
    costs = StepCosts(
        num_streams=8,
        decode_ms=7 * times_slower,
        num_prefill_tokens=512,
        prefill_ms=133 * times_slower,
    )
    acts = [act for act in first_minute(WORKLOAD, KNOBS, costs) if act.at_s < END_S]
    records = Records()
    session = SimulatedSession(setup, 0, records)
    spec, coming = WORKLOAD, iter(())
    next_request, late_ns = None, 0  # a postponed arrival delays the later ones
    knobs = KNOBS
    for act, until_s in zip(acts, [*(act.at_s for act in acts[1:]), END_S], strict=True):
        at_ns, until_ns = round(act.at_s * 1e9), round(until_s * 1e9)
        session.run_until(at_ns)
        if isinstance(act.command, SetWorkload):
            spec = act.command.workload
            coming = of_mix(spec, 8192)
            next_request, late_ns = next(coming), at_ns
        elif isinstance(act.command, SetKnobs):
            knobs = msgspec.convert(knobs.as_dict() | act.command.changes, Knobs)
            session.set_knobs(knobs, at_ns)
        elif isinstance(act.command, Submit):
            tokens, sampling = act.command.max_prompt_tokens, act.command.sampling
            session.submit(SimulatedRequest(at_ns, tokens, sampling.max_tokens))
        while next_request is not None:
            due_ns = max(at_ns, next_request.arrival_ns + late_ns)
            session.run_until(min(due_ns, until_ns))
            while session.num_unfinished >= (spec.max_concurrency or 0) and due_ns < until_ns:
                due_ns = max(due_ns, session.now_ns) + RECHECK_NS
                session.run_until(min(due_ns, until_ns))
            if due_ns >= until_ns:
                break
            late_ns = due_ns - next_request.arrival_ns
            session.submit(next_request._replace(arrival_ns=due_ns))
            next_request = next(coming)
    return records


@pytest.fixture(params=SPEEDS)
def records(request: pytest.FixtureRequest) -> Records:
    return half_a_minute(request.param)


def seconds(time_ns: int) -> float:
    return (time_ns - START_NS) / 1e9


def is_mixed(step: StepRecord) -> bool:
    return step.num_prefill_tokens > 0 and step.num_decode_tokens > 0


def test_chunks_beside_decodes_come_in_the_first_seconds_of_the_demo(records: Records) -> None:
    steps = records.steps
    early = [step for step in steps if seconds(step.tokens_ns) < 8]
    assert sum(map(is_mixed, early)) > 20
    assert sum(map(is_mixed, steps)) >= 0.25 * len(steps)


def test_nothing_is_late_in_the_demo_before_the_staged_stall(records: Records) -> None:
    late = records.history.windows.breaches(None, 4096)
    assert seconds(late[0].time_ns) > STALL_S
    assert all(said.tone != "breach" for at_s, said in records.verdicts if at_s < STALL_S)


def test_the_verdict_explains_the_staged_stall_of_the_demo(records: Records) -> None:
    said = [each.text for at_s, each in records.verdicts if STALL_S < at_s < 15]
    stalled = next(text for text in said if "stood still" in text)
    assert re.match(r"\d streams stood still [\d.]+ s at step [\d,]+ behind ", stalled), stalled
    assert "prompt" in stalled


def test_a_request_is_preempted_within_half_a_minute_of_the_demo(records: Records) -> None:
    preempted = [s for s in records.steps if any(isinstance(each, Preempted) for each in s.events)]
    assert preempted
    assert STALL_S < seconds(preempted[0].tokens_ns) < 29


def test_the_keys_in_the_hints_of_the_demo_do_what_they_say() -> None:
    hints = " ".join(act.hint for act in first_minute(WORKLOAD, KNOBS, None))
    for action, said in (
        ("pause", "space stops"),
        ("worst", "w goes there"),
        ("inspect", "Enter says why"),
        ("live", "L comes back"),
        ("budget", "B changes the token budget"),
        ("help", "? lists"),
    ):
        assert said in hints
        assert BY_ID[action].key == said.split()[0]


@pytest.mark.parametrize("times_slower", [0.25, 1.0])
def test_on_a_quiet_machine_95_percent_of_demo_tokens_keep_the_service_levels(
    times_slower: float,
) -> None:
    latency = half_a_minute(times_slower).history.windows.latency(window_s=None)
    for series, bound in (
        (latency.ttft, SERVICE_LEVELS["slo_ttft_ms"]),
        (latency.itl, SERVICE_LEVELS["slo_itl_ms"]),
    ):
        assert series.p95_ms <= bound


SETUP = SimulatedSetup(
    model=CostModel(),
    simulated="a test",
    model_name="none",
    device="virtual",
    knobs=Knobs(),
    limits=Limits(max_num_batched_tokens=4096, max_num_seqs=256, max_model_len=2048),
    num_blocks=400,
    block_size=16,
)


def test_a_simulated_engine_accepts_every_knob_and_runs_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Signals belong to the main thread.
    monkeypatch.setattr(simulated, "stop_signals", lambda core: nullcontext())
    endpoint = Endpoint.parse(f"ipc://{tmp_path}/engine")
    is_ready = threading.Event()
    arguments = (SETUP, endpoint, 100.0, 0, lambda info: is_ready.set())
    engine = threading.Thread(target=simulated.serve_simulated, args=arguments)
    engine.start()
    assert is_ready.wait(30)
    with ControlClient(endpoint) as client:
        assert client.info().simulated == "a test"
        client.ask(SetKnobs(changes={"max_num_batched_tokens": 64}, who="test"))
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        submit = Submit(prompt="word " * 400, sampling=sampling, stream=False, with_text=False)
        output = client.ask(submit)
        while not getattr(output, "finish_reason", None):
            _, output = client.receive(30)
        snapshot = client.ask(GetSnapshot())
        # 500 tokens at 64 a step, then 19 tokens: 27 steps of the cost model.
        assert snapshot.step == 26
        assert snapshot.time_ns - START_NS >= 27 * 8_000_000
        client.ask(Shutdown(who="test"))
    engine.join(30)
    assert not engine.is_alive()


def test_texts_with_equal_prefixes_have_equal_first_tokens() -> None:
    first, second = (MadeUpCodec().encode("You are helpful. " + text) for text in ("Hi", "Bye"))
    assert first[:4] == second[:4]
    assert first != second
