"""Carries out the commands that change a running engine; each succeeds as a whole or is refused.

`KnobLease`: gives knobs back their old values when the client that set them falls silent.
Runs on the engine's thread, between two steps.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stepscope.engine.loop.audit import AuditTrail, ChangeEffect
from stepscope.engine.loop.inbox import Call
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import Asker
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Ack, Error
from stepscope.engine.protocol.wire import (
    Audited,
    EngineInfo,
    KnobsChanged,
    KnobValue,
    LeasedKnobs,
    Telemetry,
)
from stepscope.engine.protocol.workload_spec import NO_WORKLOAD, WorkloadSpec
from stepscope.engine.workload.arrivals import describe

if TYPE_CHECKING:
    from stepscope.engine.loop.core import EngineCore


@dataclass(eq=False)
class KnobLease:
    """The lease of some knobs, held by one client at a time. Belongs to the engine's thread.

    `clock`: nanoseconds of real time, even if the engine's time is simulated: the client that
    renews the lease lives in real time.
    """

    clock: Callable[[], int] = time.monotonic_ns
    _due_ns: int | None = None  # None: no knob is leased
    _asker: Asker = field(default_factory=lambda: Asker(""))
    _before: dict[str, KnobValue] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether the lease has run out without a renewal."""
        return self._due_ns is not None and self.clock() >= self._due_ns

    def note(self, command: commands.SetKnobs, asker: Asker, knobs: Mapping[str, KnobValue]) -> str:
        """Begin, renew or end the lease, for a change of knobs that is about to be made.

        A change without a lease is meant to last, so it ends the lease of the knobs that it
        changes.

        Returns the name of the other client whose lease of these knobs ends; empty without one.

        Raises ConfigError: another client has the lease.
        """
        if command.lease_s is None:
            taken = [name for name in command.changes if self._before.pop(name, None) is not None]
            if not self._before:
                self._due_ns = None
            return self._asker.name if taken and asker != self._asker else ""
        if self._due_ns is not None and asker != self._asker:
            raise ConfigError(
                "leased",
                f"{self._asker.name} has leased {', '.join(self._before)}: stop that client first",
            )
        self._asker = asker
        for name in command.changes:
            self._before.setdefault(name, knobs[name])
        self._due_ns = self.clock() + round(command.lease_s * 1e9)
        return ""

    def end_if_due(self) -> tuple[Asker, dict[str, KnobValue]] | None:
        """End the lease if it has run out: return who held it, and the values from before."""
        if not self.is_due:
            return None
        ended = self._asker, self._before
        self._due_ns, self._before = None, {}
        return ended

    def published(self) -> LeasedKnobs | None:
        """Return the lease as telemetry shows it; None if no knob is leased."""
        if self._due_ns is None:
            return None
        return LeasedKnobs(who=self._asker.name, before=dict(self._before))


_MAX_MESSAGE = 500  # characters of an error message


class Steered(Protocol):
    """An engine whose knobs can be set: our own (`EngineCore`), or one that is attached."""

    audit: AuditTrail
    lease: KnobLease
    info: EngineInfo

    @property
    def knobs_version(self) -> int: ...
    @property
    def next_step(self) -> int: ...
    def knobs(self, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]: ...
    def set_knobs(self, changes: Mapping[str, KnobValue]) -> None: ...
    def publish(self, message: Telemetry) -> None: ...
    def clock(self) -> int: ...


_Engine = TypeVar("_Engine", bound=Steered)


class _TooLateError(ConfigError):
    """The request to abort has already ended; the audit trail does not record this refusal."""


def apply_change(core: "EngineCore", call: Call, command: commands.Change) -> None:
    """Carry out a change or refuse it, answer its client, and record it in the audit trail."""
    if isinstance(command, commands.SetKnobs):
        apply_knobs(core, call, command)
    else:
        _carry_out(core, call, command, _change_state)


def apply_knobs(core: Steered, call: Call, command: commands.SetKnobs) -> None:
    """Carry out a change of knobs or refuse it, as `apply_change` does with any change."""
    _carry_out(core, call, command, _set_knobs)


def _carry_out(
    core: _Engine,
    call: Call,
    command: commands.Change,
    change: Callable[[_Engine, Any, Asker], ChangeEffect],
) -> None:
    asker = call.asker or Asker(command.who)
    try:
        _check_seen(core, command, asker)
        effect = change(core, command, asker)
    except ConfigError as error:
        message = str(error)
        if len(message) > _MAX_MESSAGE:  # it may quote megabytes of a command, and is kept
            message = f"{message[:_MAX_MESSAGE]}…"
        is_rehearsal = isinstance(command, commands.SetKnobs) and command.dry_run
        if not (is_rehearsal or isinstance(error, _TooLateError)):
            core.audit.refused(type(command).__name__, asker, error.code, message)
        knobs = core.knobs({}) if error.code == "conflict" else None
        version = core.knobs_version
        call.client.reply(
            Error(code=error.code, message=message, knobs=knobs, knobs_version=version)
        )
        return
    if effect.new is not None:
        core.audit.done(command, asker, core.next_step, effect)
    step, version = core.next_step, core.knobs_version
    call.client.reply(Ack(effective_step=step, version=version, detail=effect.detail))


def end_lease_if_due(core: Steered) -> None:
    """Give leased knobs their old values again if the client has not renewed its lease in time."""
    ended = core.lease.end_if_due()
    if ended is None:
        return
    asker, before = ended
    reason = "lease expired: the client did not renew it"
    command = commands.SetKnobs(changes=before, reason=reason)
    effect = _set_knobs(core, command, asker)
    if effect.new is not None:
        core.audit.done(command, asker, core.next_step, effect)


