"""`SessionScreen`: the screen of one engine or recording, drawn a few times a second.

Actions change its `View` (page, cursor, selection). The main screen gives them keys and mouse.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import TypeVar

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.timer import Timer

from stepscope.recordings.fleets.fleet import LOOK_S
from stepscope.recordings.history.history import History
from stepscope.tui.screens.canvas import Canvas, FrameMaker
from stepscope.tui.screens.textual_parts import use_colours
from stepscope.tui.session.navigator import Navigator, replay_of
from stepscope.tui.session.operator import Operator
from stepscope.tui.session.session import Session
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.notices import Notices, Tone
from stepscope.tui.views.panels import header
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import View

log = logging.getLogger("stepscope.tui")

DEFAULT_FPS, SSH_FPS = 10.0, 5.0
MIN_FPS, MAX_FPS = 1.0, 60.0
_SLOW_S = 0.6  # between two drawings of the slow views, which are read rather than watched

_T = TypeVar("_T")

# The only actions allowed on a too small screen: the effect of any other would be invisible.
_UNSEEN = frozenset({"help", "redraw", "suspend", "quit"})


class SessionScreen(Screen[None], inherit_bindings=False):
    """The screen of one engine or recording; without `fps` 10 a second, or 5 over SSH."""

    DEFAULT_CSS = "SessionScreen { layout: vertical; overflow: hidden; }"
    BLANK = True  # the canvas covers the screen itself

    def __init__(self, session: Session, skin: Skin, fps: float | None) -> None:
        super().__init__()
        self.session = session
        self.skin = skin
        session.abilities = session.abilities.written(skin.ascii_only)
        self.fps = fps or (SSH_FPS if os.environ.get("SSH_CONNECTION") else DEFAULT_FPS)
        self.view = View()
        self.notices = Notices(session.clock)
        self.news: Callable[[], str | None] = lambda: None  # notices of the calling command
        self._logged: set[str] = set()  # errors, each of them once
        self.frame: Frame | None = None
        self.navigator = Navigator(self.view, session.source, self.notices, self._key)
        self.operator = Operator(session.history, session.link, self.notices, session.autopilot)
        self.canvas = Canvas(session, skin)
        self._replay = replay_of(session.source)
        self.frames = FrameMaker(session, self.view, self.canvas)
        self._timer: Timer | None = None
        self._seen: object = None  # the state of the session when it was drawn last
        self._all_drawn_s = 0.0
        self._is_partial = False  # the slow views were left out
        self.is_shown = True  # False while the screen of another engine is shown
        self._failure: str | None = None  # why the last frame could not be made
        self.by_action: Mapping[str, Callable[[], None]] = {}  # the handlers

    def compose(self) -> ComposeResult:
        yield self.canvas

    def on_mount(self) -> None:
        self.set_fps(self.fps)

    def set_fps(self, fps: float) -> None:
        self.fps = max(MIN_FPS, min(MAX_FPS, fps))
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(1 / self.fps, self.draw_if_changed)

    def on_resize(self, event: events.Resize) -> None:
        self.canvas.place(event.size, self.view.page)
        self.draw()

    def look_at(self, history: History) -> None:
        """Show another history of this source, such as the one from before a restart."""
        self.notices.leave_place()
        self.frames.look_at(history)
        self.navigator.look_at(history)
        self.view.follow()
        self.view.selected = self.view.followed = None
        if history is not self.session.history:
            self.view.pause(history.last_step)

    @property
    def history(self) -> History:
        """The steps that the screen shows: those of the session, or those from before a restart."""
        return self.frames.history

    def _key(self, action_id: str) -> str:
        return self.session.abilities.key(action_id)

    def set_skin(self, skin: Skin) -> None:
        if skin.ascii_only != self.skin.ascii_only:
            self.session.abilities = self.session.abilities.written(skin.ascii_only)
            self.frames.forget()
        self.skin = skin
        self.canvas.set_skin(skin)
        use_colours(self.app, skin.mode)
        self.draw()

    def draw_if_changed(self) -> None:
        """Draw a frame if something has changed since the last one. The timer calls this."""
        with self.shown_failures("the dashboard"):
            if self.is_shown:
                self._look()

    def _look(self) -> None:
        session = self.session
        seen = _seen(session, self.operator, self.view)
        self.operator.receive_answers()
        pilot = None if session.autopilot is None else session.autopilot.news()
        for news in (session.exports.news(), pilot):
            if news is not None:
                self.notices.say(*news)
        if (said := self.news()) is not None:
            self.notices.say_later(said)
        for change in session.alerts.news():
            if change.is_firing:
                self.app.bell()  # the notice line shows the alert as long as it fires
            else:
                self.notices.say_later(change.text, "good")
        self._show_notice()
        is_due = session.clock() - self._all_drawn_s >= _SLOW_S
        # The slow views must show the last change too: after a partial frame, draw once more.
        is_changed = seen != self._seen or (self._is_partial and is_due)
        if not (self.operator.pending or self.frames.is_behind or is_changed):
            self.canvas.write()
            return
        shown = self.frame
        is_moved = shown is None or shown.status != session.source.status
        is_first = shown is not None and shown.last_step is None
        is_moved |= is_first and self.history.last_step is not None
        self.draw(everything=is_due or is_moved or self.view.page in ("fleet", "compare"))

    def draw(self, everything: bool = True) -> None:
        """Draw a frame now, with `everything` or at a stopped step also the slow views."""
        self._seen = _seen(self.session, self.operator, self.view)
        failed_before, self._failure = self._failure, None
        try:
            self._draw(everything or not self.view.live)
        except Exception as error:  # any error: it is shown, and the next frame tries again
            if failed_before is None:
                log.exception("drawing failed")
            self._failure = f"drawing failed, {see_log(error)}"
        self._show_notice()
        self.canvas.write()
        self._is_seeking()

    def draw_next(self) -> None:
        """Draw a frame now; if a replay is seeking a step, draw once that step is found."""
        if not self._is_seeking():
            self.draw()

    def _is_seeking(self) -> bool:
        """Whether the replay is seeking a step; if so, the screen is drawn once it is found."""
        if self._replay is None or not self._replay.is_seeking:
            return False
        self._replay.on_found = self._found
        return self._replay.is_seeking  # it may have found the step before we set the callback

    def _found(self) -> None:
        """Called on the replay's thread when the step is found; draws on the screen's thread."""
        with contextlib.suppress(RuntimeError):  # the dashboard has just ended
            self.call_later(self.draw)

    def _draw(self, everything: bool) -> None:
        canvas = self.canvas
        if not canvas.places:
            return
        if self.session.tour is not None:
            self.session.tour.look(self.view, self.session.history)
        if canvas.page != self.view.page:
            canvas.place(self.size, self.view.page)
            self.notices.leave_place()
            everything = True
        # A page is drawn only with everything; until then the header keeps the page's frame.
        shown = self.frame
        frame = shown if self.view.page != "live" and not everything else None
        if frame is None:
            frame = self.new_frame()
            # New latency figures: draw all, so that the header and the slow panels agree.
            everything |= shown is None or frame.latency is not shown.latency
        self._is_partial = not everything
        if everything:
            self._all_drawn_s = self.session.clock()
        connection = _connection(self.session, self.history, self.fps)
        canvas.draw(frame, connection, self.operator.pending, self.following, everything)

    def new_frame(self) -> Frame:
        if self.view.live and self.history is not self.session.history:
            self.look_at(self.session.history)
        self.frame = self.navigator.frame = self.frames.frame()
        return self.frame

    def _show_notice(self) -> None:
        failure = self._failure or self.canvas.failure
        standing = _standing(self.session, self.operator, self.view, failure)
        self.canvas.notice(self.notices.line(standing, self.size.width))

    @property
    def following(self) -> bool:
        """Whether the picture moves by itself, as it shows the newest step."""
        return self.view.live and (self._replay is None or self._replay.status == "playing")

    @contextmanager
    def shown_failures(self, what: str) -> Iterator[None]:
        """Inside this context, show an exception as a notice that `what` failed; log it once."""
        try:
            yield
        except Exception as error:
            text = f"{what} failed, {see_log(error)}"
            if text not in self._logged:
                self._logged.add(text)
                log.exception("%s failed", what)
            self.notices.warn(text)

    def open_overlay(self, overlay: Screen[_T], use: Callable[[_T], None]) -> None:
        """Show an overlay above the screen. If it closes with a result, `use` gets that."""

        def closed(result: _T | None) -> None:
            if result is not None:
                use(result)
                self.draw_next()

        self.app.push_screen(overlay, closed)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "do" and parameters:
            return self.session.abilities.allows(BY_ID[str(parameters[0])])
        return True

    def action_do(self, action_id: str) -> None:
        """Run the handler of an action and draw; if it does not work here, say why."""
        abilities = self.session.abilities
        action = abilities.action(action_id)
        if not abilities.allows(action):
            return
        if self.canvas.is_too_small and action_id not in _UNSEEN:
            what = f"{self._key('help')} and {self._key('quit')} work"
            self.notices.refuse(f"{action.key} needs a larger screen ({what})")
            self.draw_next()
            return
        self.session.switches.seen(None if self.view.page == "fleet" else self.session.source)
        if self.view.page in action.pages:
            with self.shown_failures(action.label):
                self.by_action[action_id]()
        else:
            self.notices.refuse(abilities.where_else(action, self.view.page))
        self.draw_next()

    def explain(self, key: str) -> None:
        """If `key` belongs to an action that is disabled here, show why; ignore any other key."""
        abilities = self.session.abilities
        for action in abilities.actions:
            if key in action.keys and not abilities.allows(action):
                self.notices.refuse(abilities.why_not(action))
                self.draw()


_AGEING = ("stale", "down")  # the screen says how old the figures are


def _standing(
    session: Session, operator: Operator, view: View, failure: str | None
) -> list[tuple[str, Tone]]:
    """Return the notices that stay: commands without an answer, problems, why drawing failed."""
    switch = session.record_switch
    lines: list[tuple[str, Tone]] = []
    if session.exports.active is not None:
        key = session.abilities.key("back")
        lines.append((f"{session.exports.active}, {key} cancels", "text"))
    if operator.pending:
        lines.append((f"asking: {operator.pending} …", "muted"))
    errors = [failure, session.background_error]
    if view.page == "fleet":
        failed = session.switches.errors.items()
        errors += [f"{session.fleet_view.name_of(source)}: {error}" for source, error in failed]
    else:
        errors += [_source_error(session), None if switch is None else switch.error]
        previous = session.history.previous
        is_empty = view.live and not session.history.num_steps
        if is_empty and previous is not None and previous.num_steps:
            key = session.abilities.key("previous_session")
            lines.append((f"{key} shows the session before the engine restarted", "text"))
        lines += [(text, "breach") for text in session.alerts.standing]
    return [*lines, *((error, "caution") for error in errors if error is not None)]


def _source_error(session: Session) -> str | None:
    """Return the error of the source or None; if its engine is gone, with the key that helps."""
    error, switch = session.source.error, session.record_switch
    key, is_down = session.abilities.key("keep_steps"), session.source.status == "down"
    if error is None or switch is None or not (is_down and session.history.num_steps):
        return error
    # The file of a running recording lacks the steps from before it began.
    which = ", also those from before the recording" if switch.active else ""
    return f"{error}; {key} saves the steps in memory{which}"


def _seen(session: Session, operator: Operator, view: View) -> object:
    """Return a value that differs from the last one whenever the picture must be drawn again."""
    switch, now_s = session.record_switch, session.clock()
    has_clock = (switch is not None and switch.active) or session.source.status in _AGEING
    replay = replay_of(session.source)
    news: object = session.history.version
    if view.page == "fleet":
        news = round(now_s / LOOK_S)
    elif view.page == "compare":
        news = session.compare.key
    return (
        news,
        astuple(view),
        session.source.status,
        session.source.error,
        replay and (replay.file_index.num_events, replay.file_index.is_done),
        session.background_error,
        operator.pending,
        round(now_s) if has_clock else round(now_s / 4),
    )


def _connection(session: Session, shown: History, fps: float) -> header.SourceState:
    source, switch, replay = session.source, session.record_switch, replay_of(session.source)
    recorder = None if switch is None else switch.active
    recording = None if recorder is None else (recorder.elapsed_s, recorder.num_bytes)
    speed = extent_ns = None
    if replay is not None:
        speed, extent_ns = replay.speed, replay.extent_ns
    return header.SourceState(
        *(session.endpoint, source.status, fps, speed, recording),
        *(shown is not session.history, extent_ns),
    )
