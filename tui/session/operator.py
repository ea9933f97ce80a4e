"""`Operator`: sends the operator's changes to the engine, and shows the answers as notices.

`AutopilotSwitch`: starts and stops an autopilot, which moves knobs so that ITL keeps a level.
"""

import logging
import threading
import time
from collections import deque
from typing import Any, get_args

import msgspec

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import KnobsChanged, KnobSpec, KnobValue, LeasedKnobs
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.workload.arrivals import fields_of
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import changes_text, known_changes, value_text
from stepscope.recordings.state.session import SessionState
from stepscope.tui.session.engine_link import Answer, EngineLink, KnobChange
from stepscope.tui.session.who import who
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views.notices import Notices, Tone

OFF = "off"
NO_VALUE = "none"  # clears a field that may be empty
EXAMPLE = "rate=2 document_share=0.1 output_tokens=64"


def published_workload(published: dict[str, KnobValue] | None) -> WorkloadSpec | None:
    """Return the workload that telemetry reports; None if there is none, or it cannot be read."""
    try:
        return None if published is None else msgspec.convert(published, WorkloadSpec)
    except msgspec.ValidationError:
        return None


def workload_text(spec: WorkloadSpec) -> str:
    return " ".join(f"{name}={value_text(value)}" for name, value in fields_of(spec).items())


def workload_note(state: SessionState) -> str:
    """Return a line about the current workload, for the prompt in which it is changed."""
    spec, default = published_workload(state.workload_spec), workload_text(WorkloadSpec())
    if spec is not None:
        return f"now {workload_text(spec)}; fields you leave out stay"
    if state.workload is None:
        return f"now none; fields you leave out are {default}"
    return (
        f"now {state.workload}; its other fields are unknown here: fields you leave out become "
        f"{default}"
    )


def parse_workload(text: str, now: WorkloadSpec | None = None) -> WorkloadSpec | None:
    """Return the workload that a typed text means; None means to stop the one that runs.

    `now`: the workload whose fields `text` changes, or the default. Raises ValueError: it is wrong.
    """
    words = text.split()
    if words == [OFF]:
        return None
    fields = {field.name: field.type for field in msgspec.structs.fields(WorkloadSpec)}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in fields:
            raise ValueError(f"{word!r}: off or {EXAMPLE}; there are {', '.join(fields)}")
        values[name] = None if value == NO_VALUE else value
        if value in ("on", "off") and get_args(fields[name])[:1] == (bool,):
            values[name] = value == "on"
    if not values:
        raise ValueError(f"write off, or {EXAMPLE}")
    try:
        before = {} if now is None else fields_of(now)
        return msgspec.convert(before | values, WorkloadSpec, strict=False)
    except msgspec.ValidationError as error:
        wrong = in_words(error)
        expected = wrong.message.partition(", got ")[0]
        given = values.get(wrong.field or "") or NO_VALUE
        raise ValueError(f"{wrong.field}: {expected}, got {given!r}") from error


log = logging.getLogger("stepscope.tui")

BUDGET = "max_num_batched_tokens"
_TICK_S = 0.2  # of an autopilot
_CLOSE_S = 2.0  # wait for the knobs to be restored; after that the engine restores them itself


