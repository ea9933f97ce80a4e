"""A simulated engine without telemetry schedules like the real scheduler, step by step."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.request import Request
from stepscope.engine.simulation import replica as replica_module
from stepscope.engine.simulation.replica import Replica
from stepscope.engine.simulation.simulated import START_NS
from stepscope.engine.simulation.step_time import StepShape, StepTime
from stepscope.engine.simulation.virtual_requests import (
    BlockNames,
    DrawnStepTimes,
    SimulatedRequest,
    of_mix,
)
from stepscope.engine.simulation.virtual_session import (
    SimulatedSession,
    SimulatedSetup,
    TimedKnobs,
    run_requests,
)
from tests.support.engines.core_ends import Sink
from tests.support.engines.cost_model import CostModel
from tests.support.engines.kv_integrity import check_integrity

LIMITS = Limits(max_num_batched_tokens=4096, max_num_seqs=256, max_model_len=1024)
SEED = 7


class SpreadModel:
    """A cost model with random times."""

    def step_time(self, shape: StepShape) -> StepTime:
        return CostModel().step_time(shape)._replace(spread=0.1)


class Taken:
    """A figure sink that keeps everything."""

    def __init__(self) -> None:
        self.gaps: Counter[int] = Counter()
        self.ttfts: list[int] = []
        self.ends: dict[str, tuple[int | None, int]] = {}
        self.num_steps = self.num_prefill = self.num_decode = self.num_preemptions = 0

    def add_step(self, num_prefill_tokens: int, num_decode_tokens: int, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_prefill += num_prefill_tokens * num_steps
        self.num_decode += num_decode_tokens * num_steps

    def add_gaps(self, gap_ns: int, count: int) -> None:
        self.gaps[gap_ns] += count

    def add_first(self, ttft_ns: int) -> None:
        self.ttfts.append(ttft_ns)

    def add_preemption(self) -> None:
        self.num_preemptions += 1

    def add_finished(self, request: Request, worst_itl_ns: int) -> None:
        self.ends[request.client_id] = (
            request.last_token_ns, request.num_cached_tokens, worst_itl_ns,
        )  # fmt: skip


def setup(num_blocks: int = 400, **knobs: object) -> SimulatedSetup:
    return SimulatedSetup(
        model=SpreadModel(),
        simulated="a test",
        model_name="none",
        device="virtual",
        knobs=msgspec.structs.replace(Knobs(max_num_batched_tokens=512), **knobs),
        limits=LIMITS,
        num_blocks=num_blocks,
        block_size=16,
    )


def requests(rate: float, seed: int = SEED) -> list[SimulatedRequest]:
    """A mix with priorities; some of its chats share a prefix."""
    spec = WorkloadSpec(
        rate=rate, num_requests=60, document_tokens=700, output_tokens=60, seed=seed
    )
    source = random.Random(seed)
    return [each._replace(priority=source.randrange(3)) for each in of_mix(spec, 1024)]


def run(
    made: SimulatedSetup, work: list[SimulatedRequest], *, short: bool = True, changes: Any = ()
) -> Taken:
    taken = Taken()
    model = DrawnStepTimes(made.model, SEED)
    replica = Replica(made.scheduler(), model, taken, overlap=made.overlap)
    with pytest.MonkeyPatch.context() as patch:
        if not short:  # no stretch is long enough
            patch.setattr(replica_module, "_MIN_STRETCH", sys.maxsize)
        run_requests(replica, work, changes=changes)
    check_integrity(replica.scheduler.kv)
    return taken


def settings() -> Iterator[tuple[SimulatedSetup, float]]:
    yield setup(), 2.0
    yield setup(), 20.0
    yield setup(num_blocks=100), 20.0  # preempts
    yield setup(num_blocks=100, policy="priority", reserve="none"), 20.0
    yield setup(max_num_seqs=4), 20.0  # waits for seats
    yield setup(max_num_batched_tokens=8), 20.0  # fewer tokens than decodes
    yield setup(num_blocks=100, order="arrival", watermark=0.02), 10.0
    yield setup(enable_prefix_caching=False), 10.0
    yield setup(prefill_schedule_interval=8), 5.0
    yield setup(prefill_schedule_interval=6, max_num_seqs=4), 8.0  # the queue ends the cadence
    for batching in ("naive", "static", "continuous", "separate"):
        yield setup(batching=batching), 5.0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", settings(), ids=lambda case: f"{case[1]}")
def test_skipping_decode_only_steps_gives_the_schedulers_result(
    case: tuple[SimulatedSetup, float], overlap: bool
) -> None:
    made, rate = case
    made = msgspec.structs.replace(made, overlap=overlap)
    work = requests(rate)
    step_by_step, short = run(made, work, short=False), run(made, work)
    assert len(short.ends) == len(work)
    assert vars(short) == vars(step_by_step)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [400, 100])
def test_a_simulated_session_has_equal_steps_and_times_with_telemetry(
    num_blocks: int, overlap: bool
) -> None:
    made, work = setup(num_blocks), requests(8.0)
    made = msgspec.structs.replace(made, overlap=overlap)
    knobs = msgspec.structs.replace(made.knobs, max_num_batched_tokens=64, max_num_seqs=5)
    changes = [TimedKnobs(2_000_000_000, knobs)]
    sink = Sink()
    session = SimulatedSession(made, SEED, sink)
    run_requests(session, work, changes=changes)
    taken = run(made, work, changes=changes)

    steps = sink.records
    names: dict[int, str] = {}
    ends: dict[str, int] = {}
    num_preemptions = 0
    last_ns: dict[int, int] = {}
    worst_ns: dict[int, int] = {}
    for step in steps:
        for row in step.batch or ():
            if row.flags & wire.RowFlag.LAST_CHUNK:
                now_ns = step.tokens_ns
                gap_ns = now_ns - last_ns.get(row.request_id, now_ns)
                worst_ns[row.request_id] = max(gap_ns, worst_ns.get(row.request_id, 0))
                last_ns[row.request_id] = now_ns
    for message in sink.messages:
        for event in getattr(message, "events", ()):
            if isinstance(event, wire.Arrived):
                names[event.request_id] = event.client_id
            elif isinstance(event, wire.Finished):
                ends[names[event.request_id]] = message.tokens_ns - START_NS
            num_preemptions += isinstance(event, wire.Preempted)
    assert ends == {name: last_ns for name, (last_ns, *_) in taken.ends.items()}
    assert {names[each]: ns for each, ns in worst_ns.items()} == {
        name: ns for name, (*_, ns) in taken.ends.items()
    }
    assert (len(steps), num_preemptions) == (taken.num_steps, taken.num_preemptions)
    assert sum(step.num_prefill_tokens for step in steps) == taken.num_prefill
    assert steps[-1].max_num_seqs == 5


def test_simulated_requests_share_blocks_up_to_the_first_different_prefix_id() -> None:
    names = BlockNames(16)
    first, second, other = (
        names.of(SimulatedRequest(0, 80, 10, prefix=ids, prefix_tokens=32))
        for ids in ((5, 6, 7), (5, 6, 8), ())
    )
    assert len(first) == 5
    assert first[:4] == second[:4]
    assert first[4] != second[4]
    assert not set(other) & set(first + second)
