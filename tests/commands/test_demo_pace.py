"""The demo's load over minutes, on machines that stay as they are and machines that do not.

The engine is a simulated one with the real scheduler and telemetry, its seconds are virtual.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import pytest

from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.execution import step_costs
from stepscope.engine.loop import dispatch
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.config import Limits
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.simulated import (
    START_NS,
    VOCAB_SIZE,
    SimulatedRunner,
    SimulatedStep,
    simulated_info,
)
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.workload.arrivals import Arrival, PromptWriter, synthetic
from stepscope.engine.workload.corpus import Corpus
from stepscope.recordings.history.history import History
from stepscope.tui.cli.dashboards.demo import KNOBS, WORKLOAD
from stepscope.tui.cli.dashboards.demo_pace import TICK_S, Pace
from stepscope.tui.cli.dashboards.demo_rate import offer, slowness

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 2048, 16, 4096
# Slow, so that minutes of it are few steps. Attention to what came before is in no trial step.
COST = CostModel(floor_ms=5.0, token_us=350.0, context_ns=80.0)


class SharedMachine(SimulatedRunner):
    """A runner whose steps take `slower(seconds since the start)` times as long."""

    num_blocks, block_size, max_model_len = NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN

    def __init__(self, slower: Callable[[float], float]) -> None:
        super().__init__(COST)
        self._slower = slower

    def launch(self, step: ScheduledStep) -> SimulatedStep:
        times = self._slower((self.clock() - START_NS) / 1e9)
        self._cost = CostModel(
            floor_ms=times * COST.floor_ms,
            token_us=times * COST.token_us,
            context_ns=times * COST.context_ns,
        )
        return super().launch(step)


class Nobody:
    def reply(self, message: object) -> None:
        return


class DemoSession:
    """Engine, workload, history and `Pace` of a demo, in virtual time."""

    def __init__(self, slower: Callable[[float], float] = lambda seconds: 1.0) -> None:
        limits = Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=MAX_MODEL_LEN)
        self.history = History()
        self._runner = SharedMachine(slower)
        info = msgspec.structs.replace(
            simulated_info(limits, NUM_BLOCKS, BLOCK_SIZE, 0),
            step_costs=step_costs.measure(self._runner),
        )
        scheduler = Scheduler(KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), KNOBS, limits)
        self.spec: WorkloadSpec | None = None
        self.core = EngineCore(info, self._runner, scheduler, limits, self, dispatch, workload=self)
        self._arrivals: Iterator[Arrival] = iter(())
        self._next: Arrival | None = None
        self._since_s = 0.0
        self.next_sequence = self.num_dropped = 0
        self.changes: list[tuple[float, float]] = []  # (seconds, requests/s)
        self.failures: list[Exception] = []  # of the next commands ...
        self.takes_what_fails = True  # ... which are carried out all the same
        self.core.publish_heartbeat(idle=True)
        self.pace = Pace(
            WORKLOAD, offer(WORKLOAD, info, None), self.history, self.set, self.seconds
        )
        self.pace.start(adapts=False)

    def publish(self, message: Telemetry) -> None:
        self.history.append(self.next_sequence, wire.encode(message))
        self.next_sequence += 1

    def seconds(self) -> float:
        return (self._runner.clock() - START_NS) / 1e9

    def set(self, spec: WorkloadSpec) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure is None or self.takes_what_fails:
            self.spec = spec
            self._arrivals = synthetic(spec, PromptWriter(Corpus.english(), 1.0), MAX_MODEL_LEN)
            self._next, self._since_s = next(self._arrivals), self.seconds()
            self.changes.append((self.seconds(), spec.rate))
        if failure is not None:
            raise failure

    def run(self, seconds: float, *, looks: bool = True) -> None:
        """Look once a virtual second, as the thread does, until it is so late."""
        while self.seconds() < seconds:
            self._run_to(min(seconds, self.seconds() + TICK_S))
            if looks and not self.pace.look():
                return

    def _run_to(self, seconds: float) -> None:
        while self.seconds() < seconds:
            while self._next and self._since_s + self._next.offset_s <= self.seconds():
                if len(self.core.scheduler.requests) + self.core.inbox.qsize() >= 12:
                    self._since_s = self.seconds() - self._next.offset_s + 0.05
                    break
                submit = self._next.submit()
                number = int(self._next.name.split("-")[1])
                tokens = [
                    (number * 7919 + place * 31) % VOCAB_SIZE
                    for place in range(self._next.num_prompt_tokens)
                ]
                self.core.inbox.put(Call(submit, Nobody(), tokens))
                self._next = next(self._arrivals)
            if not self.core.step():
                due = self._since_s + self._next.offset_s if self._next else seconds
                self._runner.advance_to(START_NS + round(min(max(due, 0), seconds) * 1e9) + 1)
            self.core.publish_heartbeat(idle=False)


def rates_over_time(slower: Callable[[float], float], seconds: float) -> list[tuple[float, float]]:
    session = DemoSession(slower)
    session.run(seconds)
    return session.changes


# --- machines


def test_on_a_steady_machine_the_load_stays_as_it_began() -> None:
    assert len(rates_over_time(lambda seconds: 1.0, 150.0)) == 1


def test_a_machine_that_becomes_half_as_fast_gets_half_the_load_once() -> None:
    (_, before), (when_s, after) = rates_over_time(
        lambda seconds: 1.0 if seconds < 50.0 else 2.0, 150.0
    )
    assert 50.0 < when_s <= 82.0
    assert after == pytest.approx(before / 2, rel=0.2)


def test_a_machine_whose_neighbour_ends_gets_twice_the_load_once() -> None:
    (_, before), (when_s, after) = rates_over_time(
        lambda seconds: 2.0 if seconds < 50.0 else 1.0, 130.0
    )
    assert 50.0 < when_s <= 82.0
    assert after == pytest.approx(before * 2, rel=0.2)


def test_what_a_neighbour_does_for_a_few_seconds_is_not_followed() -> None:
    assert len(rates_over_time(lambda seconds: 3.0 if seconds % 40 > 28 else 1.0, 120.0)) == 1


def test_a_machine_that_never_settles_is_followed_about_once_in_a_minute_or_two() -> None:
    changes = rates_over_time(lambda seconds: 4.0 if seconds % 80 > 40 else 1.0, 320.0)
    late = [when_s for when_s, _ in changes if when_s > 120.0]
    assert all(later - sooner >= 64.0 for sooner, later in pairwise(late))


def test_prompts_that_come_before_their_outputs_make_no_machine_slow() -> None:
    """In the first seconds there is twice as much to prefill as the mix holds, later less."""
    session = DemoSession()
    session.run(24.0, looks=False)
    costs = session.core.info.step_costs
    assert costs is not None
    shares, slow = [], []
    for end_s in (8, 16, 24):
        rates = session.history.rates(end_ns=START_NS + end_s * 10**9, window_s=8.0)
        shares.append((rates.prefill_tokens_per_s or 0.0) / (rates.output_tokens_per_s or 1.0))
        slow.append(slowness(rates, costs))
    assert max(shares) > 1.5 * min(shares)
    assert all(each == pytest.approx(1.1, abs=0.15) for each in slow), (shares, slow)


# --- commands without an answer, and those of somebody else


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_change_whose_answer_is_lost_stops_nothing(is_taken: bool) -> None:
    session = DemoSession(lambda seconds: 1.0 if seconds < 30.0 else 2.0)
    session.failures = [EngineUnreachable("nobody answered")]
    session.takes_what_fails = is_taken
    said = []
    while session.seconds() < 130.0:
        try:
            session.run(session.seconds() + 1.0)
        except EngineUnreachable:
            assert len(session.pace.offers) == 1  # it is not known yet
        if (news := session.pace.news()) is not None:
            said.append(news)
    assert session.failures == []
    rates = [rate for _, rate in session.changes]
    assert len(rates) == 2  # however it was told, once
    assert [each.workload.rate for each in session.pace.offers] == rates
    assert [each.split()[3] for each in said] == [f"{rate:g}" for rate in rates]


def test_a_change_that_is_refused_is_asked_for_again() -> None:
    session = DemoSession(lambda seconds: 1.0 if seconds < 20.0 else 2.0)
    session.failures = [CommandRefused("limited", "too many")]
    session.takes_what_fails = False
    with pytest.raises(CommandRefused):
        session.run(80.0)
    assert len(session.changes) == 1
    session.run(session.seconds() + 30.0)
    assert len(session.changes) == len(session.pace.offers) == 2


def test_the_demo_leaves_a_changed_load_alone_and_says_so_once() -> None:
    session = DemoSession(lambda seconds: 1.0 if seconds < 10.0 else 5.0)
    session.run(4.0)
    assert (session.pace.news() or "").startswith("the demo's workload: ")
    assert session.pace.news() is None
    session.set(msgspec.structs.replace(WORKLOAD, rate=0.3, document_share=0.0))
    session.run(60.0)
    assert session.seconds() < 10.0  # it is seen at once, and nothing is looked at any more
    assert session.pace.news() == "you control the load from now on: " + (
        "the demo no longer fits it to the machine"
    )
    assert session.pace.news() is None
    assert len(session.pace.offers) == 1
