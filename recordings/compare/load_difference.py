"""`LoadDifference`: whether two runs had about the same load. Pure functions.

A latency depends on the engine and on its load. Under different loads, it does not show which
engine or setting is better. So loads are compared by facts that do not depend on the engine's
speed: requests, their prompts, and the requested output.

- The same requests in the same time are the same load. If clients wait for each answer before they
send the next request, the same requests at the same concurrency are the same load.
- Requests that arrive at random differ from run to run. For these, a test decides whether both runs
may have had the same rate. If a run was faster although its load was no smaller in any respect, it
is faster under any load.
- Prefix cache content from before a run made its load smaller. Content that was cached during the
run is the run's own merit.
"""

import math
from typing import NamedTuple

from stepscope.recordings.compare.offer import RATES, Offer, Sum, offer_of
from stepscope.recordings.compare.side.side import Side

ALIKE = 0.1  # relative; a smaller difference in the load does not count
ALIKE_SHARE = 0.02  # share of prompts from the cache: a smaller difference does not count
OTHER_HITS = 0.2  # the same for different requests, whose hits differ anyway
CHANCE = 0.5  # relative; a larger difference is never chance, even for random arrivals
_CACHING = "enable_prefix_caching"
_SURE = 1.96  # standard deviations


class LoadDifference(NamedTuple):
    """How the loads of two runs compare.

    Attributes:
        is_same: both had the same requests in the same time, or at the same concurrency.
        difference: the difference in a few words; None if it is small.
        is_chance: the difference may be chance, because requests arrived at random.
        more_a, more_b: the largest factor by which A (or B) had more of anything than the other
            run.
        has_like_prompts: on average, both computed about as many tokens per prompt.
        is_known: whether both runs tell of their requests; else `difference` says which does not.
    """

    is_same: bool
    difference: str | None
    is_chance: bool
    more_a: float
    more_b: float
    has_like_prompts: bool
    is_known: bool = True

    @property
    def other_work(self) -> str | None:
        """The difference in a few words, if it is more than chance; else None."""
        return None if self.is_chance else self.difference


def load_of(a: Side, b: Side, *, is_one_session: bool) -> LoadDifference:
    """Compare the loads of two runs.

    Args:
        a, b: must be up to date (`Side.settle`).
        is_one_session: both are parts of one session, so their requests are never the same.
    """
    left, right = offer_of(a), offer_of(b)
    if silent := [name for name, each in (("A", left), ("B", right)) if not each.is_known]:
        return LoadDifference(
            False,
            f"{' and '.join(silent)} without requests in the telemetry",
            is_chance=False,
            more_a=math.inf,
            more_b=math.inf,
            has_like_prompts=False,
            is_known=False,
        )
    if a.knob_values.get(_CACHING) != b.knob_values.get(_CACHING):  # hits are its effect
        left, right = left._replace(had_cache=False), right._replace(had_cache=False)
    alike = _has_like_prompts(left, right)
    more_a, more_b = _more(left, right), _more(right, left)
    if not is_one_session and _same_requests(left, right):
        found = [_other_pace(left, right), _spared(left, right, ALIKE_SHARE)]
        differs = [part for part in found if part is not None]
        if not differs:
            return LoadDifference(
                True, None, is_chance=False, more_a=1.0, more_b=1.0, has_like_prompts=alike
            )
        return LoadDifference(
            False,
            ", ".join(differs),
            is_chance=False,
            more_a=more_a,
            more_b=more_b,
            has_like_prompts=alike,
        )
    parts, is_other = _rates(left, right)
    spared = _spared(left, right, OTHER_HITS)
    if spared is not None and left.computed is not None and right.computed is not None:
        parts.append(spared)
        is_other = is_other or _is_other_rate(left, left.computed, right, right.computed)
    if not left.requests.total and not right.requests.total and _is_other(
        left.num_in_flight, right.num_in_flight
    ):  # fmt: skip
        parts.append(f"requests at a time {left.num_in_flight:,.1f}→{right.num_in_flight:,.1f}")
        is_other = True
    if _has_other_queue(left, right):
        parts.append(f"waiting at the start {left.num_queued:,}→{right.num_queued:,}")
        is_other = True
    return LoadDifference(
        False,
        ", ".join(parts) or None,
        is_chance=bool(parts) and not is_other,
        more_a=more_a,
        more_b=more_b,
        has_like_prompts=alike,
    )


def _rates(left: Offer, right: Offer) -> tuple[list[str], bool]:
    """Texts for the rates (such as requests per second) that differ between two loads.

    Also returns whether any difference is more than chance.
    """
    parts, is_other = [], False
    for label, of in RATES.items():
        one, other = of(left), of(right)
        if one is None or other is None:
            continue
        rate_a, rate_b = one.total / _time(left), other.total / _time(right)
        if not _is_other(rate_a, rate_b):
            continue
        is_other = is_other or _is_other_rate(left, one, right, other)
        digits = 0 if max(rate_a, rate_b) >= 19.5 else 1 if max(rate_a, rate_b) >= 0.95 else 2
        change = f" ({rate_b / rate_a - 1:+.0%})" if rate_a else ""
        parts.append(f"{label}/s {rate_a:,.{digits}f}→{rate_b:,.{digits}f}{change}")
    return parts, is_other


