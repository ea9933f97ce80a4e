"""Service levels changed in the dashboard apply to past steps, too."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.setting_values import parse_levels
from stepscope.tui.views.frame.chart_columns import ChartColumns
from stepscope.tui.views.view import View
from tests.support.screens.screen_text import screen_text


@pytest.mark.parametrize("slo", [SLO(100, 15), SLO(5000, 300), SLO(0.5, 0.5), SLO(500, 30)])
def test_a_changed_service_level_applies_as_if_set_from_the_start(
    still_source: Callable[..., Any], slo: SLO
) -> None:
    messages = _messages(still_source(400).history)
    changed, again = History(SLO(ttft_ms=500.0, itl_ms=30.0)), History(slo)
    for sequence, message in messages:
        changed.append(sequence, message)
        again.append(sequence, message)
    assert changed.windows.breaches(None, 10_000)  # looked at before, as the dashboard does
    changed.set_slo(slo)
    assert changed.windows.breaches(None, 10_000) == again.windows.breaches(None, 10_000)
    assert changed.windows.latency() == again.windows.latency()
    assert changed.last_stall() == again.last_stall()
    assert changed.last_stall(200) == again.last_stall(200)
    columns = (ChartColumns(each).visible(View(), 200) for each in (changed, again))
    assert next(columns) == next(columns)


def _messages(history: History) -> list[tuple[int, Any]]:
    """The steps of a history, as messages."""
    found = []
    for step in range(history.num_steps):
        summary, record = history.summary(step), history.record(step)
        assert summary is not None
        found.append((summary.sequence, record))
    return found


async def test_service_levels_changed_in_the_dashboard_are_saved(
    still_source: Callable[..., Any], tmp_path: Path
) -> None:
    source = still_source()
    path = tmp_path / "config.toml"
    began: dict[str, Any] = {"slo_ttft_ms": 500.0, "slo_itl_ms": 30.0}
    app = Dashboard(
        source, source.history, any_terminal=True, fps=1.0, preferences=Preferences(path, began)
    )
    async with app.run_test(size=(200, 60)) as pilot:
        assert "TTFT <500" not in screen_text(app)
        assert " <30 " in screen_text(app)
        num_breaches = len(source.history.windows.breaches(None, 10_000))
        await pilot.press("b", "ctrl+u", *"itl=soon", "enter")
        assert "write ttft=500 itl=50, above 0 and in ms, or ttft=0.5s" in screen_text(app)
        assert "^u empties it" in screen_text(app)
        await pilot.press("ctrl+u", *"itl=12ms", "enter")
        assert " <12 " in screen_text(app)
        assert " <500 " in screen_text(app)
        assert len(source.history.windows.breaches(None, 10_000)) > num_breaches
        await pilot.press("5")
        assert "ITL <12" in screen_text(app)
    app.close()
    assert tomllib.loads(path.read_text())["dashboard"] == {"slo_itl_ms": 12.0}


async def test_a_value_offered_in_an_input_line_is_replaced_by_typing_and_kept_by_an_arrow_key(
    still_source: Callable[..., Any],
) -> None:
    source = still_source()
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("b")
        assert "ttft=500 itl=30_  typing replaces it, → keeps it" in screen_text(app)
        await pilot.press(*"itl=40 ttft=5s", "enter")
        assert "service levels: TTFT within 5,000 ms, ITL within 40 ms" in screen_text(app)
        assert source.history.slo == SLO(5000, 40)
        await pilot.press("b", "right", "backspace", *"5", "enter")
        assert source.history.slo == SLO(5000, 45)
        for key in ("backspace", "delete"):
            await pilot.press("b", key)
            assert "in ms or 2s: _" in screen_text(app)
            await pilot.press("escape")
        await pilot.press("b", "enter")  # as they are
        assert "TTFT within 5,000 ms, ITL within 45 ms, for this session only" in screen_text(app)


def test_service_levels_are_parsed_in_every_spelling() -> None:
    now = SLO(500, 50)
    assert parse_levels("itl=30", now) == SLO(500, 30)
    assert parse_levels(" TTFT=1500ms itl=0.5 ", now) == SLO(1500, 0.5)
    assert parse_levels("ttft=2s itl=.5s", now) == SLO(2000, 500)  # as --slo-ttft takes them
    for text in ("", "itl", "itl=0", "itl=-3", "itl=nan", "itl=inf", "itl=1e10", "tpot=3", "500"):
        with pytest.raises(ValueError, match="write ttft=500 itl=50"):
            parse_levels(text, now)
