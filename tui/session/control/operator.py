"""`Operator`: sends the operator's changes to the engine, and shows the answers as notices.

On a slow engine, a command that was not answered in time may still take effect later. The engine's
audit trail, which is part of the telemetry, then tells its outcome.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.commands import (
    Change,
    Command,
    Pause,
    Resume,
    SetKnobs,
    SetWorkload,
    StepOnce,
)
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import Audited, KnobsChanged, KnobSpec, KnobValue, LeasedKnobs
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import known_changes, value_text
from stepscope.tui.session.control.asked_workload import AskedWorkload
from stepscope.tui.session.control.autopilot_switch import AutopilotSwitch
from stepscope.tui.session.control.engine_link import Answer, EngineLink, KnobChange
from stepscope.tui.session.control.who import who
from stepscope.tui.views.notices import Notices

BUDGET = "max_num_batched_tokens"


class _Unanswered(NamedTuple):
    """A change that an engine did not answer in time, so that its outcome is unknown."""

    engine_id: str
    what: str
    command: Change


class Operator:
    """Sends commands through an `EngineLink` and turns the answers into notices.

    In this class, "our" changes are those that were made in this dashboard.

    Args:
        link: None if there is no engine to change.
        key: returns the key of an action, for notices.
        autopilot: our autopilot; None if there is no engine to change.
    """

    def __init__(
        self,
        history: History,
        link: EngineLink | None,
        notices: Notices,
        key: Callable[[str], str],
        autopilot: AutopilotSwitch | None = None,
    ) -> None:
        self._autopilot = autopilot
        self._key = key
        self._history = history
        self._link = link
        self._notices = notices
        self.who = who()
        # (Engine id, knobs version) of our own changes, without those of our autopilot:
        self._own: set[tuple[str, int]] = set()
        self._undos: set[tuple[str, int]] = set()  # those of our changes that are an undo
        self._unanswered: list[_Unanswered] = []
        self._overtaken: tuple[str, KnobChange] | None = None  # (engine id, change) to send again
        self.workload = AskedWorkload()
        self._num_knobs_asked = 0  # changes of knobs without an answer so far
        self._num_undos_put_off = 0  # undos that wait until all our changes are settled

    @property
    def pending(self) -> str:
        return "" if self._link is None else self._link.pending

    def spec(self, name: str) -> KnobSpec | None:
        info = self._history.info
        return next((spec for spec in info.knobs if spec.name == name), None) if info else None

    def set_knob(self, change: KnobChange, action: str) -> None:
        """Ask the engine for a change, which it refuses if another was made since its version."""
        name, value, version = change
        before = self._history.state.knobs.get(name)
        if before == value:
            self._notices.say(f"{name} is {value_text(value)} already")
            return
        self._ask(
            f"{name} {value_text(before)}→{value_text(value)}",
            SetKnobs(changes={name: value}, expected_version=version),
            action,
        )

    def take_overtaken(self, name: str | None = None) -> KnobChange | None:
        """Return, once, our last change that was refused because another client was quicker."""
        kept, self._overtaken = self._overtaken, None
        info = self._history.info
        if kept is None or info is None or kept[0] != info.engine_id:
            return None
        return kept[1] if name in (None, kept[1].name) else None

    def undo(self) -> None:
        """Undo our last knob change, unless changed since; first, end our autopilot."""
        self.receive_answers()  # the answers tell which changes are our own
        if self._autopilot is not None and self._autopilot.is_on:
            self._autopilot.stop()
            self._notices.say("undo: ending the autopilot: it gives the knobs back")
            return
        if self._is_settled():
            self._undo()
        else:
            self._num_undos_put_off += 1
            self._notices.say("one moment: undone when the engine has answered")

    def _is_settled(self) -> bool:
        """Whether all our knob changes are answered, and telemetry shows the accepted ones."""
        state = self._history.state
        engine_id = "" if state.info is None else state.info.engine_id
        newest = max((version for owner, version in self._own if owner == engine_id), default=0)
        return not self._num_knobs_asked and newest <= state.knobs_version

    def _undo(self) -> None:
        changes = known_changes(self._history.knob_changes, self._history.state.audit)
        engine_id = "" if self._history.info is None else self._history.info.engine_id
        made = set() if self._autopilot is None else self._autopilot.made
        own = [each for each in changes if (engine_id, each.version) in self._own]
        since = own[-1].version if own else -1
        moved = [c for c in changes if (engine_id, c.version) in made and c.version > since]
        last = _as_one(moved)
        if last is None and own:
            last = own[-1]
        if last is None:
            said = "this dashboard has not changed a knob"
            if moved:
                said = "the autopilot of this dashboard has given the knobs back"
            elif changes:
                other = "elsewhere " if changes[-1].who == self.who else ""
                said += f"; the last one is {other}by {_change_text(changes[-1])}"
            self._notices.say(f"nothing to undo: {said}", "caution")
            return
        for later in reversed(changes):
            if later in moved or later.version <= last.version:
                continue
            if later.new.keys() & last.new.keys():
                self._notices.say(f"not undone: changed since: {_change_text(later)}", "caution")
                return
        back = {name: value for name, value in last.old.items() if name in last.new}
        what = ", ".join(
            f"{name} {value_text(last.new[name])}→{value_text(value)}"
            for name, value in back.items()
        )
        is_redo = (engine_id, last.version) in self._undos
        now = changes[-1].version
        if not is_redo:
            self._undos.add((engine_id, now + 1))
        self._ask(
            f"{'redo' if is_redo else 'undo'}: {what}",
            SetKnobs(changes=back, expected_version=now),
            "undo",
        )

    def pause_or_resume(self) -> None:
        if self._history.state.state in ("paused", "draining"):
            self._ask("resume the engine", Resume())
        else:
            self._ask("pause the engine", Pause())

    def run_one_step(self) -> None:
        self._ask("run one step", StepOnce(n=1))

    def end_lease(self, leased: LeasedKnobs) -> None:
        """End another client's control of knobs by restoring their values."""
        knobs = self._history.state.knobs
        what = ", ".join(
            f"{name} {value_text(knobs.get(name))}→{value_text(value)}"
            for name, value in leased.before.items()
        )
        # Without an expected version: the operator overrides whatever the client has just set.
        reason = f"ends the autopilot of {leased.who}"
        self._ask(
            f"end the autopilot of {leased.who}: {what}",
            SetKnobs(changes=leased.before, reason=reason[:200]),
        )

    def set_workload(self, spec: WorkloadSpec | None) -> None:
        """Start or replace the synthetic workload that the engine runs itself; None stops it."""
        what = "stop the workload" if spec is None else f"workload of {spec.rate:g} requests/s"
        self._ask(what, SetWorkload(workload=spec))
        if self._link is not None:
            self.workload.ask(spec, self._history.state)

    def _ask(self, what: str, command: Change, action: str = "") -> None:
        """Send a change with the operator's name and the newest audit entry that was shown here."""
        if self._link is None:
            self._notices.say("there is no engine to ask: this is a recording", "caution")
            return
        self._notices.dismiss()
        self._num_knobs_asked += isinstance(command, SetKnobs)
        audit = self._history.state.audit
        seen = audit[-1].number if audit else 0
        self._link.ask(what, msgspec.structs.replace(command, who=self.who, seen=seen), action)

    def receive_answers(self) -> None:
        """Show as notices what the engine has answered since the last call."""
        for answer in [] if self._link is None else self._link.answers():
            info = self._history.state.info
            if isinstance(answer.command, SetKnobs):
                self._num_knobs_asked -= 1
                if answer.error is not None:
                    self._num_undos_put_off = 0  # the change to undo was not made
            self._keep_overtaken(answer)
            if isinstance(answer.command, SetWorkload) and answer.error is not None:
                self.workload.forget()
            if answer.may_follow and info is not None and isinstance(answer.command, Change):
                self._unanswered.append(_Unanswered(info.engine_id, answer.what, answer.command))
                said = f"no answer yet; it may still take effect: {answer.what}"
                self._notices.say(said, "caution")
            elif answer.error is not None:
                said = self._conflict(answer) or f"{answer.what}: {answer.error}"
                self._notices.say(said, "caution")
            else:
                if isinstance(answer.reply, Ack):
                    self._remember(answer.command, answer.reply.version)
                self._notices.say(_outcome_text(answer, self._has_requests), "good")
        self._show_late_outcomes()
        self.workload.look(self._history.state)
        if self._num_undos_put_off and self._is_settled():
            self._num_undos_put_off -= 1
            self._undo()

    def _keep_overtaken(self, answer: Answer) -> None:
        """Keep our change for `take_overtaken` if it was refused because another came first."""
        command, info = answer.command, self._history.state.info
        if not isinstance(command, SetKnobs):
            return
        self._overtaken = None
        if answer.code == "conflict" and answer.action in ("budget", "knobs") and info is not None:
            ((name, value),) = command.changes.items()
            change = KnobChange(name, value, command.expected_version or 0)
            self._overtaken = info.engine_id, change

    def _conflict(self, answer: Answer) -> str | None:
        """Return whose knob change came before ours, if that is why it was refused."""
        command = answer.command
        if answer.code != "conflict" or not isinstance(command, SetKnobs):
            return None
        later = [
            change
            for change in known_changes(self._history.knob_changes, self._history.state.audit)
            if change.version > (command.expected_version or 0)
        ]
        if not later:
            return None
        same = [change for change in later if change.new.keys() & command.changes.keys()]
        last = (same or later)[-1]
        what = ", ".join(f"{name} to {value_text(value)}" for name, value in last.new.items())
        again = f"; {self._key(answer.action)} again" if answer.action else ""
        return f"not changed: {last.who} set {what} meanwhile{again}"

    def _show_late_outcomes(self) -> None:
        """Show the outcome of changes that were not answered in time, once telemetry has it."""
        if not self._unanswered:
            return
        state = self._history.state
        for each in list(self._unanswered):
            if state.info is None or state.info.engine_id != each.engine_id:
                self._unanswered.remove(each)  # another engine will never receive it
                continue
            entry = next((e for e in state.audit if self._is_entry_of(e, each.command)), None)
            if entry is None:
                continue
            self._unanswered.remove(each)
            if entry.code:
                self._notices.say(f"{each.what} refused: {entry.detail}", "caution")
            else:
                self._remember(each.command, entry.version)
                step = entry.effective_step or 0
                self._notices.say(_done(each, step, self._has_requests), "good")

    def _is_entry_of(self, entry: Audited, command: Change) -> bool:
        """Whether an entry of the audit trail records this change, one of ours."""
        if (entry.who, entry.command) != (self.who, type(command).__name__):
            return False
        if entry.number <= (command.seen or 0):
            return False
        if entry.code or not isinstance(command, SetKnobs):
            return True
        is_next = entry.version == (command.expected_version or 0) + 1
        return is_next and entry.new == command.changes

    @property
    def _has_requests(self) -> bool:
        state = self._history.state
        return state.num_running + state.num_waiting > 0

    def _remember(self, command: Command, version: int | None) -> None:
        """Remember our change for `undo`, by version: dashboards may share a name."""
        info = self._history.state.info
        if info is None or version is None or not isinstance(command, SetKnobs):
            return
        if version != command.expected_version:
            self._own.add((info.engine_id, version))


