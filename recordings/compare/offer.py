"""`Offer`: the load of a run, by facts that do not depend on the engine's speed. Pure functions.

These facts are the requests, their prompts, the requested output, and how much a prefix cache
saved.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.recordings.compare.side.side import Side


class Sum(NamedTuple):
    """A sum over requests, with the sum of squares for its variance."""

    total: float
    squares: float


class Offer(NamedTuple):
    """The load of a run.

    Attributes:
        requests: number of requests that arrived during the run.
        prompt, output: tokens of these requests; `output` is None if unknown.
        num_all, all_prompt, all_output: the same, including requests present at the beginning.
        computed: prompt tokens that had to be computed: no prefix cache held them. None if unknown.
        had_cache: whether its prefix cache may have held something at the beginning.
        num_queued: requests that waited for admission at the beginning.
        span_s: time from the first arrival to the last.
        num_in_flight: mean number of requests in the engine (Little's law).
        is_whole: whether all requests are known.
        is_known: whether any are: an engine may not publish them.
    """

    seconds: float
    requests: Sum
    prompt: Sum
    output: Sum | None
    computed: Sum | None
    had_cache: bool
    num_all: int
    all_prompt: Sum
    all_output: Sum | None
    num_queued: int
    span_s: float
    num_in_flight: float
    is_whole: bool
    is_known: bool

    @property
    def cached_share(self) -> float | None:
        """The share of the prompt tokens that a prefix cache saved."""
        if self.computed is None or not self.prompt.total:
            return None
        return max(0.0, 1 - self.computed.total / self.prompt.total)


RATES: Mapping[str, Callable[[Offer], Sum | None]] = MappingProxyType({
    "requests": lambda offer: offer.requests,
    "prompt tok": lambda offer: offer.prompt,
    "output tok": lambda offer: offer.output,
})  # fmt: skip


def offer_of(side: Side) -> Offer:
    """The load of a run, which must be up to date (`Side.settle`)."""
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
        computed=_computed(came),
        had_cache=side.had_cache,
        num_all=len(runs),
        all_prompt=_sum(run.num_prompt_tokens for run in runs),
        all_output=_output(runs),
        num_queued=sum(run.was_queued for run in runs),
        span_s=(max(arrivals) - min(arrivals)) / 1e9 if arrivals else 0.0,
        num_in_flight=lived_ns / max(1, end_ns - begin_ns),
        is_whole=not side.num_unlisted,
        is_known=bool(runs) or side.sums().num_arrived is not None,
    )


def _sum(values: Iterable[float]) -> Sum:
    total = squares = 0.0
    for value in values:
        total += value
        squares += value * value
    return Sum(total, squares)


def _output(runs: list[RequestRun]) -> Sum | None:
    """Requested output tokens, scaled up to all requests; None if unknown.

    Uses the number of output tokens of requests that ended, or `max_tokens` if too few ended.
    Tokens of unfinished requests do not count: a slower engine has generated fewer for the same
    requests.
    """
    ended = [float(run.num_output_tokens) for run in runs if run.has_all]
    if len(ended) * 2 < len(runs) or not ended:
        ended = [float(run.max_tokens) for run in runs if run.max_tokens]
    if not ended:
        return None
    found, scale = _sum(ended), len(runs) / len(ended)
    return Sum(found.total * scale, found.squares * scale)


def _computed(runs: list[RequestRun]) -> Sum | None:
    """Prompt tokens that no prefix cache held, scaled up to all requests; None if unknown.

    They are known for admitted requests. At least half of the requests must have been admitted.
    """
    known = [
        float(run.num_prompt_tokens - run.num_cached_tokens)
        for run in runs
        if run.num_cached_tokens is not None
    ]
    if len(known) * 2 < len(runs) or not known:
        return None
    found, scale = _sum(known), len(runs) / len(known)
    return Sum(found.total * scale, found.squares * scale)
