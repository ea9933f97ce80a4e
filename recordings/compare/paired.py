"""`Paired`: what the same requests say that were sent to both runs, one by one. Pure functions."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from stepscope.recordings.compare.figures import ALIKE, ALMOST
from stepscope.recordings.compare.side.requests import Matched
from stepscope.recordings.compare.statistics.chance import leans, rates_differ

_SAME_PROMPTS = 0.9  # of the pairs, or they are no pairs


class Paired(NamedTuple):
    """In how many requests that are in both runs a side was better; the rest were alike.

    A sign test tells whether that can be chance (Dixon and Mood, 1946); but requests that wait in
    one queue or decode side by side are one fact, so that stretches of the run must say so, too,
    and the middle one of all ratios must be a difference that somebody would act upon: a machine
    that is a little slower for a while makes almost every request a little later.

    Attributes:
        factor: that ratio, B / A.
        is_sure: that one side is better; `winner` says which.
    """

    what: str
    num_a: int
    num_b: int
    factor: float
    is_sure: bool

    @property
    def winner(self) -> Literal["a", "b"] | None:
        if not self.is_sure:
            return None
        return "a" if self.num_a > self.num_b else "b"


def request_by_request(requests: Matched) -> list[Paired]:
    """Nothing of a latency that no request has on both sides, nor of requests that are others."""
    pairs = sorted(requests.pairs, key=lambda pair: pair.a.arrival_ns)
    if sum(pair.has_same_prompt for pair in pairs) < _SAME_PROMPTS * len(pairs):
        return []
    first = [(pair.a.ttft_ns, pair.b.ttft_ns) for pair in pairs]
    worst = [(pair.a.worst_itl_ns, pair.b.worst_itl_ns) for pair in pairs]
    found = [_paired("TTFT", first), _paired("longest wait", worst)]
    return [each for each in found if each.num_a + each.num_b]


def _paired(what: str, values: Iterable[tuple[int | None, int | None]]) -> Paired:
    """Args: values: in the order of arrival."""
    known = [(a, b) for a, b in values if a and b]
    signs = [(b < a * (1 - ALIKE)) - (a < b * (1 - ALIKE)) for a, b in known]
    num_a, num_b = signs.count(-1), signs.count(1)
    factor = sorted(b / a for a, b in known)[len(known) // 2] if known else 1.0
    is_large = factor > 1 + ALMOST if num_a > num_b else 1 / factor > 1 + ALMOST
    is_sure = is_large and rates_differ(num_a, 1.0, num_b, 1.0) and leans(signs)
    return Paired(what, num_a, num_b, factor, is_sure)
