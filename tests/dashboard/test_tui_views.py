"""The views draw what the records say of a step, character for character."""

import re
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings import samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import work_text
from stepscope.recordings.state.events import EventLog, SessionEvent
from stepscope.recordings.state.lanes import Cell
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import LIMITS
from stepscope.tui.session.goto import wanted
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import budget_chart, kv_map, lanes
from stepscope.tui.views.frame.chart_columns import ChartColumns
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.framed_panels import cells_by_share
from stepscope.tui.views.lines import clean, fitted, framed
from stepscope.tui.views.panels import header, inspector, session_events
from stepscope.tui.views.theme import LIMIT_LETTERS
from stepscope.tui.views.view import ZOOMS, View
from tests.support.screens.screen_text import line_texts

GUTTER = 14
COLUMNS = 80
WIDTH = COLUMNS + GUTTER + 2


def frame_of(source: Any, view: View | None = None, num_lanes: int = 40) -> Frame:
    builder = FrameBuilder(source.history, clock=lambda: 0.0)
    return builder.build(view or View(), COLUMNS, num_lanes, 12)


def chart_rows(frame: Frame) -> list[str]:
    """The columns of the budget chart, without frame, labels and limits, top to bottom."""
    drawn = line_texts(budget_chart.draw(frame, WIDTH, 13, GUTTER))
    assert all(len(line) == WIDTH for line in drawn)
    return [line[1 + GUTTER : -1] for line in (*drawn[1:-3], drawn[-2])]


def paused(step: int) -> View:
    return View(cursor=step, right=step)


def header_line(frame: Frame, status: Any = "live", width: int = 120, **facts: Any) -> str:
    connection = header.SourceState("ipc://engine-0", status, 10.0, **facts)
    return line_texts(header.draw(frame, connection, width))[0]


def append(history: History, message: wire.Telemetry) -> None:
    history.append(history.last_sequence + 1, message)


# Budget chart


def test_a_strip_shows_what_limited_each_step_and_names_it_at_the_cursor(source: Any) -> None:
    history = source.history
    last = history.last_step
    strip = line_texts(budget_chart.draw(frame_of(source), WIDTH, 13, GUTTER))[-3]
    assert strip[1:].lstrip().startswith(f"limit {LIMITS[history.summary(last).limit]}")
    steps = range(last - COLUMNS + 1, last + 1)
    shown = ""
    for limit, group in groupby(LIMITS[history.summary(step).limit] for step in steps):
        band = LIMIT_LETTERS[limit] * len(list(group))
        is_named = limit != "work" and len(band) >= len(limit) + 2
        shown += f" {limit} ".ljust(len(band), "–") if is_named else band
    assert strip[1 + GUTTER : -1] == shown
    column = frame_of(source, View(zoom_idx=ZOOMS.index(50))).columns[-2]
    counts = Counter(history.summary(step).limit for step in range(column.first, column.last + 1))
    assert len(counts) > 1
    assert column.limit == LIMITS[counts.most_common(1)[0][0]]


def test_padding_is_drawn_dashed_on_top_of_the_prefill(source: Any) -> None:
    history = source.history
    last = history.record(399)
    for step, padded in ((400, 0), (401, 256)):
        record = msgspec.structs.replace(
            last, step=step, num_prefill_tokens=128, num_padded_tokens=padded, events=[]
        )
        append(history, record)
    rows = chart_rows(frame_of(source))  # 8 rows for a budget of 1,024
    assert "".join(row[-2] for row in rows[:-2]).strip("· ") == "▓"
    assert "".join(row[-1] for row in rows[:-2]).strip("· ") == "╌╌▓"
    figures = line_texts(header.key_figures(frame_of(source), 200, 1, GUTTER))[0]
    assert f"{128 + last.num_decode_tokens + 256}/512" in figures


