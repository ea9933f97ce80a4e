"""`Figure`: one thing measured of two runs, and which of them is better in it."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.compare.side.totals import CountOverTime
from stepscope.recordings.compare.statistics.estimate import Estimate, differ, ratio
from stepscope.recordings.state.series.latency import LatencyKind

ALIKE = 0.02  # nobody acts upon a smaller difference
ALMOST = 0.05  # a smaller one that may be chance is called alike, a larger one unclear
_ALIKE_SHARE = 0.002  # the same for shares, as a difference: 99.9 % and 99.8 %

# Who is better; `alike`; a difference that may be chance; a difference that is neither good nor
# bad; a value that one side does not tell.
Verdict: TypeAlias = Literal["a", "b", "alike", "unclear", "differs", "unknown"]
Unit: TypeAlias = Literal["ms", "share", "tokens/s", "/s", "/min", ""]
Better: TypeAlias = Literal["lower", "higher"]

KINDS: dict[LatencyKind, str] = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "step": "step time"}
RANKS: dict[int, str] = {50: "p50", 95: "p95", 99: "p99", 100: "max"}


class Figure(NamedTuple):
    """One thing measured of both sides. A is what one starts from, B is held against it.

    Attributes:
        key: its name for programs; `kind` is set for latencies, `rank` for their percentiles.
        a, b: in `unit`; None is unknown, or nothing was measured.
        better: what is better, None where neither is.
        num_a, num_b: of samples; 0 for what is no sample.
        interval: B / A lies between these two, with `estimate.CONFIDENCE`; 0 and infinite where
            nothing can be said. None where none is known.
        like: for what is said of like work only, what that is; `covered` is the share of the
            waits that have their like on the other side.
    """

    key: str
    label: str
    unit: Unit
    a: float | None
    b: float | None
    better: Better | None
    verdict: Verdict
    num_a: int = 0
    num_b: int = 0
    kind: LatencyKind | None = None
    rank: int | None = None
    interval: tuple[float, float] | None = None
    like: str | None = None
    covered: float | None = None

    @property
    def ratio(self) -> float | None:
        """B / A; None where that says nothing."""
        if self.a is None or self.b is None or self.a <= 0:
            return None
        return self.b / self.a

    @property
    def factor(self) -> float | None:
        """The larger one by the smaller one; None where one of them is nothing."""
        ratio = self.ratio
        return max(ratio, 1 / ratio) if ratio else None

    @property
    def least_factor(self) -> float | None:
        """The larger one is at least so many times the smaller one; None where that is not sure."""
        low, high = (0.0, math.inf) if self.interval is None else self.interval
        if low > 1:
            return low
        return 1 / high if 0 < high < 1 else None

    @property
    def weight(self) -> float:
        """How much the sides differ: 0 not at all."""
        factor = self.factor
        if factor is not None:
            return math.log(factor)
        return 0.0 if self.a == self.b else math.inf


def without_winner(verdict: Verdict) -> Verdict:
    return "differs" if verdict in ("a", "b") else verdict


def total_figures(
    a: Side, b: Side, *, is_same_offer: bool, is_one_session: bool
) -> Iterator[Figure]:
    """Throughput, what steps were made of, memory, and what was done in vain.

    Args:
        is_same_offer: who was given more to do has the larger throughput and the fuller cache.
        is_one_session: the second part works off what the first has left, whatever came in it.
    """
    for figure in _totals(a, b, has_winner=is_same_offer and not is_one_session):
        yield figure if is_same_offer else figure._replace(verdict=without_winner(figure.verdict))


def _totals(a: Side, b: Side, *, has_winner: bool) -> Iterator[Figure]:
    """Args: has_winner: in throughput."""
    left, right = a.totals, b.totals
    time_a, time_b = a.seconds, b.seconds
    for key, label, sum_a, sum_b, over_a, over_b in (
        (
            "out_tokens_per_s",
            "output tokens/s",
            left.num_out_tokens,
            right.num_out_tokens,
            left.tokens_out,
            right.tokens_out,
        ),
        (
            "in_tokens_per_s",
            "input tokens/s",
            left.num_in_tokens,
            right.num_in_tokens,
            left.tokens_in,
            right.tokens_in,
        ),
    ):
        is_sure = differ(_rate(over_a), _rate(over_b))
        yield _figure(
            key, label, "tokens/s", _per(sum_a, time_a), _per(sum_b, time_b),
            "higher" if has_winner else None, is_sure,
        )  # fmt: skip
    yield _figure("steps_per_s", "steps/s", "/s", _per(left.num_steps, time_a),
                  _per(right.num_steps, time_b))  # fmt: skip
    yield _figure("busy", "time in steps", "share", _per(left.busy_ns / 1e9, time_a),
                  _per(right.busy_ns / 1e9, time_b))  # fmt: skip
    yield _figure("mixed_steps", "mixed steps", "share", _per(left.num_mixed, left.num_steps),
                  _per(right.num_mixed, right.num_steps))  # fmt: skip
    yield _figure(
        "budget_used", "budget used", "share",
        _per(left.budget_share_sum, left.num_budget_steps),
        _per(right.budget_share_sum, right.num_budget_steps),
    )  # fmt: skip
    yield _figure("waiting", "waiting", "", _per(left.num_waiting_sum, left.num_steps),
                  _per(right.num_waiting_sum, right.num_steps))  # fmt: skip
    kv_a, kv_b = left.num_kv_steps, right.num_kv_steps
    yield _figure("kv_used", "KV used", "share", _per(left.kv_share_sum, kv_a),
                  _per(right.kv_share_sum, kv_b))  # fmt: skip
    yield _figure("kv_peak", "KV peak", "share", left.kv_share_peak if kv_a else None,
                  right.kv_share_peak if kv_b else None)  # fmt: skip
    hit_a = _per(left.num_hit_tokens, left.num_queried_tokens)
    hit_b = _per(right.num_hit_tokens, right.num_queried_tokens)
    is_sure = differ(
        ratio(left.hits.slices(), left.queried.slices()),
        ratio(right.hits.slices(), right.queried.slices()),
    )
    yield _figure("prefix_hit_rate", "prefix hits", "share", hit_a, hit_b, "higher", is_sure)
    # One prompt that does not fit preempts several, and goes on doing so.
    is_sure = differ(_rate(left.preempted), _rate(right.preempted))
    yield _figure(
        "preemptions_per_min", "preemptions/min", "/min",
        _per(left.num_preempted, time_a / 60), _per(right.num_preempted, time_b / 60),
        "lower", is_sure,
    )  # fmt: skip
    yield _figure(
        "recomputed_share", "recomputed", "share",
        None if left.num_steps_without_rows else _per(left.num_recomputed_tokens,
                                                      left.num_prefill_tokens),
        None if right.num_steps_without_rows else _per(right.num_recomputed_tokens,
                                                       right.num_prefill_tokens),
        "lower", is_sure,
    )  # fmt: skip


def _rate(count: CountOverTime) -> Estimate | None:
    slices = count.slices()
    return ratio(slices, [1.0] * len(slices))


def _figure(
    key: str,
    label: str,
    unit: Unit,
    a: float | None,
    b: float | None,
    better: Better | None = None,
    is_sure: bool = False,
) -> Figure:
    # What is neither good nor bad has no share that is missing.
    is_share = unit == "share" and better is not None
    verdict = judged(a, b, better, is_sure, is_share=is_share)
    return Figure(key, label, unit, a, b, better, verdict)


def judged(
    a: float | None,
    b: float | None,
    better: Better | None,
    is_sure: bool,
    *,
    is_share: bool = False,
) -> Verdict:
    """Args: is_sure: the difference is hardly chance."""
    if a is None or b is None:
        return "unknown"
    if a == b or _is_within(a, b, ALIKE, is_share):
        return "alike"
    if better is None:
        return "differs"
    if not is_sure:
        return "alike" if _is_within(a, b, ALMOST, is_share) else "unclear"
    return "a" if (a < b) == (better == "lower") else "b"


def _is_within(a: float, b: float, share: float, is_share: bool) -> bool:
    if is_share and abs(a - b) > _ALIKE_SHARE:
        # 99 % and 97 % look alike as a ratio, and are three times as many that were late.
        missing_a, missing_b = 1 - a, 1 - b
        return abs(a - b) <= share * min(max(a, b), max(missing_a, missing_b))
    return abs(a - b) <= share * max(abs(a), abs(b)) or (is_share and abs(a - b) <= _ALIKE_SHARE)


def _per(part: float, whole: float) -> float | None:
    return part / whole if whole else None
