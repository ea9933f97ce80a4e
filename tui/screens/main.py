"""The main screen: all views of one session, drawn at frame time from the history."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.geometry import Region
from textual.screen import Screen
from textual.timer import Timer

from stepscope.recordings.history import History
from stepscope.tui import layout
from stepscope.tui.actions import ACTIONS, BY_ID
from stepscope.tui.frame import Frame, FrameBuilder
from stepscope.tui.navigator import Navigator, recorded_extent, replay_of
from stepscope.tui.notices import Notices, Tone
from stepscope.tui.operator import Operator
from stepscope.tui.pages import PAGE_VIEWS, targets
from stepscope.tui.screens import mouse
from stepscope.tui.session import Session
from stepscope.tui.theme import Skin
from stepscope.tui.view import Page, View
from stepscope.tui.widgets import (
    budget_chart,
    event_list,
    footer,
    header,
    inspector,
    key_figures,
    knob_panel,
    kv_map,
    lanes,
    latency_panel,
    scrub_bar,
)
from stepscope.tui.widgets.lines import Line, Lines

log = logging.getLogger("stepscope.tui")

DEFAULT_FPS, SSH_FPS = 10.0, 5.0
MIN_FPS, MAX_FPS = 1.0, 60.0
_SLOW_S = 0.6  # between two drawings of what is read rather than watched

_VIEWS: Mapping[str, Callable[[Frame, int, int, int], list[Line]]] = {
    "figures": key_figures.draw,
    "chart": budget_chart.draw,
    "lanes": lanes.draw,
    "kv": kv_map.draw,
    "latency": latency_panel.draw,
    "latency_line": latency_panel.one_line,
    "inspector": inspector.draw,
    "events": event_list.draw,
    "scrub": scrub_bar.draw,
}
_FAST_VIEWS = frozenset({"chart", "lanes"})  # the others are read rather than watched


class MainScreen(Screen[None]):
    """Composes the views, lets keys and mouse change the `View`, and draws frames.

    Args:
        skin: looks, until the operator changes them.
        fps: frames a second; None finds out.
    """

    DEFAULT_CSS = "MainScreen { layout: vertical; overflow: hidden; }"
    BLANK = True  # nothing of the screen itself is ever seen
    BINDINGS = [  # noqa: RUF012 - Textual's way
        Binding(",".join(action.keys), f"do('{action.id}')", action.label, show=False, id=action.id)
        for action in ACTIONS
    ]

    def __init__(self, session: Session, skin: Skin, fps: float | None) -> None:
        super().__init__()
        self.session = session
        self.skin = skin
        self.fps = fps or (SSH_FPS if os.environ.get("SSH_CONNECTION") else DEFAULT_FPS)
        self.view = View()
        self.notices = Notices(session.clock)
        self.frame: Frame | None = None
        self.history = session.history  # that is shown: this one, or the one before a restart
        self.navigator = Navigator(self.view, session.history, session.source, self.notices)
        self.operator = Operator(session.history, session.link, self.notices)
        self._replay = replay_of(session.source)
        self._clock = session.clock
        self._builder = FrameBuilder(
            session.history, recorded_extent(session.source), session.clock
        )
        self._widgets = {name: Lines(skin, id=name) for name in layout.VIEWS}
        self._places: dict[str, Region] = {}
        self._placed_for: Page = "live"
        self._timer: Timer | None = None
        self._drawn: object = None
        self._all_drawn_s = 0.0
        self._failure: str | None = None
        from stepscope.tui.screens.handlers import handlers

        self._handlers = handlers(self)

    # Life

    def compose(self) -> ComposeResult:
        yield from self._widgets.values()

    def on_mount(self) -> None:
        self.set_fps(self.fps)

    def set_fps(self, fps: float) -> None:
        self.fps = max(MIN_FPS, min(MAX_FPS, fps))
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(1 / self.fps, self.draw_if_changed)

    def on_resize(self, event: events.Resize) -> None:
        self._place(event.size.width, event.size.height)
        self.draw()

    def look_at(self, history: History) -> None:
        """Show another history of this source."""
        self.history = history
        self._builder = FrameBuilder(history, recorded_extent(self.session.source), self._clock)
        self.navigator.look_at(history)
        self.view.follow()
        self.view.selected = self.view.followed = None
        if history is not self.session.history:
            self.view.pause(history.last_step)

    def set_skin(self, skin: Skin) -> None:
        self.skin = skin
        for widget in self._widgets.values():
            widget.skin = skin
        self.styles.background = skin.background
        self.draw()

    # Where things are

    def _place(self, width: int, height: int) -> None:
        self._placed_for = self.view.page
        self._places = layout.plan(width, height, self.view.page)
        for name, widget in self._widgets.items():
            region = self._places.get(name)
            widget.display = region is not None and region.area > 0
            if region is None or not region.area:
                continue
            widget.styles.offset = (region.x, region.y)
            widget.styles.width, widget.styles.height = region.width, region.height

    @property
    def label_width(self) -> int:
        """Cells before the first column, the same in the chart and in the lanes."""
        return 20 if self.size.width >= layout.WIDE_WIDTH else 14

    @property
    def num_columns(self) -> int:
        place = self._places.get("chart") or self._places.get("lanes")
        if place is None:
            return 0
        return max(0, place.width - 2 - self.label_width)

    # Drawing

    def draw_if_changed(self) -> None:
        """A frame, unless it would be the same picture."""
        session = self.session
        now_s = session.clock()
        switch = session.record_switch
        current = (
            session.history.version,
            astuple(self.view),
            session.source.status,
            session.source.error,
            self.operator.pending,
            round(now_s) if switch is not None and switch.active else round(now_s / 4),
        )
        self.operator.take_answers()
        if current != self._drawn or self.operator.pending or self._builder.is_busy:
            self._drawn = current
            self.draw(everything=now_s - self._all_drawn_s >= _SLOW_S)

    def draw(self, everything: bool = True) -> None:
        """A frame, now; the views that need not move ten times a second only with `everything`."""
        failed_before, self._failure = self._failure, None
        try:
            self._draw(everything or not self.view.live)
        except Exception as error:  # whatever it is: shown, and the next frame tries again
            if failed_before is None:
                log.exception("drawing failed")
            self._failure = f"drawing failed, see the log: {error!r}"
            self._show_notice()

    def new_frame(self) -> Frame:
        """What there is to see now."""
        if self.view.live and self.history is not self.session.history:
            self.look_at(self.session.history)
        places = self._places
        lanes_place, events_place = places.get("lanes"), places.get("events")
        frame = self._builder.build(
            self.view,
            self.num_columns,
            0 if lanes_place is None else max(0, lanes_place.height - 2),
            0 if events_place is None else max(8, events_place.height - 2),
        )
        if self.view.page != "live":
            self._keep_row(frame)
        self.frame = self.navigator.frame = frame
        return frame

    def _keep_row(self, frame: Frame) -> None:
        """The row of a request stays with it from step to step."""
        view, rows = self.view, targets(frame)
        if view.page == "step" and view.selected is not None:
            mine = (n for n, target in enumerate(rows) if target.request_id == view.selected)
            view.row = next(mine, view.row)
        view.row = max(0, min(view.row, len(rows) - 1))

    def _draw(self, everything: bool) -> None:
        if not self._places:
            return
        if self._placed_for != self.view.page:
            self._place(*self.size)
            everything = True
        frame = self.new_frame()
        if everything:
            self._all_drawn_s = self.session.clock()
        page = self._places.get("page")
        if page is not None and everything:
            view = PAGE_VIEWS[self.view.page]
            self._widgets["page"].show(view.draw(frame, page.width, page.height))
        for name, draw in _VIEWS.items():
            place = self._places.get(name)
            if place is not None and (everything or name in _FAST_VIEWS):
                lines = draw(frame, place.width, place.height, self.label_width)
                self._widgets[name].show(lines)
        self._show_rest(frame, everything)

    def _show_rest(self, frame: Frame, everything: bool) -> None:
        session, places = self.session, self._places
        width = self.size.width
        if "too_small" in places:
            lines = [
                *key_figures.draw(frame, width, 1, 0),
                ((f"stepscope wants 80x20, has {width}x{self.size.height}", "caution"),),
            ]
            self._widgets["too_small"].show(lines[-self.size.height :])
            return
        self._widgets["header"].show(header.draw(frame, self._connection(), width))
        if everything and "knobs" in places:
            place = places["knobs"]
            editable = session.abilities.allows(BY_ID["knobs"])
            self._widgets["knobs"].show(
                knob_panel.draw(frame, place.width, place.height, self.operator.pending, editable)
            )
        if everything:
            self._widgets["footer"].show(
                footer.draw(session.abilities, self.following, width, self.view.page)
            )
        self._show_notice()

    def _show_notice(self) -> None:
        session = self.session
        standing: list[tuple[str, Tone]] = []
        if self.operator.pending:
            standing.append((f"asking: {self.operator.pending} …", "muted"))
        switch = session.record_switch
        for error in (
            self._failure,
            session.background_error,
            session.source.error,
            None if switch is None else switch.error,
        ):
            if error is not None:
                standing.append((error, "caution"))
        line = self.notices.line(standing, self.size.width)
        self._widgets["notice"].show([line])

    @property
    def following(self) -> bool:
        """Whether the picture moves by itself."""
        return self.view.live and (self._replay is None or self._replay.status == "playing")

    def _connection(self) -> header.Connection:
        session = self.session
        switch = session.record_switch
        recording = None
        if switch is not None and switch.active:
            recording = (switch.seconds, switch.num_bytes)
        return header.Connection(
            session.title,
            session.endpoint,
            session.source.status,
            self.fps,
            None if self._replay is None else self._replay.speed,
            recording,
            self.history is not session.history,
        )

    @property
    def is_busy(self) -> bool:
        """Something is being worked out that the next picture may show."""
        return self._builder.is_busy

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "do" and parameters:
            return self.session.abilities.allows(BY_ID[str(parameters[0])])
        return True

    def action_do(self, action_id: str) -> None:
        """Carry out an action of the table and show what it did at once."""
        action = BY_ID[action_id]
        if not self.session.abilities.allows(action):
            return
        if self.view.page in action.pages:
            self._handlers[action_id]()
        else:
            self.notices.say(f"{action.shown} does nothing here; 1 is the main screen", "caution")
        self.draw()

    def explain(self, key: str) -> None:
        """Say why a key of the table does nothing here; silent for any other key."""
        abilities = self.session.abilities
        for action in ACTIONS:
            if key in action.keys and not abilities.allows(action):
                self.notices.say(abilities.why_not(action), "caution")
                self.draw()

    def text_of(self, *names: str) -> list[str]:
        """What some of the views show."""
        return [line for name in names for line in self._widgets[name].plain_text()]

    # Mouse

    def on_click(self, event: events.Click) -> None:
        mouse.click(self, event)
        self.draw()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button and event.widget is self._widgets["scrub"]:
            mouse.scrub_to(self, event.x)
            self.draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        mouse.scroll(self, -1, event.shift)
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        mouse.scroll(self, 1, event.shift)
        self.draw()

    def scroll_lanes(self, rows: int) -> None:
        """Take over from the automatic choice of lanes, which shows neither end; Esc gives back."""
        first = self.view.first_lane
        if first is None:
            total = 0 if self.frame is None else self.frame.num_lanes
            self.view.first_lane = 0 if rows < 0 else total
        else:
            self.view.first_lane = max(0, first + rows)
