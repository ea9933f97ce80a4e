"""What an attached engine does not report is drawn as unknown, never as zero."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.charts import budget_chart, kv_map, lanes
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.lines import Line
from stepscope.tui.views.pages import knobs_page
from stepscope.tui.views.pages.page_views import PAGE_VIEWS
from stepscope.tui.views.panels import header, inspector, latency_panel, session_events
from stepscope.tui.views.view import View
from tests.support.screens.screen_text import line_texts

FIRST, NUM_STEPS = 100, 60
BEYOND: list[Page] = [page for page in PAGE_VIEWS if page not in ("fleet", "compare")]
PANELS: Mapping[str, Callable[[Frame, int, int, int], list[Line]]] = {
    "figures": header.key_figures,
    "chart": budget_chart.draw,
    "lanes": lanes.draw,
    "kv": kv_map.draw,
    "latency": latency_panel.draw,
    "latency_line": latency_panel.one_line,
    "inspector": inspector.draw,
    "events": session_events.draw,
    "scrub": session_events.scrub_bar,
    "knobs": lambda frame, width, height, gutter: knobs_page.panel(frame, width, height, "", True),
}
# A figure that is nothing but 0; differences have a sign, and the foot of a scale is no figure.
ZERO = re.compile(r"(?<![\d.,:+\-┴r])0(?:\.0+)?(?![\d.,:])")
SCALE = re.compile(r"^│? *0 [│┤]")

# The optional fields of a source: a value for each step, and how a page marks it as unknown.
OPTIONAL: dict[str, Any] = {
    "schedule_end_ns": lambda start: start + 1_000_000,
    "launch_ns": lambda start: start + 2_000_000,
    "device_ns": lambda start: 15_000_000,
    "knobs_version": lambda start: 1,
    "token_budget": lambda start: 512,
    "max_num_seqs": lambda start: 32,
    "num_padded_tokens": lambda start: 3,
    "batch": lambda start: [
        wire.BatchRow(1, wire.Phase.DECODE, 300 + start // 21_000_000, 1, 0, 20, 1),
        wire.BatchRow(2, wire.Phase.PREFILL, 16 * (start // 21_000_000), 16, 4, 30, 0),
    ],
    "kv": lambda start: wire.KVCounts(50, 20, 30, 2, 40, 10),
    "waiting_reasons": lambda start: {"kv": 3},
    "hidden_ns": lambda start: 400_000,
    "num_wasted_tokens": lambda start: 2,
    "token_limit": lambda start: 256,
    "cuda_graph": lambda start: "piecewise",
    "hold_ups": lambda start: [wire.HoldUp("gc", start, 1_500_000, "generation 2")],
}


def session(told: set[str], with_snapshot: bool = False) -> History:
    """A session whose steps leave out every optional field but those in `told`."""
    history = History(SLO(500, 30))
    names = {"engine_id": "attached", "name": "vllm", "software_version": "0.32", "model": "some"}
    info = wire.EngineInfo(**names, monotonic_ns=10**9, wall_ns=17 * 10**17)
    history.append(0, info)
    if with_snapshot:
        unknown = {"client_id": "", "arrival_ns": 0, "max_tokens": 0, "is_partial": True}
        size = {"num_prompt_tokens": 33, "num_computed_tokens": 40, "num_blocks": 3}
        view = wire.RequestView(request_id=7, status="running", **unknown, **size)
        now = {"step": FIRST - 1, "time_ns": 10**9, "state": "running", "requests": [view]}
        nothing = {"knobs": {}, "knobs_version": 0, "blocks": None, "kv": None}
        history.append(1, wire.Snapshot(sequence=1, info=info, **now, **nothing))
    for number in range(NUM_STEPS):
        start = 10**9 + 21_000_000 * number
        record = wire.StepRecord(
            step=FIRST + number,
            schedule_start_ns=start,
            tokens_ns=start + 20_000_000,
            num_prefill_tokens=16,
            num_decode_tokens=12,
            num_running=12,
            num_waiting=3,
            **{name: OPTIONAL[name](start) for name in told},
        )
        history.append(2 + number, record)
    return history


def frame_of(history: History, page: Page = "live", **view: Any) -> Frame:
    return FrameBuilder(history, clock=lambda: 0.0).build(View(page=page, **view), 80, 10, 8)


def text(lines: list[Line]) -> str:
    return "\n".join(line_texts(lines))


def zeros(drawn: str) -> list[str]:
    return [line for line in drawn.splitlines() if ZERO.search(SCALE.sub("", line))]


def test_the_check_for_misleading_zeros_finds_them_and_nothing_else() -> None:
    wrong = ["PREEMPT 0/m", "cached  =      0   │", "│ breaches (0 late)", "KV 0%", "took 0.0 ms"]
    assert zeros("\n".join([*wrong, "took +0 10 0.5 r0 12:00:01 20.0 ms", "│     0 │ ██"])) == wrong


@pytest.mark.parametrize("size", [(80, 17), (120, 35), (200, 55)])
@pytest.mark.parametrize("page", BEYOND)
def test_pages_of_a_minimal_engine_show_no_zero(page: Page, size: tuple[int, int]) -> None:
    drawn = text(PAGE_VIEWS[page].draw(frame_of(session(set()), page), *size))
    assert zeros(drawn) == []
    assert "does not report" in drawn or "—" in drawn
    assert "no token came later" not in drawn


@pytest.mark.parametrize("panel", PANELS)
def test_panels_of_a_minimal_engine_show_no_zero(panel: str) -> None:
    drawn = text(PANELS[panel](frame_of(session(set())), 120, 12, 14))
    assert zeros(drawn) == []
    assert "none above" not in drawn


UNKNOWN = {
    "schedule_end_ns": ("step", r"schedule —  launch —"),
    "launch_ns": ("step", r"launch —  model —"),
    "device_ns": ("step", r"device —"),
    "token_budget": ("step", r"of —"),
    "max_num_seqs": ("step", r"seats +12 of —"),
    "batch": ("step", r"does not report the requests of a step"),
    "kv": ("kv", r"prefix hit rate +—"),
    "hidden_ns": ("step", r"prepared —"),
}


@pytest.mark.parametrize("missing", OPTIONAL)
@pytest.mark.parametrize("page", BEYOND)
def test_every_page_draws_with_any_single_field_missing(page: Page, missing: str) -> None:
    history = session(set(OPTIONAL) - {missing})
    for size in ((80, 17), (120, 35), (200, 55)):
        drawn = text(PAGE_VIEWS[page].draw(frame_of(history, page), *size))
        assert len(drawn.splitlines()) == size[1]
        if missing in UNKNOWN and UNKNOWN[missing][0] == page and size[0] == 120:
            assert re.search(UNKNOWN[missing][1], drawn), drawn
    for name, draw in PANELS.items():
        assert draw(frame_of(history), 120, 12, 14), name


@pytest.mark.parametrize(
    ("told", "overlap", "expected"),
    [
        ({"hidden_ns"}, True, "prepared while step {before} ran, 0.40 ms hidden"),
        ({"hidden_ns", "num_wasted_tokens"}, True, "0.40 ms hidden, 2 wasted"),
        ({"hidden_ns", "device_ns"}, True, "host's gap 5.0 ms: the device was idle"),
        ({"hold_ups"}, None, "held up 1.5 ms: Python collected garbage"),
        (set(), True, "prepared after step {before} had ended"),
        (set(), False, "prepared after step {before} had ended"),
        ({"token_limit"}, None, "held to 256 tokens: device memory"),
        ({"cuda_graph"}, False, "CUDA graph piecewise"),
    ],
)
def test_the_step_page_says_if_a_step_was_prepared_while_the_last_one_ran(
    told: set[str], overlap: bool | None, expected: str
) -> None:
    history = session(told)
    history.append(2 + NUM_STEPS, msgspec.structs.replace(history.info, overlap=overlap))
    drawn = text(PAGE_VIEWS["step"].draw(frame_of(history, "step"), 120, 35))
    assert expected.format(before=f"{FIRST + NUM_STEPS - 2:,}") in drawn


def test_a_request_first_seen_while_running_has_unknown_arrival_and_token_limit() -> None:
    history = session({"kv"}, with_snapshot=True)
    drawn = text(PAGE_VIEWS["request"].draw(frame_of(history, "request", selected=7), 120, 35))
    for unknown in ("arrived —", "cached prompt —", "priority —", "TTFT —", "TPOT —"):
        assert unknown in drawn
    assert "/—" in drawn
