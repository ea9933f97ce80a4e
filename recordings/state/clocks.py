"""Two clocks of an engine: the monotonic one that times its steps, and the wall clock beside it.

The monotonic clock stops while a machine sleeps, and restarts when an engine is moved or restored.
People set the wall clock. Shown times must stay sensible in both cases.

Also here: what leaves an operator's pauses, and waits from before they are known, out of latencies,
and what tells new messages from known ones.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import MAX_SPANS
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState


def known_since(told: wire.Snapshot | SessionState) -> int:
    """Engine time from which on all pauses are known, from a snapshot or state and later messages.

    If the snapshot or state lists pauses, it is assumed to list all of them, at most the last
    MAX_SPANS. For engines that publish no pauses, a file or history has its own `known_since_ns`.
    """
    spans = told.pauses if isinstance(told, wire.Snapshot) else told.pauses.spans
    if spans is None:
        return told.time_ns
    return spans[0].start_ns if len(spans) >= MAX_SPANS else 0


def leave_out(outcome: Outcome, state: SessionState, now_ns: int, since_ns: int) -> None:
    """Leave paused time out of the waits that ended at `now_ns`, and waits from before `since_ns`.

    Before `since_ns`, an operator may have paused the engine, so these waits are no valid samples.
    `state` is the one right after the step.
    """
    views, pauses, known_ns = state.requests, state.pauses, now_ns - since_ns
    if since_ns:
        for name in ("gaps_ns", "served_itl_ns"):
            waits = getattr(outcome, name).items()
            setattr(outcome, name, {ns: count for ns, count in waits if ns <= known_ns})
        for name in ("late_gaps", "ttft_ns", "served_ttft_ns", "e2e_ns"):
            kept = [each for each in getattr(outcome, name) if each[1] <= known_ns]
            setattr(outcome, name, kept)
        outcome.tpot_ns = [
            each for each in outcome.tpot_ns if (views[each[0]].first_token_ns or 0) >= since_ns
        ]
    if not pauses.spans:
        return

    def without_pauses(waits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(request_id, ns - pauses.within(now_ns - ns, now_ns)) for request_id, ns in waits]

    outcome.ttft_ns, outcome.e2e_ns = map(without_pauses, (outcome.ttft_ns, outcome.e2e_ns))
    if pauses.within(now_ns - (outcome.max_gap_ns or 0), now_ns):
        gaps_ns, request_ids = outcome.gaps_ns, outcome.gap_request_ids
        outcome.gaps_ns, outcome.gap_request_ids = {}, {}
        for gap_ns, count in gaps_ns.items():
            net_ns = gap_ns - pauses.within(now_ns - gap_ns, now_ns)
            outcome.add_gaps(net_ns, count, request_ids[gap_ns])
    for index, (request_id, tpot_ns) in enumerate(outcome.tpot_ns):
        view = views[request_id]
        first_ns, last_ns = view.first_token_ns, view.last_token_ns
        if first_ns is not None and last_ns is not None:
            share_ns = pauses.within(first_ns, last_ns) / (view.num_output_tokens - 1)
            outcome.tpot_ns[index] = request_id, tpot_ns - round(share_ns)


BACK_NS = 1_000_000_000  # further back than any late message: the clock was set back
_DRIFT_NS = 100_000_000  # smaller changes of the offset are drift and ignored


class WallClock:
    """Converts engine time (monotonic) to wall time, from pairs of both that the engine sent."""

    def __init__(self) -> None:
        self._offsets_ns: list[tuple[int, int]] = []  # engine time from which each holds, and it

    def add(self, info: wire.EngineInfo) -> None:
        """Add a pair of engine time and wall time. It applies to engine times from then on."""
        now_ns, offset_ns = info.monotonic_ns, info.wall_ns - info.monotonic_ns
        since_ns, last_ns = self._offsets_ns[-1] if self._offsets_ns else (-1, -math.inf)
        if now_ns > since_ns and abs(offset_ns - last_ns) > _DRIFT_NS:
            self._offsets_ns.append((now_ns, offset_ns))

    def wall_ns(self, engine_ns: int) -> int | None:
        """Unix time in ns of an engine time; None before the first pair."""
        if not self._offsets_ns:
            return None
        at = max(0, bisect_right(self._offsets_ns, engine_ns, key=itemgetter(0)) - 1)
        return engine_ns + self._offsets_ns[at][1]


def back_by(last_ns: int, record: wire.StepRecord) -> int:
    """How far, in ns, the monotonic clock went back since the last step; 0 if it did not.

    Only the times of steps are compared, because other messages may be timed by other processes.
    """
    back_ns = last_ns - record.tokens_ns
    return back_ns if back_ns > BACK_NS else 0


def lost_before(
    sequence: int, message: wire.Telemetry, last: int | None, *, is_unsure: bool
) -> int | None:
    """How many messages were lost right before this one; None if it tells nothing new.

    A snapshot has the number of the last message that it stands for, and puts all before it right.

    `is_unsure`: whether messages are missing and no snapshot has corrected the state since.
    """
    if last is None:
        return 0
    if isinstance(message, wire.Snapshot):
        num_lost = sequence - last
        return num_lost if num_lost > 0 or (is_unsure and not num_lost) else None
    return sequence - last - 1 if sequence > last else None


def set_back(state: SessionState, back_ns: int) -> SessionState:
    """A copy of the state in which all times are `back_ns` earlier.

    Used after the engine's clock went back, so that waits in progress keep their length.
    """
    snapshot = state.snapshot(0)
    if snapshot is None:
        return SessionState()
    info = snapshot.info
    moved = SessionState.from_snapshot(
        msgspec.structs.replace(
            snapshot,
            time_ns=snapshot.time_ns - back_ns,
            info=msgspec.structs.replace(info, monotonic_ns=info.monotonic_ns - back_ns),
        )
    )
    for view in moved.requests.values():
        if not view.is_partial:
            view.arrival_ns -= back_ns
        for name in ("first_token_ns", "last_token_ns", "finish_ns"):
            time_ns = getattr(view, name)
            if time_ns is not None:
                setattr(view, name, time_ns - back_ns)
    return moved


MAX_NUMBER = 2**62
_CHECKED = {
    wire.StepRecord: ("step", "schedule_start_ns", "tokens_ns", "sequence"),
    wire.StepInFlight: ("step", "since_ns", "time_ns"),
    wire.Snapshot: ("step", "time_ns"),
    wire.EngineStatus: ("step", "time_ns"),
}


def check_numbers(sequence: int, message: wire.Telemetry) -> None:
    """Raise msgspec.ValidationError if a number is outside the bounds."""
    for name in _CHECKED.get(type(message), ()):
        number = sequence if name == "sequence" else getattr(message, name)
        # Before its first step, the step of an engine is -1.
        is_none = number == -1 and isinstance(message, wire.Snapshot | wire.EngineStatus)
        if not 0 <= number < MAX_NUMBER and not is_none:
            raise msgspec.ValidationError(f"{number} is out of range - at `$.{name}`")
