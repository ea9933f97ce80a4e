"""What opens above the main screen to ask or to tell: prompts, editors, help, the palette."""

from typing import TYPE_CHECKING

from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.recordings.history.source import NO_ENGINE, add_mark
from stepscope.recordings.state.knob_trail import known_changes
from stepscope.tui.export.choices import folder_for, ranges_of, recording_of
from stepscope.tui.export.order import ExportOrder
from stepscope.tui.knob_change import KnobChange, KnobsNow
from stepscope.tui.lane_rows import FilterError, lane_filter
from stepscope.tui.operator import BUDGET
from stepscope.tui.screens import look_handlers
from stepscope.tui.screens.engine_watch import EngineNow, EngineWatch
from stepscope.tui.screens.help import HelpPage
from stepscope.tui.screens.knob_editor import KnobEditor
from stepscope.tui.screens.palette import Palette
from stepscope.tui.screens.prompt import Prompt
from stepscope.tui.screens.stepper import ByNow, Stepper
from stepscope.tui.service_levels import parse_levels
from stepscope.tui.workload_text import EXAMPLE, OFF, parse_workload

if TYPE_CHECKING:
    from stepscope.tui.screens.main import MainScreen


def goto(screen: "MainScreen") -> None:
    def go(text: str | None) -> None:
        if text is not None:
            screen.navigator.goto(text)
            screen.draw_next()

    question = "go to a step (1200), a time (12:41:58), so far from here (-30s):"
    screen.app.push_screen(Prompt(screen.skin, question, check=screen.navigator.check_target), go)


def filter_(screen: "MainScreen") -> None:
    def check(text: str) -> str | None:
        try:
            lane_filter(text)
        except FilterError as error:
            return str(error)
        return None

    def use(text: str | None) -> None:
        if text is not None:
            screen.view.filter = text.strip()
            screen.view.first_lane = None
            screen.draw()

    question = "lanes (state:dec state:out id:12 text !regex, empty for all):"
    screen.app.push_screen(Prompt(screen.skin, question, screen.view.filter, check), use)


def mark(screen: "MainScreen") -> None:
    key = screen.session.abilities.key
    step = screen.frame.cursor if screen.frame is not None else None
    if step is None:
        screen.notices.say("there is no step to mark yet", "caution")
        return
    if screen.history is not screen.session.history:
        text = f"marks are for the session that runs; {key('live')} goes back to it"
        screen.notices.say(text, "caution")
        return

    def set_mark(text: str | None) -> None:
        if text is not None:
            add_mark(screen.session.source, text.strip() or "mark", screen.operator.who, step)
            text = f"mark at step {step:,}; {key('previous_mark')} goes back to it"
            screen.notices.say(text, "good")
            screen.draw()

    screen.app.push_screen(Prompt(screen.skin, f"mark at step {step:,}, note:"), set_mark)


def export(screen: "MainScreen") -> None:
    """What is recorded of this session, into a file of another format."""
    session, say = screen.session, screen.notices.say
    key = session.abilities.key
    path = recording_of(session)
    if session.exports.active is not None:
        say(f"one at a time; {key('back')} cancels it", "caution")
        return
    if path is None:
        text = (
            f"nothing is recorded yet: {key('record')} records, then {key('export')} exports it; "
            f"{key('keep_steps')} keeps what is in memory"
        )
        say(text, "caution")
        return
    from stepscope.tui.screens.export_chooser import ExportChooser  # with mcap, only when needed

    try:
        folder = folder_for(path)
    except OSError as error:
        say(f"no export: {error}", "breach")
        return

    def begin(order: ExportOrder | None) -> None:
        if order is not None:
            screen.notices.dismiss()
            session.exports.begin(order)
            screen.draw()

    history = session.history
    frame = screen.frame if screen.history is history else None
    ranges = ranges_of(session, frame, history.marks)
    engine_id = None if history.info is None else history.info.engine_id
    last = session.exports.last
    chooser = ExportChooser(screen.skin, path, ranges, folder, engine_id, last)
    screen.app.push_screen(chooser, begin)


def keep_steps(screen: "MainScreen") -> None:
    """What is in memory, into a recording: of the session that is shown."""
    session, say = screen.session, screen.notices.say
    if session.exports.active is not None:
        say(f"one at a time; {session.abilities.key('back')} cancels it", "caution")
    elif session.record_switch is None or not screen.history.num_steps:
        say("there is no step in memory yet", "caution")
    else:
        screen.notices.dismiss()
        session.exports.write_memory(screen.history, session.record_switch.new_path())
        screen.draw()


