"""`Windows`: figures of a timeline over stretches of engine time."""

import math
import threading
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import NamedTuple

from stepscope.recordings.latency import LatencyKind, LatencyReport
from stepscope.recordings.latency_samples import Samples
from stepscope.recordings.longest import Breach, Longest
from stepscope.recordings.rates import Rates, rates_of
from stepscope.recordings.timeline import Timeline


class LateCounts(NamedTuple):
    """How many tokens came later than the bounds, and in how many steps."""

    num_tokens: int
    num_steps: int
    num_breaches: int


class Stalls(NamedTuple):
    """Waits above a bound in memory: for the next token, or where none is, for the first."""

    longest: list[Breach]  # the longest first
    number: int  # of all, a step counted once


class Windows:
    """Reads one timeline; what takes long is done outside its lock.

    Args:
        lock: guards the timeline.
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._breaches: list[Breach] = []  # up to the step that was scanned last
        self._scanned = -1
        self._twice: list[int] = []  # steps with late tokens of both kinds
        self._longest = {"ITL": Longest(), "TTFT": Longest()}

    def latency(self, end_ns: int | None, window_s: float | None, buckets: int) -> LatencyReport:
        """See `History.latency`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            part = self._timeline.latencies.cut(start_ns, end_ns)
        return part.report(start_ns, end_ns, buckets)

    def rates(self, end_ns: int | None, window_s: float | None) -> Rates:
        """See `History.rates`."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return rates_of(self._timeline.columns, start_ns, end_ns)

    def samples(self, kind: LatencyKind, end_ns: int | None, window_s: float | None) -> Samples:
        """A copy of the samples."""
        with self._lock:
            end_ns, start_ns = self._window(end_ns, window_s)
            return self._timeline.latencies.of(kind).cut(start_ns, end_ns)

    def breaches(self, step: int | None, limit: int) -> list[Breach]:
        """The last late tokens up to `step` (None: all), one of a kind a step, oldest first."""
        with self._lock:
            self._scan()
            known = self._breaches
            end = len(known) if step is None else bisect_right(known, step, key=_step)
            return known[max(0, end - limit) : end]

    def longest(self, step: int | None, limit: int, kind: str = "ITL") -> list[Breach]:
        """The longest up to `step` (None: all), the longest first; those of a kind before others.

        Costs the logarithm of how many there are.
        """
        with self._lock:
            self._scan()
            found: list[Breach] = []
            for each in sorted(self._longest, key=lambda each: each != kind):
                found += self._longest[each].until(step, limit - len(found))
            return found

    def stalls(self, step: int | None, limit: int) -> Stalls:
        """See `History.stalls`."""
        with self._lock:
            self._scan()
            for each in self._longest.values():
                if number := each.num_until(step):
                    return Stalls(each.until(step, limit), number)
            return Stalls([], 0)

    def late(self, step: int | None) -> LateCounts:
        """All late tokens up to `step` (None: all) that are in memory."""
        with self._lock:
            self._scan()
            columns, slo = self._timeline.columns, self._timeline.slo
            known = self._breaches
            end = len(known) if step is None else bisect_right(known, step, key=_step)
            if not end:
                return LateCounts(0, 0, 0)
            last = bisect_right(columns.steps, known[end - 1].step)
            until_ns = columns.tokens_ns[last - 1]
            num_tokens = 0
            for samples, bound_ms in (
                (self._timeline.latencies.itl, slo.itl_ms),
                (self._timeline.latencies.ttft, slo.ttft_ms),
            ):
                num_tokens += _num_late(samples, 0, samples.num_until(until_ns), bound_ms * 1e6)
            num_twice = bisect_right(self._twice, known[end - 1].step)
            return LateCounts(num_tokens, end - num_twice, end)

    def _scan(self) -> None:
        """Take in the steps since the last time, and forget what the timeline has forgotten."""
        timeline, known = self._timeline, self._breaches
        columns, slo = timeline.columns, timeline.slo
        steps, tokens_ns = columns.steps, columns.tokens_ns
        if not steps:
            return
        del known[: bisect_left(known, steps[0], key=_step)]
        del self._twice[: bisect_left(self._twice, steps[0])]
        for each in self._longest.values():
            each.forget_before(steps[0])
        found: list[Breach] = []
        for kind, bound_ms, name in (("ITL", slo.itl_ms, "itl"), ("TTFT", slo.ttft_ms, "ttft")):
            longest_ns = columns.column(f"max_{name}_ns")
            request_ids = columns.column(f"max_{name}_request_id")
            bound_ns = bound_ms * 1e6
            samples = timeline.latencies.itl if kind == "ITL" else timeline.latencies.ttft
            for index in range(bisect_right(steps, self._scanned), len(steps)):
                if longest_ns[index] > bound_ns:
                    time_ns = tokens_ns[index]
                    number = max(1, samples.num_above(time_ns - 1, time_ns, bound_ns))
                    ns, request_id = longest_ns[index], request_ids[index]
                    found.append(Breach(steps[index], time_ns, kind, ns, request_id, number))
                    self._longest[kind].add(found[-1])
        found.sort(key=_step)
        known += found
        self._twice += [each.step for each, after in pairwise(found) if each.step == after.step]
        self._scanned = steps[-1]

    def _window(self, end_ns: int | None, window_s: float | None) -> tuple[int, int]:
        timeline = self._timeline
        if end_ns is None:
            end_ns = timeline.state.time_ns
        if window_s is not None:
            return end_ns, end_ns - round(window_s * 1e9)
        tokens_ns = timeline.columns.tokens_ns
        return end_ns, (tokens_ns[0] if tokens_ns else end_ns) - 1


def _num_late(samples: Samples, first: int, last: int, bound_ns: float) -> int:
    """Tokens later than a bound, of the samples from one place to before another."""
    ranked = samples.ranked(first, last)
    return 0 if ranked is None else ranked.count - ranked.num_up_to(math.floor(bound_ns))


def _step(breach: Breach) -> int:
    return breach.step
