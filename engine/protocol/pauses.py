"""`Pauses`: when an operator had paused an engine. No latency includes paused time."""

from bisect import bisect_right

from stepscope.engine.protocol.pause_trail import PauseSpan, PauseTrail
from stepscope.engine.protocol.wire import EngineStatus, Snapshot, StepRecord, Telemetry

_MAX_SPANS = 4096


class Pauses:
    """The pauses of an engine: spans of engine time without a step, oldest first.

    A pause begins with the status message that reports it, and ends when the next step is
    scheduled. When that step is done, a new pause begins until a status message ends it. So an
    engine that runs single steps counts as paused between them. Only one thread may write.

    Args:
        trail: the pauses before the first message.
    """

    __slots__ = ("_ends", "_starts", "_trail")

    def __init__(self, trail: PauseTrail | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._adopt(trail or PauseTrail())

    @property
    def since_ns(self) -> int | None:
        """When the current pause began; None if the engine is not known to be paused."""
        return self._trail.since_ns

    @property
    def is_on(self) -> bool:
        """Whether the engine is paused, or may be: after a single step, the next message tells."""
        return self._trail.is_on

    @property
    def has_any(self) -> bool:
        """Whether any pause is known, ended or current."""
        return self.is_on or bool(self._ends)

    def take(self, message: Telemetry) -> None:
        """Process the next message of the session."""
        if isinstance(message, StepRecord):
            if self.is_on:
                self._go_on(self._trail.after_step(message.schedule_start_ns, message.tokens_ns))
        elif isinstance(message, EngineStatus):
            is_paused = message.state == "paused"
            if is_paused or self.is_on:
                self._go_on(self._trail.after_status(message.time_ns, is_paused=is_paused))
        elif isinstance(message, Snapshot) and message.pauses is not None:
            self._adopt(pauses_in(message))  # messages that reported pauses may be lost

    def spans(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The parts of [start_ns, end_ns] that were paused, in order of time."""
        found = []
        for index in range(bisect_right(self._ends, start_ns), len(self._ends)):
            if self._starts[index] >= end_ns:
                break
            found.append((max(self._starts[index], start_ns), min(self._ends[index], end_ns)))
        since_ns = self.since_ns
        if since_ns is not None and since_ns < end_ns:
            found.append((max(since_ns, start_ns), end_ns))
        return found

    def within(self, start_ns: int, end_ns: int) -> int:
        """How many ns of [start_ns, end_ns] were paused."""
        if not self.is_on and (not self._ends or self._ends[-1] <= start_ns):
            return 0
        return sum(end - start for start, end in self.spans(start_ns, end_ns))

    def prepend(self, earlier: "Pauses") -> None:
        """Insert the pauses of an earlier part of the session before these."""
        since_ns = self._trail.stepped_ns if self.since_ns is None else self.since_ns
        begin_ns = self._starts[0] if self._starts else since_ns
        num_before = (
            len(earlier._ends) if begin_ns is None else bisect_right(earlier._ends, begin_ns)
        )
        self._starts[:0] = earlier._starts[:num_before]
        self._ends[:0] = earlier._ends[:num_before]

    def forget_after(self, time_ns: int) -> None:
        """Forget pauses that ended after `time_ns`, the end of a step."""
        num_kept = bisect_right(self._ends, time_ns)
        del self._starts[num_kept:], self._ends[num_kept:]
        self._trail = PauseTrail()

    def _adopt(self, trail: PauseTrail) -> None:
        """Take over the pauses that a state knows, but keep earlier ones that it has forgotten."""
        spans = trail.spans or ()
        num_kept = bisect_right(self._ends, spans[0].start_ns) if spans else len(self._ends)
        ended = [(span.start_ns, span.end_ns) for span in spans if span.end_ns is not None]
        self._starts[num_kept:] = [start_ns for start_ns, _ in ended]
        self._ends[num_kept:] = [end_ns for _, end_ns in ended]
        self._trail = trail

    def _go_on(self, trail: PauseTrail) -> None:
        """Follow the trail, which ends at most one pause in a message."""
        self._trail = trail
        last = trail.spans[-1] if trail.spans else None
        if last is None or last.end_ns is None:
            return
        if not self._ends or last.end_ns > self._ends[-1]:
            self._starts.append(last.start_ns)
            self._ends.append(last.end_ns)
            if len(self._ends) > _MAX_SPANS:
                del self._starts[: _MAX_SPANS // 2], self._ends[: _MAX_SPANS // 2]


def pauses_in(snapshot: Snapshot) -> PauseTrail:
    """The operator's pauses in a snapshot.

    If the engine publishes no pauses, only the current pause is known, and not its beginning.
    """
    told = snapshot.pauses
    is_paused = snapshot.state == "paused"
    if told is None:
        return PauseTrail((PauseSpan(snapshot.time_ns),) if is_paused else None)
    trail = PauseTrail(tuple(told))
    if is_paused and trail.since_ns is None:
        return trail._replace(stepped_ns=snapshot.time_ns)
    return trail
