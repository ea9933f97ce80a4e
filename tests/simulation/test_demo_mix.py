"""What the first half minute of `stepscope demo` shows, on machines of any speed, in virtual time.

The scheduler is the real one; steps cost about what they cost on two CPU cores, times a factor.
"""

from functools import cache

import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.wire import Preempted, StepRecord, Telemetry
from stepscope.engine.simulation.simulated import START_NS
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.simulation.virtual.requests import of_mix
from stepscope.engine.simulation.virtual.session import SimulatedSession
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.dashboards.demo_engine import KNOBS, SERVICE_LEVELS, WORKLOAD

NUM_BLOCKS = 682  # of the demo model in 64 MB
SPEEDS = [0.25, 1.0, 2.0]  # times as long as on two quiet cores
COLUMNS = [118, 68]  # of the chart of steps at 200 and at 120 columns
RECHECK_NS = 50_000_000  # how soon the engine's workload sees that a request has ended


class Records:
    """A sink for the messages that the engine publishes."""

    def __init__(self) -> None:
        self.history = History(SLO(SERVICE_LEVELS["slo_ttft_ms"], SERVICE_LEVELS["slo_itl_ms"]))
        self.steps: list[StepRecord] = []
        self.next_sequence = self.num_dropped = 0

    def publish(self, message: Telemetry) -> None:
        payload = wire.encode(message)
        self.history.append(self.next_sequence, payload)
        self.next_sequence += 1
        record = wire.decode(payload)
        if isinstance(record, StepRecord):
            self.steps.append(record)


@cache
def half_a_minute(times_slower: float) -> Records:
    """The records of half a minute of the demo, at most 1,200 steps."""
    setup = SimulatedSetup(
        model=CostModel(
            floor_ms=5 * times_slower, token_us=250 * times_slower, context_ns=60 * times_slower
        ),
        simulated="a test",
        model_name="demo",
        device="virtual",
        knobs=KNOBS,
        limits=Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192),
        num_blocks=NUM_BLOCKS,
        block_size=16,
    )
    records = Records()
    session = SimulatedSession(setup, 0, records)
    late_ns = 0  # a postponed arrival delays the later ones
    for request in of_mix(WORKLOAD, 8192):
        due_ns = request.arrival_ns + late_ns
        session.run_until(due_ns)
        while session.num_unfinished >= (WORKLOAD.max_concurrency or 0):
            due_ns = max(due_ns, session.now_ns) + RECHECK_NS
            session.run_until(due_ns)
        late_ns = due_ns - request.arrival_ns
        if due_ns > 30e9 or len(records.steps) > 1200:
            break
        session.submit(request._replace(arrival_ns=due_ns))
    return records


def is_mixed(step: StepRecord) -> bool:
    return step.num_prefill_tokens > 0 and step.num_decode_tokens > 0


@pytest.mark.parametrize("times_slower", SPEEDS)
def test_a_third_of_the_demos_first_steps_mix_chunks_and_decodes(times_slower: float) -> None:
    steps = half_a_minute(times_slower).steps
    for columns in COLUMNS:
        first = steps[:columns]
        assert sum(map(is_mixed, first)) >= len(first) / 3
    assert sum(map(is_mixed, steps)) >= 0.4 * len(steps)


@pytest.mark.parametrize("times_slower", SPEEDS)
def test_a_stall_and_a_preemption_appear_within_half_a_minute_of_the_demo(
    times_slower: float,
) -> None:
    records = half_a_minute(times_slower)
    preempted = {
        event.request_id
        for step in records.steps
        for event in step.events
        if isinstance(event, Preempted)
    }
    stall = records.history.last_stall()
    assert stall is not None
    assert stall.request_id in preempted
    assert records.history.stalls().longest[0].time_ns <= START_NS + 30_000_000_000


@pytest.mark.parametrize("times_slower", [0.25, 1.0])
def test_on_a_quiet_machine_95_percent_of_demo_tokens_keep_the_service_levels(
    times_slower: float,
) -> None:
    latency = half_a_minute(times_slower).history.latency(window_s=None)
    for series, bound in (
        (latency.ttft, SERVICE_LEVELS["slo_ttft_ms"]),
        (latency.itl, SERVICE_LEVELS["slo_itl_ms"]),
    ):
        assert series.p95_ms is not None
        assert series.p95_ms <= bound
