"""`LoadDifference`: whether two runs had about the same load. Pure functions.

A latency depends on the engine and on its load. Under different loads, it does not show which
engine or setting is better. So loads are compared by facts that do not depend on the engine's
speed: requests, their prompts, the requested output, and what a prefix cache saved.

- The same requests in the same time are the same load. If clients wait for each answer before they
send the next request, the same requests at the same concurrency are the same load.
- Requests that arrive at random differ from run to run. For these, a test decides whether both runs
may have had the same rate. If a run was faster although its load was no smaller in any respect, it
is faster under any load.
- Prefix cache content from before a run made its load smaller. Content that was cached during the
run is the run's own merit.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.side_requests import RequestRun

ALIKE_LOAD = 0.1  # relative; a smaller difference in the load does not count
_ALIKE_SHARE = 0.02  # share of prompts from the cache: a smaller difference does not count
_OTHER_HITS = 0.2  # the same for different requests, whose hits differ anyway
_CHANCE = 0.5  # relative; a larger difference is never chance, even for random arrivals
_SURE = 1.96  # standard deviations
_CACHING = "enable_prefix_caching"
_REQUESTS, _PROMPT, _OUTPUT, _COMPUTED = "requests", "prompt tok", "output tok", "computed tok"
_RATES = (_REQUESTS, _PROMPT, _OUTPUT)


class LoadDifference(NamedTuple):
    """How the loads of two runs compare."""

    is_same: bool  # both had the same requests in the same time, or at the same concurrency
    difference: str | None  # the difference in a few words; None if it is small
    is_chance: bool  # the difference may be chance, because requests arrived at random
    more_a: float  # the largest factor by which A had more of anything than B
    more_b: float
    is_known: bool = True  # both tell of their requests; else `difference` says which does not

    @property
    def other_work(self) -> str | None:
        """The difference, if more than chance: then only some figures have a winner. Else None."""
        return None if self.is_chance else self.difference


class _Sum(NamedTuple):
    total: float
    squares: float


class _Offer:
    """The load of a run. `had_cache`: whether its prefix cache may have held something before."""

    def __init__(self, side: Side, *, had_cache: bool) -> None:
        runs = list(side.requests.values())
        came = [run for run in runs if not run.was_there]
        arrivals = [run.arrival_ns for run in came] or [0]
        begin_ns = side.totals.start_ns or 0
        end_ns = begin_ns + side.points.end_ns
        until_ns = max(arrivals) if side.num_unlisted else end_ns  # the rest are not listed
        self.seconds = max(1, until_ns - begin_ns) / 1e9
        # Over the requests that arrived during the run, and over all; unknown sums are missing.
        # "computed tok" are prompt tokens that no prefix cache held.
        self.came, self.all = _sums(came), _sums(runs)
        self.had_cache = had_cache
        self.num_queued = sum(run.was_queued for run in runs)  # at the beginning
        self.span_s = (max(arrivals) - min(arrivals)) / 1e9
        lived_ns = sum(
            max(0, (end_ns if run.end_ns is None else run.end_ns) - max(run.arrival_ns, begin_ns))
            for run in runs
        )
        # The mean number of requests in the engine (Little's law).
        self.num_in_flight = lived_ns / max(1, end_ns - begin_ns)

    def rate(self, name: str) -> float:
        return self.came[name].total / self.seconds

    @property
    def cached_share(self) -> float | None:
        if _COMPUTED not in self.came or not self.came[_PROMPT].total:
            return None
        return max(0.0, 1 - self.came[_COMPUTED].total / self.came[_PROMPT].total)


def load_of(a: Side, b: Side, *, is_one_session: bool) -> LoadDifference:
    """Compare the loads of two runs, which must be up to date (`Side.settle`).

    `is_one_session`: both are parts of one session, so their requests are never the same.
    """
    sides = {"A": a, "B": b}
    silent = [n for n, x in sides.items() if not x.requests and x.sums().num_arrived is None]
    if silent:
        text = f"{' and '.join(silent)} without requests in the telemetry"
        return LoadDifference(
            False, text, is_chance=False, more_a=math.inf, more_b=math.inf, is_known=False
        )
    # If one run caches and the other does not, the hits are the effect of that setting.
    caches_alike = a.knob_values.get(_CACHING) == b.knob_values.get(_CACHING)
    left, right = (_Offer(each, had_cache=each.had_cache and caches_alike) for each in (a, b))
    has_all = not a.num_unlisted and not b.num_unlisted and not is_one_session
    has_same = has_all and _has_same_requests(left, right)
    found = [*(_other_pace if has_same else _other_rates)(left, right)]
    is_same = has_same and not found
    return LoadDifference(
        is_same,
        ", ".join(text for text, _ in found) or None,
        is_chance=bool(found) and not any(is_other for _, is_other in found),
        more_a=1.0 if is_same else _more(left, right),
        more_b=1.0 if is_same else _more(right, left),
    )


def _sums(runs: Sequence[RequestRun]) -> dict[str, _Sum]:
    # Tokens of unfinished requests do not count: a slower engine has generated fewer of the same.
    output = [run.num_output_tokens for run in runs if run.has_all]
    if len(output) * 2 < len(runs) or not output:
        output = [run.max_tokens for run in runs if run.max_tokens]
    computed = [
        run.num_prompt_tokens - run.num_cached_tokens
        for run in runs
        if run.num_cached_tokens is not None
    ]
    known = {
        _REQUESTS: [1] * len(runs),
        _PROMPT: [run.num_prompt_tokens for run in runs],
        _OUTPUT: output,
        _COMPUTED: computed if len(computed) * 2 >= len(runs) else [],
    }
    found = {_REQUESTS: _Sum(0, 0), _PROMPT: _Sum(0, 0)}
    for name, values in known.items():
        if values:
            scale = len(runs) / len(values)  # some are known; for all
            found[name] = _Sum(sum(values) * scale, sum(each * each for each in values) * scale)
    return found


def _other_rates(a: _Offer, b: _Offer) -> Iterator[tuple[str, bool]]:
    """Texts for the differences of loads, each with whether it is more than chance."""
    for name in _RATES:
        if name in a.came and name in b.came and _differ(*(rates := (a.rate(name), b.rate(name)))):
            digits = 0 if max(rates) >= 19.5 else 1 if max(rates) >= 0.95 else 2
            change = f" ({rates[1] / rates[0] - 1:+.0%})" if rates[0] else ""
            text = f"{name}/s {rates[0]:,.{digits}f}→{rates[1]:,.{digits}f}{change}"
            yield text, _is_other_rate(a, b, name)
    if (spared := _spared(a, b, _OTHER_HITS)) is not None:
        yield spared, _is_other_rate(a, b, _COMPUTED)
    came = a.came[_REQUESTS].total + b.came[_REQUESTS].total
    if not came and _differ(a.num_in_flight, b.num_in_flight):
        yield f"requests at a time {a.num_in_flight:,.1f}→{b.num_in_flight:,.1f}", True
    if _has_other_queue(a, b):
        yield f"waiting at the start {a.num_queued:,}→{b.num_queued:,}", True


def _spared(a: _Offer, b: _Offer, least: float = _ALIKE_SHARE) -> str | None:
    """How much less prefill one run had as its cache was filled before; None: up to `least`."""
    spared_a, spared_b = a.cached_share, b.cached_share
    if spared_a is None or spared_b is None or abs(spared_a - spared_b) <= least:
        return None
    if not _differ(1 - spared_a, 1 - spared_b) or not (a if spared_a > spared_b else b).had_cache:
        return None
    return f"{spared_a:.0%}→{spared_b:.0%} of the prompts came from the prefix cache"


def _more(one: _Offer, other: _Offer) -> float:
    """The largest factor by which load `one` exceeds load `other` in any respect, at least 1."""
    names = [name for name in _RATES if name in one.came and name in other.came]
    if _spared(one, other) is not None:
        names.append(_COMPUTED)
    pairs = [(one.rate(name), other.rate(name)) for name in names]
    nums = one.came[_REQUESTS].total, other.came[_REQUESTS].total
    if all(nums):
        pairs.append((one.came[_PROMPT].total / nums[0], other.came[_PROMPT].total / nums[1]))
    else:
        pairs.append((one.num_in_flight, other.num_in_flight))
    if one.num_queued > other.num_queued and _has_other_queue(one, other):
        return math.inf
    return max(1.0, *(mine / max(1e-9, others) for mine, others in pairs))


def _has_other_queue(a: _Offer, b: _Offer) -> bool:
    most = max(a.all[_REQUESTS].total, b.all[_REQUESTS].total)
    return abs(a.num_queued - b.num_queued) > ALIKE_LOAD * most


def _has_same_requests(a: _Offer, b: _Offer) -> bool:
    names = [name for name in _RATES if name in a.all and name in b.all]
    return not any(_differ(a.all[name].total, b.all[name].total) for name in names)


def _other_pace(a: _Offer, b: _Offer) -> Iterator[tuple[str, bool]]:
    """Other times of the same requests, unless clients that wait for answers explain it."""
    longest_s = max(a.span_s, b.span_s, min(a.seconds, b.seconds))
    is_other = abs(a.span_s - b.span_s) > ALIKE_LOAD * longest_s
    if is_other and _differ(a.num_in_flight, b.num_in_flight):
        yield f"the same requests within {a.span_s:,.1f}→{b.span_s:,.1f} s", True
    if (spared := _spared(a, b)) is not None:
        yield spared, True


def _is_other_rate(a: _Offer, b: _Offer, name: str) -> bool:
    """Whether sums over independent requests differ by more than chance; squares: the variance."""
    apart, larger = abs(a.rate(name) - b.rate(name)), max(a.rate(name), b.rate(name))
    spread = math.hypot(*(each.came[name].squares ** 0.5 / each.seconds for each in (a, b)))
    return apart > _CHANCE * larger or apart > _SURE * spread


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > ALIKE_LOAD * max(a, b)
