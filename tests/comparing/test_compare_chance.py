"""With random arrivals, no winner is named by chance, and real differences are found."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.simulation.step_time import CostModel
from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.contrast import Contrast, Effect
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.compare.side.slices import (
    NUM_STRETCHES,
    Slice,
    WaitSlices,
    start_of,
)
from stepscope.recordings.session.totals import MAX_SLICES
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.dashboards.compare_report import document
from stepscope.tui.views.frame.compare_text import between, load, outcome, verdict
from tests.support.engines.simulated_run import SimulatedWorkload, simulate

NUM_PAIRS = 120


def run_of(draw: random.Random, factor: float = 1.0, seconds: int = 30) -> list[Slice]:
    """Waits that are similar when near in time, with a prompt beside them now and then."""
    slices = WaitSlices()
    level, until_s = 0.0, 0.0
    for tick in range(seconds * 50):
        time_s = tick / 50
        level = 0.98 * level + draw.gauss(0, 0.04)  # fades within a second
        if draw.random() < 0.01:
            until_s = time_s + draw.uniform(0.1, 0.6)
        wait_ms = (60.0 if time_s < until_s else 12.0) * math.exp(level) * factor
        slices.add(tick * 20_000_000, round(wait_ms * 1e6), draw.randint(1, 8))
    return slices.grouped(NUM_STRETCHES)


@cache
def pairs_of(factor: float) -> list[tuple[list[Slice], list[Slice]]]:
    draws = map(random.Random, range(NUM_PAIRS))
    return [(run_of(draw), run_of(draw, factor)) for draw in draws]


def effects(factor: float, rank: int) -> Iterator[Effect]:
    for pair in pairs_of(factor):
        effect = Contrast(*pair).percentile(rank)
        assert effect is not None
        yield effect


def test_two_equal_runs_are_called_different_in_at_most_1_of_20_pairs() -> None:
    for rank in (50, 95):
        wrong = sum(effect.is_sure for effect in effects(1.0, rank))
        assert wrong <= 0.05 * NUM_PAIRS, rank


def test_a_real_difference_is_found_and_its_size_lies_in_the_interval() -> None:
    found = list(effects(1.6, 50))
    assert sum(effect.is_sure for effect in found) >= 0.9 * NUM_PAIRS
    assert sum(effect.low <= 1.6 <= effect.high for effect in found) >= 0.95 * NUM_PAIRS
    for effect in found:
        # The interval and the verdict never contradict each other, nor the estimate.
        assert effect.is_sure is not (effect.low <= 1 <= effect.high)
        assert effect.low <= effect.b_ns / effect.a_ns <= effect.high


def test_a_difference_in_too_short_a_run_is_never_significant() -> None:
    short, other = WaitSlices(), WaitSlices()
    for tick in range(4):
        short.add(tick * 100_000_000, 10_000_000)
        other.add(tick * 100_000_000, 90_000_000)
    sides = [each.grouped(NUM_STRETCHES) for each in (short, other)]
    contrast = Contrast(*sides)
    effect = contrast.percentile(50)
    assert effect is not None
    assert (effect.is_sure, effect.low, effect.high) == (False, 0.0, math.inf)
    assert not contrast.shares_above_differ(50e6)
    assert Contrast(sides[0], []).percentile(50) is None


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**11), st.integers(0, 10**11), st.integers(1, 9)),
        min_size=1,
        max_size=80,
    ),
    st.integers(1, 20),
)
def test_any_number_of_waits_takes_bounded_memory_and_all_are_counted(
    samples: list[tuple[int, int, int]], num_groups: int
) -> None:
    slices, now_ns = WaitSlices(), 0
    for gap_ns, wait_ns, weight in samples:
        now_ns += gap_ns
        slices.add(now_ns, wait_ns, weight)
    assert now_ns // slices.width_ns < MAX_SLICES
    groups = slices.grouped(num_groups)
    assert len(groups) <= num_groups
    assert sum(group.total() for group in groups) == sum(weight for _, _, weight in samples)
    kept = sorted(at for group in groups for _, at in group)
    longest = max(wait_ns for _, wait_ns, _ in samples)
    assert start_of(kept[-1]) <= longest < start_of(kept[-1] + 1)
    assert start_of(kept[-1] + 1) - start_of(kept[-1]) <= 1 + longest / 60


def mixed_run(
    draw: random.Random, factor: float = 1.0, prompts_ms: Sequence[float] = ()
) -> list[Slice]:
    """Waits of work of many kinds, each of which comes in a few stretches only, as the number of
    those who decode goes up and down; on a machine that is now slower and now quicker.
    """
    slices, level, num_decodes = WaitSlices(), 0.0, 20.0
    for tick in range(1500):
        level = 0.98 * level + draw.gauss(0, 0.01)
        num_decodes = min(60.0, max(1.0, num_decodes + draw.gauss(0, 0.6)))
        wait_ms = (12.0 + 0.02 * num_decodes) * math.exp(level + draw.gauss(0, 0.03)) * factor
        if prompts_ms and not tick % 15:
            wait_ms = prompts_ms[tick // 15] * math.exp(level) * factor
        stop_ms = draw.expovariate(1 / 40) if draw.random() < 0.005 else 0.0
        slices.add(tick * 20_000_000, round((wait_ms + stop_ms) * 1e6), stratum=round(num_decodes))
    return slices.grouped(NUM_STRETCHES)


@cache
def mixed_pairs() -> list[tuple[list[Slice], list[Slice]]]:
    return [(mixed_run(draw), mixed_run(draw)) for draw in map(random.Random, range(NUM_PAIRS))]


@pytest.mark.parametrize("rank", [50, 99])
def test_work_that_occurs_only_now_and_then_names_no_winner_by_chance(rank: int) -> None:
    wrong = 0
    for pair in mixed_pairs():
        effect = Contrast(*pair).percentile(rank)
        wrong += effect is not None and effect.is_sure
    assert wrong <= 0.05 * NUM_PAIRS


def test_differences_in_work_that_occurred_once_are_never_significant() -> None:
    """Two similar runs, in which each stretch does work that no other stretch does."""
    sides = []
    for begin_ms in (12.0, 21.0):
        slices = WaitSlices()
        for tick in range(100):
            wait_ms = begin_ms + (tick // 10) * 7 % 30 + tick % 3
            slices.add(tick * 100_000_000, round(wait_ms * 1e6), 5, stratum=tick // 10)
        sides.append(slices.grouped(NUM_STRETCHES))
    effect = Contrast(*sides).percentile(50)
    assert effect is not None
    assert not effect.is_sure
    assert effect.low < 1 < effect.high


def test_pairing_the_same_requests_reveals_a_smaller_difference() -> None:
    """Pairing removes the differences between stretches, but not those between the machines."""
    found = {False: 0, True: 0}
    for seed in range(NUM_PAIRS):
        draw = random.Random(seed)
        prompts_ms = [draw.choice((30.0, 60.0, 90.0)) * (1 + at // 20 % 3) for at in range(100)]
        sides = mixed_run(draw, 1.0, prompts_ms), mixed_run(draw, 1.25, prompts_ms)
        for is_paired in found:
            effect = Contrast(*sides, is_paired=is_paired).percentile(95)
            assert effect is not None
            found[is_paired] += effect.is_sure and effect.low > 1
    assert found[True] > 1.3 * found[False]


# Of an engine


WORKLOAD = SimulatedWorkload(rate=6.0, document_share=0.15, document_tokens=2600, output_tokens=100)


@cache
def side_of(seed: int, budget: int, rate: float, speed: float = 1.0, seats: int = 64) -> Side:
    """Half a minute of random arrivals at one engine."""
    messages = simulate(
        seed=seed,
        num_steps=1800,
        knobs=Knobs(max_num_batched_tokens=budget, max_num_seqs=seats),
        workload=msgspec.structs.replace(WORKLOAD, rate=rate),
        cost=CostModel(floor_ms=12.0 / speed, token_us=60.0 / speed, context_ns=4.0 / speed),
        num_blocks=4096,
    )
    side = Side("part", SLO(), SessionState())
    for _, message in messages:
        if isinstance(message, EngineInfo):
            message = msgspec.structs.replace(message, engine_id="one")
        side.take(message)
    return side


def won(found: Comparison) -> dict[str, Any]:
    return {each.key: each.verdict for each in found.figures if each.verdict in ("a", "b")}


@pytest.fixture
def before() -> Side:
    return side_of(1, 2048, 6.0)


def test_the_effect_of_a_smaller_budget_is_found_despite_varying_load(before: Side) -> None:
    after = side_of(2, 512, 6.0)
    found = compare(before, after)
    assert found.is_one_session
    assert not found.load.is_same
    assert found.different_work is None
    figure = found.figure("like_itl_prefill_p99")
    assert figure.verdict == "b"
    assert figure.interval is not None
    assert figure.ratio is not None
    assert figure.interval[0] <= figure.ratio <= figure.interval[1] < 1
    assert figure.covered is not None
    assert figure.covered > 0.5
    assert "ITL beside a prefill p99" in outcome(found, "b")[1][-1]
    assert ", at least " in outcome(found, "b")[1][-1]
    assert between(figure).endswith("x")
    told = document(found, (before, after))
    assert told["figures"][figure.key]["interval"] == list(figure.interval)
    assert told["load"]["is_same"] is False


def test_a_run_is_not_called_worse_for_more_load_and_a_faster_run_still_wins(before: Side) -> None:
    busier = compare(before, side_of(2, 2048, 10.0))
    assert busier.different_work is not None
    assert "requests/s" in busier.different_work
    assert won(busier) == {}
    for figure in busier.figures:
        if figure.like is not None and figure.verdict != "unknown":
            assert figure.verdict in ("alike", "unclear"), figure
    # The same load on an engine three times as fast: it has more load and is still quicker.
    faster = compare(before, side_of(2, 2048, 10.0, speed=3.0))
    assert faster.different_work is not None
    assert {won(faster).get(key) for key in ("itl_p50", "ttft_p50", "like_step_p50")} == {"b"}
    assert "only like waits and wins with more count: " in (load(faster) or "")
    assert set(won(faster).values()) == {"b"}
    # The other way round: that the side with less load is quicker proves nothing.
    slower = compare(side_of(2, 2048, 10.0), side_of(4, 2048, 6.0, speed=1.1))
    assert set(won(slower)) <= {each.key for each in slower.figures if each.like is not None}
    assert won(slower)["like_step_p50"] == "b"
    # Without any similar work on the other side there is no verdict.
    apart = compare(side_of(2, 2048, 10.0), side_of(1, 2048, 6.0, speed=3.0))
    assert won(apart) == {}
    assert verdict(apart.figure("like_step_p50")) == "too little in common"


def test_a_run_is_not_called_worse_for_a_queue_near_capacity() -> None:
    """Slightly more load than the engine can serve makes a short wait for a seat a long one."""
    before, after = side_of(0, 2048, 8.0, seats=16), side_of(7, 2048, 8.0, seats=16)
    found = compare(before, after)
    assert found.different_work is None
    ttft = found.figure("ttft_p50")
    assert (ttft.factor or 0) > 5
    assert ttft.verdict == "differs"
    # The side with more load and still no queue is better.
    quicker = compare(before, side_of(7, 2048, 8.0, speed=3.0, seats=16))
    assert quicker.figure("ttft_p50").verdict == "b"
