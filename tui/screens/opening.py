"""Opens the overlays above the main screen: prompts, editors, help, the palette."""

from collections.abc import Callable
from functools import partial

from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.recordings.history.source import NO_ENGINE, add_mark
from stepscope.recordings.state.latency import SLO
from stepscope.tui.screens.help import HelpPage
from stepscope.tui.screens.knob_editor import KnobEditor
from stepscope.tui.screens.overlay import Prompt
from stepscope.tui.screens.session_screen import SessionScreen
from stepscope.tui.screens.textual_parts import palette
from stepscope.tui.session.engine_link import KnobsNow
from stepscope.tui.session.operator import (
    BUDGET,
    EXAMPLE,
    OFF,
    parse_workload,
    published_workload,
    workload_note,
)
from stepscope.tui.session.what_if import KnobForecast
from stepscope.tui.settings.setting_values import parse_levels
from stepscope.tui.views.frame.lane_rows import lane_filter


class Opening:
    """Opens the overlays above one screen; `use_levels` gets the service levels that are typed."""

    def __init__(self, screen: SessionScreen, use_levels: Callable[[SLO], None]) -> None:
        self._screen = screen
        self._session, self._view, self._navigator = screen.session, screen.view, screen.navigator
        self._operator, self._notices = screen.operator, screen.notices
        self._use_levels = use_levels

    def ask(
        self,
        question: str,
        use: Callable[[str], None],
        check: Callable[[str], str | None] | None = None,
        text: str = "",
        note: str = "",
    ) -> None:
        prompt = Prompt(self._screen.skin, question, text, check, note=note)
        self._screen.open_overlay(prompt, use)

    def goto(self) -> None:
        question = "go to a step (1200), a time (12:41:58), or a distance (-30s):"
        self.ask(question, self._navigator.goto, _checked(self._navigator.target))

    def filter_(self) -> None:
        def use(text: str) -> None:
            self._view.filter = text.strip()
            self._view.first_lane = None

        question = "lanes (state:dec state:out id:12 text !regex, empty for all):"
        self.ask(question, use, _checked(lane_filter), self._view.filter)

    def mark(self) -> None:
        key, warn = self._session.abilities.key, self._notices.warn
        step = None if self._screen.frame is None else self._screen.frame.cursor

        def set_mark(text: str) -> None:
            add_mark(self._session.source, text.strip() or "mark", self._operator.who, step)
            said = f"mark at step {step:,}; {key('previous_mark')} goes back to it"
            self._notices.say(said, "good")

        if step is None:
            warn("there is no step to mark yet")
        elif self._screen.history is not self._session.history:
            warn(f"marks are for the running session; {key('live')} goes back to it")
        else:
            self.ask(f"mark at step {step:,}, note:", set_mark)

    def keep_steps(self) -> None:
        session, warn = self._session, self._notices.warn
        if session.exports.active is not None:
            warn(f"a file is being written; {session.abilities.key('back')} cancels it")
        elif session.record_switch is None or not self._screen.history.num_steps:
            warn("there is no step in memory yet")
        else:
            self._notices.dismiss()
            session.exports.write_memory(self._screen.history, session.record_switch.new_path())
            self._screen.draw()

    def _has_engine(self) -> bool:
        """Whether an engine answers, so that it can be changed; if not, show a notice."""
        if self._session.source.status not in NO_ENGINE:
            return True
        self._notices.warn("no engine answers, so nothing can be changed")
        return False

    def budget(self) -> None:
        if self._operator.spec(BUDGET) is not None:
            self.edit_knob(BUDGET, is_alone=True)
        elif self._has_engine():
            self._notices.warn("this engine has no token budget to change")

    def edit_knob(self, name: str | None, *, is_alone: bool = False) -> None:
        """Open the knob editor; if `name` is given, with that knob selected, or it `is_alone`."""
        if not self._has_engine():
            return
        if not self._knobs_now().specs:
            self._notices.warn("the engine has not reported its knobs yet")
            return
        forecast = partial(KnobForecast, self._session.history)
        editor = KnobEditor(self._screen.skin, self._knobs_now, name, forecast, is_alone)
        self._screen.open_overlay(editor, self._operator.set_knob)

    def _knobs_now(self) -> KnobsNow:
        now = self._session.history.state
        engine_id, specs = ("", ()) if now.info is None else (now.info.engine_id, now.info.knobs)
        return KnobsNow(engine_id, now.knobs_version, now.knobs, specs)

    def workload(self) -> None:
        """Ask for the engine's own synthetic workload; fields not typed keep their values."""
        if not self._has_engine():
            return
        history = self._session.history

        def parsed(text: str) -> WorkloadSpec | None:
            return parse_workload(text, published_workload(history.state.workload_spec))

        def use(text: str) -> None:
            self._operator.set_workload(parsed(text))

        note = workload_note(history.state)
        self.ask(f"{OFF} or {EXAMPLE}:", use, _checked(parsed), note=note)

    def service_levels(self) -> None:
        now = self._session.history.slo
        parsed = partial(parse_levels, now=now)

        def use(text: str) -> None:
            self._use_levels(parsed(text))

        text = f"ttft={now.ttft_ms:g} itl={now.itl_ms:g}"
        self.ask("service levels, in ms or 2s:", use, _checked(parsed), text)

    def help_(self) -> None:
        session = self._session
        page = HelpPage(self._screen.skin, session.abilities, self._view.page, session.log_file)
        self._screen.app.push_screen(page)

    def palette(self) -> None:
        app, offered = self._screen.app, self._session.abilities.on(self._view.page)
        app.push_screen(palette(app.screen, offered, self._screen.action_do))


def _checked(parse: Callable[[str], object]) -> Callable[[str], str | None]:
    """Return a function that says what is wrong with a text; None if `parse` accepts it."""

    def check(text: str) -> str | None:
        try:
            parse(text)
        except ValueError as error:
            return str(error)
        return None

    return check
