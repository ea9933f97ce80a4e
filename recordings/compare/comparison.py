"""`Comparison`: two runs side by side, in figures. Made from two `Side`s, holds nothing of them.

A is what one starts from, B what is held against it: a ratio is B / A, a change is B - A.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from stepscope.recordings.causes import Cause
from stepscope.recordings.compare.chance import leans, rates_differ
from stepscope.recordings.compare.figures import ALIKE, Figure, total_figures
from stepscope.recordings.compare.latencies import latency_figures
from stepscope.recordings.compare.like_work import like_work_figures
from stepscope.recordings.compare.load import Load, load_of
from stepscope.recordings.compare.requests import Matched, lived_in_both, matched, were_sent_twice
from stepscope.recordings.compare.settings import Setting, differing_settings
from stepscope.recordings.compare.side import Kind, Side
from stepscope.recordings.latency import SLO


class CauseShare(NamedTuple):
    """What late waits were made of on each side."""

    kind: Kind
    cause: Cause
    a_ns: int
    b_ns: int
    num_a: int  # late tokens with it as their largest cause
    num_b: int


class Paired(NamedTuple):
    """In how many requests that are in both runs a side was better; the rest were alike.

    A sign test tells whether that can be chance (Dixon and Mood, 1946); but requests that wait in
    one queue or decode side by side are one fact, so that stretches of the run must say so, too.
    """

    what: str
    num_a: int
    num_b: int
    is_sure: bool


class Work(NamedTuple):
    """What a side did."""

    num_steps: int
    seconds: float
    num_requests: int
    num_finished: int
    num_in_tokens: int
    num_out_tokens: int


class Comparison(NamedTuple):
    """All figures of two sides as they stood at one moment.

    Attributes:
        causes: of waits beyond the service level, what took most time first.
        paired: first tokens and longest waits, request by request; none for parts of one session
            and none where the work differs.
        load: how what they were given to do compares.
        is_one_session: both sides are parts of one, so that they may be of any length; one engine
            that was sent the same twice makes two.
        resolution_ns: latencies are exact to this.
    """

    names: tuple[str, str]
    slo: SLO
    figures: list[Figure]
    settings: list[Setting]
    causes: list[CauseShare]
    works: tuple[Work, Work]
    requests: Matched
    resolution_ns: int
    num_unlisted: int
    is_one_session: bool
    load: Load
    paired: list[Paired]

    @property
    def different_work(self) -> str | None:
        """How what they were given to do differs, in a few words; None when it was about the same,
        or may have been. Where it differs only some figures can say who is better.
        """
        return self.load.other_work

    def figure(self, key: str) -> Figure:
        return next(figure for figure in self.figures if figure.key == key)

    def names_winner(self, side: Literal["a", "b"]) -> bool:
        """Whether it can be said in what a side is better, if only that it is in nothing."""
        return self.different_work is None or bool(self.better(side))

    def better(self, side: Literal["a", "b"]) -> list[Figure]:
        """In what a side is better, as they stand in `figures`."""
        return [figure for figure in self.figures if figure.verdict == side]


def compare(a: Side, b: Side) -> Comparison:
    """Both sides as they stand. To be called by the thread that feeds them."""
    for side in (a, b):
        side.settle()
    is_one_engine = (
        a.info is not None and b.info is not None and a.info.engine_id == b.info.engine_id
    )
    is_one_session = is_one_engine and not were_sent_twice(a.requests, b.requests)
    load = load_of(a, b, is_one_session=is_one_session)
    is_same_offer = load.difference is None
    stretches = a.sliced.stretches(), b.sliced.stretches()
    figures = [
        *latency_figures(a, b, stretches, load),
        *like_work_figures(stretches, load),
        *total_figures(a, b, is_same_offer=is_same_offer, is_one_session=is_one_session),
    ]
    requests = (lived_in_both if is_one_session else matched)(a.requests, b.requests)
    return Comparison(
        (a.name, b.name),
        a.slo,
        figures,
        differing_settings(a, b),
        _causes(a, b),
        (_work(a), _work(b)),
        requests,
        max(counts.resolution_ns for side in (a, b) for counts in side.waits.values()),
        a.num_unlisted + b.num_unlisted,
        is_one_session,
        load,
        request_by_request(requests) if is_same_offer and not is_one_session else [],
    )


def request_by_request(requests: Matched) -> list[Paired]:
    """What the same requests say; nothing of a latency that none of them has on both sides."""
    pairs = sorted(requests.pairs, key=lambda pair: pair.a.arrival_ns)
    first = [(pair.a.ttft_ns, pair.b.ttft_ns) for pair in pairs]
    worst = [(pair.a.worst_itl_ns, pair.b.worst_itl_ns) for pair in pairs]
    found = [_paired("TTFT", first), _paired("longest wait", worst)]
    return [each for each in found if each.num_a + each.num_b]


def _paired(what: str, values: Iterable[tuple[int | None, int | None]]) -> Paired:
    """Args: values: in the order of arrival."""
    known = [(a, b) for a, b in values if a is not None and b is not None]
    signs = [(b < a * (1 - ALIKE)) - (a < b * (1 - ALIKE)) for a, b in known]
    num_a, num_b = signs.count(-1), signs.count(1)
    return Paired(what, num_a, num_b, rates_differ(num_a, 1.0, num_b, 1.0) and leans(signs))


def _causes(a: Side, b: Side) -> list[CauseShare]:
    keys = {**a.cause_ns, **b.cause_ns}
    shares = [
        CauseShare(
            kind,
            cause,
            a.cause_ns.get((kind, cause), 0),
            b.cause_ns.get((kind, cause), 0),
            a.num_late.get((kind, cause), 0),
            b.num_late.get((kind, cause), 0),
        )
        for kind, cause in keys
    ]
    return sorted(shares, key=lambda share: -max(share.a_ns, share.b_ns))


def _work(side: Side) -> Work:
    totals = side.totals
    return Work(
        totals.num_steps,
        side.seconds,
        len(side.requests) + side.num_unlisted,
        totals.num_finished,
        totals.num_in_tokens,
        totals.num_out_tokens,
    )
