"""Opens the overlays above the main screen: prompts, editors, help, the palette."""

from collections.abc import Callable

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.recordings.history.source import NO_ENGINE, add_mark
from stepscope.recordings.state.audit_text import known_changes
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.screens.handlers.stage import Stage
from stepscope.tui.screens.overlays.engine_watch import EngineNow, EngineWatch
from stepscope.tui.screens.overlays.help import HelpPage
from stepscope.tui.screens.overlays.knob_editor import KnobEditor
from stepscope.tui.screens.overlays.palette import Palette
from stepscope.tui.screens.overlays.prompt import Prompt
from stepscope.tui.screens.overlays.stepper import ByNow, Stepper
from stepscope.tui.session.control.knob_change import KnobChange, KnobsNow
from stepscope.tui.session.control.operator import BUDGET, Operator
from stepscope.tui.session.control.workload_text import EXAMPLE, OFF, parse_workload
from stepscope.tui.session.export.order import ExportOrder
from stepscope.tui.session.export_choices import folder_for, ranges_of, recording_of
from stepscope.tui.session.knob_forecast import KnobForecast
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import Navigator
from stepscope.tui.settings.service_levels import parse_levels
from stepscope.tui.views.frame.lane_rows import FilterError, lane_filter
from stepscope.tui.views.notices import Notices
from stepscope.tui.views.view import View


