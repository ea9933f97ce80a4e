"""Two runs side by side: their figures are the dashboard's, and no winner is named by chance."""

import math
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.recordings.compare import points as comparison_points
from stepscope.recordings.compare.columns import axis_of
from stepscope.recordings.compare.comparison import Comparer, Comparison, compare
from stepscope.recordings.compare.feed import HistoryFeed
from stepscope.recordings.compare.points import (
    KNOB,
    LATE,
    MARKED,
    PREEMPTED,
    StepPoint,
    StepPoints,
)
from stepscope.recordings.compare.recording_feed import RecordingFeed
from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.side_requests import RequestRun, matched, were_sent_twice
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from stepscope.recordings.session.indexer import NewRows
from stepscope.recordings.session.steps import UNKNOWN
from stepscope.recordings.session.totals import TimeSlices
from stepscope.recordings.state.clocks import known_since
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.session import SessionState
from stepscope.tui.views.frame.compare_text import load as load_text
from stepscope.tui.views.frame.compare_text import outcome, setting_text
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.history_steps import step as step_of
from tests.support.sessions.paused import paused

SLO_ = SLO(ttft_ms=500.0, itl_ms=30.0)
WORKLOAD = SimulatedWorkload(rate=9.0, document_share=0.25, document_tokens=2600, output_tokens=140)
Messages = list[tuple[int, wire.Telemetry]]
Both = tuple[Messages, Messages]


def run_of(budget: int, num_steps: int = 300, seed: int = 3, **options: Any) -> Messages:
    return simulate(
        seed=seed, num_steps=num_steps, knobs=Knobs(max_num_batched_tokens=budget, max_num_seqs=32),
        workload=WORKLOAD, cost=CostModel(floor_ms=12.0, token_us=120.0, context_ns=4.0),
        num_blocks=512, **options,
    )  # fmt: skip


def side_of(messages: Messages, name: str = "run", **knobs: Any) -> Side:
    side = Side(name, SLO_, SessionState(knobs=knobs))
    for _, message in messages:
        side.apply(message)
    return side


@pytest.fixture(scope="module")
def small_and_large() -> Both:
    """The same arrivals under two budgets."""
    return run_of(256), run_of(4096)


# A side


def test_each_request_of_a_compared_run_has_its_longest_itl(small_and_large: Both) -> None:
    messages = paused(small_and_large[0])
    side, history = side_of(messages), history_of(messages)
    views = history.state.requests
    checked = 0
    for request_id, run in side.requests.items():
        life = history.lives.life(views[request_id]) if request_id in views else None
        waits = [] if life is None else [w for w in life.waits if w.token_idx > 0]
        if not waits:
            continue
        checked += 1
        assert run.worst_itl_ns == max(w.gap_ns - w.paused_ns for w in waits)
        longest = [w.step for w in waits if w.gap_ns - w.paused_ns == run.worst_itl_ns]
        assert run.worst_step in longest
    assert checked > 5


def test_a_compared_run_counts_each_step_once_while_others_draw_it(small_and_large: Both) -> None:
    side, is_over = Side("run", SLO_, SessionState()), threading.Event()
    messages = small_and_large[0][:100]

    def draw() -> None:
        while not is_over.is_set():
            with side.lock:
                side.points.worst(0, 10**6)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _, message in messages:
            side.apply(message)
            side.sums()
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        for thread in threads:
            thread.join()
    assert side.sums().num_records > 80
    assert side.figures() == side_of(messages).figures()


@settings(max_examples=15)
@given(st.lists(st.integers(0, 9999), min_size=1, max_size=200), st.data())
def test_a_run_of_any_length_keeps_its_worst_step(prefills: list[int], data: st.DataObject) -> None:
    points = StepPoints()
    number = len(prefills)
    columns = np.full((len(StepPoint._fields), number), UNKNOWN)
    columns[0] = columns[1] = np.arange(number)
    columns[2:6] = columns[0] * 10, columns[0] * 10 + 9, prefills, np.ones(number)
    columns[-1] = LATE * (np.array(prefills) > 9000)
    cuts = data.draw(st.lists(st.integers(0, number), max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_points, "MAX_POINTS", 8)
        for begin, end in pairwise(sorted({0, number, *cuts})):
            points.extend(columns[:, begin:end])
    assert len(points) <= 8
    whole = points.worst(0, len(points) - 1)
    assert (whole.first, whole.last) == (0, len(prefills) - 1)
    assert whole.num_prefill_tokens == max(prefills)
    assert whole.longest_us is None
    step = data.draw(st.integers(0, len(prefills) - 1))
    index = points.index_at(step, by_step=True)
    point = points.worst(index, index)
    assert point.first <= step <= point.last
    largest = max(prefills[point.first : point.last + 1])
    assert (point.num_prefill_tokens, bool(point.flags & LATE)) == (largest, largest > 9000)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=300))