@pytest.mark.parametrize(
    ("most", "row"), [(256, 6), (129, 6), (257, 5), (1024, None), (2048, None)]
)
def test_a_line_shows_the_largest_step_of_a_cuda_graph(
    source: Any, most: int, row: int | None
) -> None:
    before = chart_rows(frame_of(source))
    append(source.history, msgspec.structs.replace(source.history.info, max_graph_tokens=most))
    frame = frame_of(source)  # 8 rows for a budget of 1,024
    drawn = chart_rows(frame)
    changed = {at for at, (old, new) in enumerate(zip(before, drawn, strict=True)) if old != new}
    assert changed == {row} - {None}
    if row is not None:
        assert drawn[row].replace("─", " ") == before[row]
        labels = line_texts(budget_chart.draw(frame, WIDTH, 13, GUTTER))
        assert f"graph {most}" in labels[1 + row]


def in_flight(source: Any) -> wire.StepInFlight:
    """A step in flight that spends half its budget on a prompt."""
    history = source.history
    budget = history.summary(history.last_step).token_budget
    flying = wire.StepInFlight(
        step=history.last_step + 1,
        since_ns=history.state.time_ns,
        time_ns=history.state.time_ns + 7_300_000_000,
        num_prefill_tokens=budget // 2,
        num_decode_tokens=63,
        num_decodes=63,
        prefills=[wire.PrefillPart(17, 0, budget // 2)],
        token_budget=budget,
    )
    append(history, flying)
    return flying


def test_a_step_in_flight_is_the_newest_column_and_named_in_the_header(source: Any) -> None:
    before = [row[:COLUMNS] for row in chart_rows(frame_of(source))]
    flying = in_flight(source)
    frame = frame_of(source)
    after = [row[:COLUMNS] for row in chart_rows(frame)]
    wide = sum(column is not None and column.is_open for column in frame.columns)
    assert wide == COLUMNS // 8  # it has run for far longer than any step before it
    assert [row[:-wide] for row in after[:-1]] == [row[wide:] for row in before[:-1]]
    for x in range(-wide, 0):
        column = [row[x] for row in after[:-1]]
        assert set(column) == set(" ·▒╍")
        assert column[-1] == "╍"
    assert after[-1].endswith("!7300 ms".ljust(wide, "─"))
    drawn = line_texts(lanes.draw(frame, WIDTH, 40, GUTTER))
    assert any(line.endswith("!" * wide + "│") for line in drawn)
    doing = {lane.cells[-1] for lane in frame.lanes}
    assert doing <= {0, int(Cell.WAITING), int(Cell.PREFILL), len(Cell)}
    for width in (120, 200):
        said = f"STEP {flying.step:,} IN FLIGHT 7.3 s: {work_text(flying)}"
        assert said in header_line(frame, width=width)
    frame.status = "down"
    line = header_line(frame, "down")
    assert f"silent since 7.3 s into step {flying.step:,}" in line
    assert "IN FLIGHT" not in line


def test_header_and_verdict_say_alike_how_long_a_step_in_flight_has_run(source: Any) -> None:
    flying, history = in_flight(source), source.history
    builder = FrameBuilder(history, clock=lambda: 0.0)  # its slow figures stay as they are
    status = {"num_running": 0, "num_waiting": 0, "events": []}  # an idle engine, before this step
    append(history, wire.EngineStatus(step=399, time_ns=flying.time_ns, state="idle", **status))
    for more_s in (1, 2):
        time_ns = flying.time_ns + more_s * 10**9
        append(history, msgspec.structs.replace(flying, time_ns=time_ns))
        frame = replace(builder.build(View(), 100, 10, 8), status="live")
        assert f"IN FLIGHT {7.3 + more_s:.1f} s: " in header_line(frame)
        assert "▐LIVE▌" in header_line(frame)
        (verdict,) = line_texts(header.verdict(frame, 120, 1, GUTTER))
        assert f"step {flying.step:,} has run for {7.3 + more_s:.1f} s: " in verdict


def test_a_draining_engine_is_called_so_while_a_long_step_runs(source: Any) -> None:
    flying, history = in_flight(source), source.history
    status = {"num_running": 1, "num_waiting": 0, "events": []}
    append(history, wire.EngineStatus(step=399, time_ns=flying.time_ns, state="draining", **status))
    append(history, flying)
    frame = replace(FrameBuilder(history).build(View(), 100, 10, 8), status="live")
    assert frame.in_flight is not None
    assert line_texts(header.verdict(frame, 120, 1, GUTTER)) == [f" {frame.verdict.text}"]
    assert frame.verdict.text.startswith("draining")


def test_the_figures_of_an_idle_engine_are_not_called_old(source: Any) -> None:
    history, last = source.history, source.history.state
    builder = FrameBuilder(history, clock=lambda: 0.0)
    builder.build(View(), 100, 10, 8)
    status = {"num_running": 0, "num_waiting": 0, "events": []}
    time_ns = last.time_ns + 100 * 10**9
    append(history, wire.EngineStatus(step=399, time_ns=time_ns, state="idle", **status))
    frame = replace(builder.build(View(), 100, 10, 8), status="live")
    assert "old" not in line_texts(header.verdict(frame, 120, 1, GUTTER))[0]


def test_a_column_of_several_steps_shows_the_worst_of_them(source: Any) -> None:
    history = source.history
    columns = ChartColumns(history).visible(View(zoom_idx=2), COLUMNS, history.last_step)
    for column in (c for c in columns if c is not None):
        steps = [history.summary(s) for s in range(column.first, column.last + 1)]
        assert column.last - column.first < 5
        assert column.num_prefill_tokens == max(s.num_prefill_tokens for s in steps)
        assert column.num_decode_rows == max(s.num_decode_tokens for s in steps)
        assert column.has_preemption == any(s.num_preempted for s in steps)
    assert columns[-1].last == history.last_step


def test_on_the_time_axis_a_long_step_is_wider(source: Any) -> None:
    history = source.history
    found = ChartColumns(history).visible(View(axis="time"), 300, history.last_step)
    columns = [column for column in found if column is not None]
    widths = Counter(column.first for column in columns if column.first == column.last)
    longest = max(widths, key=lambda step: history.summary(step).duration_ns)
    assert widths[longest] >= 3
    assert widths[longest] >= max(widths.values()) - 1
    for before, after in pairwise(columns):  # every step is in some column
        assert after.first <= before.last + 1
        assert after.last >= before.last


# Lanes


def test_lanes_and_budget_chart_share_their_columns(source: Any) -> None:
    frame = frame_of(source)
    drawn = line_texts(lanes.draw(frame, WIDTH, len(frame.lanes) + 2, GUTTER))
    last = source.history.last_step
    for row, line in zip(frame.lanes, drawn[1:-1], strict=True):
        cells = line[1 + GUTTER : -1]
        assert len(cells) == COLUMNS
        for x in range(COLUMNS):
            record = source.history.record(last - COLUMNS + 1 + x)
            mine = [r for r in record.batch if r.request_id == row.request_id]
            ended = [e.request_id for e in record.events if isinstance(e, wire.Finished)]
            if row.request_id in ended:
                assert cells[x] == "●"
            elif not mine:
                assert cells[x] in " ·✗"
            elif mine[0].phase == wire.Phase.DECODE:
                assert cells[x] == ("!" if frame.columns[x].is_slow else "━")
            else:
                assert cells[x] in "▓▒░"


def test_the_lane_of_a_preempted_request_shows_the_preemption_and_the_wait(source: Any) -> None:
    history = source.history
    step = history.next_event(10**9, -1, frozenset({"preempt"})).step
    victim = next(e for e in history.record(step).events if isinstance(e, wire.Preempted))
    frame = frame_of(source, View(cursor=step, right=min(step + 20, history.last_step)), 60)
    row = next(row for row in frame.lanes if row.request_id == victim.request_id)
    assert row.status == "OUT"
    drawn = line_texts(lanes.draw(frame, WIDTH, 62, GUTTER))
    line = next(line for line in drawn if f" r{row.request_id} " in line)
    assert "✗·" in line


def test_if_not_all_lanes_fit_running_requests_are_kept_and_the_rest_counted(source: Any) -> None:
    frame = frame_of(source, num_lanes=8)
    assert len(frame.lanes) == 8 < frame.num_lanes
    assert all(row.status in ("DEC", "PRE", "OUT", "WAIT") for row in frame.lanes)
    title = line_texts(lanes.draw(frame, WIDTH, 10, GUTTER))[0]
    assert f"(8 of {frame.num_lanes})" in title


def test_a_prompt_that_stalled_streams_keeps_its_lane_while_its_step_is_shown(source: Any) -> None:
    source.history.set_slo(SLO(ttft_ms=500.0, itl_ms=5.0))
    frame = frame_of(source, num_lanes=8)
    late = [c for c in frame.columns if c is not None and c.has_breach and c.num_prefill_tokens]
    record = source.history.record(late[-1].last)
    prompts = {row.request_id for row in record.batch if row.phase != wire.Phase.DECODE}
    assert prompts
    assert prompts <= {row.request_id for row in frame.lanes}


def test_consecutive_equal_operator_actions_are_one_event() -> None:
    log = EventLog()
    for step in range(5):
        log.add(SessionEvent(step, step, "engine", "me: ran single steps"))
    log.add(SessionEvent(5, 5, "engine", "me: resumed the engine"))
    log.add(SessionEvent(6, 6, "engine", "me: ran single steps"))
    assert [event.step for event in log.until(9, 10, None)] == [4, 5, 6]


def test_a_replay_fits_its_time_axis_to_the_screen_once_and_keeps_a_later_zoom() -> None:
    view = View(zoom_idx=2)
    view.next_axis()
    view.fit_time(790, 1.7, 100)
    assert (view.axis, view.zoom) == ("time", 10)
    view.change_zoom(-1)
    view.fit_time(790, 1.7, 100)
    assert view.zoom == 5
    view.next_axis()
    assert (view.axis, view.zoom) == ("step", 5)


def test_requests_that_arrive_after_the_cursor_are_below_the_queue(source: Any) -> None:
    rows = frame_of(source, View(cursor=200, right=260)).lanes
    newest = max(row.request_id for row in rows if row.status)
    order = [(row.request_id > newest, row.status == "WAIT") for row in rows]
    assert {(False, True), (True, False)} <= set(order)
    assert order == sorted(order)


@pytest.mark.parametrize("sort", ["state", "blocks", "latest"])
def test_lanes_can_be_sorted(source: Any, sort: Any) -> None:
    rows = frame_of(source, View(sort=sort)).lanes
    requests = source.history.state.requests
    if sort == "latest":
        ids = [row.request_id for row in rows]
        assert ids == sorted(ids, reverse=True)
    elif sort == "blocks":
        blocks = [requests[row.request_id].num_blocks for row in rows if row.status != ""]
        assert blocks == sorted(blocks, reverse=True)
    else:
        order = [("OUT", "PRE", "DEC", "WAIT", "END").index(r.status) for r in rows if r.status]
        assert order == sorted(order)


@pytest.mark.parametrize("status", ["PRE", "WAIT"])
@pytest.mark.parametrize("context", [41, 312, 4100, 128_400, 10_000_000, None])
@pytest.mark.parametrize("request_id", [1, 1000, 99_999_999])
def test_lane_labels_leave_out_a_size_without_room(
    request_id: int, context: int | None, status: str
) -> None:
    rough = "" if context is None else lanes._rough(context)
    said = "".join(text for text, _ in lanes._label(f"r{request_id}", status, rough, 16, False))
    assert len(said) == 16
    assert said.split()[:2] == [f"r{request_id}", status]
    if request_id == 1:
        sizes = {41: "41", 312: "0.3k", 4100: "4k", 128_400: "128k", 10_000_000: "10M", None: ""}
        assert " ".join(said.split()[2:]) == sizes[context]


@pytest.mark.parametrize(
    ("parts", "cells"),
    [
        ((0.02, 802.75, 13.16), [0, 61, 1]),
        ((0.39, 0.49, 714.0), [0, 0, 62]),
        ((0.03, 0.24, 7.7), [0, 2, 60]),
        ((30.0, 0.0, 32.0), [30, 0, 32]),
    ],
)
def test_a_time_bar_gives_each_part_its_share_and_short_parts_no_cell(
    parts: tuple[float, ...], cells: list[int]
) -> None:
    assert cells_by_share(parts, 62) == cells


def test_the_filter_narrows_the_lanes(source: Any) -> None:
    waiting = frame_of(source, View(filter="state:wait")).lanes
    assert {row.status for row in waiting} == {"WAIT"}
    one = frame_of(source, View(filter=f"id:{waiting[0].request_id}")).lanes
    assert [row.request_id for row in one] == [waiting[0].request_id]
    documents = frame_of(source, View(filter="!^r\\d+ doc-")).lanes
    names = source.history.lane_names(row.request_id for row in documents)
    assert {each.client_id.split("-")[0] for each in names} == {"doc"}
    assert frame_of(source, View(filter="doc- id:999999")).lanes == []


# The other views


def test_a_kv_pool_larger_than_the_map_is_condensed_evenly(source: Any) -> None:
    body = line_texts(kv_map.draw(frame_of(source), 24, 5, GUTTER))[1:-2]
    assert all(line[2:22].strip() and " " not in line[2:22] for line in body)


def test_the_age_of_the_figures_is_that_of_the_last_message_whatever_is_pressed(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = source.history
    monkeypatch.setattr(history, "heard_s", time.monotonic() - 42.0)
    for _ in range(2):
        frame = replace(FrameBuilder(history).build(View(), 100, 10, 8), status="down")
        (line,) = line_texts(header.verdict(frame, 120, 1, GUTTER))
        assert re.search(r"does not answer: the figures are 4\d s old", line)
        history.set_slo(history.slo)  # as key b does
    other = History()
    for hear in (lambda: other.append(0, history.info), lambda: other.reset(history.snapshot())):
        other.heard_s = 0.0
        hear()
        assert other.heard_s > 0.0


def test_the_key_figures_do_not_move_from_a_small_step_to_a_full_one(source: Any) -> None:
    places = set()
    for step in range(150):  # the budget is the same in all of them
        frame = frame_of(source, paused(step))
        (shown,) = line_texts(header.key_figures(frame, 300, 1, GUTTER))
        places.add((shown.index("%"), shown.index(" │ RUN")))
        assert frame.state.num_waiting or not re.search(r"WAIT 0 [▲▼]", shown)
    assert len(places) == 1


def test_the_step_panel_counts_the_seats_of_requests_that_ended_in_it(source: Any) -> None:
    records = [source.history.record(step) for step in range(400)]
    ending = next(each for each in records if each.num_running < len(each.batch))
    lines = line_texts(inspector.draw(frame_of(source, paused(ending.step)), 60, 30, GUTTER))
    assert any(line[2:].split()[:2] == ["seats", f"{len(ending.batch)}"] for line in lines)


def test_the_step_panel_says_of_a_recompute_no_part_of_the_prompt(source: Any) -> None:
    records = [source.history.record(step) for step in range(400)]
    again = [
        (each.step, row)
        for each in records
        for row in each.batch
        if row.phase == wire.Phase.RECOMPUTE
    ]
    for step, row in again:
        end = row.start + row.num_tokens
        lines = line_texts(inspector.draw(frame_of(source, paused(step)), 60, 60, GUTTER))
        assert any(f"recompute r{row.request_id} {row.start:,}→{end:,} " in each for each in lines)
    assert again


def test_the_step_panel_counts_lines_that_have_no_room(source: Any) -> None:
    def num_prefills(step: int) -> int:
        return sum(row.phase != wire.Phase.DECODE for row in source.history.record(step).batch)

    step = max(range(400), key=num_prefills)
    lines = line_texts(inspector.draw(frame_of(source, paused(step)), 60, 10, GUTTER))
    assert len(lines) == 10
    assert f"step {step}" in lines[0]
    assert int(re.search(r"and (\d+) more lines", lines[-2])[1]) >= num_prefills(step)


@pytest.mark.parametrize(
    ("status", "live", "expected"),
    [
        ("live", True, "▐LIVE▌"),
        ("stale", True, "▐STALE▌"),
        ("down", True, "▐DOWN▌"),
        ("connecting", True, "▐CONNECTING▌"),
        ("playing", True, "▐REPLAY 2x▌"),
        ("ended", True, "▐REPLAY END▌"),
        ("live", False, "▐PAUSED▌"),
    ],
)
def test_the_header_badge_never_marks_an_earlier_step_as_live(
    source: Any, status: Any, live: bool, expected: str
) -> None:
    frame = frame_of(source, None if live else paused(300))
    frame.is_replay = status in ("playing", "ended")
    line = header_line(frame, status, speed=2.0)
    assert len(line) == 120
    assert expected in line
    frame.status = status
    (scrubber,) = line_texts(session_events.scrub_bar(frame, 120, 1, GUTTER))
    assert live is False or ("LIVE" in scrubber) == (expected == "▐LIVE▌")
    if not live:
        assert f" {fmt.moment(frame.wall_ns(300), with_tenths=True)}, 1.4 s back (99 steps)" in line


@pytest.mark.parametrize("status", ["live", "paused"])
def test_goto_accepts_the_time_shown_in_the_header(source: Any, status: Any) -> None:
    frame = frame_of(source, paused(300))
    frame.is_replay = status == "paused"
    narrow = header_line(frame, status, 80, recording=(761.0, 38_000_000))
    shown = re.search(r"(\w{3} \d+ \d{4} )?\d\d:\d\d:\d\d\.\d", narrow)
    assert shown, narrow
    assert "step 300 " in narrow
    history = source.history
    found = wanted(shown[0], 350, history, None).step
    at_ns = [history.summary(step).tokens_ns for step in (found, found + 1, 300)]
    moments = [fmt.moment(history.wall_ns(each), with_tenths=True) for each in at_ns]
    assert moments[0] <= shown[0] <= moments[1]
    assert moments[2] == shown[0]


@pytest.mark.parametrize("target", ["Foo 14 12:00:00", "Nov 14 12:00:00 2023", "25:14:23", "12:60"])
def test_goto_refuses_an_invalid_date_or_time(source: Any, target: str) -> None:
    with pytest.raises(ValueError, match="not a step, a time or"):
        wanted(target, 300, source.history, None)


def test_the_date_is_shown_unless_it_is_today_and_the_year_unless_it_is_this_one() -> None:
    now_s = int(time.time())
    assert fmt.moment(now_s * 10**9) == time.strftime("%H:%M:%S", time.localtime(now_s))
    for days in (3, 400, 4_000):
        then_s = now_s - days * 86_400
        then, now = time.localtime(then_s), time.localtime(now_s)
        year = "" if then.tm_year == now.tm_year else " %Y"
        expected = time.strftime(f"%b {then.tm_mday}{year} %H:%M:%S", then)
        assert fmt.moment(then_s * 10**9) == expected
        assert fmt.moment(then_s * 10**9 + 370_000_000, with_tenths=True) == f"{expected}.3"


def test_the_header_shows_the_recording_and_shortens_on_narrow_screens(source: Any) -> None:
    recording = (761.0, 38_000_000)
    assert "● REC 12:41 38MB" in header_line(frame_of(source), recording=recording)
    for width in (1, 10, 40, 79):
        assert header_line(frame_of(source), width=width, recording=recording)


def test_rare_events_are_not_crowded_out_of_the_event_list(source: Any) -> None:
    frame = frame_of(source)
    kinds = {event.kind for event in frame.events}
    assert {"knobs", "finish", "slo"} <= kinds
    lines = line_texts(session_events.draw(frame, 60, 14, GUTTER))
    assert any("◆ budget 1024→512 by " in line for line in lines)
    lines = line_texts(session_events.draw(frame, 90, 14, GUTTER))
    assert any("◆ max_num_batched_tokens 1024→512 by " in line for line in lines)
    packed = line_texts(session_events.draw(frame, 120, 2, GUTTER))
    assert len(packed) == 2
    assert all(len(line) <= 120 for line in packed)


def test_the_scrub_bar_maps_steps_to_cells_and_back(source: Any) -> None:
    frame = frame_of(source, paused(200))
    line = line_texts(session_events.scrub_bar(frame, 120, 1, GUTTER))[0]
    at = line.index("█")
    assert abs(session_events.step_at(frame, at, 120) - 200) <= 3
    assert "◆" in line
    assert "✗" in line
    assert session_events.step_at(frame, 0, 120) is None
    assert "LIVE" in line_texts(session_events.scrub_bar(frame_of(source), 120, 1, GUTTER))[0]


# Lines


def test_control_characters_in_foreign_text_cannot_reach_the_terminal() -> None:
    assert clean("a\x1b[2Jb\nc", 20) == "a?[2Jb?c"
    assert clean("日本", 20) == "??"
    assert clean("e\u0301", 20) == "e?"
    assert clean("abcdef", 4) == "abc…"


def test_lines_are_cut_or_filled_to_their_exact_width() -> None:
    for width in range(12):
        assert sum(len(run) for run, _ in fitted((("ab", "x"), ("cdef", "y")), width)) == width
        for height in range(6):
            box = framed([(("content", "text"),)], width, height, (("title", "text"),))
            assert len(box) <= max(1, height) or width >= 4
            assert all(sum(len(run) for run, _ in line) == width for line in box)


# Time axis


def test_on_the_time_axis_a_token_is_drawn_when_it_was_produced(source: Any) -> None:
    slowest = max(range(300, 400), key=lambda s: source.history.summary(s).duration_ns)
    frame = frame_of(source, View(cursor=slowest, right=slowest, axis="time"))
    columns = [x for x, c in enumerate(frame.columns) if c and c.first <= slowest <= c.last]
    assert len(columns) > 3, "the slowest step was to be wider than a few columns"
    drawn = line_texts(lanes.draw(frame, WIDTH, 30, GUTTER))[1:-1]
    rows = [[line[1 + GUTTER : -1][x] for x in columns] for line in drawn]
    assert {cell for row in rows if row[-1] == "━" for cell in row[1:-1]} == {"─"}


def test_axis_labels_never_cover_the_signs_of_breaches_and_preemptions(source: Any) -> None:
    for last in range(150, 400, 7):
        frame = frame_of(source, paused(last))
        axis = chart_rows(frame)[-1]
        for x, column in enumerate(frame.columns):
            if column is not None and (column.has_breach or column.has_preemption):
                assert axis[x + len(axis) - len(frame.columns)] in "!✗◆", (last, column.first)
        for label in re.finditer(r"┴(\d+)", axis):
            column = frame.columns[label.start() - len(axis) + len(frame.columns)]
            assert int(label[1]) == column.first, axis
            past_round = column.first % 20  # only where a sign leaves no room at the round step
            assert not past_round or set("!✗◆") & set(axis[: label.end()][-past_round - 9 :]), axis


def test_times_on_the_axis_are_those_of_their_columns_and_cover_no_event_sign(source: Any) -> None:
    """Where breaches leave no room for a time of day, its seconds are shown."""
    history = source.history
    kinds = set()
    for zoom_idx in range(4):
        for last in range(150, 400, 23):
            frame = frame_of(source, View(cursor=last, right=last, axis="time", zoom_idx=zoom_idx))
            axis = chart_rows(frame)[-1]
            before = None
            for x, column in enumerate(frame.columns):
                if column is not None and column.has_breach:
                    is_held = before is not None and column.is_pending and before.is_pending
                    is_marked = before is not None and before[:2] == column[:2]
                    is_marked |= is_held and before.last == column.last
                    assert is_marked or axis[x] in "!✗◆", (last, column.first)
                before = column
            for label in re.finditer(r"┴((?:\d\d:\d\d)?:\d\d\.\d)", axis):
                column = frame.columns[label.start()]
                wall_ns = history.wall_ns(column.start_ns)
                exact = f"{fmt.clock(wall_ns)}.{wall_ns // 100_000_000 % 10}"
                assert exact.endswith(label[1])
                kinds.add(len(label[1]))
    assert kinds == {5, 10}


@pytest.fixture(scope="module")
def freeze() -> History:
    with Recording(samples.shipped()["freeze"]) as recording:
        history = History(SLO(3000, 150))
        for message, _ in recording.frames():
            history.append(message.sequence, message.payload)
    return history


@pytest.mark.parametrize("axis", ["step", "time"])
def test_a_step_in_which_all_stood_still_is_a_band_across_lanes(freeze: History, axis: Any) -> None:
    view = View(axis=axis)
    view.pause(130)
    frame = FrameBuilder(freeze).build(view, 104, 12, 4)
    shown = line_texts(lanes.draw(frame, 120, 14, 14))[1:-1]
    decoding = [line for line in shown if " DEC " in line and "0.2k" in line]
    assert len(decoding) > 5
    assert all(re.search(r"!{10,}━", line) for line in decoding)
    axis_line = line_texts(budget_chart.draw(frame, 120, 12, 14))[-2]
    assert re.search(r"!\d{3} ms", axis_line)  # and how long it took
    assert re.search("[▓▒]{10,}", "".join(shown))  # the prompt that they stood still behind


@pytest.mark.parametrize("width", [20, 64, 104, 170])
@pytest.mark.parametrize("zoom_idx", [0, 1, 3])
def test_wide_steps_leave_no_step_out(freeze: History, width: int, zoom_idx: int) -> None:
    columns = ChartColumns(freeze)
    for right in range(0, 450, 9):
        view = View(cursor=right, right=right, zoom_idx=zoom_idx)
        shown = columns.visible(view, width, freeze.last_step)
        assert len(shown) == width
        known = [each for each in shown if each is not None]
        assert known[-1].first <= right <= known[-1].last
        for before, column in pairwise(known):
            assert column[:2] == before[:2] or column.first == before.last + 1
        for steps, group in groupby(known, key=lambda each: each[:2]):
            wide = list(group)
            is_long = freeze.span(*steps).longest_ns > 150e6
            assert len(wide) == 1 or is_long
            assert not wide[-1].is_pending
            assert all(each.is_pending for each in wide[:-1])


def test_the_cursor_stays_on_the_screen_beside_wide_steps(freeze: History) -> None:
    columns = ChartColumns(freeze).visible(View(axis="time", zoom_idx=4), 66, freeze.last_step)
    assert sum(column is not None and column.is_wide for column in columns) >= 7 * 3
    builder, view = FrameBuilder(freeze), View()
    view.pause(450)
    for step in [*range(450, 0, -7), *range(0, 450, 11)]:
        view.go(step, 0, 453)
        frame = builder.build(view, 40, 12, 4)
        assert frame.columns[frame.cursor_column].last == step


def test_how_long_a_wide_step_took_is_never_cut(freeze: History) -> None:
    frame = FrameBuilder(freeze).build(View(), 60, 12, 4)
    long = frame.columns[-1]._replace(is_wide=True, has_breach=True, longest_ns=812_000_000)
    for num, said in ((3, "!──"), (6, "!─────"), (7, "!812 ms")):
        columns = [*frame.columns[:-num], *[long] * num]
        drawn = budget_chart.draw(replace(frame, columns=columns), 76, 12, GUTTER)
        assert line_texts(drawn)[-2][1 + GUTTER : -1].rstrip()[-num:] == said
