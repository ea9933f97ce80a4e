"""The demo gives an engine what it carries: on any machine, and when the machine changes."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.engine.protocol.config import Limits
from stepscope.engine.protocol.wire import Audited, EngineInfo, StepCosts
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.simulation.simulated import simulated_info
from stepscope.engine.workload.arrivals import describe
from stepscope.engine.workload.capacity import reckoned_ms, requests_per_s
from stepscope.recordings.history.rates import Rates
from stepscope.recordings.state.audit_text import change_text
from stepscope.tui.cli.dashboards.demo import WORKLOAD
from stepscope.tui.cli.dashboards.demo_pace import FIRST_REST_S, NUM_WINDOWS, WINDOW_S, Pace
from stepscope.tui.cli.dashboards.demo_rate import (
    LEAST_RATE,
    DemoLoad,
    asked_rate,
    next_offer,
    offer,
    slowness,
)
from stepscope.tui.settings.cli_errors import WrongUsage

LIMITS = Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192)

FAST = StepCosts(num_streams=8, decode_ms=2.5, num_prefill_tokens=400, prefill_ms=40.0)


def times_slower(factor: float, costs: StepCosts = FAST) -> StepCosts:
    """Of a machine that is so many times slower."""
    return replace(costs, decode_ms=factor * costs.decode_ms, prefill_ms=factor * costs.prefill_ms)


def info(costs: StepCosts | None) -> EngineInfo:
    return replace(simulated_info(LIMITS, 1024, 16, 0), step_costs=costs)


# --- what that carries


@given(factor=st.floats(0.01, 1000.0))
def test_a_machine_of_half_the_speed_carries_half_as_much(factor: float) -> None:
    fast, slow = (requests_per_s(WORKLOAD, each, 8192) for each in (FAST, times_slower(factor)))
    assert slow == pytest.approx(fast / factor)


def test_a_request_costs_its_prompt_and_its_share_of_each_decode() -> None:
    spec = WorkloadSpec(document_share=0.5, chat_tokens=100, document_tokens=300, output_tokens=80)
    # 200 tokens at 0.1 ms, then 80 steps of 2.5 ms that eight share.
    assert requests_per_s(spec, FAST, None) == pytest.approx(1000 / (20.0 + 25.0))
    # Prompts that the model cannot take are cut, and then cost less.
    assert requests_per_s(spec, FAST, 160) > requests_per_s(spec, FAST, None)


# --- what the demo offers


def test_a_fast_machine_gets_the_usual_workload_and_no_excuse() -> None:
    found = offer(WORKLOAD, info(FAST), None)
    assert found.workload == WORKLOAD
    assert str(found) == "2.5 requests/s"


@given(factor=st.floats(0.01, 100.0))
def test_no_machine_gets_more_than_it_carries_or_than_is_usual(factor: float) -> None:
    costs = times_slower(factor)
    found = offer(WORKLOAD, info(costs), None)
    carried = 0.7 * requests_per_s(WORKLOAD, costs, LIMITS.max_model_len)
    assert found.workload.rate <= WORKLOAD.rate
    assert found.workload.rate <= max(carried, LEAST_RATE) * (1 + 1e-9)
    # ... and not much less, either: it is rounded to two figures.
    assert found.workload.rate > 0.9 * min(carried, WORKLOAD.rate)
    assert (found.why == "") == (found.workload.rate == WORKLOAD.rate)


def test_a_slow_machine_gets_less_load_and_a_notice() -> None:
    found = offer(WORKLOAD, info(times_slower(4)), None)
    assert str(found) == "0.65 requests/s, 70 % of what this machine can serve"
    assert found.measured == "decode of 8 streams 10 ms a step, prefill of 400 tokens 160 ms"
    assert found.workload.max_concurrency == 12


def test_on_a_very_slow_machine_something_happens_all_the_same() -> None:
    found = offer(WORKLOAD, info(times_slower(100)), None)
    assert str(found) == "0.2 requests/s, though 70 % of what this machine can serve is 0.026"


def test_what_is_asked_for_is_what_is_offered() -> None:
    assert str(offer(WORKLOAD, info(FAST), 1.5)) == "1.5 requests/s, as asked"
    too_much = offer(WORKLOAD, info(times_slower(4)), 6.0)
    assert (
        str(too_much) == "6 requests/s, as asked; 70 % of what this machine can serve is about 0.65"
    )
    assert too_much.workload.rate == 6.0


def test_an_engine_that_timed_no_steps_gets_the_usual_workload() -> None:
    assert offer(WORKLOAD, info(None), None) == DemoLoad(WORKLOAD)
    assert str(offer(WORKLOAD, info(None), 0.5)) == "0.5 requests/s, as asked"


@pytest.mark.parametrize("text", ["0", "-1", "much", "inf", "nan", "10001", ""])
def test_a_rate_that_is_none_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(WrongUsage, match="--rate: expected a number above 0 and of at most 10000"):
        asked_rate(text)


def test_a_rate_may_be_left_out() -> None:
    assert asked_rate(None) is None
    assert asked_rate("0.5") == 0.5


# --- while it runs

INFO = info(replace(FAST, stream_ms=1.8))  # 1.7 ms a step, 0.1 ms a decode


def seen(times: float, prefill: int = 600, output: int = 640, idle: float = 0.0) -> Rates:
    """8 s of steps that take so many times longer than at the start."""
    costs = INFO.step_costs
    assert costs is not None
    per_step = (1, prefill / 100, output / 100)
    steps_per_s = (1.0 - idle) * 1000 / (times * reckoned_ms(costs, *per_step))
    return Rates(8.0, 100, *(None,) * 12)._replace(
        steps_per_s=steps_per_s,
        prefill_tokens_per_s=steps_per_s * per_step[1],
        output_tokens_per_s=steps_per_s * per_step[2],
        idle_share=idle,
    )


@given(
    times=st.floats(2.0, 9.0),
    prefill=st.integers(0, 12_000),
    output=st.integers(1, 1_200),
    idle=st.floats(0.0, 0.9),
)
def test_measured_slowness_does_not_depend_on_the_mix_of_steps(
    times: float, prefill: int, output: int, idle: float
) -> None:
    rates = seen(times, prefill, output, idle)
    assert INFO.step_costs is not None
    assert slowness(rates, INFO.step_costs) == pytest.approx(times)
    found = next_offer(DemoLoad(WORKLOAD), WORKLOAD, INFO, rates)
    assert found is not None
    at_first = offer(WORKLOAD, info(times_slower(times)), None)
    assert found.workload.rate == pytest.approx(at_first.workload.rate, rel=0.1)
    assert str(found) == f"{found.workload.rate:g} requests/s, 70 % of what this machine can serve"
    assert found.workload.seed != WORKLOAD.seed  # no prompt comes a second time


@pytest.mark.parametrize(
    "rates",
    [
        seen(0.5),  # more than the usual load nobody gets
        seen(1.4),
        seen(9.0, idle=0.95),  # hardly a step to judge by
        seen(9.0, idle=1.0),
        seen(9.0)._replace(idle_share=None),
        seen(9.0)._replace(steps_per_s=None),
        seen(9.0)._replace(prefill_tokens_per_s=None),
        seen(9.0)._replace(output_tokens_per_s=None),
    ],
)
def test_a_rate_that_is_about_right_or_unknown_stays(rates: Rates) -> None:
    assert next_offer(DemoLoad(WORKLOAD), WORKLOAD, INFO, rates) is None


def test_an_engine_that_timed_no_steps_keeps_its_load() -> None:
    assert next_offer(DemoLoad(WORKLOAD), WORKLOAD, info(None), seen(9.0)) is None


def test_the_least_load_is_not_changed_for_itself() -> None:
    found = next_offer(DemoLoad(WORKLOAD), WORKLOAD, INFO, seen(90.0))
    assert found is not None
    assert found.workload.rate == LEAST_RATE
    assert next_offer(found, WORKLOAD, INFO, seen(200.0)) is None


class Watched:
    """An engine that takes workloads, and the history of it as far as `Pace` looks."""

    info = INFO

    def __init__(self, times: float) -> None:
        self.state = SimpleNamespace(knobs_version=3, workload=None, state="running")
        self.times = times
        self.taken: list[WorkloadSpec] = []
        self.now_s = 100.0

    def rates(self, window_s: float) -> Rates:
        return seen(self.times)

    def set_workload(self, spec: WorkloadSpec) -> None:
        self.taken.append(spec)
        self.state.workload = describe(spec)

    def pace(self) -> Pace:
        """What `stepscope demo` has just started, without its thread."""
        pace = Pace(WORKLOAD, DemoLoad(WORKLOAD), self, self.set_workload, lambda: self.now_s)  # type: ignore[arg-type]
        pace.start(adapts=False)
        return pace

    def looks(self, pace: Pace, num_seconds: int) -> bool:
        for _ in range(num_seconds):
            self.now_s += 1.0
            if not pace.look():
                return False
        return True


SOON_S = round(FIRST_REST_S + NUM_WINDOWS * WINDOW_S)


def test_a_machine_that_becomes_busy_or_idle_later_gets_less_or_more_and_it_is_said() -> None:
    watched = Watched(times=5.0)
    pace = watched.pace()
    assert pace.news() == "the demo's workload: 2.5 requests/s"
    assert watched.looks(pace, SOON_S - 1)
    assert len(watched.taken) == 1  # not before there are steps to judge by
    assert watched.looks(pace, 1)
    share = "70 % of what this machine can serve"
    assert pace.news() == f"the demo's workload: 0.52 requests/s, {share}"
    assert pace.news() is None
    watched.times = 1.0
    assert watched.looks(pace, round(SOON_S + FIRST_REST_S))
    assert pace.news() == "the demo's workload: 2.5 requests/s"
    assert [each.rate for each in watched.taken] == [2.5, 0.52, 2.5]
    assert len({each.seed for each in watched.taken}) == 3


def test_one_dissenting_window_of_three_keeps_the_load() -> None:
    watched = Watched(times=5.0)
    pace = watched.pace()
    for _ in range(20):
        watched.times = 5.0
        assert watched.looks(pace, round(2 * WINDOW_S))
        watched.times = 1.0
        assert watched.looks(pace, round(WINDOW_S))
    assert len(watched.taken) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, WORKLOAD, f"started a workload of {describe(WORKLOAD)}"),
        (WORKLOAD, None, f"stopped the workload of {describe(WORKLOAD)}"),
        (None, None, "stopped the workload: there was none"),
        (WORKLOAD, WORKLOAD, f"started the same workload anew: {describe(WORKLOAD)}"),
        (
            WORKLOAD,
            replace(WORKLOAD, rate=0.5),
            "changed the workload: 2.5 requests/s→0.5 requests/s",
        ),
        (
            WORKLOAD,
            replace(WORKLOAD, max_concurrency=None, output_tokens=9),
            "changed the workload: outputs of 640, at most 12 under way→outputs of 9",
        ),
        (
            WORKLOAD,
            replace(WORKLOAD, max_concurrency=None),
            "changed the workload: no longer at most 12 under way",
        ),
        (
            replace(WORKLOAD, document_share=0.0),
            WORKLOAD,
            "changed the workload: now also 30% documents of 2048",
        ),
    ],
)
def test_the_trail_says_of_two_workloads_what_they_differ_in(
    old: WorkloadSpec | None, new: WorkloadSpec | None, said: str
) -> None:
    """A mix is longer than the line it stands in."""
    before, after = ("none" if each is None else describe(each) for each in (old, new))
    entry = Audited(
        number=2,
        command="SetWorkload",
        who="stepscope demo",
        time_ns=1,
        old={"workload": before},
        new={"workload": after},
    )
    assert change_text(entry) == said


@pytest.mark.parametrize(
    "change",
    [{"knobs_version": 4}, {"workload": None}, {"workload": describe(WorkloadSpec(rate=9.0))}],
)
def test_the_demo_leaves_a_changed_load_alone(change: dict[str, object]) -> None:
    """A queue that grows because seats were taken away is what they want to see."""
    watched = Watched(times=9.0)
    pace = watched.pace()
    assert watched.looks(pace, 1)
    pace.news()
    vars(watched.state).update(change)
    assert not watched.looks(pace, SOON_S)
    assert len(watched.taken) == 1
    assert "you control" in (pace.news() or "")
    assert pace.news() is None


def test_a_load_not_yet_in_telemetry_still_belongs_to_the_demo() -> None:
    watched = Watched(times=9.0)
    pace = watched.pace()
    told, watched.state.workload = watched.state.workload, None
    assert watched.looks(pace, 3)
    watched.state.workload = told
    assert watched.looks(pace, SOON_S)
    assert len(watched.taken) == 2


def test_a_paused_engine_is_not_a_slow_one() -> None:
    watched = Watched(times=9.0)
    pace = watched.pace()
    watched.state.state = "paused"
    assert watched.looks(pace, 5 * SOON_S)
    assert len(watched.taken) == 1
    watched.state.state = "running"
    assert watched.looks(pace, SOON_S)
    assert len(watched.taken) == 2
