"""`LivePilot`: an autopilot for a running engine.

It changes knobs under a lease that it must renew: if this process dies or is cut off, the lease
expires and the engine restores the knobs.
"""

from collections import deque
from typing import NamedTuple, TypeAlias

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import (
    Audited,
    EngineStatus,
    KnobsChanged,
    KnobValue,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.autopilot.pilot import BUDGET, Autopilot, Move
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.audit_text import value_text

LEASE_S = 6.0
_RENEW_S = 1.0
_JOIN_S = 10.0
_ANSWER_S = 30.0  # an engine answers between steps, and a step may be long
_MAX_REASON = 200
_SAME = 0.1  # relative; in shadow mode, a proposal closer to the last one is not repeated
_Message: TypeAlias = StepRecord | EngineStatus | KnobsChanged | Audited
_MAX_WAITING = 20_000  # beyond that, the oldest are dropped
_MAX_BYTES = 1024 * 1024  # of steps in memory, which nobody looks back at


class StepFeed(History):
    """A queue of steps, statuses, knob changes and audit messages.

    The source's thread fills it, and one other thread empties it.
    """

    def __init__(self) -> None:
        super().__init__(max_bytes=_MAX_BYTES)
        self._waiting: deque[_Message] = deque(maxlen=_MAX_WAITING)

    def drain(self) -> list[_Message]:
        """Return the messages that came since the last call.

        Of very many, the oldest are dropped.
        """
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        super()._take(sequence, message, payload)
        if isinstance(message, _Message):
            self._waiting.append(message)


class Moved(NamedTuple):
    """A change of knobs that was made, or that would have been made in shadow mode."""

    before: dict[str, KnobValue]
    move: Move
    step: int | None  # the first step with the new values; None in shadow mode


class LivePilot:
    """Follows one engine and changes its knobs to hold an ITL level.

    Belongs to one thread, which calls `tick` a few times a second and `close` at the end.

    Args:
        who: the name under which the engine's audit trail shows the changes.
        is_shadow: only propose changes, and make none.

    Raises:
        ConfigError: the engine has no token budget to change, or a lease on knobs is held already.
        EngineUnreachable: no engine answers.
    """

    def __init__(
        self, endpoint: Endpoint, itl_ms: float, who: str, *, is_shadow: bool = False
    ) -> None:
        self.ended: str | None = None  # why the autopilot has stopped; None while it works
        # The knobs that the autopilot has changed, with their present values.
        self.held: dict[str, KnobValue] = {}
        self.is_shadow = is_shadow
        self._who = who
        self._title = f"autopilot, ITL {itl_ms:g} ms"
        self._client = ControlClient(endpoint, _ANSWER_S)
        try:
            snapshot = self._client.snapshot()
            _check(snapshot)
        except BaseException:
            self._client.close()
            raise
        self._version: int | None = snapshot.knobs_version
        self._knobs = dict(snapshot.knobs)
        self._before: dict[str, KnobValue] = {}  # original values of the held knobs
        self._engine_id = snapshot.info.engine_id
        self._pilot = Autopilot(itl_ms, snapshot.info.knobs, snapshot.knobs)
        self._feed = StepFeed()
        self._source = Subscriber(endpoint, self._feed)
        self._begun_s: float | None = None
        self._is_joined = False
        self._renewed_s = 0.0
        self._newest_ns = 0
        self._proposed: Move | None = None
        self._source.start()

    @property
    def late_share(self) -> float | None:
        return self._pilot.late_share

    def tick(self, now_s: float) -> Moved | None:
        """Process new messages, and change the knobs if that is due. Does nothing after `ended`.

        Returns the change made or proposed; None without one.
        """
        if self.ended is None:
            self._begun_s = now_s if self._begun_s is None else self._begun_s
            self._look(now_s)
            self._apply_new()
        return self._steer(now_s) if self.ended is None else None

    def close(self) -> dict[str, KnobValue]:
        """Restore the knobs and return their original values.

        If the engine refuses or does not answer, returns {}; the engine restores them when the
        lease expires.
        """
        try:
            before = {name: self._before[name] for name in self.held}
            if before:
                # If another client changed knobs since, this is refused, and the lease expires.
                reason = f"{self._title}: ended"
                self._client.set_knobs(before, self._who, self._version, reason=reason)
            self.held = {}
            return before
        except (CommandRefused, EngineUnreachable):
            return {}
        finally:
            self._source.stop()
            self._client.close()

    def _steer(self, now_s: float) -> Moved | None:
        # Decide by the time of steps, so that an idle or paused engine is left alone.
        if (move := self._pilot.decide(self._newest_ns)) is not None:
            if self.is_shadow:
                return self._propose(move)
            if (moved := self._make(move, now_s)) is not None:
                return moved
        if self.ended is None and self.held and now_s - self._renewed_s >= _RENEW_S:
            self._send(self.held, "", now_s)
        return None

    def _apply_new(self) -> None:
        for message in self._feed.drain():
            if isinstance(message, KnobsChanged):
                self._apply_knobs(message)
            elif isinstance(message, Audited):
                if message.command == SetKnobs.__name__ and not message.code and not message.new:
                    self.ended = f"{message.who} has ended it"  # its command changed nothing
                    self.held = {}
            elif isinstance(message, EngineStatus):
                self._pilot.apply_status(message)
            else:
                self._pilot.apply_step(message)
                self._newest_ns = message.tokens_ns

    def _look(self, now_s: float) -> None:
        assert self._begun_s is not None
        if self._source.status == "live":
            self._is_joined = True
            info = self._feed.info
            if info is not None and info.engine_id != self._engine_id:
                self.ended = f"{info.name} was restarted"
                self.held = {}  # they belonged to the other engine
        elif self._is_joined and self._source.status != "connecting":
            self.ended = f"the telemetry is lost: {self._source.error or self._source.status}"
        elif now_s - self._begun_s > _JOIN_S:
            self.ended = f"no telemetry comes: {self._source.error or self._source.status}"

    def _apply_knobs(self, changed: KnobsChanged) -> None:
        self._knobs |= changed.new
        self._pilot.apply_knobs(self._knobs, changed.effective_step)
        if self._version is not None and changed.version <= self._version:
            return  # this is our own change
        self._version = changed.version
        taken = [name for name, value in self.held.items() if changed.new.get(name, value) != value]
        if taken:
            for name in taken:
                del self.held[name]
            values = ", ".join(f"{name} to {value_text(changed.new[name])}" for name in taken)
            self.ended = f"{changed.who} has set {values}"

    def _propose(self, move: Move) -> Moved | None:
        last = self._proposed.changes if self._proposed is not None else {}
        if last.keys() == move.changes.keys() and all(
            abs(value - move.changes[name]) <= _SAME * value for name, value in last.items()
        ):
            return None
        self._proposed = move
        return Moved({name: self._knobs[name] for name in move.changes}, move, None)

    def _make(self, move: Move, now_s: float) -> Moved | None:
        before = {name: self._knobs[name] for name in move.changes}
        changes = self.held | move.changes
        step = self._send(changes, f"{self._title}: {move.reason}", now_s)
        if step is None:
            return None
        for name, value in before.items():
            self._before.setdefault(name, value)
        self.held = dict(changes)
        return Moved(before, move, step)

    def _send(self, changes: dict[str, KnobValue], reason: str, now_s: float) -> int | None:
        """Set knobs and return the first step with them; None if that failed or came too late."""
        try:
            ack = self._client.set_knobs(
                changes, self._who, self._version, reason=reason[:_MAX_REASON], lease_s=LEASE_S
            )
        except (CommandRefused, EngineUnreachable) as error:
            # If another client came first, its change will arrive here as a message.
            if getattr(error, "code", "") != "conflict":
                self.ended = str(error)
            return None
        self._version, self._renewed_s = ack.version, now_s
        return ack.effective_step


def _check(snapshot: Snapshot) -> None:
    if not any(spec.name == BUDGET for spec in snapshot.info.knobs):
        names = ", ".join(spec.name for spec in snapshot.info.knobs) or "none"
        raise ConfigError(
            "no_budget",
            f"{snapshot.info.name} has no knob {BUDGET} that can be changed while it runs "
            f"(its knobs: {names})",
        )
    if snapshot.leased is not None:
        raise ConfigError(
            "leased", f"{snapshot.leased.who} already holds {', '.join(snapshot.leased.before)}"
        )