class Opening:
    """Opens the overlays above one screen.

    Args:
        use_levels: gets the service levels that the operator typed.
    """

    def __init__(
        self,
        session: Session,
        view: View,
        navigator: Navigator,
        operator: Operator,
        notices: Notices,
        stage: Stage,
        use_levels: Callable[[SLO], None],
    ) -> None:
        self._session = session
        self._view = view
        self._navigator = navigator
        self._operator = operator
        self._notices = notices
        self._stage = stage
        self._use_levels = use_levels

    def goto(self) -> None:
        def go(text: str | None) -> None:
            if text is not None:
                self._navigator.goto(text)
                self._stage.draw_next()

        question = "go to a step (1200), a time (12:41:58), or a distance (-30s):"
        self._stage.open_overlay(
            Prompt(self._stage.skin, question, check=self._navigator.check_target), go
        )

    def filter_(self) -> None:
        def check(text: str) -> str | None:
            try:
                lane_filter(text)
            except FilterError as error:
                return str(error)
            return None

        def use(text: str | None) -> None:
            if text is not None:
                self._view.filter = text.strip()
                self._view.first_lane = None
                self._stage.draw()

        question = "lanes (state:dec state:out id:12 text !regex, empty for all):"
        self._stage.open_overlay(Prompt(self._stage.skin, question, self._view.filter, check), use)

    def mark(self) -> None:
        key = self._session.abilities.key
        step = self._stage.frame.cursor if self._stage.frame is not None else None
        if step is None:
            self._notices.say("there is no step to mark yet", "caution")
            return
        if self._stage.history is not self._session.history:
            text = f"marks are for the running session; {key('live')} goes back to it"
            self._notices.say(text, "caution")
            return

        def set_mark(text: str | None) -> None:
            if text is not None:
                add_mark(self._session.source, text.strip() or "mark", self._operator.who, step)
                text = f"mark at step {step:,}; {key('previous_mark')} goes back to it"
                self._notices.say(text, "good")
                self._stage.draw()

        self._stage.open_overlay(
            Prompt(self._stage.skin, f"mark at step {step:,}, note:"), set_mark
        )

    def export(self) -> None:
        """Ask for format and range, then export this session's recording to a file."""
        session, say = self._session, self._notices.say
        key = session.abilities.key
        path = recording_of(session)
        if session.exports.active is not None:
            say(f"an export already runs; {key('back')} cancels it", "caution")
            return
        if path is None:
            text = (
                f"nothing is recorded yet: {key('record')} records, then {key('export')} exports "
                f"it; {key('keep_steps')} keeps what is in memory"
            )
            say(text, "caution")
            return
        from stepscope.tui.screens.overlays.export_chooser import (
            ExportChooser,  # with mcap, only when needed
        )

        try:
            folder = folder_for(path)
        except OSError as error:
            say(f"no export: {error}", "breach")
            return

        def begin(order: ExportOrder | None) -> None:
            if order is not None:
                self._notices.dismiss()
                session.exports.begin(order)
                self._stage.draw()

        history = session.history
        frame = self._stage.frame if self._stage.history is history else None
        ranges = ranges_of(session, frame, history.marks)
        engine_id = None if history.info is None else history.info.engine_id
        last = session.exports.last
        chooser = ExportChooser(self._stage.skin, path, ranges, folder, engine_id, last)
        self._stage.open_overlay(chooser, begin)

    def keep_steps(self) -> None:
        """Write the steps in memory of the shown session to a recording."""
        session, say = self._session, self._notices.say
        if session.exports.active is not None:
            say(f"an export already runs; {session.abilities.key('back')} cancels it", "caution")
        elif session.record_switch is None or not self._stage.history.num_steps:
            say("there is no step in memory yet", "caution")
        else:
            self._notices.dismiss()
            session.exports.write_memory(self._stage.history, session.record_switch.new_path())
            self._stage.draw()

    def _has_engine(self) -> bool:
        """Whether an engine answers, so that it can be changed; if not, show a notice."""
        if self._session.source.status not in NO_ENGINE:
            return True
        self._notices.say("no engine answers, so nothing can be changed", "caution")
        return False

    def _engine_watch(self) -> EngineWatch:
        """Return a watch for an editor; it tells whether the editor's engine still answers."""

        def now() -> EngineNow:
            session = self._session
            state = session.history.state
            if state.info is None:
                return EngineNow(None, False)
            # A new engine publishes the specs of its knobs before their values.
            has_knobs = bool(state.knobs) or not state.info.knobs
            return EngineNow(
                state.info.engine_id, session.source.status not in NO_ENGINE and has_knobs
            )

        return EngineWatch(now)

    def budget(self) -> None:
        if not self._has_engine():
            return
        state = self._session.history.state
        spec, value = self._operator.spec(BUDGET), state.knobs.get(BUDGET)
        if spec is None or not isinstance(value, int):
            self._notices.say("this engine has no token budget to change", "caution")
            return

        def apply(change: KnobChange | None) -> None:
            if change is not None:
                self._operator.set_knob(change, "budget")
                self._stage.draw()

        def by_now() -> ByNow:
            now = self._knobs_now()
            spec = self._operator.spec(BUDGET)
            return ByNow(now.values.get(BUDGET), now.changed_by(BUDGET), now.version, spec)

        overtaken = self._operator.take_overtaken(BUDGET)
        kept = None if overtaken is None else overtaken.value
        chosen = kept if isinstance(kept, int) else None
        watch = self._engine_watch()
        self._stage.open_overlay(
            Stepper(self._stage.skin, spec, value, by_now, chosen, watch), apply
        )

    def knobs(self) -> None:
        self.edit_knob(None)

    def edit_knob(self, name: str | None) -> None:
        """Open the knob editor; if `name` is given, with that knob selected."""
        if not self._has_engine():
            return
        state = self._session.history.state
        if state.info is None or not state.info.knobs:
            self._notices.say("the engine has not reported its knobs yet", "caution")
            return

        def apply(change: KnobChange | None) -> None:
            if change is not None:
                self._operator.set_knob(change, "knobs")
                self._stage.draw()

        def look() -> KnobsNow:
            return self._knobs_now()

        overtaken = self._operator.take_overtaken(name)
        forecast = KnobForecast(self._session.history)
        editor = KnobEditor(self._stage.skin, look, self._engine_watch(), name, overtaken, forecast)
        self._stage.open_overlay(editor, apply)

    def _knobs_now(self) -> KnobsNow:
        history = self._session.history
        now = history.state
        changes = known_changes(history.knob_changes, now.audit)
        return KnobsNow(now.knobs_version, now.knobs, changes, now.info.knobs if now.info else ())

    def workload(self) -> None:
        """Ask for the synthetic workload that the engine runs itself, and set it.

        Fields that the operator does not type keep their values.
        """
        if not self._has_engine():
            return

        def parsed(text: str) -> WorkloadSpec | None:
            return parse_workload(text, self._operator.workload.now(self._session.history.state))

        def check(text: str) -> str | None:
            try:
                parsed(text)
            except ValueError as error:
                return str(error)
            return None

        def use(text: str | None) -> None:
            if text is not None:
                self._operator.set_workload(parsed(text))
                self._stage.draw()

        def note() -> str:
            return self._operator.workload.note(self._session.history.state)

        question = f"{OFF} or {EXAMPLE}:"
        watch = self._engine_watch()
        self._stage.open_overlay(
            Prompt(self._stage.skin, question, check=check, note=note, watch=watch), use
        )

    def service_levels(self) -> None:
        """Ask for the service levels (TTFT and ITL bounds), and set them."""
        session = self._session
        now = session.history.slo

        def check(text: str) -> str | None:
            try:
                parse_levels(text, now)
            except ValueError as error:
                return str(error)
            return None

        def use(text: str | None) -> None:
            if text is not None:
                self._use_levels(parse_levels(text, now))

        text = f"ttft={now.ttft_ms:g} itl={now.itl_ms:g}"
        self._stage.open_overlay(
            Prompt(self._stage.skin, "service levels, in ms or 2s:", text, check), use
        )

    def help_(self) -> None:
        session = self._session
        page = HelpPage(self._stage.skin, session.abilities, self._view.page, session.log_file)
        self._stage.open_overlay(page)

    def palette(self) -> None:
        def run(action_id: str | None) -> None:
            if action_id is not None:
                self._stage.action_do(action_id)

        offered = self._session.abilities.on(self._view.page)
        available = [action for action in offered if action.id != "palette"]
        self._stage.open_overlay(Palette(self._stage.skin, available), run)
