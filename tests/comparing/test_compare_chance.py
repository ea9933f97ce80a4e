"""With random arrivals, no winner is named by chance, and real differences are found."""

import math
import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.compare.bootstrap import RatioInterval, percentile_ratio
from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load import LoadDifference, load_of
from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.side_requests import RequestRun
from stepscope.recordings.session.totals import MAX_SLICES, NUM_SLICES, TimeSlices
from stepscope.recordings.session.waits import Waits, bin_of, start_of
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.dashboards.compare import document
from stepscope.tui.views.frame.compare_text import between, load, outcome
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import step

NUM_PAIRS = 120
APART, PAIRED = (0, 1), (0, 0)


def waits_of(samples: Sequence[tuple[int, float, int]]) -> Waits:
    """Waits from (nanoseconds since the start, milliseconds, number)."""
    slices = TimeSlices[tuple[str, int]]()
    for time_ns, wait_ms, number in samples:
        slices.at(time_ns)["itl", bin_of(round(wait_ms * 1e6))] += number
    return Waits(slices.grouped(NUM_SLICES), "itl")


def run_of(draw: random.Random, factor: float = 1.0) -> Waits:
    """Waits that are similar when near in time, with a prompt beside them now and then."""
    samples = []
    level, until_s = 0.0, 0.0
    for tick in range(1500):
        time_s = tick / 50
        level = 0.98 * level + draw.gauss(0, 0.04)  # fades within a second
        if draw.random() < 0.01:
            until_s = time_s + draw.uniform(0.1, 0.6)
        wait_ms = (60.0 if time_s < until_s else 12.0) * math.exp(level) * factor
        samples.append((tick * 20_000_000, wait_ms, draw.randint(1, 8)))
    return waits_of(samples)


@cache
def intervals(factor: float, rank: int) -> list[RatioInterval]:
    draws = map(random.Random, range(NUM_PAIRS))
    pairs = [(run_of(draw), run_of(draw, factor)) for draw in draws]
    return [percentile_ratio(*pair, rank, APART) for pair in pairs]


@pytest.mark.parametrize("rank", [50, 95])
def test_two_equal_runs_are_called_different_in_at_most_1_of_20_pairs(rank: int) -> None:
    assert sum(each.is_sure for each in intervals(1.0, rank)) <= 0.05 * NUM_PAIRS


def test_a_real_difference_is_found_and_its_size_lies_in_the_interval() -> None:
    found = intervals(1.6, 50)
    assert sum(each.is_sure for each in found) >= 0.9 * NUM_PAIRS
    assert sum(each.low <= 1.6 <= each.high for each in found) >= 0.95 * NUM_PAIRS


def test_a_difference_in_too_short_a_run_is_never_significant() -> None:
    short, other = (waits_of([(tick * 100_000_000, ms, 1) for tick in range(4)]) for ms in (10, 90))
    assert percentile_ratio(short, other, 50, APART) == (0.0, math.inf)
    assert percentile_ratio(short, waits_of([]), 50, APART) == (0.0, math.inf)


SAMPLES = st.tuples(st.integers(0, 10**11), st.integers(0, 10**5), st.integers(1, 9))


@settings(max_examples=25)
@given(st.lists(SAMPLES, min_size=1, max_size=80))
def test_any_number_of_waits_takes_bounded_memory(samples: list[tuple[int, int, int]]) -> None:
    slices, now_ns = TimeSlices[tuple[str, int]](), 0
    for gap_ns, wait_ms, weight in samples:
        now_ns += gap_ns
        slices.at(now_ns)["itl", bin_of(wait_ms * 1_000_000)] += weight
    assert now_ns // slices.width_ns < MAX_SLICES
    waits = Waits(slices.grouped(NUM_SLICES), "itl")
    assert len(waits.totals) <= NUM_SLICES
    assert waits.count == sum(waits.totals) == sum(weight for _, _, weight in samples)
    longest = max(wait_ms for _, wait_ms, _ in samples) * 1_000_000
    last = waits.percentile(100)
    assert waits.within(last) == waits.totals
    assert start_of(last) <= longest < start_of(last + 1)
    assert start_of(last + 1) - start_of(last) <= 1 + longest / 60


