"""The latencies of two runs as figures, and which run is better in them.

A difference counts if it is larger than the variation within each run. If requests arrive at
random, their load differs from run to run. In that case, the difference in latency must also be
larger than the difference in load.

Figures of like work compare waits in which the engine did the same amount of work. The load decides
how often a decode shares a step with a prefill. The engine and its settings decide how long the
token then takes. So these figures have a winner even if the loads of the runs differ.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.recordings.compare.contrast import MIN_COVERED, Contrast
from stepscope.recordings.compare.figures import (
    ComparedFigure,
    Verdict,
    judged,
    without_winner,
)
from stepscope.recordings.compare.load_difference import ALIKE as ALIKE_LOAD
from stepscope.recordings.compare.load_difference import LoadDifference
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.compare.side.slices import (
    GapWork,
    Slice,
    Stratum,
    Stretches,
    as_one,
    in_strata,
)
from stepscope.recordings.figures.table import KINDS, RANKS, latency_name
from stepscope.recordings.state.series.distribution import LatencySpread
from stepscope.recordings.state.series.latency import LatencyKind

DECODE_ONLY, BESIDE_PREFILL = "ITL decode only", "ITL beside a prefill"
LIKE_STEP = "step, like work"
_LIKE_RANKS = {50: "p50", 99: "p99"}


class _Sampled(NamedTuple):
    """The samples of one latency (such as ITL) in both runs."""

    a: LatencySpread
    b: LatencySpread
    contrast: Contrast
    queued: tuple[bool, bool]  # whether these waits include waits in a queue


def latency_figures(
    a: Side, b: Side, stretches: tuple[Stretches, Stretches], load: LoadDifference
) -> Iterator[ComparedFigure]:
    """Percentiles of each latency, and the share of samples within the service level.

    Args:
        stretches: the waits of each run, divided into stretches of time.
        load: the difference in load. A run that waits less because it has less load is not better.
    """
    for kind, label in KINDS.items():
        slices = [as_one(each[kind]) for each in stretches]
        sampled = _Sampled(
            a.waits[kind].spread(),
            b.waits[kind].spread(),
            Contrast(*slices, is_paired=load.is_same),
            (kind == "ttft" and _has_queue(a), kind == "ttft" and _has_queue(b)),
        )
        for rank, name in RANKS.items():
            yield _percentile(kind, f"{label} {name}", rank, sampled, load)
        bound_ns = a.waits[kind].level
        if bound_ns is not None:
            yield _within(kind, f"{label} within {bound_ns / 1e6:g} ms", bound_ns, sampled, load)


def _has_queue(side: Side) -> bool:
    """Whether on average at least one request of this run waited for admission."""
    sums = side.sums()
    return (sums.num_waiting or 0) >= sums.num_records > 0


def _percentile(
    kind: LatencyKind, label: str, rank: int, sampled: _Sampled, load: LoadDifference
) -> ComparedFigure:
    left, right = sampled.a, sampled.b
    value_a, value_b = left.at(rank), right.at(rank)
    # The maximum grows with the length of a run, so it has no winner.
    effect = sampled.contrast.percentile(rank) if rank < 100 else None
    interval = None if effect is None else (effect.low, effect.high)
    if rank < 100:
        verdict = judged(value_a, value_b, "lower", effect is not None and effect.is_sure)
    else:
        verdict = without_winner(judged(value_a, value_b, "lower", True))
    factor = value_a / value_b if value_a and value_b else math.inf
    return ComparedFigure(
        latency_name(kind, rank),
        label,
        "ms",
        None if value_a is None else value_a / 1e6,
        None if value_b is None else value_b / 1e6,
        "lower",
        _under(load, verdict, max(factor, 1 / factor), sampled.queued),
        left.num_samples,
        right.num_samples,
        kind,
        rank,
        interval,
    )


def _within(
    kind: LatencyKind, label: str, bound_ns: float, sampled: _Sampled, load: LoadDifference
) -> ComparedFigure:
    left, right = sampled.a, sampled.b
    within_a, within_b = left.within_slo, right.within_slo
    is_sure, factor = False, 1.0
    if within_a is not None and within_b is not None:
        is_sure = sampled.contrast.shares_above_differ(bound_ns)
        late = sorted((1 - within_a, 1 - within_b))
        factor = late[1] / late[0] if late[0] else math.inf
    verdict = judged(within_a, within_b, "higher", is_sure, is_share=True)
    return ComparedFigure(
        f"{kind}_within_slo",
        label,
        "share",
        within_a,
        within_b,
        "higher",
        _under(load, verdict, factor, sampled.queued),
        left.num_samples,
        right.num_samples,
        kind,
    )


def _under(
    load: LoadDifference, verdict: Verdict, factor: float, queued: tuple[bool, bool]
) -> Verdict:
    """Return a verdict, without a winner if the difference in load may explain it.

    Args:
        factor: by how much the latencies differ, >= 1.
        queued: whether requests of A and of B waited in a queue. Near capacity, a little more load
            makes the queue many times longer. So with a queue, the load may explain any factor.
    """
    if verdict not in ("a", "b") or load.is_same:
        return verdict
    # At most by this factor, the better side had less to do.
    excess = load.more_b if verdict == "a" else load.more_a
    is_queued = queued[1] if verdict == "a" else queued[0]
    if load.other_work is None and not is_queued:
        return verdict if factor > excess else without_winner(verdict)
    return verdict if excess <= 1 + ALIKE_LOAD else without_winner(verdict)


def like_work_figures(
    stretches: tuple[Stretches, Stretches], load: LoadDifference
) -> Iterator[ComparedFigure]:
    """Compare ITL and step time among steps of like size.

    ITL is compared apart for waits with and without a prefill, among steps with as many decodes.

    Args:
        stretches: the waits of each run, divided into stretches of time.
    """
    itl_a, itl_b = (each["itl"] for each in stretches)
    decode = _Like(
        DECODE_ONLY,
        in_strata(itl_a, _decode_only),
        in_strata(itl_b, _decode_only),
        is_paired=load.is_same,
    )
    for rank, name in _LIKE_RANKS.items():
        yield decode.figure(f"like_itl_decode_{name}", f"{DECODE_ONLY} {name}", rank)
    beside = _Like(
        BESIDE_PREFILL,
        in_strata(itl_a, _beside_prefill),
        in_strata(itl_b, _beside_prefill),
        is_paired=load.is_same,
    )
    for rank, name in _LIKE_RANKS.items():
        figure = beside.figure(f"like_itl_prefill_{name}", f"{BESIDE_PREFILL} {name}", rank)
        # Different prompts make steps of different length.
        if not load.has_like_prompts:
            figure = figure._replace(verdict=without_winner(figure.verdict))
        yield figure
    steps = _Like(LIKE_STEP, *(each["step"] for each in stretches), is_paired=load.is_same)
    yield steps.figure("like_step_p50", LIKE_STEP, 50)


class _Like:
    """The waits of both runs with one kind of work, such as decodes beside a prefill.

    Args:
        what: name of the kind of work.
        is_paired: see `Contrast`.
    """

    def __init__(self, what: str, a: list[Slice], b: list[Slice], *, is_paired: bool) -> None:
        self._what = what
        self._contrast = Contrast(a, b, is_paired=is_paired)
        self._num_a, self._num_b = (sum(each.total() for each in side) for side in (a, b))

    def figure(self, key: str, label: str, rank: int) -> ComparedFigure:
        covered = self._contrast.covered
        effect = self._contrast.percentile(rank) if covered >= MIN_COVERED else None
        if effect is None:
            return ComparedFigure(
                key, label, "ms", None, None, "lower", "unknown", rank=rank, like=self._what,
                covered=covered,
            )  # fmt: skip
        return ComparedFigure(
            key,
            label,
            "ms",
            effect.a_ns / 1e6,
            effect.b_ns / 1e6,
            "lower",
            judged(effect.a_ns, effect.b_ns, "lower", effect.is_sure),
            self._num_a,
            self._num_b,
            rank=rank,
            interval=(effect.low, effect.high),
            like=self._what,
            covered=covered,
        )


def _decode_only(work: Stratum) -> bool:
    return isinstance(work, GapWork) and not work.has_prefill


def _beside_prefill(work: Stratum) -> bool:
    return isinstance(work, GapWork) and work.has_prefill
