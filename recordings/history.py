"""`History`: a session so far, in memory. One writer (the source's thread), any number of readers.

The lock is held for the length of one message or one look-up; whatever takes longer (decoding,
going back to an earlier state, percentiles) is done outside of it, on what cannot change any more.

An engine that starts anew begins a new history: its step numbers start again at 0. The one before
is kept whole as `previous` until `reset`, or until the engine starts anew once more.
"""

import threading
from bisect import bisect_left, bisect_right
from typing import Self

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import (
    EngineInfo,
    EngineStatus,
    KnobsChanged,
    Mark,
    RequestView,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.causes import Late
from stepscope.recordings.columns import Rates, StepSummary
from stepscope.recordings.events import Gap, SessionEvent
from stepscope.recordings.follower import Follower
from stepscope.recordings.lane_keeper import LaneKeeper
from stepscope.recordings.lanes import Lane
from stepscope.recordings.latency import SLO, TREND_BUCKETS, LatencyReport
from stepscope.recordings.lives import Life, LifeKeeper
from stepscope.recordings.session import SessionState
from stepscope.recordings.step_cache import StepCache
from stepscope.recordings.timeline import Timeline
from stepscope.recordings.windows import Windows

MAX_STEPS = 100_000
MAX_BYTES = 256 * 1024 * 1024
_MAX_NUMBER = 2**62


class History:
    """All times in nanoseconds are the engine's monotonic ones, unless a name says `wall`.

    What is handed out is not changed afterwards and must not be changed by who gets it.

    Args:
        slo: bounds that breaches, stalls and attainment refer to.
        max_steps, max_bytes: what is kept before the oldest is forgotten.
    """

    def __init__(
        self, slo: SLO | None = None, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
    ) -> None:
        self.slo = slo or SLO()
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.version = 0  # grows with every message
        self.previous: History | None = None
        self._lock = threading.RLock()
        self._newest: tuple[int, SessionState] | None = None  # version and state
        self._begin(self._new_timeline(SessionState(), None))

    # Writing: the source's thread

    def append(
        self, sequence: int, message: Telemetry | bytes, payload: bytes | None = None
    ) -> None:
        """Take the next message: decoded, or its payload, or both.

        A sequence number that was seen already is ignored; one that skips some makes a `Gap`. A
        `Snapshot` sets the state right when messages before it are missing, else it is redundant
        and ignored. A new engine id begins a new history.

        Raises:
            msgspec.DecodeError: the payload is no telemetry, or a number in it cannot be; nothing
                has changed.
        """
        if isinstance(message, bytes):
            payload, message = message, wire.decode(message)
        elif payload is None:
            payload = wire.encode(message)
        _check(sequence, message)
        with self._lock:
            if isinstance(message, Mark):
                self._timeline.add_mark(message)
            else:
                self._take(sequence, message, payload)
            self.version += 1

    def skip(self, sequence: int) -> None:
        """A message came of a kind that this version does not know: it is not missing."""
        with self._lock:
            if self._timeline.last_sequence == sequence - 1:
                self._timeline.last_sequence = sequence

    def reset(self, snapshot: Snapshot) -> None:
        """Forget everything but the marks of this engine, and go on from `snapshot`."""
        with self._lock:
            old = self._timeline
            self.previous = None
            self._begin(self._new_timeline(SessionState.from_snapshot(snapshot), snapshot.sequence))
            self._keep_marks(old)
            self.version += 1

    def adopt(self, other: "History") -> None:
        """Show what another history holds; that one is not to be used any more."""
        with self._lock:
            old = self._timeline
            self.previous = None
            self._begin(other._timeline)
            self._keep_marks(old)
            self.version += 1

    def keep(self, max_steps: int, max_bytes: int) -> None:
        """Change what is kept at most; the oldest goes with the next message, if it has to."""
        with self._lock:
            self.max_steps = self._timeline.ring.max_steps = max_steps
            self.max_bytes = self._timeline.ring.max_bytes = max_bytes

    def rewind(self, step: int) -> bool:
        """Forget what came after `step`, so that it is the newest one again.

        False, and nothing has changed, when `step` is not in memory.
        """
        with self._lock:
            if not self._timeline.rewind(step):
                return False
            self._drop_caches()
            self.version += 1
            return True

    def add_mark(self, mark: Mark) -> None:
        """Keep a note; from any thread. The same one twice is kept once."""
        with self._lock:
            self._timeline.add_mark(mark)
            self.version += 1

    # Now

    @property
    def state(self) -> SessionState:
        """The newest state; the same object as long as nothing new has come."""
        with self._lock:
            if self._newest is None or self._newest[0] != self.version:
                self._newest = (self.version, self._timeline.state.copy())
            return self._newest[1]

    @property
    def info(self) -> EngineInfo | None:
        return self._timeline.state.info

    @property
    def last_sequence(self) -> int | None:
        return self._timeline.last_sequence

    def snapshot(self) -> Snapshot | None:
        """The newest state as a message; None before the engine is known."""
        with self._lock:
            sequence = self._timeline.last_sequence
            return self._timeline.state.snapshot(0 if sequence is None else sequence)

    def wall_ns(self, monotonic_ns: int) -> int | None:
        """Wall-clock time (Unix) of an engine time; None before the engine is known."""
        anchor = self._timeline.anchor
        return None if anchor is None else anchor.wall_ns + monotonic_ns - anchor.monotonic_ns

    # Any step

    @property
    def first_step(self) -> int | None:
        with self._lock:
            steps = self._timeline.columns.steps
            return steps[0] if steps else None

    @property
    def last_step(self) -> int | None:
        with self._lock:
            steps = self._timeline.columns.steps
            return steps[-1] if steps else None

    @property
    def num_steps(self) -> int:
        """Steps in memory."""
        return len(self._timeline.columns)

    def step_at(self, time_ns: int) -> int | None:
        """The last step whose tokens were known by `time_ns`, or the first one there is."""
        with self._lock:
            columns = self._timeline.columns
            return columns.steps[max(0, columns.index_at(time_ns))] if columns.steps else None

    def neighbour(self, step: int, offset: int) -> int:
        """The step so many records after `step` (before, if negative), lost ones not counted.

        Where the history ends it is the first or last step there is; `step` itself without any.
        """
        with self._lock:
            steps = self._timeline.columns.steps
            if not steps:
                return step
            index = bisect_left(steps, step) if offset < 0 else bisect_right(steps, step) - 1
            return steps[min(max(index + offset, 0), len(steps) - 1)]

    def summary(self, step: int) -> StepSummary | None:
        """Figures of a step; None when it is lost, forgotten or still to come."""
        with self._lock:
            return self._timeline.summary(step)

    def summaries(self, first: int, last: int) -> list[StepSummary | None]:
        """One entry for each step from `first` to `last`."""
        with self._lock:
            return [self._timeline.summary(step) for step in range(first, last + 1)]

    def record(self, step: int) -> StepRecord | None:
        """The whole record; None when it is lost, forgotten or still to come."""
        return self._cache.record(step)

    def state_at(self, step: int) -> SessionState:
        """The state right after the record of `step`.

        For a step that was lost it is the state after the last one before it, and for one before
        the history the oldest state there is.
        """
        return self._cache.state_at(step)

    def lanes(self, first: int, last: int) -> list[Lane]:
        """What each request did in the steps `first` to `last`, by request id.

        Steps that have not come yet or are forgotten are `Cell.ABSENT`, lost ones `Cell.UNKNOWN`.
        """
        return self._lanes.view(first, last)

    # Windows of time

    def latency(
        self, end_ns: int | None = None, window_s: float | None = 60.0, buckets: int = TREND_BUCKETS
    ) -> LatencyReport:
        """Latencies over the window that ends at `end_ns` (None: now), or over all (None).

        Exact, so not free: about 1 ms for a minute at 50 steps a second. Once or twice a second
        is often enough to draw it.
        """
        return self.windows.latency(end_ns, window_s, buckets)

    def rates(self, end_ns: int | None = None, window_s: float | None = 10.0) -> Rates:
        """Throughput, hit rate and where the time went, over a window like that of `latency`."""
        return self.windows.rates(end_ns, window_s)

    def follow(self, first: int | None = None) -> Follower:
        """A reader of all messages kept, from a step on (None: the oldest), and of those to come.

        It stays with the engine that there is now: one that starts anew is another session.
        """
        return Follower(self._lock, self._timeline, first)

    def is_followed_by(self, follower: Follower) -> bool:
        """Whether what comes now is what `follower` reads."""
        return follower.is_of(self._timeline)

    # What happened

    def events(
        self,
        last_step: int | None = None,
        limit: int = 100,
        kinds: frozenset[str] | None = None,
    ) -> list[SessionEvent]:
        """The last events up to a step (None: all), oldest first."""
        with self._lock:
            return self._timeline.log.until(2**62 if last_step is None else last_step, limit, kinds)

    def next_event(
        self, step: int, direction: int, kinds: frozenset[str] | None = None
    ) -> SessionEvent | None:
        """The nearest event in a later step (direction 1) or an earlier one (-1)."""
        with self._lock:
            return self._timeline.log.next(step, direction, kinds)

    # Why a token was late

    def wait(self, step: int, request_id: int) -> Late | None:
        """What the wait of a request for its token of `step` was made of; None without a token.

        A wait whose beginning is forgotten has a piece `unknown` for it.
        """
        found = self._lives.wait(step, request_id)
        if found is None:
            return None
        bound_ms = self.slo.itl_ms if found.token_idx else self.slo.ttft_ms
        return found._replace(bound_ns=round(bound_ms * 1e6))

    def life(self, view: RequestView, last: int | None = None) -> Life | None:
        """All waits of a request from its arrival to its end, or to `last` (None: the newest).

        Asking again for the same request costs only the steps since. None without any step.
        """
        return self._lives.life(view, last)

    def stall(self, step: int) -> Late | None:
        """Why the longest wait for a token that ended in `step` took so long; None without one."""
        summary = self.summary(step)
        if summary is None or summary.max_itl_request_id is None:
            return None
        return self.wait(step, summary.max_itl_request_id)

    def last_stall(self, step: int | None = None) -> Late | None:
        """The last stall above the ITL bound, up to a step (None: the newest)."""
        with self._lock:
            timeline = self._timeline
            found = timeline.last_stall_step
            if found is not None and step is not None and found > step:
                found = timeline.newest_breach(step)
        return None if found is None else self.stall(found)

    @property
    def gaps(self) -> list[Gap]:
        with self._lock:
            return list(self._timeline.gaps)

    @property
    def num_lost(self) -> int:
        """Messages lost for good."""
        with self._lock:
            return self._timeline.num_lost

    @property
    def needs_snapshot(self) -> bool:
        """Messages are missing, and no snapshot has set the state right since."""
        return self._timeline.needs_snapshot

    @property
    def marks(self) -> list[Mark]:
        """By step."""
        with self._lock:
            return list(self._timeline.marks)

    @property
    def knob_changes(self) -> list[KnobsChanged]:
        """Oldest first; `effective_step` is the first step with the new values."""
        with self._lock:
            return list(self._timeline.knob_changes)

    # Inside

    def _new_timeline(self, state: SessionState, last_sequence: int | None) -> Timeline:
        return Timeline(self.slo, self.max_steps, self.max_bytes, state, last_sequence)

    def _begin(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._drop_caches()

    def _drop_caches(self) -> None:
        self._newest = None
        self._cache = StepCache(self._lock, self._timeline)
        self._lanes = LaneKeeper(self._lock, self._timeline)
        self._lives = LifeKeeper(self._lock, self._timeline, self._cache)
        self.windows = Windows(self._lock, self._timeline)

    def _keep_marks(self, old: Timeline) -> None:
        before, now = old.state.info, self._timeline.state.info
        if before is not None and now is not None and before.engine_id == now.engine_id:
            for mark in old.marks:
                self._timeline.add_mark(mark)

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        info = message.info if isinstance(message, Snapshot) else message
        known = self._timeline.state.info
        if isinstance(info, EngineInfo) and known is not None and info.engine_id != known.engine_id:
            self.previous = self._detached()
            state = (
                SessionState.from_snapshot(message)
                if isinstance(message, Snapshot)
                else SessionState(info=info)
            )
            self._begin(self._new_timeline(state, sequence))
            text = f"{info.name} started anew (pid {info.pid or '?'})"
            self._timeline.log.add(SessionEvent(max(state.step, 0), state.time_ns, "engine", text))
            return
        self._timeline.take(sequence, message, payload)

    def _detached(self) -> Self:
        """A history of its own that holds what this one has held so far."""
        other = type(self)(self.slo, self.max_steps, self.max_bytes)
        other.version = self.version
        other._begin(self._timeline)
        return other


def _check(sequence: int, message: Telemetry) -> None:
    """Raises msgspec.ValidationError for numbers that no engine counts or measures."""
    if isinstance(message, StepRecord):
        numbers = {
            "sequence": sequence,
            "step": message.step,
            "schedule_start_ns": message.schedule_start_ns,
            "tokens_ns": message.tokens_ns,
        }
    elif isinstance(message, Snapshot | EngineStatus):
        numbers = {"step": message.step + 1, "time_ns": message.time_ns}
    else:
        return
    for name, number in numbers.items():
        if not 0 <= number < _MAX_NUMBER:
            raise msgspec.ValidationError(f"{number} is out of range - at `$.{name}`")