def test_percentiles_are_exact_or_state_their_error(values: list[int]) -> None:
    counts = Distribution(10**9, max_values=100)
    for value in values:
        counts.add(value)
    assert (counts.error == 0) == (len(set(values)) <= 100)
    spread = counts.spread()
    for rank in (50, 95, 99):
        found, value = spread.at_ns[rank], sorted(values)[-(-rank * len(values) // 100) - 1]
        assert 0 <= value - found <= counts.error * value
    assert spread.at_ns[100] == max(values)
    assert counts.num_within == sum(value <= 10**9 for value in values)


@pytest.mark.parametrize("seconds", [0.3, 1.1, 2.0, 5.0, 300.0])
def test_the_end_of_a_short_run_counts_in_its_slices(seconds: float) -> None:
    over, num_ticks = TimeSlices[str](), 1000
    for tick in range(1, num_ticks + 1):
        over.at(round(tick * seconds * 1e9 / num_ticks))["late"] += tick > 0.9 * num_ticks
    lengths = over.seconds(20)
    rates = [each["late"] / s for each, s in zip(over.grouped(20), lengths, strict=True) if s]
    assert rates[-1] == max(rates) > 0
    assert sum(lengths) == pytest.approx(seconds)


# Chance


def test_preemptions_that_come_in_bursts_name_no_winner_by_chance() -> None:
    def preempting(bursts: dict[int, int]) -> Side:
        side = Side("run", SLO_, SessionState())
        for tick in range(2000):
            ns = tick * 20_000_000
            events = [wire.Preempted(request_id=0, num_blocks=1, reason="kv")] * bursts.get(tick, 0)
            side.apply(step_of(tick, [], schedule_start_ns=ns, tokens_ns=ns, events=events))
        return side

    steady = preempting(dict.fromkeys(range(0, 2000, 50), 1))
    twice = preempting(dict.fromkeys(range(0, 2000, 25), 1))
    burst = preempting({300: 40, 900: 40})
    assert compare(steady, twice).figure("preemptions_per_min").verdict == "a"
    assert compare(steady, burst).figure("preemptions_per_min").verdict == "unclear"


def test_with_few_samples_no_winner_is_named() -> None:
    a, b = (Side(name, SLO_, SessionState()) for name in "ab")
    for side, waits in ((a, (10, 12, 14)), (b, (10, 13, 90))):
        rows = NewRows()
        ttft_ns = [(number, wait * 1_000_000) for number, wait in enumerate(waits)]
        rows.append(AppliedStep(0, step_of(0), Outcome(ttft_ns=ttft_ns)))
        side.totals.add(rows.rows(), is_one_step=True)
    found = compare(a, b)
    # The longest wait of one run does not predict that of the next.
    assert found.figure("ttft_max").verdict == "differs"
    assert found.figure("ttft_p50").verdict == "unclear"
    assert found.figure("itl_p50").verdict == "unknown"


# Both


def test_the_better_run_is_named_with_the_knobs_that_differ() -> None:
    small = side_of(run_of(256, 800), "small", max_num_batched_tokens=256, order="arrival")
    messages = another(run_of(4096, 800))
    large = side_of(messages, "large", max_num_batched_tokens=4096, order="arrival")
    found = compare(small, large)
    itl = found.figure("itl_p95")
    assert itl.a > 2 * itl.b  # chunks in every other step, not whole prompts now and then
    assert itl.verdict == "b"
    assert itl.factor == pytest.approx(itl.a / itl.b)
    (setting,) = found.settings
    assert (setting.name, setting.a, setting.b) == ("max_num_batched_tokens", (256,), (4096,))
    reverse = compare(large, small).figure("itl_p95")
    assert (reverse.a, reverse.b, reverse.verdict) == (itl.b, itl.a, "a")
    causes = {(share.kind, share.cause): share for share in found.causes}
    beside = causes["ITL", "prefill"]
    assert beside.num_a > beside.num_b > 0
    late = sum(share.num_a for share in found.causes if share.kind == "ITL")
    within = found.figure("itl_within_slo")
    assert late == round((1 - (within.a or 0)) * within.num_a)


def test_a_run_compared_with_itself_has_no_winner(small_and_large: Both) -> None:
    found = compare(side_of(small_and_large[0]), side_of(small_and_large[0]))
    assert {figure.verdict for figure in found.figures} <= {"alike", "unknown"}
    assert found.settings == []
    assert found.load.other_work is None
    assert all(pair.difference_ns == 0 for pair in found.requests.pairs)


def test_step_overlap_in_one_engine_only_is_a_difference_if_both_publish_it() -> None:
    messages = run_of(1024, 20)

    def told(overlap: bool | None) -> Side:
        info = msgspec.structs.replace(messages[0][1], overlap=overlap)
        return side_of([(0, info), *messages[1:]])

    found = compare(told(True), told(False)).settings
    assert [(each.name, each.a, each.b) for each in found] == [("overlap", (True,), (False,))]
    assert [setting_text(each) for each in found] == ["overlap on | off"]
    assert compare(told(True), told(True)).settings == []
    assert compare(told(True), told(None)).settings == []


def another(messages: Messages, engine_id: str = "another") -> Messages:
    """The same run, published by another engine."""
    info = msgspec.structs.replace(messages[0][1], engine_id=engine_id)
    return [(messages[0][0], info), *messages[1:]]


def test_under_different_loads_no_run_is_called_better() -> None:
    """Half the request rate makes waits shorter, but not the engine better."""
    busy, calm = run_of(512), simulate(
        seed=3, num_steps=300, knobs=Knobs(max_num_batched_tokens=512, max_num_seqs=32),
        workload=msgspec.structs.replace(WORKLOAD, rate=3.0), num_blocks=512,
        cost=CostModel(floor_ms=12.0, token_us=120.0, context_ns=4.0),
    )  # fmt: skip
    for other in (calm, another(calm)):  # a part of the same session, and another engine
        found = compare(side_of(busy), side_of(other))
        assert "requests" in found.load.other_work
        assert found.better("a") == found.better("b") == []
        itl = found.figure("itl_p95")
        assert itl.verdict in ("differs", "unclear")
        assert itl.b < itl.a
        told = dict([outcome(found, "a"), outcome(found, "b")])
        assert list(told) == ["A lower", "B lower"]
        assert any(phrase.startswith("ITL") for phrase in told["B lower"])
        assert "loads differ; only more work may win: " in (load_text(found) or "")


def run(request_id: int, name: str, arrival_ns: int, ttft_ns: int = 1, prompt: int = 9) -> Any:
    return RequestRun(request_id, name, prompt, arrival_ns, ttft_ns=ttft_ns)


def test_requests_are_matched_by_client_id_or_by_order_of_arrival() -> None:
    a = {1: run(1, "x", 10), 2: run(2, "y", 20), 3: run(3, "x", 30), 4: run(4, "only a", 40)}
    b = {7: run(7, "y", 10, 50), 8: run(8, "x", 20, 5), 9: run(9, "x", 30, 900)}
    found = matched(a, b)
    assert found.by == "client id"
    assert [(p.a.request_id, p.b.request_id) for p in found.pairs] == [(3, 9), (2, 7), (1, 8)]
    assert (found.only_a, found.only_b) == (1, 0)
    nameless = {k: run(v.request_id, f"other-{k}", v.arrival_ns) for k, v in b.items()}
    found = matched(a, nameless)
    assert found.by == "order of arrival"
    assert sorted((p.a.request_id, p.b.request_id) for p in found.pairs) == [(1, 7), (2, 8), (3, 9)]
    assert matched({}, b).pairs == []


# One axis


def test_compared_runs_are_aligned_by_time_step_or_request(small_and_large: Both) -> None:
    a, b = (side_of(messages) for messages in small_and_large)
    by_step = axis_of("step", a, b, None)
    point = by_step.column(by_step.a, 40, 41)
    other = by_step.column(by_step.b, 40, 41)
    assert (point.first, other.first) == (40, 40)
    assert by_step.column(by_step.a, 10_000, 10_001) is None
    by_time = axis_of("time", a, b, None)
    for place in (by_time.a, by_time.b):
        found = by_time.column(place, 2_000_000_000, 2_000_000_001)
        assert found.start_ns <= 2_000_000_000 < found.end_ns
    pair = compare(a, b).requests.pairs[0]
    by_request = axis_of("request", a, b, pair)
    for place, side, one in ((by_request.a, a, pair.a), (by_request.b, b, pair.b)):
        first = by_request.column(place, one.ttft_ns - 1, one.ttft_ns)
        assert first.first == one.first_token_step
        assert place.zero + (side.totals.start_ns or 0) == one.arrival_ns
    whole = [by_time.column(by_time.a, s, s + 10**8) for s in range(0, by_time.end, 10**8)]
    shown = [each for each in whole if each is not None]
    assert max(p.num_prefill_tokens for p in shown) == max(
        m.num_prefill_tokens for _, m in small_and_large[0] if isinstance(m, wire.StepRecord)
    )
    assert all(p.first <= q.first for p, q in pairwise(shown))


def test_knob_changes_marks_and_preemptions_are_kept_at_their_steps() -> None:
    messages = run_of(1024, 200, changes={90: {"max_num_batched_tokens": 512}})
    messages.append((len(messages), wire.Mark(step=50, time_ns=0, text="here", who="me")))
    points = side_of(messages).points
    found = {flag: points.next_flagged(-1, 1, flag) for flag in (KNOB, MARKED)}
    assert found == {KNOB: 90, MARKED: 50}
    preempted = [m.step for _, m in messages if isinstance(m, wire.StepRecord)
                 and any(isinstance(e, wire.Preempted) for e in m.events)]  # fmt: skip
    assert points.next_flagged(-1, 1, PREEMPTED) == (preempted[0] if preempted else None)


# A session in memory


def test_a_session_in_memory_counts_as_read_only_when_none_of_its_messages_is_left() -> None:
    feed = HistoryFeed(history_of(run_of(1024, 60)), "x", SLO_, StepRange())
    feed.read(0.0)  # its time was up before it began
    assert feed.share == 0
    feed.read(math.inf)
    assert feed.share is None


def read_both(comparer: Comparer) -> Comparison:
    while comparer.read_some():
        pass
    return comparer.renew()


def test_a_live_session_compared_before_and_after_a_step_adds_new_steps_to_the_second() -> None:
    messages = run_of(1024, 200, changes={90: {"max_num_batched_tokens": 256}})
    history = history_of(messages[:150])
    before = HistoryFeed(history, "before", SLO_, StepRange(None, 89))
    after = HistoryFeed(history, "after", SLO_, StepRange(90, None))
    comparer = Comparer(before, after)
    read_both(comparer)
    assert before.is_done
    assert not after.is_done
    for sequence, message in messages[150:]:
        history.append(sequence, message)
    found = read_both(comparer)
    steps = [work.num_steps for work in found.works]
    assert steps == [90, (history.last_step or 0) - 89]
    left, right = comparer.sides
    assert (left.points.first_step, left.points.last_step) == (0, 89)
    assert right.points.first_step == 90
    budgets = [each for each in found.settings if each.name == "max_num_batched_tokens"]
    assert budgets == []  # of a session that never published its initial budget
    other = another(messages)[0][1]
    history.append((history.last_sequence or 0) + 1, other)
    comparer.read_some()
    comparer.read_some()
    assert after.is_done
    assert "restarted" in comparer.notes[0]
    assert comparer.renew().works[1].num_steps == steps[1]


def test_the_parts_before_and_after_a_knob_change_differ_in_that_knob_only() -> None:
    """The message of a change comes before its effective step, and belongs to the time after it."""
    messages = run_of(1024, 120, changes={90: {"max_num_batched_tokens": 256}})
    history = history_of(messages)
    history.reset(msgspec.structs.replace(  # as a dashboard that has asked who is there
        history_of(messages[:1]).snapshot(), knobs={"max_num_batched_tokens": 1024}
    ))  # fmt: skip
    for sequence, message in messages:
        history.append(sequence, message)
    stretches = (StepRange(None, 89), StepRange(90, None))
    comparer = Comparer(*(HistoryFeed(history, "x", SLO_, stretch) for stretch in stretches))
    found = read_both(comparer)
    (setting,) = found.settings
    assert (setting.name, setting.a, setting.b) == ("max_num_batched_tokens", (1024,), (256,))
    assert found.is_one_session
    assert found.works[0].num_steps == 90


def read_whole(*feeds: Any) -> list[Side]:
    for feed in feeds:
        while feed.read(time.monotonic() + 1) and not feed.is_done:
            pass
    return [feed.side for feed in feeds]


def measured(side: Side) -> list[Any]:
    """The number of waits of each kind, the longest, and the explained late first tokens."""
    spreads = [side.totals.waits.of[kind].spread() for kind in ("ttft", "itl", "tpot")]
    late = sum(number for (kind, _), number in side.num_late.items() if kind == "TTFT")
    return [*((spread.num_samples, spread.at_ns.get(100)) for spread in spreads), late]


@pytest.mark.parametrize("with_pause", [True, False])
@pytest.mark.parametrize("are_told", [True, False])
def test_a_compared_run_that_begins_with_a_queue_includes_the_waits_of_its_requests(
    tmp_path: Path, with_pause: bool, are_told: bool
) -> None:
    """A side joined or recorded in mid-session measures the same as a longer one of these steps.

    Unless the engine reports no pauses: then any part of these waits may have been a pause.
    """
    messages = paused(run_of(256)) if with_pause else run_of(256)
    whole, state = history_of(messages), history_of(messages).state_at(125)
    assert sum(view.status == "waiting" for view in state.requests.values()) > 2
    [expected] = read_whole(HistoryFeed(whole, "x", SLO_, StepRange(126, None)))
    number = next(n for n, m in messages if isinstance(m, wire.StepRecord) and m.step == 125)
    snapshot = state.snapshot(number)
    pauses = (snapshot.pauses or []) if are_told else None
    snapshot = msgspec.structs.replace(snapshot, pauses=pauses)
    joined = History(SLO_, known_since_ns=known_since(snapshot))
    joined.reset(snapshot)
    writer = RecordingWriter(tmp_path / "joined.mcap")
    writer.start(snapshot)
    for sequence, message in messages[number + 1 :]:
        joined.append(sequence, message)
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    writer.close()
    for side in read_whole(
        HistoryFeed(joined, "x", SLO_, StepRange()),
        RecordingFeed(Recording(writer.path), "x", SLO_, StepRange()),
    ):
        if are_told:
            assert measured(side) == measured(expected)
        else:
            assert measured(side)[0][0] < measured(expected)[0][0]


def test_parts_of_one_session_have_no_throughput_winner_and_no_request_pairs() -> None:
    history = history_of(run_of(1024))
    sides = read_whole(
        HistoryFeed(history, "before", SLO_, StepRange(None, 79)),
        HistoryFeed(history, "after", SLO_, StepRange(80, None)),
    )
    found = compare(*sides)
    for key in ("out_tokens_per_s", "in_tokens_per_s"):
        assert found.figure(key).verdict in ("differs", "alike")
    views = history.state_at(79).requests.values()
    there = {view.request_id for view in views if view.status != "finished"}
    assert {pair.a.request_id for pair in found.requests.pairs} == there
    assert all(pair.a.request_id == pair.b.request_id for pair in found.requests.pairs)
    assert found.requests.by == "request id"


def test_requests_sent_twice_to_one_engine_are_recognised_as_two_runs() -> None:
    def sent(first: int, prompts: range) -> dict[int, RequestRun]:
        return {first + n: RequestRun(first + n, f"load-{n}", 100 + n, n) for n in prompts}

    once = sent(0, range(40))
    assert were_sent_twice(once, sent(40, range(40)))
    assert were_sent_twice(once, sent(40, range(37)))  # cut off before its end
    assert not were_sent_twice(once, once)  # the requests themselves, in two parts of a session
    assert not were_sent_twice(once, sent(40, range(30, 70)))  # others came
    longer = {key: replace(run, num_prompt_tokens=7) for key, run in sent(40, range(40)).items()}
    assert not were_sent_twice(once, longer)
    assert not were_sent_twice({}, {})
