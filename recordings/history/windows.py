"""`Windows`: latencies, rates and other figures of a timeline over windows of engine time."""

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stepscope.recordings.attribution.late_sweep import Breach, worst_of_seconds
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.history.rates import MINUTE_S, Rates, rates_of
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.session.drafts import Speculation, speculation_in
from stepscope.recordings.session.knee import Knee, knee_of, newest_columns
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import Sums, limited_sums, per, sums_between, sums_in
from stepscope.recordings.state.series.events import SessionEvent, breach_event
from stepscope.recordings.state.series.latency import TREND_BUCKETS, LatencyKind, LatencyReport
from stepscope.recordings.state.series.latency_samples import Samples
from stepscope.recordings.state.series.limits import LIMITS, Limit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Places: TypeAlias = NDArray[np.int64] | range  # of steps; a range if there are none

_SECOND_NS = 1_000_000_000
_MAX_AT_HAND = 2048
_MAX_WINDOWS = 64
_KINDS = ("ITL", "TTFT")  # of late tokens


class LateCounts(NamedTuple):
    """Numbers of late tokens, of steps with late tokens, and of breaches of a service level.

    A step has at most two breaches: one of the ITL and one of the TTFT.
    """

    num_tokens: int
    num_steps: int
    num_breaches: int


class Goodput(NamedTuple):
    """How many requests met all service levels, of those observed from arrival to end."""

    num_judged: int
    num_kept: int
    per_s: float | None  # kept ones per second; None without a step

    @property
    def share(self) -> float | None:
        return per(self.num_kept, self.num_judged)

    @property
    def is_low(self) -> bool:
        """Whether most of at least a few requests broke a level."""
        return self.num_judged >= 5 and self.num_kept * 2 < self.num_judged


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
        self._at_hand: dict[tuple[int, int, str], Breach] = {}  # lists are drawn repeatedly
        self._summed_at: tuple[int, ...] = ()  # the steps in memory ...
        self._summed: dict[tuple[int, int], Sums] = {}  # ... and their sums by window

    def latency(
        self, end_ns: int | None = None, window_s: float | None = 60.0, buckets: int = TREND_BUCKETS
    ) -> LatencyReport:
        """Exact latencies; about 1 ms for a minute at 50 steps a second."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
        return part.report(start_ns, end_ns, buckets)

    def rates(self, end_ns: int | None = None, window_s: float | None = 10.0) -> Rates:
        """Throughput, hit rate and shares of time."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            begin_ns = self._timeline.columns.column("schedule_start_ns")[:1]
            minute_s = min(MINUTE_S, max(0.0, (end_ns - min(begin_ns, default=end_ns)) / 1e9))
            sums = self._sums(start_ns, end_ns)
            minute = self._sums(end_ns - round(MINUTE_S * 1e9), end_ns)
            return rates_of(sums, minute, minute_s, self._timeline.state)

    def goodput(self, end_ns: int | None = None, window_s: float | None = 60.0) -> Goodput:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            slo = self._timeline.slo
            finished = self._timeline.latencies.finished.cut(start_ns, end_ns)
            seconds = self._sums(start_ns, end_ns).seconds
        kept = finished.kept(slo.ttft_ms, slo.itl_ms)
        return Goodput(*kept, per(kept.num_kept, seconds))

    def speculation(self, end_ns: int | None, window_s: float | None) -> Speculation | None:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            table = self._timeline.columns
            return speculation_in(table, *table.places(start_ns, end_ns))

    def limits(self, end_ns: int | None, window_s: float | None) -> dict[Limit, float]:
        """For each limit, the share of the steps that had it."""
        sums = self.sums(end_ns, window_s)
        known = sums.num_known_limits
        return {limit: n / known for limit, n in zip(LIMITS, sums.num_limited, strict=True) if n}

    def knee(self, last_step: int | None = None) -> Knee | None:
        """The knee by the steps in memory, up to one (None: all). It takes some 5 ms."""
        with self._lock:
            columns = newest_columns(self._timeline.columns, last_step)
        return knee_of(columns)

    def sums(self, end_ns: int | None, window_s: float | None) -> Sums:
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._sums(start_ns, end_ns)

    def _sums(self, start_ns: int, end_ns: int) -> Sums:
        """The sums of a window, kept until a step comes: a picture asks for them several times."""
        columns = self._timeline.columns
        now = (len(columns), columns.steps[0], columns.steps[-1]) if columns.steps else ()
        if self._summed_at != now or len(self._summed) >= _MAX_WINDOWS:
            self._summed_at, self._summed = now, {}
        window = start_ns, end_ns
        if window not in self._summed:
            self._summed[window] = sums_in(columns, start_ns, end_ns)
        return self._summed[window]

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
            sums = self._sums(start_ns, end_ns)
            if is_whole:
                sums += sums_between(self._timeline.state.between)
            slo = self._timeline.slo
        kept = part.finished.kept(slo.ttft_ms, slo.itl_ms)
        return figures_of(sums, part.spreads(), kept)

    def samples(self, kind: LatencyKind, end_ns: int | None, window_s: float | None) -> Samples:
        """A copy of the samples of one latency (such as ITL) in a window."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._timeline.latencies.of[kind].cut(start_ns, end_ns)

    def breaches(self, step: int | None, limit: int) -> list[Breach]:
        """The last breaches of service levels up to `step` (None: all), oldest first.

        There is at most one per step for the ITL, and one for the TTFT.
        """
        with self._lock:
            late = [(self._late_places(kind, step), kind) for kind in _KINDS]
            return [self._breach(*each) for each in _last(late, limit)]

    def longest(self, step: int | None, limit: int, kind: str = "ITL") -> list[Breach]:
        """The longest late waits up to `step` (None: all), longest first, then earliest.

        All waits of `kind` ("ITL" or "TTFT") come before the others.
        """
        with self._lock:
            found: list[Breach] = []
            for each in sorted(_KINDS, key=lambda each: each != kind):
                places = self._late_places(each, step)
                found += self._longest_of(places, each, limit - len(found))
            return found

    def stalls(self, step: int | None = None, limit: int = 1) -> Stalls:
        """The longest waits above the ITL level up to a step (None: all), one per second.

        If none exceeds the ITL level, those above the TTFT level: a stall delays all decoding
        requests, a long TTFT only one.
        """
        with self._lock:
            for kind in _KINDS:
                if number := len(places := self._worst_places(kind, step)):
                    return Stalls(self._longest_of(places, kind, limit), number)
            return Stalls([], 0)

    def last_stall_step(self, step: int | None) -> int | None:
        """The last step up to `step` (None: all) in which a gap above the ITL level ended."""
        with self._lock:
            late = self._late_places("ITL", step)
            return self._timeline.columns.steps[late[-1]] if len(late) else None

    def late_events(
        self, step: int | None, limit: int, kinds: Collection[str] = _KINDS
    ) -> list[SessionEvent]:
        """The longest late wait of each second up to `step` (None: all), oldest first.

        The second of the newest step may still be in progress; its wait is the longest so far.
        """
        with self._lock:
            worst = [(self._worst_places(kind, step), kind) for kind in kinds]
            return [self._late_event(*each) for each in _last(worst, limit)]

    def next_late_event(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest late event in a later step (direction 1) or an earlier one (-1)."""
        with self._lock:
            steps = self._timeline.columns.steps
            near = [
                (int(place), kind)
                for kind in _KINDS
                for place in self._worst_places(kind)
                if (steps[place] - step) * direction > 0
            ]
            nearest = min(near, key=lambda each: each[0] * direction, default=None)
            return None if nearest is None else self._late_event(*nearest)

    def late(self, step: int | None) -> LateCounts:
        """Counts of all late tokens in memory up to `step` (None: all)."""
        with self._lock:
            places = [self._late_places(kind, step) for kind in _KINDS]
            if not (num_breaches := sum(map(len, places))):
                return LateCounts(0, 0, 0)
            num_steps = len({place for each in places for place in each})
            last = max(int(each[-1]) for each in places if len(each))
            until_ns = self._timeline.columns.tokens_ns[last]
            num_tokens = 0
            for kind in _KINDS:
                samples, bound_ns = self._judged(kind)
                num_tokens += samples.num_above(-1, until_ns, bound_ns)
            return LateCounts(num_tokens, num_steps, num_breaches)

    def _judged(self, kind: str) -> tuple[Samples, float]:
        slo, latencies = self._timeline.slo, self._timeline.latencies
        if kind == "ITL":
            return latencies.of["itl"], slo.itl_ms * 1e6
        return latencies.of["ttft"], slo.ttft_ms * 1e6

    def _late_places(self, kind: str, step: int | None = None) -> "_Places":
        columns = self._timeline.columns
        end = len(columns) if step is None else columns.num_before(step + 1)
        late = _column(columns, kind)[:end] > self._judged(kind)[1] if end else None
        return range(0) if late is None or not late.any() else late.nonzero()[0]

    def _worst_places(self, kind: str, step: int | None = None) -> "_Places":
        late, columns = self._late_places(kind, step), self._timeline.columns
        if isinstance(late, range):
            return late
        return late[worst_of_seconds(_column(columns, None)[late], _column(columns, kind)[late])]

    def _longest_of(self, places: "_Places", kind: str, limit: int) -> list[Breach]:
        if isinstance(places, range):
            return []
        waits_ns = _column(self._timeline.columns, kind)[places]
        longest = places[(-waits_ns).argsort(kind="stable")[: max(0, limit)]]
        return [self._breach(place, kind) for place in longest.tolist()]

    def _late_event(self, place: int, kind: str) -> SessionEvent:
        return breach_event(self._timeline.slo, *self._breach(place, kind)[:5])

    def _breach(self, place: int, kind: str) -> Breach:
        """The breach of `kind` (ITL or TTFT) in a late step, from the cache if possible."""
        columns, name = self._timeline.columns, kind.lower()
        step, time_ns = columns.steps[place], columns.tokens_ns[place]
        breach = self._at_hand.get((step, time_ns, kind))
        if breach is None:
            if len(self._at_hand) >= _MAX_AT_HAND:
                self._at_hand.clear()
            samples, bound_ns = self._judged(kind)
            number = max(1, samples.num_above(time_ns - 1, time_ns, bound_ns))
            ns, request_id = (
                columns.column(f"max_{name}_{each}")[place] for each in ("ns", "request_id")
            )
            breach = Breach(step, time_ns, kind, ns, request_id, number)
            self._at_hand[step, time_ns, kind] = breach
        return breach

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        tokens_ns = timeline.columns.tokens_ns
        if end_ns is None:  # without a window, no time after the last step counts
            has_end = window_s is None and bool(tokens_ns)
            end_ns = tokens_ns[-1] if has_end else timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1


def _column(columns: StepTable, kind: str | None) -> "NDArray[np.int64]":
    """The longest waits of a kind; None: the end of each step. Keep it only under the lock."""
    import numpy as np  # not before the first step

    name = "tokens_ns" if kind is None else f"max_{kind.lower()}_ns"
    return np.frombuffer(columns.column(name), dtype=np.int64)


def _last(found: "Iterable[tuple[_Places, str]]", limit: int) -> list[tuple[int, str]]:
    """The last places of all kinds, each with its kind; within a step, ITL comes before TTFT."""
    last = [
        (int(place), kind)
        for places, kind in found
        for place in places[max(0, len(places) - limit) :]
    ]
    last.sort()
    return last[max(0, len(last) - limit) :]
