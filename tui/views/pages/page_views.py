"""The table of all pages but the main one: how to draw each, and the targets of its rows."""

from collections.abc import Mapping
from typing import Protocol

from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Target
from stepscope.tui.views.lines import Line
from stepscope.tui.views.pages import (
    compare_page,
    fleet_page,
    knobs_page,
    kv_page,
    latency_page,
    request_page,
    step_page,
)


class PageView(Protocol):
    """The module of a page: pure functions from a frame to its lines and to its rows' targets."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Line]: ...

    def targets(self, frame: Frame) -> list[Target]: ...


PAGE_VIEWS: Mapping[Page, PageView] = {
    "step": step_page,
    "request": request_page,
    "kv": kv_page,
    "latency": latency_page,
    "knobs": knobs_page,
    "compare": compare_page,
    "fleet": fleet_page,
}


def targets(frame: Frame) -> list[Target]:
    page = PAGE_VIEWS.get(frame.view.page)
    return [] if page is None else page.targets(frame)
