"""`Pauses`: when an operator had paused the engine. No latency includes paused time."""

from bisect import bisect_right

from stepscope.engine.protocol.pause_trail import MAX_SPANS, PauseTrail
from stepscope.engine.protocol.wire import EngineStatus, Snapshot, StepRecord, Telemetry
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState, pauses_in

_MAX_SPANS = 4096


class Pauses:
    """The pauses of an engine: spans of engine time without a step, oldest first.

    A pause begins with the status message that reports it, and ends when the next step is
    scheduled. When that step is done, a new pause begins until a status message ends it. So an
    engine that runs single steps counts as paused between them. Only one thread may write.

    Args:
        state: the state before the first message, with earlier pauses.
    """

    __slots__ = ("_ends", "_is_stated", "_since_ns", "_starts")

    def __init__(self, state: SessionState | Snapshot | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._is_stated = True  # False: paused before the last step, not confirmed since
        self._since_ns: int | None = None
        if state is not None:
            self._adopt(pauses_in(state) if isinstance(state, Snapshot) else state.pauses)

    @property
    def since_ns(self) -> int | None:
        """When the current pause began; None if the engine is not known to be paused."""
        return self._since_ns if self._is_stated else None

    @property
    def has_any(self) -> bool:
        """Whether any pause is known, ended or current."""
        return self._since_ns is not None or bool(self._ends)

    def take(self, message: Telemetry) -> None:
        """Process the next message of the session."""
        if isinstance(message, StepRecord):
            if self._since_ns is not None:
                self._close(message.schedule_start_ns)
                self._since_ns, self._is_stated = message.tokens_ns, False
        elif isinstance(message, EngineStatus):
            if message.state == "paused":
                if self._since_ns is None:
                    self._since_ns = max(message.time_ns, self._ends[-1] if self._ends else 0)
                self._is_stated = True
            elif self._since_ns is not None:
                if self._is_stated:
                    self._close(message.time_ns)
                self._since_ns = None
        elif isinstance(message, Snapshot) and message.pauses is not None:
            self._adopt(pauses_in(message))  # messages that reported pauses may be lost

    def spans(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The parts of [start_ns, end_ns] that were paused, in order of time."""
        found = []
        for index in range(bisect_right(self._ends, start_ns), len(self._ends)):
            if self._starts[index] >= end_ns:
                break
            found.append((max(self._starts[index], start_ns), min(self._ends[index], end_ns)))
        if self._since_ns is not None and self._is_stated and self._since_ns < end_ns:
            found.append((max(self._since_ns, start_ns), end_ns))
        return found

    def within(self, start_ns: int, end_ns: int) -> int:
        """How many ns of [start_ns, end_ns] were paused."""
        if self._since_ns is None and (not self._ends or self._ends[-1] <= start_ns):
            return 0
        return sum(end - start for start, end in self.spans(start_ns, end_ns))

    def prepend(self, earlier: "Pauses") -> None:
        """Insert the pauses of an earlier part of the session before these."""
        begin_ns = self._starts[0] if self._starts else self._since_ns
        num_before = (
            len(earlier._ends) if begin_ns is None else bisect_right(earlier._ends, begin_ns)
        )
        self._starts[:0] = earlier._starts[:num_before]
        self._ends[:0] = earlier._ends[:num_before]

    def forget_after(self, time_ns: int) -> None:
        """Forget pauses that ended after `time_ns`, the end of a step."""
        num_kept = bisect_right(self._ends, time_ns)
        del self._starts[num_kept:], self._ends[num_kept:]
        self._since_ns = None

    def _adopt(self, trail: PauseTrail) -> None:
        """Take over the pauses that a state knows, but keep earlier ones that it has forgotten."""
        spans = trail.spans or ()
        num_kept = bisect_right(self._ends, spans[0].start_ns) if spans else len(self._ends)
        ended = [(span.start_ns, span.end_ns) for span in spans if span.end_ns is not None]
        self._starts[num_kept:] = [start_ns for start_ns, _ in ended]
        self._ends[num_kept:] = [end_ns for _, end_ns in ended]
        self._is_stated = trail.since_ns is not None
        self._since_ns = trail.since_ns if self._is_stated else trail.stepped_ns

    def _close(self, end_ns: int) -> None:
        since_ns = self._since_ns
        if since_ns is not None and since_ns < end_ns:
            self._starts.append(since_ns)
            self._ends.append(end_ns)
            if len(self._ends) > _MAX_SPANS:
                del self._starts[: _MAX_SPANS // 2], self._ends[: _MAX_SPANS // 2]


def known_since(told: Snapshot | SessionState) -> int:
    """Engine time from which on all pauses are known, from a snapshot or state and later messages.

    If the snapshot or state lists pauses, it is assumed to list all of them, at most the last
    MAX_SPANS. For engines that publish no pauses, a file or history has its own `known_since_ns`.
    """
    spans = told.pauses if isinstance(told, Snapshot) else told.pauses.spans
    if spans is None:
        return told.time_ns
    return spans[0].start_ns if len(spans) >= MAX_SPANS else 0


def leave_out_pauses(outcome: Outcome, pauses: Pauses, state: SessionState, now_ns: int) -> None:
    """Subtract paused time from the waits for tokens that ended in a step.

    Args:
        state: the state right after the step.
        now_ns: when the tokens of the step were known.
    """
    if not pauses.has_any:
        return
    longest_ns = max(outcome.max_gap_ns or 0, *(ns for _, ns in outcome.ttft_ns), 0)
    if pauses.within(now_ns - longest_ns, now_ns):
        gaps_ns, request_ids = outcome.gaps_ns, outcome.gap_request_ids
        outcome.gaps_ns, outcome.gap_request_ids = {}, {}
        for gap_ns, count in gaps_ns.items():
            net_ns = gap_ns - pauses.within(now_ns - gap_ns, now_ns)
            outcome.gaps_ns[net_ns] = outcome.gaps_ns.get(net_ns, 0) + count
            outcome.gap_request_ids.setdefault(net_ns, request_ids[gap_ns])
        outcome.ttft_ns = [
            (request_id, ns - pauses.within(now_ns - ns, now_ns))
            for request_id, ns in outcome.ttft_ns
        ]
    if outcome.e2e_ns:
        outcome.e2e_ns = [
            (request_id, ns - pauses.within(now_ns - ns, now_ns))
            for request_id, ns in outcome.e2e_ns
        ]
    for index, (request_id, tpot_ns) in enumerate(outcome.tpot_ns):
        view = state.requests[request_id]
        first_ns, last_ns = view.first_token_ns, view.last_token_ns
        if first_ns is not None and last_ns is not None:
            paused_ns = pauses.within(first_ns, last_ns)
            if paused_ns:
                share_ns = round(paused_ns / (view.num_output_tokens - 1))
                outcome.tpot_ns[index] = request_id, tpot_ns - share_ns


def leave_out(
    outcome: Outcome, pauses: Pauses, state: SessionState, now_ns: int, since_ns: int
) -> None:
    """Correct the outcome of a step for pauses. The tokens of the step were known at `now_ns`.

    First drops waits that began before `since_ns` (unless that is 0), then subtracts paused time.
    """
    if since_ns:
        leave_out_begun(outcome, state, now_ns, since_ns)
    if pauses.has_any:
        leave_out_pauses(outcome, pauses, state, now_ns)


def leave_out_begun(outcome: Outcome, state: SessionState, now_ns: int, since_ns: int) -> None:
    """Remove the waits that ended in a step but began before `since_ns`.

    An operator may have paused the engine at that time, so these waits are no valid samples.

    Args:
        state: the state right after the step.
        now_ns: when the tokens of the step were known.
        since_ns: engine time from which on pauses are known.
    """
    known_ns = now_ns - since_ns
    if outcome.gaps_ns and max(outcome.gaps_ns) > known_ns:
        outcome.gaps_ns = {ns: count for ns, count in outcome.gaps_ns.items() if ns <= known_ns}
    if outcome.ttft_ns:
        outcome.ttft_ns = [each for each in outcome.ttft_ns if each[1] <= known_ns]
    if outcome.e2e_ns:
        outcome.e2e_ns = [each for each in outcome.e2e_ns if each[1] <= known_ns]
    if outcome.tpot_ns:
        outcome.tpot_ns = [
            each
            for each in outcome.tpot_ns
            if (state.requests[each[0]].first_token_ns or 0) >= since_ns
        ]
