"""What the mouse does: the cursor, lanes, the scrub bar, key figures and footer."""

from typing import TYPE_CHECKING, cast

from textual import events

from stepscope.tui.fleet_desk import ColumnKey
from stepscope.tui.widgets import fleet_page, footer, key_figures, scrub_bar

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
    elif name == "footer":
        found = footer.action_at(abilities, screen.following, width, event.x, screen.view.page)
        if found is not None:
            screen.action_do(found)


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
    if through_time:
        screen.navigator.move(direction * 3)
    elif screen.view.page != "live":
        screen.action_do("lane_down" if direction > 0 else "lane_up")
    else:
        screen.scroll_lanes(direction * 3)
