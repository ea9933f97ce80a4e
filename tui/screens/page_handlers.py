"""What the actions do on the screens beyond the main one, and on the way there."""

from typing import TYPE_CHECKING

from stepscope.tui.frame import Frame
from stepscope.tui.navigator import lane_keys
from stepscope.tui.page_names import Page
from stepscope.tui.pages import targets
from stepscope.tui.widgets import latency_panel
from stepscope.tui.widgets.panels import Target
from stepscope.tui.widgets.request_page import request_id_of

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen


def show(screen: "MainScreen", page: Page) -> None:
    """Go to a screen; on the main one already, to the newest step."""
    view = screen.view
    if view.page == "fleet" and page != "fleet":
        open_engine(screen, page)
        return
    if page == "compare":
        view.show(page)
        screen.session.compare.go_home(page)
        return
    if page == "live" and view.page == "live":
        screen.navigator.follow()
    if page == "request" and view.selected is None and screen.frame is not None:
        # Which one it is must not change with every step.
        view.selected = request_id_of(screen.frame)
    view.show(page)


def open_engine(screen: "MainScreen", page: Page) -> None:
    """From several engines to a screen of the chosen one."""
    chosen_engine = screen.session.desk.selected
    if chosen_engine is not None:
        screen.session.desk.open(chosen_engine, page)


def select(screen: "MainScreen", direction: int) -> None:
    """Another row of the screen."""
    view = screen.view
    if view.page == "compare":
        screen.session.compare.take_row(view.row + direction)
        return
    rows = targets(screen.frame) if screen.frame is not None else []
    view.row = max(0, min(view.row + direction, len(rows) - 1))
    view.entry = rows[view.row] if rows else None
    if view.page == "fleet" and rows:
        screen.session.desk.selected = rows[view.row].engine
    if view.page == "step" and rows:
        view.selected = rows[view.row].request_id


def chosen(screen: "MainScreen") -> Target | None:
    """What the selected row leads to."""
    rows = targets(screen.frame) if screen.frame is not None else []
    return rows[screen.view.row] if screen.view.row < len(rows) else None


def inspect(screen: "MainScreen") -> None:
    """Enter: from the main screen to a request or step, elsewhere where the row leads."""
    view, frame = screen.view, screen.frame
    if view.page == "fleet":
        open_engine(screen, "live")
        return
    if frame is None or frame.cursor is None:
        return
    if view.page == "live":
        show(screen, "step" if view.selected is None else "request")
        return
    target = chosen(screen)
    if target is None:
        screen.notices.say("there is no row to go on from", "caution")
    elif target.knob is not None:
        edit(screen, target.knob)
    elif view.page in ("step", "kv"):
        view.selected = target.request_id
        view.show("request")
    elif target.step is not None:
        if target.request_id is not None:
            view.selected = target.request_id
        screen.navigator.go(target.step)
        view.show("live" if view.page == "knobs" else "step")
        _find_row(screen, target.request_id)


def _find_row(screen: "MainScreen", request_id: int | None) -> None:
    """Select the row of a request on the screen that has just been opened."""
    rows = targets(screen.new_frame())
    for number, target in enumerate(rows):
        if request_id is not None and target.request_id == request_id:
            screen.view.row = number
            return


def edit(screen: "MainScreen", name: str) -> None:
    from stepscope.tui.screens.opening import edit_knob

    abilities = screen.session.abilities
    action = abilities.action("knobs")
    if abilities.allows(action):
        edit_knob(screen, name)
    else:
        screen.notices.refuse(abilities.why_not(action))


def follow(screen: "MainScreen") -> None:
    """Keep the selected request in sight, or let it go."""
    view, key = screen.view, screen.session.abilities.key
    if view.followed is not None and view.selected in (None, view.followed):
        screen.notices.say(f"r{view.followed} is not followed any more")
        view.followed = None
        return
    if view.selected is None:
        screen.notices.say(f"select a request first ({lane_keys(key)})", "caution")
        return
    view.followed = view.selected
    screen.notices.say(
        f"r{view.followed} stays in sight; {key('previous_of_request')} and "
        f"{key('next_of_request')} go to its steps, {key('follow')} lets go",
        "good",
    )


def copy(screen: "MainScreen") -> None:
    """What the screen says, to the clipboard of the terminal."""
    if screen.view.page == "live":
        text = "\n".join(line.rstrip() for line in screen.text_of("header", "figures"))
        if screen.frame is not None:
            text += _stalls(screen.frame)
        what = "the key figures"
    else:
        text = "\n".join(line.rstrip() for line in screen.text_of("page"))
        what = "this screen"
    screen.app.copy_to_clipboard(text.strip())
    screen.notices.say(f"{what} sent to the terminal's clipboard (if it takes OSC 52)", "good")


def _stalls(frame: Frame) -> str:
    """The last stall, and the worst one where that is another; a line each."""
    text = "" if frame.stall is None else f"\nlast stall: {frame.stall.text}"
    worst = latency_panel.other_worst(frame)
    if worst is not None:
        late = frame.history.wait(worst.step, worst.request_id)
        why = f"step {worst.step:,} → {worst.kind} {worst.ns / 1e6:.0f} ms"
        text += f"\nworst in memory: {why if late is None else late.text}"
    return text
