"""The screen at a step is the same for a live session and a replay of its file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.views.charts import budget_chart, kv_map, lanes
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages.page_views import PAGE_VIEWS
from stepscope.tui.views.panels import event_list, inspector, key_figures, knob_panel, latency_panel
from stepscope.tui.views.view import View
from tests.support.engines.simulated_run import SimulatedWorkload, simulate

WIDTH, GUTTER = 140, 14
EXTENT = 0, 399


def screen(history: History, step: int) -> dict[str, list[str]]:
    """Every panel and screen of the dashboard, paused at `step`, as characters."""
    view = View(cursor=step, right=step)
    frame = FrameBuilder(history, clock=lambda: 0.0).build(view, WIDTH - GUTTER - 2, 20, 12)
    panels = {
        "figures": key_figures.draw(frame, WIDTH, 2, GUTTER),
        "steps": budget_chart.draw(frame, WIDTH, 12, GUTTER),
        "lanes": lanes.draw(frame, WIDTH, 22, GUTTER),
        "kv": kv_map.draw(frame, WIDTH, 10, GUTTER),
        "latency": latency_panel.draw(frame, 60, 10, GUTTER),
        "step": inspector.draw(frame, 60, 14, GUTTER),
        "knobs": knob_panel.draw(frame, 60, 12, "", False),
        "events": event_list.draw(frame, 60, 14, GUTTER),
    }
    for page, drawing in PAGE_VIEWS.items():
        view = View(cursor=step, right=step, page=page)
        frame = FrameBuilder(history, clock=lambda: 0.0).build(view, 0, 0, 8)
        frame.extent = EXTENT  # a replay also knows the later steps
        panels[page] = drawing.draw(frame, WIDTH, 50)
    return {
        name: ["".join(characters for characters, _ in line) for line in lines]
        for name, lines in panels.items()
    }


@pytest.fixture(scope="module")
def live_and_file(
    tmp_path_factory: pytest.TempPathFactory, recorded_to: Callable[..., Any]
) -> tuple[History, Path]:
    """A busy session as received, and its recording from the first message on."""
    path = tmp_path_factory.mktemp("session") / "session.mcap"
    messages = simulate(
        seed=3,
        num_steps=400,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=32),
        changes={340: {"max_num_batched_tokens": 512}},
        workload=SimulatedWorkload(
            rate=9.0, document_share=0.12, document_tokens=2600, output_tokens=140
        ),
    )
    with recorded_to(path, SLO(ttft_ms=500.0, itl_ms=30.0)) as source:
        for sequence, message in messages:
            source.take(sequence, message)
    return source.history, path


@pytest.mark.parametrize("step", [1, 57, 200, 341, 399])
def test_every_panel_at_a_step_is_the_same_live_and_replayed(
    live_and_file: tuple[History, Path], step: int
) -> None:
    live, path = live_and_file
    with Recording(path) as recording:
        source = ReplaySource(recording, History(live.slo), playing=False)
        source.start()
        try:
            source.seek(step)
            assert source.wait()
            replayed = screen(source.history, step)
        finally:
            source.stop()
    expected = screen(live, step)
    for panel, lines in expected.items():
        assert replayed[panel] == lines, panel
    assert "━" in "".join(expected["lanes"])


def test_right_after_a_seek_the_figures_are_those_of_the_shown_step(
    live_and_file: tuple[History, Path],
) -> None:
    live, path = live_and_file
    stalls = sorted(each.step for each in live.windows.stalls(None, 100).longest)
    source = ReplaySource(Recording(path), History(live.slo), playing=False)
    source.start()
    try:
        # No refresh is due by time.
        builder = FrameBuilder(source.history, clock=lambda: 0.0, stands=lambda: True)
        for step in (stalls[-1], stalls[0], stalls[len(stalls) // 2]):
            source.seek(step)
            assert source.wait()
            frame = builder.build(View(), 80, 10, 8)
            assert frame.stall is not None
            assert (frame.cursor, frame.stall.step) == (step, step)
            assert frame.latency.end_ns == frame.state.time_ns
    finally:
        source.stop()
