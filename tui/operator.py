"""`Operator`: what the operator does to the engine, and what the engine answers."""

import msgspec

from stepscope.engine.commands import (
    Ack,
    Change,
    Pause,
    Resume,
    SetKnobs,
    SetWorkload,
    StepOnce,
    WorkloadSpec,
)
from stepscope.engine.wire import KnobsChanged, KnobSpec, KnobValue
from stepscope.recordings.history import History
from stepscope.tui.commands.connect import who
from stepscope.tui.engine_link import Answer, EngineLink
from stepscope.tui.notices import Notices
from stepscope.tui.widgets.knob_panel import value_text

BUDGET = "max_num_batched_tokens"


class Operator:
    """Sends commands through the link and turns the answers into notices.

    Args:
        link: None where there is no engine to ask.
    """

    def __init__(self, history: History, link: EngineLink | None, notices: Notices) -> None:
        self._history = history
        self._link = link
        self._notices = notices
        self.who = who()
        self._own: set[tuple[str, int]] = set()  # engines, and versions that we made of their knobs

    @property
    def pending(self) -> str:
        return "" if self._link is None else self._link.pending

    def spec(self, name: str) -> KnobSpec | None:
        info = self._history.info
        return next((spec for spec in info.knobs if spec.name == name), None) if info else None

    def set_knob(self, name: str, value: KnobValue, expected_version: int) -> None:
        """Ask for a change; refused when somebody changed a knob since `expected_version`."""
        before = self._history.state.knobs.get(name)
        if before == value:
            self._notices.say(f"{name} is {value_text(value)} already")
            return
        self._ask(
            f"{name} {value_text(before)}→{value_text(value)}",
            SetKnobs(changes={name: value}, expected_version=expected_version),
        )

    def undo(self) -> None:
        """Take this operator's own last change of a knob back, if it still holds."""
        self.take_answers()  # they say which changes are our own
        changes = self._history.knob_changes
        own = [change for change in changes if self._is_own(change)]
        if not own:
            said = f"; the last one is {_change_text(changes[-1])}" if changes else ""
            self._notices.say(f"this dashboard has changed no knob{said}", "caution")
            return
        last = own[-1]
        for later in reversed(changes):
            if later.version > last.version and later.new.keys() & last.new.keys():
                self._notices.say(f"not undone: since then {_change_text(later)}", "caution")
                return
        back = {name: value for name, value in last.old.items() if name in last.new}
        what = ", ".join(
            f"{name} {value_text(last.new[name])}→{value_text(value)}"
            for name, value in back.items()
        )
        self._ask(
            f"undo: {what}",
            SetKnobs(changes=back, expected_version=changes[-1].version),
        )

    def _is_own(self, change: KnobsChanged) -> bool:
        info = self._history.info
        return info is not None and (info.engine_id, change.version) in self._own

    def pause_or_resume(self) -> None:
        if self._history.state.state in ("paused", "draining"):
            self._ask("resume the engine", Resume())
        else:
            self._ask("pause the engine", Pause())

    def run_one_step(self) -> None:
        self._ask("run one step", StepOnce(n=1))

    def set_workload(self, spec: WorkloadSpec | None) -> None:
        """Start, replace or (None) stop what the engine gives itself to do."""
        what = "stop the workload" if spec is None else f"workload of {spec.rate:g} requests/s"
        self._ask(what, SetWorkload(workload=spec))

    def _ask(self, what: str, command: Change) -> None:
        """Ask as this operator, who has seen what is on the screen: else it is a conflict."""
        if self._link is None:
            self._notices.say("there is no engine to ask: this is a recording", "caution")
            return
        self._notices.dismiss()
        audit = self._history.state.audit
        seen = audit[-1].number if audit else 0
        self._link.ask(what, msgspec.structs.replace(command, who=self.who, seen=seen))

    def take_answers(self) -> None:
        """Say what the engine has answered since the last call."""
        for answer in [] if self._link is None else self._link.answers():
            if answer.error is not None:
                self._notices.say(f"{answer.what}: {answer.error}", "breach")
            else:
                self._remember(answer)
                self._notices.say(_told(answer), "good")

    def _remember(self, answer: Answer) -> None:
        """Keep which changes are ours: a name may be that of several dashboards."""
        info, command, reply = self._history.info, answer.command, answer.reply
        if info is None or not isinstance(command, SetKnobs) or not isinstance(reply, Ack):
            return
        if reply.version is not None and reply.version != command.expected_version:
            self._own.add((info.engine_id, reply.version))


def _change_text(change: KnobsChanged) -> str:
    what = ", ".join(
        f"{name} {value_text(change.old.get(name))}→{value_text(value)}"
        for name, value in change.new.items()
    )
    return f"{change.who}: {what} at step {change.effective_step:,}"


def _told(answer: Answer) -> str:
    reply = answer.reply
    if isinstance(reply, Ack):
        detail = f" ({reply.detail})" if reply.detail else ""
        if isinstance(answer.command, SetKnobs):
            return f"{answer.what} applied at step {reply.effective_step:,}{detail}"
        return f"{answer.what}: done before step {reply.effective_step:,}{detail}"
    return f"{answer.what}: {type(reply).__name__}"
