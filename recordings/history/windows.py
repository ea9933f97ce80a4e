"""`Windows`: latencies, sums and other figures of a timeline over windows of engine time."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepscope.recordings.figures import figures_of
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.session.drafts import Speculation, speculation_in
from stepscope.recordings.session.knee import Knee, knee_of, newest_columns
from stepscope.recordings.session.sums import Sums, limited_sums, sums_between, sums_in
from stepscope.recordings.session.waits import Breach, LateWaits
from stepscope.recordings.state.events import SessionEvent, breach_event
from stepscope.recordings.state.latency import TREND_BUCKETS, LatencyKind, LatencyReport
from stepscope.recordings.state.latency_samples import KeptLevels, Samples
from stepscope.recordings.state.lazy_numpy import np
from stepscope.recordings.state.limits import Limit

_MAX_AT_HAND = 2048
_KINDS: Mapping[str, LatencyKind] = {"ITL": "itl", "TTFT": "ttft"}  # of late tokens


class LateCounts(NamedTuple):
    num_tokens: int  # that were late
    num_steps: int  # in which some were


class Stalls(NamedTuple):
    """The waits in memory above the ITL level. If there are none, those above the TTFT level."""

    longest: list[Breach]  # the longest wait of each second, longest first
    number: int  # number of seconds with such a wait


class Windows:
    """Computes figures of one timeline. Long computations happen outside its lock.

    A window ends at `end_ns` (None: now) and is `window_s` long (None: all of memory).
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._at_hand: dict[Breach, Breach] = {}  # without and with the number of tokens

    def latency(
        self, end_ns: int | None = None, window_s: float | None = 60.0, buckets: int = TREND_BUCKETS
    ) -> LatencyReport:
        """Exact latencies; about 1 ms for a minute at 50 steps a second."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
        return part.report(start_ns, end_ns, buckets)

    def kept(self, end_ns: int | None = None, window_s: float | None = 60.0) -> KeptLevels:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            slo = self._timeline.slo
            finished = self._timeline.latencies.finished.cut(start_ns, end_ns)
        return finished.kept(slo.ttft_ms, slo.itl_ms)

    def speculation(self, end_ns: int | None, window_s: float | None) -> Speculation | None:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            table = self._timeline.columns
            return speculation_in(table, *table.places(start_ns, end_ns))

    def knee(self, last_step: int | None = None) -> Knee | None:
        """The knee by the steps in memory, up to one (None: all). It takes some 5 ms."""
        with self._lock:
            columns = newest_columns(self._timeline.columns, last_step)
        return knee_of(columns)

    def sums(self, end_ns: int | None, window_s: float | None) -> Sums:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return sums_in(self._timeline.columns, start_ns, end_ns)

    def limited(self, end_ns: int | None, window_s: float | None) -> Mapping[Limit, Sums]:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            table = self._timeline.columns
            return limited_sums(table, *table.places(start_ns, end_ns))

    def figures(
        self, end_ns: int | None = None, window_s: float | None = 60.0
    ) -> dict[str, float | None]:
        is_whole = end_ns is None and window_s is None
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
            sums = sums_in(self._timeline.columns, start_ns, end_ns)
            if is_whole:
                sums += sums_between(self._timeline.state.between)
            slo = self._timeline.slo
        kept = part.finished.kept(slo.ttft_ms, slo.itl_ms)
        return figures_of(sums, part.spreads(), kept)

    def samples(self, kind: LatencyKind, end_ns: int | None, window_s: float | None) -> Samples:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._timeline.latencies.of[kind].cut(start_ns, end_ns)

    def breaches(self, step: int | None, limit: int, kinds: Iterable[str] = _KINDS) -> list[Breach]:
        """The last breaches of service levels up to `step` (None: all), oldest first.

        There is at most one per step for the ITL, and one for the TTFT.
        """
        with self._lock:
            return self._counted(_last([self._late(kind, step) for kind in kinds], limit))

    def longest(self, step: int | None, limit: int, kind: str = "ITL") -> list[Breach]:
        """The longest late waits up to `step` (None: all), longest first, then earliest.

        All waits of `kind` ("ITL" or "TTFT") come before the others.
        """
        with self._lock:
            found: list[Breach] = []
            for each in sorted(_KINDS, key=lambda each: each != kind):
                found += self._late(each, step).longest(limit - len(found))
            return self._counted(found)

    def stalls(self, limit: int = 1) -> Stalls:
        """The longest waits above the ITL level, one per second.

        If none exceeds the ITL level, those above the TTFT level: a stall delays all decoding
        requests, a long TTFT only one.
        """
        with self._lock:
            for kind in _KINDS:
                if worst := self._late(kind).of_seconds():
                    return Stalls(self._counted(worst.longest(limit)), len(worst))
            return Stalls([], 0)

    def late_events(
        self, step: int | None, limit: int, kinds: Iterable[str] = _KINDS
    ) -> list[SessionEvent]:
        """The longest late wait of each second up to `step` (None: all), oldest first."""
        with self._lock:
            worst = [self._late(kind, step).of_seconds() for kind in kinds]
            return [breach_event(self._timeline.slo, *each[:5]) for each in _last(worst, limit)]

    def next_late_event(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest late event in a later step (direction 1) or an earlier one (-1)."""
        with self._lock:
            found = [self._late(kind).of_seconds().next(step, direction) for kind in _KINDS]
            late = [each for each in found if each is not None]
            near = min(late, key=lambda each: each.step * direction, default=None)
            return None if near is None else breach_event(self._timeline.slo, *near[:5])

    def late(self, step: int | None) -> LateCounts:
        """Counts of all late tokens in memory up to `step` (None: all)."""
        with self._lock:
            found = [self._late(kind, step) for kind in _KINDS]
            until_ns = max((each.time_ns for waits in found for each in waits.last(1)), default=-1)
            judged = [self._judged(kind) for kind in _KINDS]
            num_tokens = sum(samples.num_above(-1, until_ns, bound) for samples, bound in judged)
            steps = {each for waits in found for each in waits.steps}
            return LateCounts(num_tokens, len(steps))

    def _judged(self, kind: str) -> tuple[Samples, float]:
        slo = self._timeline.slo
        level_ms = slo.itl_ms if kind == "ITL" else slo.ttft_ms
        return self._timeline.latencies.of[_KINDS[kind]], level_ms * 1e6

    def _late(self, kind: str, step: int | None = None) -> LateWaits:
        """The waits above the level; how many tokens waited so long is not counted yet."""
        columns, latency = self._timeline.columns, _KINDS[kind]
        end = len(columns) if step is None else columns.num_before(step + 1)
        names = ("step", "tokens_ns", f"max_{latency}_ns", f"max_{latency}_request_id")
        found = [columns.values(name)[:end] for name in names]
        places = (found[2] > self._judged(kind)[1]).nonzero()[0]
        rows = [each[places] for each in found]
        return LateWaits(latency, np.array([*rows, np.ones_like(places)]))

    def _counted(self, found: Sequence[Breach]) -> list[Breach]:
        """Count the late tokens of each step; from the cache if possible: lists are drawn often."""
        if len(self._at_hand) >= _MAX_AT_HAND:
            self._at_hand.clear()
        for each in found:
            if each not in self._at_hand:
                samples, bound_ns = self._judged(each.kind)
                number = samples.num_above(each.time_ns - 1, each.time_ns, bound_ns)
                self._at_hand[each] = each._replace(num_tokens=max(1, number))
        return [self._at_hand[each] for each in found]

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        tokens_ns = timeline.columns.tokens_ns
        if end_ns is None:  # without a window, no time after the last step counts
            has_end = window_s is None and bool(tokens_ns)
            end_ns = tokens_ns[-1] if has_end else timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1


def _last(found: Sequence[LateWaits], limit: int) -> list[Breach]:
    # Within a step, ITL comes before TTFT.
    last = [each for waits in found for each in waits.last(limit)]
    last.sort(key=lambda each: each.step)
    return last[max(0, len(last) - limit) :]
