"""What the mouse does: the cursor, lanes, the scrub bar, key figures and footer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from textual import events

from stepscope.tui.fleet_desk import ColumnKey
from stepscope.tui.page_names import Page
from stepscope.tui.screens import page_handlers as pages
from stepscope.tui.view import LATENCIES
from stepscope.tui.widgets import compare_page, fleet_page, footer, key_figures, scrub_bar

# Panels of the main screen, and the screens that say more of the same.
_DETAILS: Mapping[str, Page] = {
    "kv": "kv",
    "latency": "latency",
    "latency_line": "latency",
    "inspector": "step",
    "knobs": "knobs",
}

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen


def click(screen: "MainScreen", event: events.Click) -> None:
    """A click on one of the views; twice inspects."""
    name = "" if event.widget is None else event.widget.id
    frame, width = screen.frame, screen.size.width
    abilities = screen.session.abilities
    if frame is None:
        return
    if name in ("chart", "lanes"):
        if name == "lanes" and 0 < event.y <= len(frame.lanes):
            screen.view.selected = frame.lanes[event.y - 1].request_id
        screen.navigator.of_column(event.x - 1 - screen.canvas.label_width)
        if event.chain == 2:
            screen.action_do("inspect")
    elif name == "scrub":
        scrub_to(screen, event.x)
    elif name == "figures":
        found = key_figures.action_at(frame, width, event.x, event.y)
        if found is not None and abilities.allows(abilities.action(found)):
            screen.action_do(found)
    elif name == "page" and frame.fleet is not None:
        _click_fleet(screen, event)
    elif name == "page" and frame.compare is not None and _click_charts(screen, event):
        pass
    elif name in ("page", "events", *_DETAILS):
        _click_spot(screen, event, name)
    elif name == "header" and _is_badge(screen, event.x):
        screen.action_do("pause")
    elif name == "footer":
        found = footer.action_at(abilities, screen.following, width, event.x, screen.view.page)
        if found is not None:
            screen.action_do(found)


def _is_badge(screen: "MainScreen", x: int) -> bool:
    """The state of the picture: a click on it pauses, or goes on."""
    line = screen.canvas.widgets["header"].content(0)
    begin = 0
    for text, style in line:
        if begin <= x < begin + len(text):
            return style.startswith("badge_")
        begin += len(text)
    return False


def _click_spot(screen: "MainScreen", event: events.Click, name: str) -> None:
    """What stands at this place leads somewhere; twice on a panel opens the screen of it."""
    view = screen.view
    kind, value = screen.canvas.widgets[name].spot_at(event.x, event.y) or ("", "")
    if kind == "row":
        view.row = int(value)
        pages.select(screen, 0)
        if event.chain == 2:
            screen.action_do("inspect")
    elif kind == "step":
        screen.navigator.go(int(value))
    elif kind == "latency":
        view.latency = next(each for each in LATENCIES if each == value)
        pages.show(screen, "latency")
    elif kind == "knob" and event.chain == 2:
        pages.edit(screen, value)
    elif event.chain == 2 and name in _DETAILS:
        pages.show(screen, _DETAILS[name])


def _click_charts(screen: "MainScreen", event: events.Click) -> bool:
    """A column of two runs; False beside the charts."""
    line = "".join(text for text, _ in screen.canvas.widgets["page"].content(event.y))
    column = compare_page.column_at(line, screen.size.width, event.x)
    if column is None:
        return False
    screen.session.compare.go_to_column(column)
    if event.chain == 2:
        screen.action_do("inspect")
    return True


def _click_fleet(screen: "MainScreen", event: events.Click) -> None:
    """An engine, or the heading of a column to order by."""
    place, desk = screen.canvas.places["page"], screen.session.desk
    assert screen.frame is not None
    found = fleet_page.hit(screen.frame, place.width, place.height, event.x, event.y)
    if found in desk.fleet.names:
        desk.selected = found
        if event.chain == 2:
            screen.action_do("inspect")
    elif found is not None:
        desk.sort_by(cast(ColumnKey, found))


def scrub_to(screen: "MainScreen", x: int) -> None:
    """The cursor to a place on the scrub bar."""
    step = None if screen.frame is None else scrub_bar.step_at(screen.frame, x, screen.size.width)
    if step is not None:
        screen.navigator.go(step)


def scroll(screen: "MainScreen", direction: int, through_time: bool) -> None:
    """The wheel: lanes or rows, with shift time."""
    if through_time and screen.view.page == "compare":
        screen.session.compare.move(direction * 3)
    elif through_time:
        screen.navigator.move(direction * 3)
    elif screen.view.page != "live":
        screen.action_do("lane_down" if direction > 0 else "lane_up")
    else:
        screen.view.scroll_lanes(direction * 3, screen.num_lanes)
