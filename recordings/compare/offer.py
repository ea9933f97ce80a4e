"""What two runs were given to do, and whether that was about the same. Pure functions.

A latency is made by the engine and by its load: under another load it says nothing about which of
two engines, or of two settings, is better. The load is compared by what nobody's speed changes:
requests, their prompts and the output they were after. Two runs of the same requests in the same
time, or kept equally busy by clients that wait for their answers, had the same load; so had two
whose requests came at the same rate, for however long.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stepscope.recordings.compare.requests import RequestRun
from stepscope.recordings.compare.side import Side

ALIKE = 0.1  # a smaller difference in the load is none
CHANCE = 0.25  # a smaller one is none either, where requests that come at random would make it


class Sum(NamedTuple):
    """Of what requests brought; the squares tell how much of it is chance."""

    total: float
    squares: float


class Offer(NamedTuple):
    """What a side was given to do.

    Attributes:
        prompt, output: tokens of the requests that came; `output` is None where nobody tells.
        all_prompt, all_output: the same with the requests that were there when it began.
        span_s: from the first arrival to the last.
        num_in_flight: requests that were there at a time, on average (Little's law).
        is_whole: all requests are known.
    """

    seconds: float
    requests: Sum
    prompt: Sum
    output: Sum | None
    num_all: int
    all_prompt: Sum
    all_output: Sum | None
    num_queued: int
    span_s: float
    num_in_flight: float
    is_whole: bool


def offer_of(side: Side) -> Offer:
    """Args: side: up to date (`Side.settle`)."""
    runs = list(side.requests.values())
    came = [run for run in runs if not run.was_there]
    arrivals = [run.arrival_ns for run in came]
    begin_ns = side.origin_ns or 0
    end_ns = begin_ns + side.points.end_ns
    seconds = side.seconds
    if side.num_unlisted and arrivals:
        seconds = max(arrivals) / 1e9 - begin_ns / 1e9
    lived_ns = sum(
        max(0, (end_ns if run.end_ns is None else run.end_ns) - max(run.arrival_ns, begin_ns))
        for run in runs
    )
    return Offer(
        seconds=seconds,
        requests=Sum(len(came), len(came)),
        prompt=_sum(run.num_prompt_tokens for run in came),
        output=_output(came),
        num_all=len(runs),
        all_prompt=_sum(run.num_prompt_tokens for run in runs),
        all_output=_output(runs),
        num_queued=sum(run.was_queued for run in runs),
        span_s=(max(arrivals) - min(arrivals)) / 1e9 if arrivals else 0.0,
        num_in_flight=lived_ns / max(1, end_ns - begin_ns),
        is_whole=not side.num_unlisted,
    )


def _sum(values: Iterable[float]) -> Sum:
    total = squares = 0.0
    for value in values:
        total += value
        squares += value * value
    return Sum(total, squares)


def _output(runs: list[RequestRun]) -> Sum | None:
    """Tokens that requests were after: as many as those had that ended, else as they may have.

    What has been made by now is no measure: the slower engine has made less of the same.
    """
    ended = [float(run.num_output_tokens) for run in runs if run.has_all]
    if len(ended) * 2 < len(runs) or not ended:
        ended = [float(run.max_tokens) for run in runs if run.max_tokens]
    if not ended:
        return None
    found, scale = _sum(ended), len(runs) / len(ended)
    return Sum(found.total * scale, found.squares * scale)


def difference(a: Side, b: Side, *, is_one_session: bool) -> str | None:
    """How the load of both differs, in a few words; None where it was about the same.

    Args:
        is_one_session: both are parts of one session: what came in them is never the same.
    """
    left, right = offer_of(a), offer_of(b)
    if not is_one_session and _same_requests(left, right):
        return _other_pace(left, right)
    parts = []
    rates: tuple[tuple[str, Callable[[Offer], Sum | None]], ...] = (
        ("requests", lambda offer: offer.requests),
        ("prompt tokens", lambda offer: offer.prompt),
        ("output tokens", lambda offer: offer.output),
    )
    for label, of in rates:
        one, other = of(left), of(right)
        if one is not None and other is not None and _is_other_rate(left, one, right, other):
            rate_a, rate_b = one.total / _time(left), other.total / _time(right)
            digits = 0 if max(rate_a, rate_b) >= 19.5 else 1 if max(rate_a, rate_b) >= 0.95 else 2
            parts.append(f"{rate_a:,.{digits}f} and {rate_b:,.{digits}f} {label}")
    if parts:
        parts[-1] += " a second"
    if not left.requests.total and not right.requests.total and _is_other(
        left.num_in_flight, right.num_in_flight
    ):  # fmt: skip
        parts.append(f"{left.num_in_flight:,.1f} and {right.num_in_flight:,.1f} requests at a time")
    if abs(left.num_queued - right.num_queued) > ALIKE * max(left.num_all, right.num_all):
        parts.append(f"{left.num_queued:,} and {right.num_queued:,} in the queue to begin with")
    return ", ".join(parts) or None


def _same_requests(a: Offer, b: Offer) -> bool:
    """Whether the requests themselves were about the same, no matter when they came."""
    if not (a.is_whole and b.is_whole):
        return False
    if _is_other(a.num_all, b.num_all) or _is_other(a.all_prompt.total, b.all_prompt.total):
        return False
    if a.all_output is None or b.all_output is None:
        return True
    return not _is_other(a.all_output.total, b.all_output.total)


def _other_pace(a: Offer, b: Offer) -> str | None:
    """The same requests may have come in another time, and for another reason than slowness."""
    apart_s = abs(a.span_s - b.span_s)
    if apart_s <= ALIKE * max(a.span_s, b.span_s, min(a.seconds, b.seconds)):
        return None
    # Clients that wait for an answer send the next request later when the engine is slower.
    if not _is_other(a.num_in_flight, b.num_in_flight):
        return None
    return f"the requests came within {a.span_s:,.1f} and {b.span_s:,.1f} s"


def _is_other_rate(a: Offer, sum_a: Sum, b: Offer, sum_b: Sum) -> bool:
    """Requests that come independently: their sums spread as the squares tell."""
    rate_a, rate_b = sum_a.total / _time(a), sum_b.total / _time(b)
    apart, larger = abs(rate_a - rate_b), max(rate_a, rate_b)
    if apart <= ALIKE * larger:
        return False
    spread = (sum_a.squares / _time(a) ** 2 + sum_b.squares / _time(b) ** 2) ** 0.5
    return apart > CHANCE * larger or apart > 1.96 * spread


def _time(offer: Offer) -> float:
    return max(offer.seconds, 1e-9)


def _is_other(a: float, b: float) -> bool:
    return abs(a - b) > ALIKE * max(a, b)
