"""`Paired`: compares runs that were sent the same requests, request by request. Pure functions."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stepscope.recordings.compare.bootstrap import draw, ratio_of
from stepscope.recordings.compare.figures import ALIKE, ALMOST
from stepscope.recordings.compare.side.requests import Matched
from stepscope.recordings.session.totals import NUM_SLICES

_SAME_PROMPTS = 0.9  # least share of pairs with equally long prompts
_MIN_REQUESTS = 8  # fewer may all agree by chance: 2 / 2**8 is the first below 1 %


class Paired(NamedTuple):
    """How many of the shared requests were faster in A, and how many in B. The rest were alike.

    A run is surely better if it wins more requests consistently in all parts of the run. Parts are
    compared and not requests, because requests in one queue are not independent. The median ratio
    must also be large enough to matter: a machine that is slightly slower for a while delays almost
    every request slightly.

    Attributes:
        what: the latency that is compared.
        num_a, num_b: requests in which A (or B) was better.
        factor: the median ratio, B / A.
        is_sure: whether one run is surely better; `winner` names it.
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
    """Compare TTFT and longest wait of each request; empty if the runs had different requests."""
    pairs = sorted(requests.pairs, key=lambda pair: pair.a.arrival_ns)
    if sum(pair.has_same_prompt for pair in pairs) < _SAME_PROMPTS * len(pairs):
        return []
    first = [(pair.a.ttft_ns, pair.b.ttft_ns) for pair in pairs]
    worst = [(pair.a.worst_itl_ns, pair.b.worst_itl_ns) for pair in pairs]
    found = [_paired("TTFT", first), _paired("longest wait", worst)]
    return [each for each in found if each.num_a + each.num_b]


def _paired(what: str, values: Iterable[tuple[int | None, int | None]]) -> Paired:
    """Compare pairs of values (of A, of B), one for each request, in order of arrival."""
    known = [(a, b) for a, b in values if a and b]
    signs = [(b < a * (1 - ALIKE)) - (a < b * (1 - ALIKE)) for a, b in known]
    num_a, num_b = signs.count(-1), signs.count(1)
    factor = sorted(b / a for a, b in known)[len(known) // 2] if known else 1.0
    is_large = factor > 1 + ALMOST if num_a > num_b else 1 / factor > 1 + ALMOST
    is_sure = is_large and is_one_sided(signs)
    return Paired(what, num_a, num_b, factor, is_sure)


def is_one_sided(signs: Sequence[int]) -> bool:
    """Whether one run surely won more requests, by who won each (-1, 0, 1) in order of time."""
    if len(signs) < _MIN_REQUESTS:
        return False
    num_slices = min(NUM_SLICES, len(signs))
    won_a, won_b, all_of = ([0] * num_slices for _ in range(3))
    for place, sign in enumerate(signs):
        at = place * num_slices // len(signs)
        won_a[at] += sign < 0
        won_b[at] += sign > 0
        all_of[at] += 1
    return ratio_of(draw(won_a, all_of, 0), draw(won_b, all_of, 0)).is_sure
