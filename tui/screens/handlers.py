"""What each action of the table does on the main screen."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from textual.binding import Binding, BindingsMap

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.source import Source
from stepscope.tui import format as fmt
from stepscope.tui.action_table import Action
from stepscope.tui.navigator import replay_of
from stepscope.tui.page_names import PAGES
from stepscope.tui.screens import compare_handlers as comparing
from stepscope.tui.screens import look_handlers as looks
from stepscope.tui.screens import opening
from stepscope.tui.screens import page_handlers as pages
from stepscope.tui.worst import WorstStalls

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen

_PREEMPTIONS = ("preempt",)
_ROWS = 10  # of a list at a time


def bindings(actions: Iterable[Action]) -> BindingsMap:
    """The keys of all actions that have some on a screen of an engine."""
    return BindingsMap(
        [
            Binding(",".join(each.keys), f"do('{each.id}')", each.label, show=False, id=each.id)
            for each in actions
            if each.keys and not each.pages.isdisjoint(PAGES)
        ]
    )


def handlers(screen: "MainScreen") -> Mapping[str, Callable[[], None]]:
    """Action id -> what to do. Every action of the table is in it."""
    navigator, operator, view = screen.navigator, screen.operator, screen.view
    actions: dict[str, Callable[[], None]] = {
        **{f"screen_{page}": partial(pages.show, screen, page) for page in PAGES},
        "pause": navigator.pause,
        "step_back": partial(_column, screen, -1),
        "step_forward": partial(_column, screen, 1),
        "ten_back": partial(navigator.move, -10),
        "ten_forward": partial(navigator.move, 10),
        "screen_back": partial(_screen, screen, -1),
        "screen_forward": partial(_screen, screen, 1),
        "oldest": navigator.oldest,
        "live": navigator.live,
        "previous_event": partial(navigator.event, -1),
        "next_event": partial(navigator.event, 1),
        "previous_preemption": partial(navigator.event, -1, _PREEMPTIONS),
        "next_preemption": partial(navigator.event, 1, _PREEMPTIONS),
        "previous_of_request": partial(navigator.of_request, -1),
        "next_of_request": partial(navigator.of_request, 1),
        "previous_mark": navigator.mark,
        "worst": _worst(screen).next,
        "goto": partial(opening.goto, screen),
        "previous_session": partial(_previous_session, screen),
        "slower": partial(navigator.change_speed, 0.5),
        "faster": partial(navigator.change_speed, 2.0),
        "zoom_in": partial(view.change_zoom, -1),
        "zoom_out": partial(view.change_zoom, 1),
        "axis": partial(looks.axis, screen),
        "lane_up": partial(_select_lane, screen, -1),
        "lane_down": partial(_select_lane, screen, 1),
        "sort": partial(_sort, screen),
        "reverse": partial(_reverse, screen),
        "compare_with": partial(comparing.choose, screen),
        "other_side": screen.session.compare.other_side,
        "follow": partial(pages.follow, screen),
        "copy": partial(pages.copy, screen),
        "filter": partial(opening.filter_, screen),
        "service_levels": partial(opening.service_levels, screen),
        "glyphs": partial(looks.glyphs, screen),
        "inspect": partial(pages.inspect, screen),
        "budget": partial(opening.budget, screen),
        "knobs": partial(opening.knobs, screen),
        "undo": operator.undo,
        "pause_engine": operator.pause_or_resume,
        "step_engine": operator.run_one_step,
        "workload": partial(opening.workload, screen),
        "record": partial(_record, screen),
        "screenshot": partial(_screenshot, screen),
        "export": partial(opening.export, screen),
        "keep_steps": partial(opening.keep_steps, screen),
        "mark": partial(opening.mark, screen),
        "help": partial(opening.help_, screen),
        "palette": partial(opening.palette, screen),
        "theme": partial(looks.theme, screen),
        "more_frames": partial(looks.frames, screen, 1),
        "fewer_frames": partial(looks.frames, screen, -1),
        "own_load": partial(looks.own_load, screen),
        "redraw": partial(_redraw, screen),
        "suspend": partial(_suspend, screen),
        "back": partial(_back, screen),
        "quit": partial(_quit, screen),
    }
    return _elsewhere(screen, actions)


def _elsewhere(
    screen: "MainScreen",
    main: Mapping[str, Callable[[], None]],
) -> Mapping[str, Callable[[], None]]:
    """The same keys, where a comparison is shown go through it."""
    own = comparing.handlers(screen)

    def chosen(action_id: str) -> None:
        if action_id == "back" and screen.session.exports.cancel():
            return
        found = own if screen.view.page == "compare" and action_id in own else main
        found[action_id]()

    return {action_id: partial(chosen, action_id) for action_id in main}


def _column(screen: "MainScreen", direction: int) -> None:
    """One column on in time, or to the next one that engines are ordered by."""
    if screen.view.page == "fleet":
        screen.session.desk.move_sort(direction)
    else:
        screen.navigator.move(direction)


def _screen(screen: "MainScreen", direction: int) -> None:
    """A screen on in time, or through a list."""
    if screen.view.page == "live":
        screen.navigator.move_screen(direction)
    else:
        pages.select(screen, direction * _ROWS)


def _sort(screen: "MainScreen") -> None:
    if screen.view.page == "fleet":
        screen.session.desk.move_sort(1)
    else:
        screen.view.next_order()
        screen.session.preferences.set("sort", screen.view.sort)


def _reverse(screen: "MainScreen") -> None:
    """The other way round: engines, or late tokens."""
    if screen.view.page == "fleet":
        screen.session.desk.reverse()
    else:
        screen.view.longest_first = not screen.view.longest_first


def _worst(screen: "MainScreen") -> WorstStalls:
    def key(action_id: str) -> str:
        return screen.session.abilities.key(action_id)

    replay = replay_of(screen.session.source)
    return WorstStalls(screen.navigator, lambda: screen.history, replay, screen.notices, key)


def _previous_session(screen: "MainScreen") -> None:
    current, shown = screen.session.history, screen.history
    if shown is not current:
        screen.look_at(current)
    elif current.previous is None:
        screen.notices.refuse("the engine has not started anew since this dashboard began")
    elif current.previous.last_step is None:
        screen.notices.refuse("no step of the session before the restart has come")
    else:
        screen.look_at(current.previous)
        key = screen.session.abilities.key
        back = f"{key('previous_session')} or {key('live')} goes back"
        number = current.num_displaced
        lost = f"of {fmt.plural(number, 'earlier one')} nothing is kept; " if number else ""
        screen.notices.say_of_place(f"the session before the restart; {lost}{back}")


def _record(screen: "MainScreen") -> None:
    """Begin or end a recording: of this engine, or of the selected one of several."""
    session, who = screen.session, ""
    source: Source | None = session.source
    if screen.view.page == "fleet":
        source, who = session.desk.chosen, f"{session.desk.selected}: "
    switch = None if source is None else session.switches.of(source)
    if source is None or switch is None:
        return
    if switch.active:
        switch.stop()
        screen.notices.say(f"{who}recording ended: {switch.path}", "good")
        return
    if not switch.has_engine:
        screen.notices.say(f"{who}nothing to record: no engine answers", "caution")
        return
    try:
        path = switch.start()
    except RecordingError as error:
        screen.notices.say(f"{who}cannot record: {error}", "breach")
    else:
        num_marks = len(source.history.marks)
        before = f" ({fmt.plural(num_marks, 'mark')} from before not in it)" if num_marks else ""
        screen.notices.say(f"{who}recording{before} to {path}", "good")


def _screenshot(screen: "MainScreen") -> None:
    from stepscope.tui.picture import new_picture, svg

    name = screen.session.source.name
    try:
        path = new_picture(svg(screen.app), "engines" if screen.view.page == "fleet" else name)
    except OSError as error:
        screen.notices.say(f"no screenshot: {error.filename}: {error.strerror}", "breach")
    else:
        screen.notices.say(f"screenshot: {path}", "good")


def _select_lane(screen: "MainScreen", direction: int) -> None:
    if screen.view.page != "live":
        pages.select(screen, direction)
        return
    rows = screen.frame.lanes if screen.frame is not None else []
    if not rows:
        return
    ids = [row.request_id for row in rows]
    selected = screen.view.selected
    if selected not in ids:
        screen.view.selected = ids[0] if direction > 0 else ids[-1]
        return
    at = ids.index(selected) + direction
    if 0 <= at < len(ids):
        screen.view.selected = ids[at]
    else:
        screen.view.scroll_lanes(direction, screen.num_lanes)
        shown = screen.new_frame().lanes
        if shown:
            screen.view.selected = shown[-1 if direction > 0 else 0].request_id


def _redraw(screen: "MainScreen") -> None:
    screen.app.screen.refresh(layout=True)


def _suspend(screen: "MainScreen") -> None:
    screen.app.action_suspend_process()


def _back(screen: "MainScreen") -> None:
    screen.notices.dismiss()
    screen.session.background_error = None
    if screen.view.page != "live":
        screen.view.leave()
        comparing.go_home(screen)
        return
    if screen.view.trail == ("compare",):
        screen.view.leave()
        comparing.go_home(screen)
        return
    if screen.view.selected is None and screen.view.first_lane is None:
        if len(screen.session.desk.fleet) > 1:
            pages.show(screen, "fleet")
        return
    screen.view.selected = None
    screen.view.first_lane = None


def _quit(screen: "MainScreen") -> None:
    screen.app.exit()
