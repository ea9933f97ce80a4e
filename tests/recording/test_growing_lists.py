"""The selection stays on its row while a list grows at its top."""

from collections.abc import Callable
from typing import Any

from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.pages.page_views import targets
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.screens.screen_text import main_text


async def test_a_selected_breach_stays_selected_while_others_appear_above_it(
    still_source: Callable[..., Any],
) -> None:
    history = History(SLO(ttft_ms=30.0, itl_ms=8.0), max_steps=200)
    messages = simulate(seed=3, num_steps=600, workload=SimulatedWorkload(rate=9.0))
    for sequence, message in messages[:300]:
        history.append(sequence, message)
    source = type(still_source(2))(history)
    app = Dashboard(source, history, any_terminal=True, fps=1.0, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5", "j", "j")
        chosen = app.main.handlers.pages.chosen()
        assert chosen is not None
        assert (app.main.view.row, chosen) == (2, targets(app.main.frame)[2])
        for sequence, message in messages[300:340]:
            history.append(sequence, message)
        app.main.draw()
        assert targets(app.main.frame)[2] != chosen
        assert app.main.handlers.pages.chosen() == chosen
        lines = [strip.text for strip in app.main._compositor.render_strips()]
        assert any(f"▶ {chosen.step:>8,}" in line for line in lines), "\n".join(lines)
        for sequence, message in messages[340:]:
            history.append(sequence, message)
        app.main.draw()  # forgotten meanwhile
        assert chosen not in targets(app.main.frame)
        assert (app.main.view.row, app.main.view.entry) == (0, None)


async def test_the_first_steps_appear_on_the_scrub_bar_as_soon_as_in_the_chart(
    still_source: Callable[..., Any],
) -> None:
    now_s = 0.0
    history = History()
    messages = simulate(seed=3, num_steps=60)
    source = type(still_source(2))(history)
    app = Dashboard(source, history, any_terminal=True, fps=1.0, clock=lambda: now_s)
    async with app.run_test(size=(120, 40)):
        app.main.draw_if_changed()
        for sequence, message in messages:
            history.append(sequence, message)
        now_s = 0.1
        app.main.draw_if_changed()
        shown = main_text(app)
    assert "no step in memory" not in shown
    assert "60 steps in memory" in shown
