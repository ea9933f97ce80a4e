"""`HistoryView`: reads a session in memory, from any number of threads.

It holds the lock for one look-up at a time. Longer work (decoding, going back to an earlier state,
percentiles) happens outside the lock, on data that never changes.
"""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.baseline import Baseline, MemoryBaseline
from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.history.lives import LifeKeeper
from stepscope.recordings.history.ring import StepCache
from stepscope.recordings.history.timeline import Follower, Timeline
from stepscope.recordings.history.windows import Windows
from stepscope.recordings.session.drafts import Speculation, with_records
from stepscope.recordings.session.steps import Span, StepSummary
from stepscope.recordings.state.events import Gap, SessionEvent
from stepscope.recordings.state.lanes import LaneName
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState

_DRAFT_STEPS = 256  # to count drafts by position and request in


class HistoryView:
    """Queries of a `History`, its only direct subclass.

    Times in nanoseconds are the engine's monotonic clock, unless the name says `wall`. Returned
    objects never change, and callers must not change them.
    """

    def __init__(self, slo: SLO, timeline: Timeline) -> None:
        self.slo = slo
        self.version = 0  # grows with every message
        self.heard_s = time.monotonic()  # when the newest message came
        self.is_short = False  # whether steps before the first one are being loaded
        self._lock = threading.RLock()
        self._newest: tuple[int, SessionState] | None = None  # version and state
        self._file_baseline: Baseline | None = None
        self._begin(timeline)

    def _begin(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._baseline = MemoryBaseline(self._lock, timeline.columns, self._file_baseline)
        self._drop_caches()

    def _drop_caches(self) -> None:
        self._newest = None
        self._cache = StepCache(self._lock, self._timeline.ring)
        self.lives = LifeKeeper(self._lock, self._timeline, self._cache, self._baseline)
        self.windows = Windows(self._lock, self._timeline)

    # Now

    @property
    def state(self) -> SessionState:
        """The newest state; the same object until the next message."""
        with self._lock:
            if self._newest is None or self._newest[0] != self.version:
                self._newest = (self.version, self._timeline.state.copy())
            return self._newest[1]

    @property
    def newest(self) -> tuple[int | None, int | None, SessionState]:
        """The first and last step in memory, and the newest state, all of the same moment."""
        with self._lock:
            return self.first_step, self.last_step, self.state

    @property
    def info(self) -> wire.EngineInfo | None:
        return self._timeline.state.info

    @property
    def last_sequence(self) -> int | None:
        return self._timeline.last_sequence

    def snapshot(self) -> wire.Snapshot | None:
        """The newest state as a message; None before the engine is known."""
        with self._lock:
            return self._timeline.state.snapshot(self._timeline.last_sequence or 0)

    def wall_ns(self, monotonic_ns: int) -> int | None:
        """Wall-clock time (Unix) of an engine time; None before the engine is known."""
        return self._timeline.wall_clock.wall_ns(monotonic_ns)

    # Any step

    @property
    def first_step(self) -> int | None:
        with self._lock:
            return next(iter(self._timeline.columns.steps), None)

    @property
    def last_step(self) -> int | None:
        with self._lock:
            return next(reversed(self._timeline.columns.steps), None)

    @property
    def kept_from_ns(self) -> int:
        """Engine time from which on no step was forgotten; 0: since the engine's first step."""
        with self._lock:
            oldest = self._timeline.ring.segments[0].keyframe.state
            return oldest.time_ns if oldest.step >= 0 else 0

    @property
    def num_steps(self) -> int:
        return len(self._timeline.columns)

    def step_at(self, time_ns: int) -> int | None:
        """The last step finished by `time_ns`, or the first step in memory if none was."""
        with self._lock:
            columns = self._timeline.columns
            return columns.steps[max(0, columns.index_at(time_ns))] if columns.steps else None

    def neighbour(self, step: int, offset: int) -> int:
        """The step `offset` records after `step` (before, if negative), as far as memory reaches.

        Returns `step` itself if memory holds no step.
        """
        with self._lock:
            steps = self._timeline.columns.steps
            if not steps:
                return step
            index = bisect_left(steps, step) if offset < 0 else bisect_right(steps, step) - 1
            return steps[min(max(index + offset, 0), len(steps) - 1)]

    def summary(self, step: int) -> StepSummary | None:
        """The `StepSummary` of a step; None if the step is lost, forgotten or in the future."""
        with self._lock:
            timeline = self._timeline
            index = timeline.columns.index(step)
            if index is None:
                return None
            return timeline.columns.summary(index)._replace(
                has_knob_change=any(step == each.effective_step for each in timeline.knob_changes),
                after_gap=step in timeline.gaps.steps,
                has_mark=any(step == mark.step for mark in timeline.marks),
            )

    def summaries(self, first: int, last: int) -> list[StepSummary | None]:
        with self._lock:
            return [self.summary(step) for step in range(first, last + 1)]

    def span(self, first: int, last: int) -> Span | None:
        """Summarize the steps `first` to `last` as one `Span`; None if none is in memory."""
        with self._lock:
            changes, marks = self._timeline.knob_changes, self._timeline.marks
            span = self._timeline.columns.span(first, last)
            if span is None or not (changes or marks):
                return span
            return span._replace(
                has_knob_change=any(first <= each.effective_step <= last for each in changes),
                has_mark=any(first <= mark.step <= last for mark in marks),
            )

    def record(self, step: int) -> wire.StepRecord | None:
        """The decoded record of a step; None if the step is lost, forgotten or in the future."""
        return self._cache.record(step)

    def state_at(self, step: int) -> SessionState:
        """The state after the last step up to `step` in memory; before that, the oldest state."""
        return self._cache.state_at(step)

    def lane_ids(self, first: int, last: int) -> list[int]:
        """The ids of the requests that did anything in the steps `first` to `last`, in order."""
        with self._lock:
            return self._timeline.lanes.ids(first, last)

    def lane_names(self, request_ids: Iterable[int]) -> list[LaneName]:
        with self._lock:
            return self._timeline.lanes.names(request_ids)

    def lane_cells(self, request_ids: Iterable[int], first: int, last: int) -> list[bytes]:
        """What these requests did in the steps `first` to `last`: one `Cell` per step."""
        with self._lock:
            return self._timeline.lanes.cells(request_ids, first, last)

    # Windows of time

    def speculation(
        self, end_ns: int | None = None, window_s: float | None = 60.0
    ) -> Speculation | None:
        """What drafts did; by position and request, in the last steps. None if there were none."""
        found = self.windows.speculation(end_ns, window_s)
        step = self.last_step if end_ns is None else self.step_at(end_ns)
        if found is None or step is None:
            return found
        last = [self.record(each) for each in range(step - _DRAFT_STEPS + 1, step + 1)]
        return with_records(found, [each for each in last if each is not None])

    def follow(self, first: int | None = None) -> Follower:
        """A reader of all messages of this engine from a step on (None: the oldest)."""
        return Follower(self._lock, self._timeline, self._cache, first)

    def is_followed_by(self, follower: Follower) -> bool:
        return follower.timeline is self._timeline

    # What happened

    def events(
        self, last_step: int | None = None, limit: int = 100, kinds: frozenset[str] | None = None
    ) -> list[SessionEvent]:
        """The last events up to a step (None: all), oldest first.

        Late tokens (kind `slo`) are thinned out: only the longest late TTFT and the longest late
        ITL of each second of engine time are included. For the second of the last step, these are
        the longest so far.
        """
        with self._lock:
            until = 2**62 if last_step is None else last_step
            found = self._timeline.log.until(until, limit, kinds)
        if kinds is None or "slo" in kinds:
            found += self.windows.late_events(last_step, limit)
            found.sort(key=lambda event: event.step)
        return found[max(0, len(found) - limit) :]

    def next_event(
        self, step: int, direction: int, kinds: frozenset[str] | None = None
    ) -> SessionEvent | None:
        """The nearest event in a later step (direction 1) or an earlier one (-1)."""
        with self._lock:
            found = [self._timeline.log.next(step, direction, kinds)]
        if kinds is None or "slo" in kinds:
            found.append(self.windows.next_late_event(step, direction))
        near = [each for each in found if each is not None]
        return min(near, key=lambda event: (event.step - step) * direction, default=None)

    def end_of(self, request_id: int, step: int) -> SessionEvent | None:
        """The finish or abort event of a request by `step`; None if not ended or not in memory."""
        with self._lock:
            return self._timeline.log.end_of(request_id, step)

    # Why a token was late

    def wait(self, step: int, request_id: int) -> Late | None:
        """Explain why a request waited for its token of `step`; None if it got none in that step.

        The part of the wait that is no longer in memory gets the cause `unknown`.
        """
        found = self.lives.wait(step, request_id)
        if found is None:
            return None
        bound_ms = self.slo.itl_ms if found.token_idx else self.slo.ttft_ms
        return found._replace(bound_ns=round(bound_ms * 1e6))

    def stall(self, step: int) -> Late | None:
        """Explain the longest ITL wait that ended in `step`; None if there was none."""
        summary = self.summary(step)
        if summary is None or summary.max_itl_request_id is None:
            return None
        return self.wait(step, summary.max_itl_request_id)

    def last_stall(self, step: int | None = None) -> Late | None:
        """The last wait above the ITL level, up to a step (None: the newest)."""
        found = self.windows.breaches(step, 1, ("ITL",))
        return self.stall(found[0].step) if found else None

    @property
    def gaps(self) -> list[Gap]:
        with self._lock:
            return list(self._timeline.gaps.found)

    @property
    def num_lost(self) -> int:
        with self._lock:
            return self._timeline.gaps.num_lost

    @property
    def needs_snapshot(self) -> bool:
        """Whether messages are missing and no snapshot has corrected the state since."""
        return self._timeline.gaps.needs_snapshot

    @property
    def marks(self) -> list[wire.Mark]:
        with self._lock:
            return list(self._timeline.marks)

    @property
    def knob_changes(self) -> list[wire.KnobsChanged]:
        with self._lock:
            return list(self._timeline.knob_changes)
