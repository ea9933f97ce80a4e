"""The state of the source, recorder and dashboard, for the header and the notice line."""

from dataclasses import astuple

from stepscope.recordings.fleets.fleet import LOOK_S
from stepscope.recordings.history.history import History
from stepscope.tui.session.control.operator import Operator
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import replay_of
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Tone
from stepscope.tui.views.panels import header
from stepscope.tui.views.view import View

_AGEING = ("stale", "down")  # the screen says how old the figures are


def standing(
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
        if previous is not None and previous.num_steps and not session.history.num_steps:
            key, number = session.abilities.key("previous_session"), session.history.num_displaced
            lost = f"; {fmt.plural(number, 'earlier session')} not kept" if number else ""
            lines.append((f"{key} shows the session before the engine restarted{lost}", "text"))
        lines += [(text, "breach") for text in session.alerts.standing]
    return [*lines, *((error, "caution") for error in errors if error is not None)]


def _source_error(session: Session) -> str | None:
    """Return the error of the source or None; if its engine is gone, with the key that helps."""
    error, switch = session.source.error, session.record_switch
    key = session.abilities.key("keep_steps")
    if error is None or session.source.status != "down" or switch is None:
        return error
    if not key or not session.history.num_steps:
        return error
    # The file of a running recording lacks the steps from before it began.
    which = ", also those from before the recording" if switch.active else ""
    return f"{error}; {key} saves the steps in memory{which}"


def seen(session: Session, operator: Operator, view: View) -> object:
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
        replay and (len(replay.file_index.found), replay.file_index.is_done),
        session.background_error,
        operator.pending,
        round(now_s) if has_clock else round(now_s / 4),
    )


def connection(session: Session, shown: History, fps: float) -> header.SourceState:
    """Return what the header shows about source and recording; `shown`: on the screen."""
    switch, replay = session.record_switch, replay_of(session.source)
    recording = None
    if switch is not None and switch.active:
        recording = (switch.seconds, switch.num_bytes)
    return header.SourceState(
        session.title,
        session.endpoint,
        session.source.status,
        fps,
        None if replay is None else replay.speed,
        recording,
        shown is not session.history,
        None if replay is None else replay.extent_ns,
    )
