"""Latencies are exact: from samples and step records, against values worked out by hand."""

import math
import random

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO, series_of
from stepscope.recordings.state.latency_samples import Samples
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.panels import header
from stepscope.tui.views.view import View
from tests.support.sessions.history_steps import DECODE, FIRST, LAST, MS, PREFILL, RECOMPUTE


def record(
    step: int, start_ms: int, end_ms: int, rows: list[wire.BatchRow], *events: wire.RequestEvent
) -> wire.StepRecord:
    decodes = sum(row.num_tokens for row in rows if row.phase == DECODE)
    return wire.StepRecord(
        step=step, schedule_start_ns=start_ms * MS, schedule_end_ns=(start_ms + 1) * MS,
        launch_ns=(start_ms + 2) * MS, tokens_ns=end_ms * MS, batch=rows, num_running=len(rows),
        num_prefill_tokens=sum(row.num_tokens for row in rows) - decodes,
        num_decode_tokens=decodes, num_waiting=0, events=list(events),
    )  # fmt: skip


def arrived(request_id: int, time_ms: int, num_prompt_tokens: int) -> wire.Arrived:
    return wire.Arrived(request_id, "", num_prompt_tokens, 9, 0, time_ms * MS)


FIRST_ROW = wire.BatchRow(1, PREFILL, 0, 8, 0, 1, FIRST)


def test_a_latency_trend_keeps_the_worst_of_each_time_slice_and_no_value_for_empty_ones() -> None:
    samples = Samples()
    for time_ns, value_ms in ((1, 5), (9, 7), (31, 4), (40, 6)):
        samples.add(time_ns, value_ms * MS)
    assert series_of(samples, 0, 40, buckets=4).trend_ms == (7.0, None, None, 6.0)
    # Slices stand still as time goes on: at 35 they still end at multiples of 10.
    assert series_of(samples, -5, 35, buckets=4).trend_ms == (7.0, None, None, 4.0)


def test_percentiles_of_any_window_equal_those_of_its_sorted_samples() -> None:
    rng = random.Random(1)
    samples = Samples()
    kept: list[tuple[int, int, int]] = []
    time_ns = 0
    for turn in range(6):
        for _ in range(rng.randrange(2048)):
            time_ns += rng.randrange(3)
            value = rng.randrange(-5, 10 ** rng.randrange(1, 12))
            kept.append((time_ns, value, rng.randrange(1, 4)))
            samples.add(*kept[-1])
        if turn % 3 == 1:
            until_ns = time_ns // 5
            samples.forget_before(until_ns)
            kept = [each for each in kept if each[0] >= until_ns]
        elif turn % 3 == 2:
            time_ns -= rng.randrange(1024)
            samples.forget_after(time_ns)
            kept = [each for each in kept if each[0] <= time_ns]
        assert list(samples) == kept
        for _ in range(8):
            start_ns, end_ns = sorted(rng.randrange(-1, time_ns + 2) for _ in range(2))
            rows = [each for each in kept if start_ns < each[0] <= end_ns]
            values = sorted(value for _, value, weight in rows for _ in range(weight))
            cut = samples.cut(start_ns, end_ns)
            series = series_of(cut, start_ns, end_ns, 1.0)
            uncut = series_of(samples, start_ns, end_ns, 1.0)
            assert series[:-1] == uncut[:-1]  # slices of the trend may begin before the window
            assert series.num_samples == len(values)
            if not values:
                continue
            nearest = (values[math.ceil(rank * len(values) / 100) - 1] for rank in (50, 95, 99))
            assert [series.p50_ms, series.p95_ms, series.p99_ms] == [each / 1e6 for each in nearest]
            assert series.max_ms == values[-1] / 1e6
            assert series.within_slo == sum(value <= 1_000_000 for value in values) / len(values)