class Operator:
    """Sends commands through an `EngineLink` and turns the answers into notices.

    In this class, "our" changes are those that were made in this dashboard. `link` and `autopilot`
    are None if there is no engine to change.
    """

    def __init__(
        self,
        history: History,
        link: EngineLink | None,
        notices: Notices,
        autopilot: "AutopilotSwitch | None",
    ) -> None:
        self._autopilot = autopilot
        self._history = history
        self._link = link
        self._notices = notices
        self.who = who()
        # (Engine id, knobs version) of our own changes, without those of our autopilot:
        self._own: set[tuple[str, int]] = set()
        self._num_knobs_asked = 0  # changes of knobs without an answer so far

    @property
    def pending(self) -> str:
        return "" if self._link is None else self._link.pending

    def spec(self, name: str) -> KnobSpec | None:
        info = self._history.info
        return next((spec for spec in info.knobs if spec.name == name), None) if info else None

    def set_knob(self, change: KnobChange) -> None:
        """Ask the engine for a change, which it refuses if another was made since its version."""
        name, value, version, engine_id = change
        before = self._history.state.knobs.get(name)
        if before == value:
            self._notices.say(f"{name} is {value_text(value)} already")
            return
        command = commands.SetKnobs(
            changes={name: value}, expected_version=version, engine_id=engine_id
        )
        self._ask(changes_text(self._history.state.knobs, command.changes), command)

    def undo(self) -> None:
        """Undo our last knob change, unless changed since; first, end our autopilot."""
        self.receive_answers()  # the answers tell which changes are our own
        if self._autopilot is not None and self._autopilot.is_on:
            self._autopilot.stop()
            self._notices.say("undo: ending the autopilot: it gives the knobs back")
            return
        state = self._history.state
        engine_id = "" if state.info is None else state.info.engine_id
        newest = max((version for owner, version in self._own if owner == engine_id), default=0)
        if self._num_knobs_asked or newest > state.knobs_version:
            self._notices.say("not yet: the engine has not answered your last change", "caution")
            return
        changes = known_changes(self._history.knob_changes, state.audit)
        last = next((c for c in reversed(changes) if (engine_id, c.version) in self._own), None)
        if last is None:
            said = "this dashboard has not changed a knob"
            if changes:
                other = "elsewhere " if changes[-1].who == self.who else ""
                said += f"; the last one is {other}by {_change_text(changes[-1])}"
            self._notices.say(f"nothing to undo: {said}", "caution")
            return
        later = [c for c in changes if c.version > last.version and c.new.keys() & last.new.keys()]
        # What was given back since, as by an autopilot, is as we left it.
        if later and any(state.knobs.get(name) != value for name, value in last.new.items()):
            self._notices.say(f"not undone: changed since: {_change_text(later[-1])}", "caution")
            return
        back = {name: value for name, value in last.old.items() if name in last.new}
        command = commands.SetKnobs(changes=back, expected_version=changes[-1].version)
        self._ask(f"back: {changes_text(last.new, back)}", command)

    def pause_or_resume(self) -> None:
        if self._history.state.state in ("paused", "draining"):
            self._ask("resume the engine", commands.Resume())
        else:
            self._ask("pause the engine", commands.Pause())

    def run_one_step(self) -> None:
        self._ask("run one step", commands.StepOnce(n=1))

    def end_lease(self, leased: LeasedKnobs) -> None:
        """End another client's control of knobs by restoring their values."""
        what = changes_text(self._history.state.knobs, leased.before)
        # Without an expected version: the operator overrides whatever the client has just set.
        reason = f"ends the autopilot of {leased.who}"
        self._ask(
            f"end the autopilot of {leased.who}: {what}",
            commands.SetKnobs(changes=leased.before, reason=reason[:200]),
        )

    def set_workload(self, spec: WorkloadSpec | None) -> None:
        """Start or replace the synthetic workload that the engine runs itself; None stops it."""
        what = "stop the workload" if spec is None else f"workload of {spec.rate:g} requests/s"
        self._ask(what, commands.SetWorkload(workload=spec))

    def _ask(self, what: str, command: commands.Change) -> None:
        """Send a change with the operator's name and the newest audit entry that was shown here."""
        if self._link is None:
            self._notices.say("there is no engine to ask: this is a recording", "caution")
            return
        self._notices.dismiss()
        self._num_knobs_asked += isinstance(command, commands.SetKnobs)
        audit = self._history.state.audit
        seen = audit[-1].number if audit else 0
        self._link.ask(what, msgspec.structs.replace(command, who=self.who, seen=seen))

    def receive_answers(self) -> None:
        """Show as notices what the engine has answered since the last call."""
        for answer in [] if self._link is None else self._link.answers():
            self._num_knobs_asked -= isinstance(answer.command, commands.SetKnobs)
            if answer.may_follow:
                said = f"no answer yet; it may still take effect: {answer.what}"
                self._notices.say(said, "caution")
            elif answer.error is not None:
                self._notices.say(f"{answer.what}: {answer.error}", "caution")
            else:
                if isinstance(answer.reply, Ack):
                    self._remember(answer.command, answer.reply.version)
                state = self._history.state
                has_requests = state.num_running + state.num_waiting > 0
                self._notices.say(_outcome_text(answer, has_requests), "good")

    def _remember(self, command: commands.Command, version: int | None) -> None:
        """Remember our change for `undo`, by version: dashboards may share a name."""
        info = self._history.state.info
        if info is None or version is None or not isinstance(command, commands.SetKnobs):
            return
        if version != command.expected_version:
            self._own.add((info.engine_id, version))


def _change_text(change: KnobsChanged) -> str:
    what = changes_text(change.old, change.new)
    return f"{change.who}: {what} at step {change.effective_step:,}"


def _outcome_text(answer: Answer, has_requests: bool) -> str:
    reply = answer.reply
    if not isinstance(reply, Ack):
        return f"{answer.what}: {type(reply).__name__}"
    step = reply.effective_step
    if isinstance(answer.command, commands.StepOnce):
        when = "" if has_requests else " once a request comes"
        return f"the engine runs step {step:,}{when}, then pauses"
    done = f"{answer.what}: done before step {step:,}"
    if isinstance(answer.command, commands.SetKnobs):
        done = f"{answer.what} applied at step {step:,}"
    return f"{done} ({reply.detail})" if reply.detail else done


class AutopilotSwitch:
    """Starts and stops the autopilot of this dashboard. Use it only on the UI thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._news: deque[tuple[str, Tone]] = deque()

    @property
    def is_on(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopping.is_set()

    def start(self, itl_ms: float) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(itl_ms, self._stopping), name="autopilot", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Tell the autopilot to restore the knobs and end; do not wait for it."""
        self._stopping.set()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def news(self) -> tuple[str, Tone] | None:
        """Return the oldest line about the autopilot not returned yet, with its style."""
        return self._news.popleft() if self._news else None

    def _run(self, itl_ms: float, stopping: threading.Event) -> None:
        # Imported here: few sessions need it, and the code that fits models loads slowly.
        from stepscope.recordings.autopilot.live_pilot import LivePilot

        try:
            pilot = LivePilot(Endpoint.parse(self._endpoint), itl_ms, who())
        except (ConfigError, CommandRefused, EngineUnreachable) as error:
            self._news.append((f"no autopilot: {error}", "caution"))
            return
        try:
            while pilot.ended is None and not stopping.wait(_TICK_S):
                if (moved := pilot.tick(time.monotonic())) is not None:
                    changes = changes_text(moved.before, moved.move.changes)
                    self._news.append((f"autopilot: {changes} ({moved.move.reason})", "text"))
        except Exception as failure:
            log.exception("the autopilot failed")
            pilot.ended = f"internal error, {see_log(failure)}"
        given_back = pilot.close()
        values = ", ".join(f"{name} {value_text(value)}" for name, value in given_back.items())
        why = "" if pilot.ended is None else f": {pilot.ended}"
        back = f"; given back: {values}" if values else ""
        self._news.append((f"autopilot ended{why}{back}", "caution" if why else "good"))
