"""The dashboard reports its own load truthfully."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.frame.frame_meter import DrawingLoad, FrameMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def frame(meter: FrameMeter, cost: Clock, draw_s: float, write_s: float) -> None:
    with meter.drawing():
        cost.now_s += draw_s
    with meter.writing():
        cost.now_s += write_s


def test_the_dashboards_load_names_frames_processor_time_and_dropped_frames() -> None:
    clock, cost, cpu = Clock(), Clock(), Clock()
    meter = FrameMeter(clock, cost, cpu)
    assert meter.load() is None
    for _ in range(10):
        meter.tick(10.0)
        frame(meter, cost, 0.003, 0.002)
        clock.now_s += 0.1
        cpu.now_s += 0.007
    clock.now_s += 0.9  # another process had the processor
    cpu.now_s += 0.02
    meter.tick(10.0)
    assert meter.num_dropped == 9
    clock.now_s += 1.1
    assert meter.load() == pytest.approx(DrawingLoad(10 / 3.0, 0.09 / 3.0, 9))
    assert meter.frame_times_s == pytest.approx([0.005] * 10)


def test_a_frame_that_is_not_due_does_not_count_as_dropped() -> None:
    clock = Clock()
    meter = FrameMeter(clock)
    meter.tick(10.0)
    meter.rest()
    clock.now_s += 60.0
    meter.tick(10.0)
    clock.now_s += 0.14  # late, but before the next one was due
    meter.tick(10.0)
    assert meter.num_dropped == 0


def test_terminal_output_without_a_frame_counts_as_no_frame() -> None:
    cost = Clock()
    meter = FrameMeter(cost_clock=cost)
    with meter.writing():
        cost.now_s += 1.0
    assert meter.frame_times_s == []


async def test_a_key_shows_the_dashboards_own_load_in_the_header(
    still_source: Callable[..., Any],
) -> None:
    source, clock = still_source(40), Clock()
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0, clock=clock)

    def header() -> str:
        return str(app.screen._compositor.render_strips()[0].text)

    async with app.run_test(size=(120, 40)) as pilot:
        assert header().endswith(" 1fps ")
        await pilot.press("percent_sign")
        clock.now_s += 2.0
        app.main.draw()
        await pilot.pause()
        assert re.search(r" \d\.\d/1fps  cpu \d+%  \d dropped $", header()), header()
        assert app.main.meter.frame_times_s
        await pilot.press("percent_sign")
        assert header().endswith(" 1fps ")
    begun = Dashboard(source, source.history, any_terminal=True, clock=clock, own_load=True)
    async with begun.run_test(size=(120, 40)):
        assert begun.main.view.own_load