def _has_engine(screen: "MainScreen") -> bool:
    """Whether anybody answers who could be asked for a change; says so where nobody does."""
    if screen.session.source.status not in NO_ENGINE:
        return True
    screen.notices.say("nothing to change: no engine answers", "caution")
    return False


def _engine_watch(screen: "MainScreen") -> EngineWatch:
    """For an editor of what belongs to the engine."""

    def now() -> EngineNow:
        session = screen.session
        state = session.history.state
        if state.info is None:
            return EngineNow(None, False)
        # One that has just come tells its knobs before it tells how they are set.
        is_told = bool(state.knobs) or not state.info.knobs
        return EngineNow(state.info.engine_id, session.source.status not in NO_ENGINE and is_told)

    return EngineWatch(now)


def budget(screen: "MainScreen") -> None:
    if not _has_engine(screen):
        return
    state = screen.session.history.state
    spec, value = screen.operator.spec(BUDGET), state.knobs.get(BUDGET)
    if spec is None or not isinstance(value, int):
        screen.notices.say("this engine has no token budget to change", "caution")
        return

    def apply(change: KnobChange | None) -> None:
        if change is not None:
            screen.operator.set_knob(change, "budget")
            screen.draw()

    def by_now() -> ByNow:
        now = _knobs_now(screen)
        spec = screen.operator.spec(BUDGET)
        return ByNow(now.values.get(BUDGET), now.changed_by(BUDGET), now.version, spec)

    overtaken = screen.operator.take_overtaken(BUDGET)
    kept = None if overtaken is None else overtaken.value
    chosen = kept if isinstance(kept, int) else None
    watch = _engine_watch(screen)
    screen.app.push_screen(Stepper(screen.skin, spec, value, by_now, chosen, watch), apply)


def knobs(screen: "MainScreen") -> None:
    edit_knob(screen, None)


def edit_knob(screen: "MainScreen", name: str | None) -> None:
    """Open the editor, at one of the knobs if it is named."""
    if not _has_engine(screen):
        return
    state = screen.session.history.state
    if state.info is None or not state.info.knobs:
        screen.notices.say("the engine has not told its knobs yet", "caution")
        return

    def apply(change: KnobChange | None) -> None:
        if change is not None:
            screen.operator.set_knob(change, "knobs")
            screen.draw()

    def look() -> KnobsNow:
        return _knobs_now(screen)

    overtaken = screen.operator.take_overtaken(name)
    editor = KnobEditor(screen.skin, look, _engine_watch(screen), name, overtaken)
    screen.app.push_screen(editor, apply)


def _knobs_now(screen: "MainScreen") -> KnobsNow:
    history = screen.session.history
    now = history.state
    changes = known_changes(history.knob_changes, now.audit)
    return KnobsNow(now.knobs_version, now.knobs, changes, now.info.knobs if now.info else ())


def workload(screen: "MainScreen") -> None:
    """What the engine gives itself to do; what is not named stays as it is."""
    if not _has_engine(screen):
        return

    def parsed(text: str) -> WorkloadSpec | None:
        return parse_workload(text, screen.operator.workload.now(screen.session.history.state))

    def check(text: str) -> str | None:
        try:
            parsed(text)
        except ValueError as error:
            return str(error)
        return None

    def use(text: str | None) -> None:
        if text is not None:
            screen.operator.set_workload(parsed(text))
            screen.draw()

    def note() -> str:
        return screen.operator.workload.note(screen.session.history.state)

    question = f"{OFF} or {EXAMPLE}:"
    watch = _engine_watch(screen)
    screen.app.push_screen(Prompt(screen.skin, question, check=check, note=note, watch=watch), use)


def service_levels(screen: "MainScreen") -> None:
    """Which latencies are good enough."""
    session = screen.session
    now = session.history.slo

    def check(text: str) -> str | None:
        try:
            parse_levels(text, now)
        except ValueError as error:
            return str(error)
        return None

    def use(text: str | None) -> None:
        if text is not None:
            look_handlers.use_levels(screen, parse_levels(text, now))

    text = f"ttft={now.ttft_ms:g} itl={now.itl_ms:g}"
    screen.app.push_screen(Prompt(screen.skin, "service levels, in ms or 2s:", text, check), use)


def help_(screen: "MainScreen") -> None:
    session = screen.session
    page = HelpPage(screen.skin, session.abilities, screen.view.page, session.log_file)
    screen.app.push_screen(page)


def palette(screen: "MainScreen") -> None:
    def run(action_id: str | None) -> None:
        if action_id is not None:
            screen.action_do(action_id)

    offered = screen.session.abilities.on(screen.view.page)
    available = [action for action in offered if action.id != "palette"]
    screen.app.push_screen(Palette(screen.skin, available), run)