def _spared(a: Offer, b: Offer, least: float) -> str | None:
    """Text for how much less prefill one run had because its cache was filled before; else None.

    Args:
        least: a smaller difference in the share of cached prompt tokens does not count.
    """
    spared_a, spared_b = a.cached_share, b.cached_share
    if spared_a is None or spared_b is None or abs(spared_a - spared_b) <= least:
        return None
    if not _is_other(1 - spared_a, 1 - spared_b) or not (a if spared_a > spared_b else b).had_cache:
        return None
    return f"{spared_a:.0%}→{spared_b:.0%} of the prompts came from the prefix cache"


def _more(one: Offer, other: Offer) -> float:
    """The largest factor by which load `one` exceeds load `other` in any respect, at least 1."""
    found = 1.0
    for of in RATES.values():
        mine, others = of(one), of(other)
        if mine is None or others is None or not mine.total:
            continue
        rate = mine.total / _time(one)
        others_rate = others.total / _time(other)
        found = max(found, rate / others_rate if others_rate else math.inf)
    if _spared(one, other, ALIKE_SHARE) and one.computed is not None and other.computed is not None:
        computed = one.computed.total / _time(one), other.computed.total / _time(other)
        found = max(found, computed[0] / max(1e-9, computed[1]))
    if one.requests.total and other.requests.total:
        prompts = one.prompt.total / one.requests.total, other.prompt.total / other.requests.total
        found = max(found, prompts[0] / max(1e-9, prompts[1]))
    elif one.num_in_flight > other.num_in_flight:
        found = max(found, one.num_in_flight / max(1e-9, other.num_in_flight))
    if one.num_queued > other.num_queued and _has_other_queue(one, other):
        return math.inf
    return found


def _has_other_queue(a: Offer, b: Offer) -> bool:
    return abs(a.num_queued - b.num_queued) > ALIKE * max(a.num_all, b.num_all)


def _has_like_prompts(a: Offer, b: Offer) -> bool:
    """Whether both runs computed about as many tokens per prompt, apart from chance."""
    is_known = a.computed is not None and b.computed is not None
    means, errors, lengths = [], [], []
    for offer in (a, b):
        number = offer.requests.total
        if not number:
            return False
        prompt = offer.computed if is_known and offer.computed is not None else offer.prompt
        lengths.append(offer.prompt.total / number)
        mean = prompt.total / number
        means.append(mean)
        errors.append(max(0.0, prompt.squares / number - mean * mean) / number)
    apart = abs(means[0] - means[1])
    if apart <= ALIKE * max(means) or apart <= ALIKE_SHARE * max(lengths):
        return True
    return apart <= _SURE * math.sqrt(sum(errors))


def _same_requests(a: Offer, b: Offer) -> bool:
    """Whether the requests were about the same, regardless of when they arrived."""
    if not (a.is_whole and b.is_whole):
        return False
    if _is_other(a.num_all, b.num_all) or _is_other(a.all_prompt.total, b.all_prompt.total):
        return False
    if a.all_output is None or b.all_output is None:
        return True
    return not _is_other(a.all_output.total, b.all_output.total)


def _other_pace(a: Offer, b: Offer) -> str | None:
    """Text for the same requests arriving within different times; else None.

    None also if a slower engine explains it: clients that wait for answers then send later.
    """
    apart_s = abs(a.span_s - b.span_s)
    if apart_s <= ALIKE * max(a.span_s, b.span_s, min(a.seconds, b.seconds)):
        return None
    # Clients that wait for an answer send the next request later when the engine is slower.
    if not _is_other(a.num_in_flight, b.num_in_flight):
        return None
    return f"the same requests within {a.span_s:,.1f}→{b.span_s:,.1f} s"


def _is_other_rate(a: Offer, sum_a: Sum, b: Offer, sum_b: Sum) -> bool:
    """Whether sums over independent requests differ by more than chance.

    The sums of squares give the variance.
    """
    rate_a, rate_b = sum_a.total / _time(a), sum_b.total / _time(b)
    apart, larger = abs(rate_a - rate_b), max(rate_a, rate_b)
    spread = (sum_a.squares / _time(a) ** 2 + sum_b.squares / _time(b) ** 2) ** 0.5
    return apart > CHANCE * larger or apart > _SURE * spread


def _time(offer: Offer) -> float:
    return max(offer.seconds, 1e-9)


def _is_other(a: float, b: float) -> bool:
    return abs(a - b) > ALIKE * max(a, b)