def test_pairing_the_same_requests_reveals_a_smaller_difference() -> None:
    """Pairing removes the differences between slices, but not those between the machines."""

    def served(draw: random.Random, factor: float, prompts_ms: Sequence[float]) -> Waits:
        level, samples = 0.0, []
        for tick in range(1500):
            level = 0.98 * level + draw.gauss(0, 0.01)
            wait_ms = 12.0 if tick % 15 else prompts_ms[tick // 15]
            wait_ms *= math.exp(level + draw.gauss(0, 0.03)) * factor
            samples.append((tick * 20_000_000, wait_ms, 1))
        return waits_of(samples)

    found = {APART: 0, PAIRED: 0}
    for seed in range(NUM_PAIRS):
        draw = random.Random(seed)
        prompts_ms = [draw.choice((30.0, 60.0, 90.0)) * (1 + at // 20 % 3) for at in range(100)]
        sides = served(draw, 1.0, prompts_ms), served(draw, 1.25, prompts_ms)
        for seeds in found:
            found[seeds] += percentile_ratio(*sides, 95, seeds).low > 1
    assert found[PAIRED] > 1.3 * found[APART]


# Of an engine


WORKLOAD = SimulatedWorkload(rate=6.0, document_share=0.15, document_tokens=2600, output_tokens=100)


@cache
def side_of(
    seed: int, budget: int, rate: float, speed: float = 1.0, seats: int = 64, steps: int = 1800
) -> Side:
    """Half a minute of random arrivals at one engine."""
    messages = simulate(
        seed=seed, num_steps=steps, knobs=Knobs(max_num_batched_tokens=budget, max_num_seqs=seats),
        workload=msgspec.structs.replace(WORKLOAD, rate=rate),
        cost=CostModel(floor_ms=12.0 / speed, token_us=60.0 / speed, context_ns=4.0 / speed),
        num_blocks=4096,
    )  # fmt: skip
    side = Side("part", SLO(), SessionState())
    for _, message in messages:
        if isinstance(message, EngineInfo):
            message = msgspec.structs.replace(message, engine_id="one")
        side.apply(message)
    return side


def won(found: Comparison) -> dict[str, Any]:
    return {each.key: each.verdict for each in found.figures if each.verdict in ("a", "b")}


def is_judged(figure: ComparedFigure) -> bool:
    return None not in (figure.better, figure.interval, figure.a, figure.b)


@pytest.fixture
def before() -> Side:
    return side_of(1, 2048, 6.0)


def test_equal_engines_under_random_arrivals_rarely_get_a_winner_in_any_figure() -> None:
    sides = [side_of(seed, 2048, 6.0, steps=900) for seed in range(12)]
    figures = [figure for a, b in pairwise(sides) for figure in compare(a, b).figures]
    found = [figure for figure in figures if is_judged(figure)]
    assert sum(figure.verdict in ("a", "b") for figure in found) <= 0.02 * len(found)


def test_the_effect_of_a_smaller_budget_is_found_despite_varying_load(before: Side) -> None:
    after = side_of(2, 512, 6.0)
    found = compare(before, after)
    assert found.is_one_session
    assert not found.load.is_same
    assert found.load.other_work is None
    figure = found.figure("itl_prefill_p99")
    assert figure.verdict == "b"
    assert figure.interval.low <= figure.ratio <= figure.interval.high < 1
    assert "ITL beside a prefill p99" in outcome(found, "b")[1][-1]
    assert ", at least " in outcome(found, "b")[1][-1]
    assert between(figure).endswith("x")
    told = document(found, (before, after))
    assert told["figures"][figure.key]["interval"] == list(figure.interval)
    assert told["load"]["is_same"] is False


def test_a_run_is_not_called_worse_for_more_load_and_a_faster_run_still_wins(before: Side) -> None:
    busier = compare(before, side_of(2, 2048, 10.0))
    assert "requests/s" in busier.load.other_work
    assert won(busier) == {}
    # The same load on an engine three times as fast: it has more load and is still quicker.
    faster = compare(before, side_of(2, 2048, 10.0, speed=3.0))
    assert faster.load.other_work is not None
    assert {won(faster).get(key) for key in ("itl_p50", "ttft_p50", "step_p50")} == {"b"}
    assert set(won(faster).values()) == {"b"}
    assert "loads differ; only more work may win: " in (load(faster) or "")
    # The other way round: that the side with less load is quicker proves nothing.
    slower = compare(side_of(2, 2048, 10.0), side_of(4, 2048, 6.0, speed=1.1))
    assert won(slower) == {}


def test_a_run_is_not_called_worse_for_a_queue_near_capacity() -> None:
    """Slightly more load than the engine can serve makes a short wait for a seat a long one."""
    before, after = side_of(0, 2048, 8.0, seats=16), side_of(7, 2048, 8.0, seats=16)
    found = compare(before, after)
    assert found.load.other_work is None
    ttft = found.figure("ttft_p50")
    assert (ttft.factor or 0) > 5
    assert ttft.verdict == "differs"
    # The side with more load and still no queue is better.
    quicker = compare(before, side_of(7, 2048, 8.0, speed=3.0, seats=16))
    assert quicker.figure("ttft_p50").verdict == "b"


SLO_ = SLO(ttft_ms=500.0, itl_ms=30.0)


def asked(
    arrivals: Iterable[float], name: str = "run", *, seconds: float = 60.0, num_prompt: int = 100,
    max_tokens: int = 64, took_s: float = 1.0, num_out: int | None = None, num_queued: int = 0,
    cached: float | None = None, kv: wire.KVCounts | None = None, **knobs: wire.KnobValue,
) -> Side:  # fmt: skip
    """A side that got requests at the given times."""
    state = SessionState(knobs=knobs)
    state.kv = kv
    for number in range(num_queued):
        state.requests[-1 - number] = wire.RequestView(
            request_id=-1 - number, client_id="", status="waiting", arrival_ns=0,
            num_prompt_tokens=num_prompt, max_tokens=max_tokens,
        )  # fmt: skip
    side = Side(name, SLO_, state)
    side.apply(step(0, [], schedule_start_ns=0, tokens_ns=round(seconds * 1e9)))
    for number, arrival in enumerate(arrivals):
        run = RequestRun(number, "", num_prompt, round(arrival * 1e9), max_tokens=max_tokens)
        if arrival + took_s <= seconds:
            run.end_ns, run.has_all = round((arrival + took_s) * 1e9), True
            run.num_output_tokens = max_tokens if num_out is None else num_out
        run.num_cached_tokens = None if cached is None else round(cached * num_prompt)
        side.requests[number] = run
    return side


def evenly(number: int, seconds: float) -> list[float]:
    return [place * seconds / number for place in range(number)]


def test_the_load_is_judged_by_requests_sent_not_by_work_done() -> None:
    """For each kind of load: a real difference, and one that only a slower engine causes."""

    def load(a: Side, b: Side, *, is_one_session: bool = False) -> LoadDifference:
        return load_of(a, b, is_one_session=is_one_session)

    def told(a: Side, b: Side, *, is_one_session: bool = False) -> str | None:
        return load(a, b, is_one_session=is_one_session).other_work

    usual, twice = asked(evenly(60, 50.0)), asked(evenly(120, 50.0))
    alike = {
        "slower": asked(evenly(60, 50.0), took_s=5.0),
        "cut off before most had ended": asked(evenly(60, 50.0), took_s=40.0),
        "twice as long at the same rate": asked(evenly(144, 118.0), seconds=120.0),
        "clients that wait for their answers": asked(evenly(60, 100.0), seconds=110.0, took_s=2.0),
    }
    for what, other in alike.items():
        assert told(usual, other) is None, what
        assert told(other, usual) is None, what
    others = {
        "requests/s 1.0→2.0 (+100%), prompt tok/s 100→200 (+100%), output": twice,
        "prompt tok/s 100→200 (+100%)": asked(evenly(60, 50.0), num_prompt=200),
        "output tok/s 64→128 (+100%)": asked(evenly(60, 50.0), max_tokens=128),
        "output tok/s 64→8 (-88%)": asked(evenly(60, 50.0), num_out=8),
        "within 49.2→4.9 s": asked(evenly(60, 5.0), seconds=20.0),
    }
    for what, other in others.items():
        assert what in (told(usual, other) or ""), what
        assert told(other, usual) is not None, what
    # Parts of one session: what came, by the second, and what the first part left to the second.
    draw = random.Random(4)
    times = [draw.uniform(0, 60) for _ in range(132)]
    some, more = asked(times[:60]), asked(times[60:])
    assert told(some, more, is_one_session=True) is None  # 1.0 and 1.2 a second are chance
    queue = told(some, asked(times[60:], num_queued=40), is_one_session=True)
    assert (queue or "").endswith("waiting at the start 0→40")
    assert told(asked([]), asked([]), is_one_session=True) is None
    going = asked([]), asked([], num_queued=20)
    assert "requests at a time 0.0→20.0" in (told(*going, is_one_session=True) or "")


def test_hits_of_a_prefilled_cache_are_a_load_difference_but_a_runs_own_hits_are_not() -> None:
    """The same requests sent twice: the second run computes nothing of their prompts."""
    empty = wire.KVCounts(used=0, cached=0, empty=99, evicted=0)
    filled = wire.KVCounts(used=0, cached=70, empty=29, evicted=0)
    times = evenly(60, 50.0)
    first = asked(times, cached=0.05, kv=empty)
    again = asked(times, cached=0.98, kv=filled)
    told = load_of(first, again, is_one_session=False)
    assert told.other_work == "5%→98% of the prompts came from the prefix cache"
    assert not told.is_same
    assert told.more_a > 10
    assert told.more_b == 1.0  # the side that computed more may still be better
    # Of other requests at the same rate it is other work as well, and it stands beside the rates.
    others = load_of(first, asked(evenly(120, 50.0), cached=0.98, kv=filled), is_one_session=False)
    assert "requests/s" in (others.other_work or "")
    assert "prefix cache" in (others.other_work or "")
    # Hits that a run made of its own prompts, in a cache that was empty, are what is compared.
    own = asked(times, cached=0.6, kv=empty)
    assert load_of(first, own, is_one_session=False).is_same
    # So are those that the setting brought.
    without = asked(times, cached=0.05, kv=empty, enable_prefix_caching=False)
    with_cache = asked(times, cached=0.98, kv=filled, enable_prefix_caching=True)
    assert load_of(without, with_cache, is_one_session=False).is_same
    # As much from the cache on both sides is the same work; what nobody tells is no difference.
    warm = asked(times, cached=0.97, kv=filled)
    assert load_of(asked(times, cached=0.98, kv=filled), warm, is_one_session=False).is_same
    assert load_of(asked(times), warm, is_one_session=False).is_same
