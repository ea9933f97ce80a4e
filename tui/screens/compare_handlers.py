"""What the actions do on the compare screen; time there is that of the comparison."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings.compare.side.points import PREEMPTED
from stepscope.recordings.errors import RecordingError
from stepscope.tui.compare.choices import file_origin, session_origin
from stepscope.tui.compare.desk import EVENTS
from stepscope.tui.compare.origin import Origin
from stepscope.tui.screens.prompt import Prompt

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen


def handlers(screen: "MainScreen") -> Mapping[str, Callable[[], None]]:
    """Action id -> what to do there; of all others the usual."""
    desk = screen.session.compare
    return {
        "step_back": partial(desk.move, -1),
        "step_forward": partial(desk.move, 1),
        "ten_back": partial(desk.move, -10),
        "ten_forward": partial(desk.move, 10),
        "screen_back": partial(desk.move_screen, -1),
        "screen_forward": partial(desk.move_screen, 1),
        "oldest": partial(desk.go_to_end, -1),
        "live": partial(desk.go_to_end, 1),
        "previous_event": partial(_event, screen, -1, EVENTS),
        "next_event": partial(_event, screen, 1, EVENTS),
        "previous_preemption": partial(_event, screen, -1, PREEMPTED),
        "next_preemption": partial(_event, screen, 1, PREEMPTED),
        "zoom_in": partial(desk.zoom, 1),
        "zoom_out": partial(desk.zoom, -1),
        "lane_up": partial(_select, screen, -1),
        "lane_down": partial(_select, screen, 1),
        "sort": desk.next_align,
        "inspect": partial(_inspect, screen),
        "back": partial(_back, screen),
    }


def choose(screen: "MainScreen") -> None:
    """What is there to compare with?"""
    from stepscope.tui.screens import page_handlers

    screen.session.compare.choose(screen.session.source)
    page_handlers.show(screen, "compare")


def go_home(screen: "MainScreen") -> None:
    """Where a comparison is shown, it is on the screen of the session that is compared."""
    if screen.view.page == "compare":
        screen.session.compare.go_home("compare")


def _event(screen: "MainScreen", direction: int, flags: int) -> None:
    if not screen.session.compare.event(direction, flags):
        what = "preemption" if flags == PREEMPTED else "event"
        where = "after" if direction > 0 else "before"
        screen.notices.say(f"no {what} {where} the cursor on either side", "caution")


def _select(screen: "MainScreen", direction: int) -> None:
    desk = screen.session.compare
    if desk.chooser.choices is not None or desk.align == "request":
        desk.select(direction)
    else:
        key = screen.session.abilities.key("sort")
        screen.notices.say(f"{key} aligns by request; then these choose one", "caution")


def _back(screen: "MainScreen") -> None:
    screen.notices.dismiss()
    if not screen.session.compare.back():
        screen.view.leave()


def _inspect(screen: "MainScreen") -> None:
    desk = screen.session.compare
    if desk.chooser.choices is not None:
        _take_choice(screen)
    elif desk.align == "request" and desk.pairs:
        pair = desk.pairs[min(desk.selected, len(desk.pairs) - 1)]
        run = pair.a if desk.focus == "a" else pair.b
        _open(screen, run.worst_step or run.first_token_step, run.request_id)
    else:
        page = None if screen.frame is None else screen.frame.compare
        point = None if page is None else page.points[0 if desk.focus == "a" else 1]
        if point is None:
            screen.notices.say(f"{desk.focus.upper()} has no step here", "caution")
        else:
            _open(screen, point.first, None)


def _open(screen: "MainScreen", step: int | None, request_id: int | None) -> None:
    """A step or a request on the side in focus."""
    desk = screen.session.compare
    if desk.origins is not None:
        with _errors_said(screen):
            desk.open(desk.origins[0 if desk.focus == "a" else 1], step, request_id)


def _take_choice(screen: "MainScreen") -> None:
    choice = screen.session.compare.chooser.chosen
    if choice is None:
        return
    if choice.origins is not None:
        begin(screen, *choice.origins)
        return

    def use(text: str | None) -> None:
        if text is not None and text.strip():
            session = session_origin(screen.session.source)
            begin(screen, session, file_origin(Path(text.strip()).expanduser(), session))
            screen.draw()

    question = "compare with this recording:"
    screen.app.push_screen(Prompt(screen.skin, question, check=_no_such_file), use)


def _no_such_file(text: str) -> str | None:
    path = Path(text.strip()).expanduser()
    return None if not text.strip() or path.is_file() else f"there is no file {path}"


def begin(screen: "MainScreen", a: Origin, b: Origin) -> None:
    """Compare these two; what is wrong with one of them is said."""
    with _errors_said(screen):
        screen.session.compare.begin(a, b)


class _errors_said:  # noqa: N801 - reads as what it does
    """What cannot be read is a line on the screen."""

    def __init__(self, screen: "MainScreen") -> None:
        self._screen = screen

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, RecordingError | OSError):
            self._screen.notices.say(str(error), "breach")
            return True
        return False
