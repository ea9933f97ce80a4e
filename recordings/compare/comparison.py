"""`Comparison`: the figures of two runs side by side. It keeps no reference to their `Side`s.

A is the baseline run, and B is compared with it: a ratio is B / A, a change is B - A.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.compare.bootstrap import draw, ratio_of
from stepscope.recordings.compare.figures import ALIKE, ALMOST, ComparedFigure, compared_figures
from stepscope.recordings.compare.load import LoadDifference, load_of
from stepscope.recordings.compare.side.requests import (
    Matched,
    lived_in_both,
    matched,
    were_sent_twice,
)
from stepscope.recordings.compare.side.side import Kind, Side
from stepscope.recordings.session.totals import NUM_SLICES
from stepscope.recordings.state.series.latency import SLO

_SAME_PROMPTS = 0.9  # least share of pairs with equally long prompts
_MIN_REQUESTS = 8  # fewer may all agree by chance: 2 / 2**8 is the first below 1 %


class Paired(NamedTuple):
    """How many of the shared requests were faster in A, and how many in B. The rest were alike.

    A run is surely better if it wins more requests consistently in all parts of the run. Parts are
    compared and not requests, because requests in one queue are not independent. The median ratio
    must also be large enough to matter: a machine that is slightly slower for a while delays almost
    every request slightly.

    `num_a`, `num_b`: requests in which A (or B) was better.
    """

    what: str
    num_a: int
    num_b: int
    factor: float
    is_sure: bool  # whether one run is surely better; `winner` names it

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


# Fields of `EngineInfo` that may change performance, unlike names and addresses.
_FIELDS = (
    "model",
    "num_parameters",
    "dtype",
    "device",
    "implementation",
    "attention_backend",
    "block_size",
    "num_blocks",
    "max_model_len",
    "overlap",
    "software_version",
)
_CAPACITIES = {"max_num_batched_tokens": "token budget at most", "max_num_seqs": "seats at most"}


class SettingDifference(NamedTuple):
    """A knob or an engine property in which two runs differ.

    `a`, `b`: all values it had in that run, in order; empty if unknown.
    """

    name: str
    a: tuple[KnobValue, ...]
    b: tuple[KnobValue, ...]
    is_knob: bool


def differing_settings(a: Side, b: Side) -> list[SettingDifference]:
    """Differing knobs, then engine properties. A setting unknown on one side is left out."""
    names = [name for name in a.knob_values if name in b.knob_values]
    found = [
        SettingDifference(name, tuple(a.knob_values[name]), tuple(b.knob_values[name]), True)
        for name in names
    ]
    if a.info is not None and b.info is not None:
        for field, label in {**{name: name for name in _FIELDS}, **_CAPACITIES}.items():
            found.append(
                SettingDifference(label, _values(a.info, field), _values(b.info, field), False)
            )
    if a.workload is not None and b.workload is not None:
        found.append(SettingDifference("workload", (a.workload,), (b.workload,), False))
    return [each for each in found if each.a and each.b and each.a != each.b]


def _values(info: EngineInfo, field: str) -> tuple[KnobValue, ...]:
    value: KnobValue | None = getattr(info, field)
    return () if value is None else (value,)


class ComparedCause(NamedTuple):
    """How much one cause contributed to late waits, in each of the two runs."""

    kind: Kind
    cause: Cause
    a_ns: int
    b_ns: int
    num_a: int  # late tokens with it as their largest cause
    num_b: int


class SideWork(NamedTuple):
    num_steps: int  # of records, if `sums_up`
    seconds: float
    num_requests: int | None
    num_arrived: int | None  # of them, during the run
    num_finished: int | None
    num_in_tokens: int | None
    num_out_tokens: int | None
    simulated: str | None  # source of the simulated step times; None if it really ran
    sums_up: bool  # whether its records are not of one step each


class Comparison(NamedTuple):
    """The result of comparing two runs, as far as they were read.

    Attributes:
        causes: causes of waits longer than the service level, the most costly first.
        paired: TTFT and longest wait compared request by request, if both runs had the same load.
        is_one_session: whether both runs are parts of one session, so that their lengths may
            differ. Two parts in which one engine was sent the same requests count as two sessions.
    """

    names: tuple[str, str]
    slo: SLO
    figures: list[ComparedFigure]
    settings: list[SettingDifference]
    causes: list[ComparedCause]
    works: tuple[SideWork, SideWork]
    requests: Matched
    percentile_error: float  # by which share of itself a percentile may be too small
    num_unlisted: int  # number of requests beyond those that the `Side`s keep
    is_one_session: bool
    load: LoadDifference  # how the loads of the two runs differ
    paired: list[Paired]

    @property
    def different_work(self) -> str | None:
        """How the load differs, in a few words; None if the difference is small or may be chance.

        If the load differs, only some figures have a winner.
        """
        return self.load.other_work

    def figure(self, key: str) -> ComparedFigure:
        return next(figure for figure in self.figures if figure.key == key)

    def names_winner(self, side: Literal["a", "b"]) -> bool:
        """Whether a run can be judged: the loads are alike, or it is better in some figure."""
        return self.different_work is None or bool(self.better(side))

    def better(self, side: Literal["a", "b"]) -> list[ComparedFigure]:
        """The figures in which a run is better, in the order of `figures`."""
        return [figure for figure in self.figures if figure.verdict == side]


def compare(a: Side, b: Side) -> Comparison:
    """Compare what has been read of both runs. Call it from the thread that reads them."""
    for side in (a, b):
        side.settle()
    is_one_engine = (
        a.info is not None and b.info is not None and a.info.engine_id == b.info.engine_id
    )
    is_one_session = is_one_engine and not were_sent_twice(a.requests, b.requests)
    load = load_of(a, b, is_one_session=is_one_session)
    requests = (lived_in_both if is_one_session else matched)(a.requests, b.requests)
    return Comparison(
        (a.name, b.name),
        a.slo,
        compared_figures(a, b, load, is_one_session=is_one_session),
        differing_settings(a, b),
        _causes(a, b),
        (_work(a), _work(b)),
        requests,
        max(side.totals.waits.error for side in (a, b)),
        a.num_unlisted + b.num_unlisted,
        is_one_session,
        load,
        request_by_request(requests) if load.is_same else [],
    )


def _causes(a: Side, b: Side) -> list[ComparedCause]:
    keys = {**a.cause_ns, **b.cause_ns}
    shares = [
        ComparedCause(
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


def _work(side: Side) -> SideWork:
    sums = side.sums()
    num_requests = len(side.requests) + side.num_unlisted
    return SideWork(
        sums.num_records,
        sums.seconds,
        num_requests or (None if sums.num_arrived is None else 0),
        sums.num_arrived,
        sums.num_finished,
        sums.num_in_tokens,
        sums.num_out_tokens,
        None if side.info is None else side.info.simulated,
        side.info is not None and side.info.totals_every_s is not None,
    )