def _as_one(changes: Sequence[KnobsChanged]) -> KnobsChanged | None:
    """Several changes as one, of the knobs that are not as before them; None if all are."""
    old: dict[str, KnobValue] = {}
    new: dict[str, KnobValue] = {}
    for change in changes:
        old = change.old | old
        new |= change.new
    new = {name: value for name, value in new.items() if old.get(name) != value}
    return msgspec.structs.replace(changes[-1], old=old, new=new) if new else None


def _change_text(change: KnobsChanged) -> str:
    what = ", ".join(
        f"{name} {value_text(change.old.get(name))}→{value_text(value)}"
        for name, value in change.new.items()
    )
    return f"{change.who}: {what} at step {change.effective_step:,}"


def _outcome_text(answer: Answer, has_requests: bool) -> str:
    reply = answer.reply
    if isinstance(reply, Ack):
        done = _done(answer, reply.effective_step, has_requests)
        # For a single step, `_done` already says everything.
        is_complete = isinstance(answer.command, StepOnce) or not reply.detail
        return done if is_complete else f"{done} ({reply.detail})"
    return f"{answer.what}: {type(reply).__name__}"


def _done(sent: Answer | _Unanswered, step: int, has_requests: bool) -> str:
    if isinstance(sent.command, SetKnobs):
        return f"{sent.what} applied at step {step:,}"
    if isinstance(sent.command, StepOnce):
        when = "" if has_requests else " once a request comes"
        return f"the engine runs step {step:,}{when}, then pauses"
    return f"{sent.what}: done before step {step:,}"
