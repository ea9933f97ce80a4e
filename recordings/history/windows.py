"""`Windows`: latencies, rates and other figures of a timeline over windows of engine time."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from stepscope.recordings.attribution.longest import Breach, LateSeconds, Longest
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.history.rates import Rates, rates_of
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.session.steps import UNKNOWN
from stepscope.recordings.session.sums import per, sums_between, sums_in
from stepscope.recordings.state.series.events import SessionEvent, breach_event
from stepscope.recordings.state.series.latency import LatencyKind, LatencyReport
from stepscope.recordings.state.series.latency_samples import Samples
from stepscope.recordings.state.series.limits import LIMITS, Limit

_SECOND_NS = 1_000_000_000
_MAX_AT_HAND = 2048
_MAX_AT_ONCE = 4096  # steps to scan with the lock held, while the source waits


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


class Stalls(NamedTuple):
    """The waits in memory above the ITL level. If there are none, those above the TTFT level."""

    longest: list[Breach]  # the longest wait of each second, longest first
    number: int  # number of seconds with such a wait


class Windows:
    """Computes figures of one timeline. Long computations happen outside its lock."""

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._begin()

    def _begin(self) -> None:
        """Forget which steps were scanned for late tokens."""
        self._scanned = -1
        self._longest = {"ITL": Longest(), "TTFT": Longest()}  # up to the last scanned step
        self._seconds = {kind: LateSeconds(late) for kind, late in self._longest.items()}
        self._twice: list[int] = []  # steps with late tokens of both kinds
        self._at_hand: dict[tuple[int, str], Breach] = {}  # a cache, as lists are drawn repeatedly

    def latency(self, end_ns: int | None, window_s: float | None, buckets: int) -> LatencyReport:
        """Latencies of a window; see `HistoryView.latency`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
        return part.report(start_ns, end_ns, buckets)

    def rates(self, end_ns: int | None, window_s: float | None) -> Rates:
        """Throughput, hit rate and shares of time in a window; see `HistoryView.rates`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return rates_of(self._timeline.columns, start_ns, end_ns, self._timeline.state)

    def goodput(self, end_ns: int | None, window_s: float | None) -> Goodput:
        """How many requests of a window met all service levels; see `HistoryView.goodput`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            slo = self._timeline.slo
            finished = self._timeline.latencies.finished.cut(start_ns, end_ns)
            seconds = sums_in(self._timeline.columns, start_ns, end_ns).seconds
        kept = finished.kept(slo.ttft_ms, slo.itl_ms)
        return Goodput(*kept, per(kept.num_kept, seconds))

    def output_trend(self, end_ns: int | None, seconds: int) -> tuple[float | None, ...]:
        """Output tokens in each of the last whole seconds, None where unknown; oldest first."""
        with self._lock:
            table, (end_ns, _) = self._timeline.columns, self._window(end_ns, 0.0)
            begin_ns = (end_ns // _SECOND_NS - seconds) * _SECOND_NS
            counts: list[float | None] = []
            for since_ns in range(begin_ns, begin_ns + seconds * _SECOND_NS, _SECOND_NS):
                first, last = table.places(since_ns, since_ns + _SECOND_NS)
                tokens = table.column("num_output_tokens")[first:last]
                is_known = first > 0 and UNKNOWN not in tokens
                counts.append(sum(tokens) if is_known else None)
        return tuple(counts)

    def limits(self, end_ns: int | None, window_s: float | None) -> dict[Limit, float]:
        """For each limit, the share of the steps that had it; see `HistoryView.limits`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            sums = sums_in(self._timeline.columns, start_ns, end_ns)
        known = sums.num_known_limits
        return {limit: n / known for limit, n in zip(LIMITS, sums.num_limited, strict=True) if n}

    def figures(self, end_ns: int | None, window_s: float | None) -> dict[str, float | None]:
        """All figures of `recordings/figures/table.py` in a window; see `HistoryView.figures`."""
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
        """A copy of the samples of one latency (such as ITL) in a window."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._timeline.latencies.of(kind).cut(start_ns, end_ns)

    def breaches(self, step: int | None, limit: int) -> list[Breach]:
        """The last breaches of service levels up to `step` (None: all), oldest first.

        There is at most one per step for the ITL, and one for the TTFT.
        """
        with self._searched():
            last = _last({k: each.last(step, limit) for k, each in self._longest.items()}, limit)
            return [self._breach(*each) for each in last]

    def longest(self, step: int | None, limit: int, kind: str = "ITL") -> list[Breach]:
        """The longest late waits up to `step` (None: all), longest first.

        All waits of `kind` ("ITL" or "TTFT") come before the others. The time is logarithmic in the
        number of late steps.
        """
        with self._searched():
            found: list[Breach] = []
            for each in sorted(self._longest, key=lambda each: each != kind):
                steps = self._longest[each].until(step, limit - len(found))
                found += [self._breach(late, each) for late in steps]
            return found

    def last_stall_step(self, step: int | None) -> int | None:
        """The last step, up to `step` (None: all), in which a gap above the ITL level ended."""
        with self._searched():
            return next(iter(self._longest["ITL"].last(step, 1)), None)

    def stalls(self, step: int | None, limit: int) -> Stalls:
        """The longest late waits, one per second; see `HistoryView.stalls`."""
        with self._searched():
            for kind, seconds in self._seconds.items():
                if number := seconds.num_until(step):
                    steps = seconds.until(step, limit)
                    return Stalls([self._breach(late, kind) for late in steps], number)
            return Stalls([], 0)

    def late_events(
        self, step: int | None, limit: int, kinds: Collection[str] = ("ITL", "TTFT")
    ) -> list[SessionEvent]:
        """The longest late wait of each second up to `step` (None: all), oldest first.

        The second of the newest step may still be in progress; its wait is the longest so far.
        """
        with self._searched():
            last = _last({k: self._seconds[k].last(step, limit) for k in kinds}, limit)
            return [self._late_event(*each) for each in last]

    def next_late_event(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest late event in a later step (direction 1) or an earlier one (-1)."""
        with self._searched():
            found = [(seconds.next(step, direction), k) for k, seconds in self._seconds.items()]
            near = [(late, kind) for late, kind in found if late is not None]
            nearest = min(near, key=lambda each: (each[0] - step) * direction, default=None)
            return None if nearest is None else self._late_event(*nearest)

    def late(self, step: int | None) -> LateCounts:
        """Counts of all late tokens in memory up to `step` (None: all)."""
        with self._searched():
            columns, slo = self._timeline.columns, self._timeline.slo
            kinds = self._longest.values()
            num_breaches = sum(each.num_until(step) for each in kinds)
            if not num_breaches:
                return LateCounts(0, 0, 0)
            last_step = max(late for each in kinds for late in each.last(step, 1))
            until_ns = columns.tokens_ns[bisect_right(columns.steps, last_step) - 1]
            num_tokens = 0
            for samples, bound_ms in (
                (self._timeline.latencies.of("itl"), slo.itl_ms),
                (self._timeline.latencies.of("ttft"), slo.ttft_ms),
            ):
                num_tokens += samples.num_above(-1, until_ns, bound_ms * 1e6)
            num_twice = bisect_right(self._twice, last_step)
            return LateCounts(num_tokens, num_breaches - num_twice, num_breaches)

    @contextmanager
    def _searched(self) -> Iterator[None]:
        """Hold the lock, with all steps searched for late tokens, and old ones forgotten.

        After a change of the service levels it searches all of memory, and lets the source use the
        lock in between.
        """
        while True:
            with self._lock:
                if not self._scan_some():
                    yield
                    return
            time.sleep(0)  # otherwise other threads would hardly get the lock

    def _scan_some(self) -> bool:
        """Search at most `_MAX_AT_ONCE` steps for late tokens. Returns whether more are left.

        It keeps as little as possible of each late step.
        """
        columns, slo = self._timeline.columns, self._timeline.slo
        steps = columns.steps
        if self._scanned > (steps[-1] if steps else -1):  # the timeline went back or forgot all
            self._begin()
        if not steps:
            return False
        del self._twice[: bisect_left(self._twice, steps[0])]
        begin = bisect_right(steps, self._scanned)
        end = min(begin + _MAX_AT_ONCE, len(steps))
        found: list[list[int]] = []
        for kind, bound_ms in (("ITL", slo.itl_ms), ("TTFT", slo.ttft_ms)):
            waits_ns = columns.column(f"max_{kind.lower()}_ns")
            bound_ns = bound_ms * 1e6
            places = [at for at, ns in enumerate(waits_ns[begin:end], begin) if ns > bound_ns]
            late = [steps[at] for at in places]
            self._longest[kind].forget_before(steps[0])
            self._seconds[kind].forget_before(steps[0])
            self._longest[kind].extend(late, [waits_ns[at] for at in places])
            self._seconds[kind].extend(late, [columns.tokens_ns[at] for at in places])
            found.append(late)
        self._twice += sorted(set(found[0]).intersection(found[1]))
        self._scanned = steps[end - 1]
        return end < len(steps)

    def _breach(self, step: int, kind: str) -> Breach:
        """The breach of `kind` (ITL or TTFT) in a late step, from the cache if possible."""
        breach = self._at_hand.get((step, kind))
        if breach is None:
            if len(self._at_hand) >= _MAX_AT_HAND:
                self._at_hand.clear()
            breach = self._at_hand[step, kind] = self._look_up(step, kind)
        return breach

    def _late_event(self, step: int, kind: str) -> SessionEvent:
        time_ns, ns, request_id = self._longest_in(step, kind)
        return breach_event(self._timeline.slo, step, time_ns, kind, ns, request_id)

    def _look_up(self, step: int, kind: str) -> Breach:
        slo, latencies = self._timeline.slo, self._timeline.latencies
        bound_ms, samples = slo.itl_ms, latencies.of("itl")
        if kind == "TTFT":
            bound_ms, samples = slo.ttft_ms, latencies.of("ttft")
        time_ns, ns, request_id = self._longest_in(step, kind)
        number = max(1, samples.num_above(time_ns - 1, time_ns, bound_ms * 1e6))
        return Breach(step, time_ns, kind, ns, request_id, number)

    def _longest_in(self, step: int, kind: str) -> tuple[int, int, int]:
        columns, name = self._timeline.columns, f"max_{kind.lower()}"
        at = bisect_left(columns.steps, step)
        ns, request_ids = columns.column(f"{name}_ns"), columns.column(f"{name}_request_id")
        return columns.tokens_ns[at], ns[at], request_ids[at]

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        tokens_ns = timeline.columns.tokens_ns
        if end_ns is None:  # without a window, no time after the last step counts
            has_end = window_s is None and bool(tokens_ns)
            end_ns = tokens_ns[-1] if has_end else timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1


def _last(steps: Mapping[str, Sequence[int]], limit: int) -> list[tuple[int, str]]:
    """The last `limit` of the steps of several kinds, with their kinds, oldest first."""
    last = sorted((step, kind) for kind, each in steps.items() for step in each)
    return last[max(0, len(last) - limit) :]  # within a step, ITL sorts before TTFT