@pytest.mark.parametrize(("reason", "detail"), [("kv_full", ""), ("priority", "priority")])
def test_tokens_computed_again_name_why_if_not_for_blocks(reason: str, detail: str) -> None:
    again = wire.BatchRow(1, RECOMPUTE, 0, 9, 0, 1, LAST)
    records = [
        record(0, 0, 10, [FIRST_ROW], arrived(1, 0, 8), wire.Admitted(1, 0)),
        record(1, 10, 20, [], wire.Preempted(1, 1, reason)),
        record(2, 20, 80, [again], wire.Admitted(1, 0)),
    ]
    history = History()
    for sequence, message in enumerate(records):
        history.append(sequence, message)
    stall = history.stall(2)
    told = [(piece.cause, piece.detail, piece.step, piece.ns // MS) for piece in stall.pieces]
    assert told == [("preempted", "", 1, 10), ("recompute", detail, 2, 60)]


def status(time_ms: int, state: wire.EngineState) -> wire.EngineStatus:
    return wire.EngineStatus(
        time_ns=time_ms * MS, state=state, step=0, num_running=1, num_waiting=0
    )


def test_an_operators_pause_counts_in_no_latency_or_service_level() -> None:
    """A pause of 5 s between two tokens that would have been 20 ms apart; one before a first."""
    history = History(SLO(ttft_ms=100, itl_ms=50))
    other_row = wire.BatchRow(2, PREFILL, 0, 8, 0, 1, FIRST)
    messages = [
        record(0, 0, 10, [FIRST_ROW], arrived(1, 0, 8), wire.Admitted(1, 0)),
        status(15, "paused"),
        status(1015, "paused"),
        record(
            1, 5015, 5030, [wire.BatchRow(1, DECODE, 8, 1, 0, 1, LAST), other_row],
            arrived(2, 12, 8), wire.Admitted(2, 0), wire.Finished(1, "length", 2),
        ),
        record(2, 5030, 5090, [wire.BatchRow(2, DECODE, 8, 1, 0, 1, LAST)]),
    ]  # fmt: skip
    for sequence, message in enumerate(messages):
        history.append(sequence, message)
        if sequence == 3:
            assert history.last_stall() is None
            assert not history.events(kinds=frozenset({"slo"}))
    report = history.windows.latency()
    assert (report.itl.num_samples, report.itl.p50_ms, report.itl.max_ms) == (2, 20.0, 60.0)
    assert report.itl.within_slo == 0.5
    assert (report.ttft.num_samples, report.ttft.max_ms, report.ttft.within_slo) == (2, 18.0, 1.0)
    assert report.tpot.max_ms == 20.0
    # The client's wait and its cause are shown all the same.
    wait = history.wait(1, 1)
    assert (wait.gap_ns, wait.paused_ns) == (5020 * MS, 5000 * MS)
    assert (wait.cause, wait.is_excused) == ("paused", True)
    breach = history.last_stall()
    assert (breach.step, breach.is_excused) == (2, False)
    told = [event.text for event in history.events(kinds=frozenset({"engine"}))]
    assert told == ["the engine was paused", "the engine goes on after 5.0 s of pause"]


def test_rates_and_wall_time_shares_equal_those_worked_out_by_hand() -> None:
    history = History()
    for step in range(10):
        rows = [
            wire.BatchRow(1, DECODE, 8 + step, 1, 0, 1, LAST),
            wire.BatchRow(2, PREFILL, 9 * step, 9, 0, 1, 0),
        ]
        history.append(step, record(step, step * 100, step * 100 + 80, rows))
    sums = history.windows.sums(900 * MS + 80 * MS, 0.5)  # (480, 980]: steps 5..9
    assert sums.num_mixed == sums.num_steps == 5
    assert sums.steps_per_s == pytest.approx(10.0)
    assert sums.num_in_tokens == 45
    assert sums.out_tokens_per_s == pytest.approx(10.0)
    assert sums.span_ns == 500 * MS
    assert (sums.model_ns, sums.schedule_ns, sums.busy_ns) == (5 * 78 * MS, 5 * MS, 5 * 80 * MS)
    assert sums.prefix_hit_rate is None
    assert sums.evictions_per_s is None


def test_preemptions_are_shown_over_the_last_minute_or_the_seconds_that_are_known() -> None:
    history = History()
    history.append(0, record(0, 0, 5, [wire.BatchRow(1, DECODE, 8, 1, 0, 1, LAST)]))
    history.append(1, record(1, 5000, 5008, [], wire.Preempted(1, 1, "KV full")))
    for step in range(2, 90):
        rows = [wire.BatchRow(2, DECODE, 8 + step, 1, 0, 1, LAST)]
        history.append(step, record(step, 5000 + step * 1000, 5008 + step * 1000, rows))
    for step, told in ((4, "1/9s"), (9, "1/14s"), (25, "1/30s"), (59, "1/m"), (61, "0/m")):
        assert f"PREEMPT {told}" in key_figures(history, step), step
    assert "PREEMPT —" in key_figures(History())


@pytest.mark.parametrize(("tokens", "budget"), [(-(10**15), 8), (10**15, 8), (5, 0)])
def test_a_senseless_number_of_tokens_leaves_the_key_figures_readable(
    tokens: int, budget: int
) -> None:
    history = History()
    row = wire.BatchRow(1, DECODE, 0, tokens, 0, 1, LAST)
    step = record(0, 0, 5, [row])
    history.append(0, msgspec.structs.replace(step, token_budget=budget))
    assert "BUDGET" in key_figures(history, 0)


def key_figures(history: History, step: int | None = None) -> str:
    frame = FrameBuilder(history, clock=lambda: 0.0).build(View(cursor=step), 80, 10, 8)
    (line,) = header.key_figures(frame, 300, 1, 0)
    return "".join(text for text, _ in line)


def test_the_share_of_tokens_computed_again_is_of_the_last_minute() -> None:
    history = History()
    for step in range(90):
        phase = RECOMPUTE if step == 1 else DECODE
        rows = [wire.BatchRow(1, phase, 8 + step, 1, 0, 1, LAST)]
        history.append(step, record(step, step * 1000, step * 1000 + 8, rows))
    for step, told in ((0, "0.0%"), (1, "50.0%"), (19, "5.0%"), (59, "1.7%"), (61, "0.0%")):
        assert f"RECOMPUTE {told}" in key_figures(history, step), step


def test_prompt_tokens_a_second_are_shown_of_an_engine_that_tells_no_rows() -> None:
    history = History()
    for step in range(200):
        rows = [wire.BatchRow(2, PREFILL, 9 * step, 9, 0, 1, 0)]
        told = record(step, step * 100, step * 100 + 80, rows)
        history.append(step, msgspec.structs.replace(told, batch=None))
    assert history.windows.sums(None, 10.0).num_in_tokens is None
    assert "in 90 tok/s" in key_figures(history, 199)
