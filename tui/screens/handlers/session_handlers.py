"""Handlers of the actions that show another session, record this one, or save a picture of it."""

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.source import Source
from stepscope.tui.screens.handlers.handled_screen import HandledScreen
from stepscope.tui.screens.handlers.svg_picture import new_picture, svg
from stepscope.tui.views import format as fmt


class SessionHandlers:
    """The handlers of one screen that concern the session as a whole."""

    def __init__(self, screen: HandledScreen) -> None:
        self._screen = screen
        self._session, self._operator, self._view = screen.session, screen.operator, screen.view
        self._notices = screen.notices

    def previous_session(self) -> None:
        current, shown = self._session.history, self._screen.history
        if shown is not current:
            self._screen.look_at(current)
        elif current.previous is None:
            self._notices.refuse("the engine has not restarted since this dashboard opened")
        elif current.previous.last_step is None:
            self._notices.refuse("no step from before the restart is known")
        else:
            self._screen.look_at(current.previous)
            key = self._session.abilities.key
            back = f"{key('previous_session')} or {key('live')} goes back"
            number = current.num_displaced
            lost = f"{fmt.plural(number, 'earlier session')} not kept; " if number else ""
            self._notices.say_of_place(f"the session before the restart; {lost}{back}")

    def record(self) -> None:
        """Start or stop recording this engine, or on the fleet page the engine selected there."""
        session, who = self._session, ""
        source: Source | None = session.source
        if self._view.page == "fleet":
            source, who = session.fleet_view.chosen, f"{session.fleet_view.selected}: "
        switch = None if source is None else session.switches.of(source)
        if source is None or switch is None:
            return
        if switch.active:
            switch.stop()
            self._notices.say(f"{who}recording ended: {switch.path}", "good")
            return
        if not switch.has_engine:
            self._notices.say(f"{who}no engine answers, so nothing can be recorded", "caution")
            return
        try:
            path = switch.start()
        except RecordingError as error:
            self._notices.say(f"{who}cannot record: {error}", "caution")
        else:
            num_marks = len(source.history.marks)
            before = f" (without {fmt.plural(num_marks, 'earlier mark')})" if num_marks else ""
            self._notices.say(f"{who}recording{before} to {path}", "good")

    def autopilot(self) -> None:
        """Start an autopilot that holds the ITL level, or end what controls the knobs."""
        switch, history = self._session.autopilot, self._session.history
        leased = history.state.leased
        if switch is None:
            return
        if switch.is_on:
            switch.stop()
            self._notices.say("ending the autopilot: it gives the knobs back")
        elif leased is not None:
            self._operator.end_lease(leased)
        else:
            itl_ms = history.slo.itl_ms
            switch.start(itl_ms)
            key = self._session.abilities.key
            self._notices.say(
                f"autopilot: moves the budget so that 95 % of the gaps keep {itl_ms:g} ms "
                f"({key('service_levels')} sets that level before); {key('autopilot')} ends it",
                "good",
            )

    def screenshot(self) -> None:
        shown = "engines" if self._view.page == "fleet" else self._session.source.name
        try:
            path = new_picture(svg(self._screen.app), shown)
        except OSError as error:
            self._notices.say(f"no screenshot: {error.filename}: {error.strerror}", "caution")
        else:
            self._notices.say(f"screenshot: {path}", "good")