def _check_seen(core: Steered, command: commands.Change, asker: Asker) -> None:
    """Check that the command is for this engine, and that its client has seen all changes.

    Raises ConfigError: the command is for an earlier run of the engine; or another client has
    changed the same thing (such as the knobs), and this client had not seen that.
    """
    if command.engine_id and command.engine_id != core.info.engine_id:
        raise ConfigError(
            "another_engine", "the engine was restarted meanwhile; nothing was changed"
        )
    if command.seen is None:
        return
    later = core.audit.changed_since(command.seen, command, asker)
    if later is not None:
        raise ConfigError(
            "conflict",
            f"another client made a change first ({_change_text(later)}): check it, then ask "
            "again if needed",
        )


def _change_text(entry: Audited) -> str:
    name = Asker(entry.who, entry.key).name
    old, new = entry.old or {}, entry.new or {}
    what = ", ".join(f"{key} {_text(old.get(key))}→{_text(value)}" for key, value in new.items())
    return f"{name}: {what or entry.command} at step {entry.effective_step:,}"


def _text(value: KnobValue | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "—" if value is None else str(value)


def _changed_knobs(core: Steered, command: commands.SetKnobs) -> dict[str, KnobValue]:
    new = core.knobs(command.changes)
    expected = command.expected_version
    if expected is not None and expected != core.knobs_version:
        later = core.audit.changed_since(0, command)
        what = "" if later is None else f" ({_change_text(later)})"
        raise ConfigError(
            "conflict",
            f"another client changed knobs meanwhile{what}: look at the new values and try again "
            f"(they are at version {core.knobs_version}, not {expected})",
        )
    return new


def _set_knobs(core: Steered, command: commands.SetKnobs, asker: Asker) -> ChangeEffect:
    before, after = core.knobs({}), _changed_knobs(core, command)
    if command.dry_run:
        return ChangeEffect(detail="dry run: nothing was changed")
    ended_for = core.lease.note(command, asker, before)
    changed = {name: value for name, value in after.items() if value != before[name]}
    if not changed:
        nothing = ChangeEffect(detail="the knobs have these values already")
        if ended_for:  # recorded so that the client that held the lease sees its end
            detail = f"{nothing.detail}; {ended_for}'s lease of these knobs has ended"
            core.audit.done(command, asker, core.next_step, ChangeEffect(detail=detail))
        return nothing
    core.set_knobs(command.changes)
    was = {name: before[name] for name in changed}
    core.publish(
        KnobsChanged(
            version=core.knobs_version,
            effective_step=core.next_step,
            who=asker.name,
            old=was,
            new=changed,
            time_ns=core.clock(),
        )
    )
    return ChangeEffect(was, changed, command.reason, version=core.knobs_version)


def _change_state(core: "EngineCore", command: commands.Change, _: Asker) -> ChangeEffect:
    old, new, detail = core.state, "", ""
    pipeline, nothing = core.pipeline, ChangeEffect(detail=f"it is {old} already")
    match command:
        case commands.ResetPrefixCache():
            num = core.scheduler.kv.reset_prefix_cache()
            detail = f"{num} blocks forgotten"
            return ChangeEffect({"cached_blocks": num}, {"cached_blocks": 0}, detail)
        case commands.Abort(request_id=request_id):
            return _abort(core, request_id)
        case commands.SetWorkload(workload=spec):
            return _set_workload(core, spec)
        case commands.Pause():
            if pipeline.steps_allowed == 0:
                return nothing
            pipeline.steps_allowed = 0
        case commands.Resume():
            if pipeline.steps_allowed is None and not core.draining:
                return nothing
            pipeline.steps_allowed, core.draining = None, False
        case commands.StepOnce(n=count):
            if old != "paused" and not core.scheduler.has_work():
                raise ConfigError(
                    "nothing_to_run",
                    "there is nothing to run: no request is waiting or running "
                    "(pause the engine first to hold the next one)",
                )
            pipeline.steps_allowed = count
            new, detail = "step", f"pauses after step {core.next_step + count - 1:,}"
        case commands.Drain():
            if core.draining:
                return nothing
            core.draining = True
            new, detail = "draining", f"{len(core.scheduler.requests)} requests to finish"
        case commands.Shutdown():
            core.stop()
            new = "stopped"
    return ChangeEffect({"state": old}, {"state": new or core.state}, detail)


def _abort(core: "EngineCore", request_id: int) -> ChangeEffect:
    status, name = core.status_of(request_id), f"r{request_id}"
    if status is not None and core.abort(request_id, "asked for"):
        return ChangeEffect({name: status}, {name: "aborted"})
    if 0 <= request_id < core.client_requests.next_request_id:
        raise _TooLateError("not_found", f"request {request_id} has ended already")
    raise ConfigError("not_found", f"there is no request {request_id}")


def _set_workload(core: "EngineCore", spec: WorkloadSpec | None) -> ChangeEffect:
    workload = core.workload
    if workload is None:
        raise ConfigError("unsupported", "this engine has no workload of its own")
    old = workload.spec
    workload.set(spec)
    return ChangeEffect({"workload": _in_words(old)}, {"workload": _in_words(workload.spec)})


def _in_words(workload: WorkloadSpec | None) -> str:
    return NO_WORKLOAD if workload is None else describe(workload)
