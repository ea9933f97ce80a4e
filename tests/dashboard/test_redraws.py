"""The dashboard draws each state once, and again as soon as something has changed."""

from collections.abc import Callable
from typing import Any

from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.view import View


class Drawings:
    """Counts the drawings of a dashboard."""

    def __init__(self, app: Dashboard) -> None:
        self.number = 0
        self._draw = app.main.canvas.draw
        app.main.canvas.draw = self._count  # type: ignore[method-assign]

    def _count(self, *args: Any) -> None:
        self.number += 1
        self._draw(*args)


async def test_a_screen_redrawn_for_a_key_is_not_drawn_again_in_the_next_frame(
    still_source: Callable[..., Any],
) -> None:
    source, now_s = still_source(), [100.0]
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0, clock=lambda: now_s[0])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("space")
        drawings = Drawings(app)
        await pilot.press("left")
        assert drawings.number == 1
        for _ in range(3):
            now_s[0] += 0.1
            app.main.draw_if_changed()
        assert drawings.number == 1
        app.main.view.change_zoom(1)  # whichever it is that changes
        app.main.draw_if_changed()
        assert drawings.number == 2


async def test_figures_skipped_in_one_frame_are_refreshed_without_new_steps(
    still_source: Callable[..., Any],
) -> None:
    history, now_s = still_source().history, [100.0]
    builder, view = FrameBuilder(history, clock=lambda: now_s[0]), View()
    before = builder.build(view, 80, 10, 8)
    assert not builder.is_behind
    history.rewind(history.last_step - 100)
    now_s[0] += 0.1
    frame = builder.build(view, 80, 10, 8)
    assert frame.last_step == before.last_step - 100
    assert (frame.latency, frame.events) == (before.latency, before.events)  # for now
    assert not builder.is_behind, "it cannot be taken yet: no reason to draw"
    now_s[0] += 1.0
    assert builder.is_behind
    frame = builder.build(view, 80, 10, 8)
    assert frame.latency == history.windows.latency(None, 60.0)
    assert frame.events[-1].step <= frame.last_step
    assert not builder.is_behind
    now_s[0] += 5.0
    assert not builder.is_behind


async def test_an_idle_dashboard_redraws_almost_nothing(still_source: Callable[..., Any]) -> None:
    source, now_s = still_source(), [100.0]
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0, clock=lambda: now_s[0])
    async with app.run_test(size=(120, 40)):
        app.main.draw()
        drawings = Drawings(app)
        for _ in range(100):  # ten seconds at ten frames a second
            now_s[0] += 0.1
            app.main.draw_if_changed()
        assert drawings.number <= 8  # ages change every four seconds
