"""`Sums`: what adds up over the steps of a session, or of any part of it.

Sums of neighbouring parts add up to those of the whole. So a session of any length is summed up in
little memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Self

from stepscope.recordings.session.steps import COLUMNS, PPM, UNKNOWN, StepTable
from stepscope.recordings.state.lazy_numpy import Ints, np
from stepscope.recordings.state.limits import LIMITS, Limit
from stepscope.recordings.state.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over steps. None is unknown, because it is so of some of the steps.

    Attributes:
        num_records: rows of the table: steps, or intervals of which the engine tells totals alone.
        num_limited: steps with each of `LIMITS`; steps whose limit is unknown are left out.
    """

    span_ns: int = 0  # the time that the steps span, and what lies between them
    num_records: int = 0
    num_steps: int | None = 0
    num_arrived: int | None = 0
    num_finished: int | None = 0
    num_preempted: int | None = 0
    num_in_tokens: int | None = 0
    num_output_tokens: int | None = 0
    num_queried_tokens: int | None = 0
    num_hit_tokens: int | None = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_padded_tokens: int = 0  # where it is unknown, there is none
    num_recomputed_tokens: int | None = 0
    num_decode_rows: int | None = 0
    num_drafted_tokens: int | None = 0
    num_accepted_tokens: int | None = 0
    num_evicted_tokens: int | None = 0
    num_diverged_tokens: int | None = 0
    num_more_hits_1_5x: int | None = 0
    num_more_hits_2x: int | None = 0
    num_waiting: int | None = 0  # summed up over steps, as are KV blocks and budgets
    num_evicted: int | None = 0
    num_kv_used: int | None = 0
    num_kv_blocks: int | None = 0
    kv_peak: float | None = 0.0  # the largest share of the KV cache in use
    num_budget_tokens: int | None = 0
    num_mixed: int | None = 0
    busy_ns: int | None = 0
    model_ns: int | None = 0  # from the launch of the model to its tokens
    device_ns: int | None = 0  # in which a device ran the model
    schedule_ns: int | None = 0
    recompute_ns: int | None = 0  # the part of `busy_ns` that went into tokens computed again
    ranked_ns: int = 0  # time in steps whose ranks are known
    rank_waits_ns: tuple[int, ...] = ()  # of that, how long the others waited for each rank
    num_limited: tuple[int, ...] = (0,) * len(LIMITS)

    def __add__(self, other: Self) -> "Sums":
        both = {name: (getattr(self, name), getattr(other, name)) for name in _ADDED}
        added: dict[str, Any] = {
            name: None if None in parts else sum(parts) for name, parts in both.items()
        }
        is_known = self.kv_peak is not None and other.kv_peak is not None
        added["kv_peak"] = max(self.kv_peak or 0.0, other.kv_peak or 0.0) if is_known else None
        for name in ("num_limited", "rank_waits_ns"):
            parts = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            added[name] = tuple(map(sum, parts))
        return Sums(**added)

    @property
    def seconds(self) -> float:
        return self.span_ns / 1e9

    @property
    def num_spent_tokens(self) -> int:
        """What the steps took from their token budgets, padding included."""
        return self.num_prefill_tokens + self.num_decode_tokens + self.num_padded_tokens

    @property
    def steps_per_s(self) -> float | None:
        return per(self.num_steps, self.seconds)

    @property
    def out_tokens_per_s(self) -> float | None:
        return per(self.num_output_tokens, self.seconds)

    @property
    def evictions_per_s(self) -> float | None:
        return per(self.num_evicted, self.seconds)

    @property
    def prefix_hit_rate(self) -> float | None:
        return per(self.num_hit_tokens, self.num_queried_tokens)

    @property
    def rank_wait(self) -> float | None:
        return per(sum(self.rank_waits_ns), self.ranked_ns)

    @property
    def budget_used(self) -> float | None:
        return per(self.num_spent_tokens, self.num_budget_tokens)

    @property
    def kv_used(self) -> float | None:
        return per(self.num_kv_used, self.num_kv_blocks)

    @property
    def num_new_tokens(self) -> int | None:
        """Prompt tokens that were neither hit nor evicted, and have not diverged."""
        rest = plus(self.num_hit_tokens, self.num_evicted_tokens, self.num_diverged_tokens)
        queried = self.num_queried_tokens
        return None if queried is None or rest is None else queried - rest

    @property
    def num_known_limits(self) -> int:
        return sum(self.num_limited)

    @property
    def limits(self) -> dict[Limit, float]:
        """For each limit that held, the share of the steps that had it."""
        known = self.num_known_limits
        return {limit: n / known for limit, n in zip(LIMITS, self.num_limited, strict=True) if n}


_MOST_RANKS = 4_096
_OTHERS = ("num_limited", "kv_peak", "rank_waits_ns")
_ADDED = tuple(field.name for field in fields(Sums) if field.name not in _OTHERS)
# Those that are the sum of a column of the table, unknown if it is so of one step.
_TOTALS = tuple(name for name in COLUMNS if name in _ADDED and name != "num_padded_tokens")


def per(part: float | None, whole: float | None) -> float | None:
    """Return `part / whole`; None if one of them is unknown or `whole` is 0."""
    return None if part is None or not whole else part / whole


def plus(*parts: int | None) -> int | None:
    """Return the sum; None if one of `parts` is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def sums_between(outcome: Outcome | None) -> Sums:
    """What happened to requests since the last step, which no row tells yet."""
    if outcome is None:
        return Sums()
    return Sums(
        num_arrived=outcome.num_arrived,
        num_finished=outcome.num_finished,
        num_preempted=outcome.num_preempted,
    )


def sums_in(table: StepTable, start_ns: int, end_ns: int) -> Sums:
    """The sums over the steps that ended in (start_ns, end_ns], over that time.

    The oldest step in memory counts as a whole, and no time before it.
    """
    first, last = table.places(start_ns, end_ns)
    if first >= last:
        return Sums()
    since_ns = start_ns if first else table.column("schedule_start_ns")[0]
    return replace(sums_of(table, first, last), span_ns=max(0, end_ns - since_ns))


def sums_of(table: StepTable, first: int, last: int) -> Sums:
    """The sums over the steps in the places [first, last), from the begin of the first one."""
    return _Rows(table, slice(first, last)).sums() if first < last else Sums()


def limited_sums(table: StepTable, first: int = 0, last: int | None = None) -> Mapping[Limit, Sums]:
    """For each limit, the sums over the steps in [first, last) that had it; they span no time."""
    limits = table.values("limit")[first:last]
    found = {}
    for code, limit in enumerate(LIMITS):
        if (limits == code).any():
            rows = first + np.flatnonzero(limits == code)
            found[limit] = replace(_Rows(table, rows).sums(), span_ns=0)
    return found


class _Rows:
    """Some rows of a table, at least one."""

    def __init__(self, table: StepTable, chosen: slice | Ints) -> None:
        self._table = table
        self._chosen = chosen
        # Else a row is no step, and has no duration.
        self._is_stepwise = bool((self.values("num_steps") == 1).all())

    def values(self, name: str) -> Ints:
        return self._table.values(name)[self._chosen]

    def total(self, name: str) -> int | None:
        """Sum of a column; None if any value is unknown."""
        values = self.values(name)
        return None if values.min() == UNKNOWN else _sum(values)

    def spent_ns(self, begin: str, end: str) -> int | None:
        """Time between two moments of each step; None if unknown."""
        starts, ends = self.values(begin), self.values(end)
        if not self._is_stepwise or UNKNOWN in (starts.min(), ends.min()):
            return None
        return _sum(np.maximum(ends - starts, 0))

    def sums(self) -> Sums:
        starts, ends = self.values("schedule_start_ns"), self.values("tokens_ns")
        prefill, decode = self.values("num_prefill_tokens"), self.values("num_decode_tokens")
        limits = self.values("limit")
        used, num_blocks, peak = self._kv()
        rank, waited_ns = self.values("waited_rank"), self.values("rank_wait_ns")
        is_ranked = (rank >= 0) & (rank < _MOST_RANKS)
        waits_ns = np.bincount(rank[is_ranked], waited_ns[is_ranked])
        totals: dict[str, Any] = {name: self.total(name) for name in _TOTALS}
        return Sums(
            **totals,
            span_ns=int(ends[-1] - starts[0]),
            num_records=len(starts),
            num_padded_tokens=_sum(np.maximum(self.values("num_padded_tokens"), 0)),
            num_kv_used=used,
            num_kv_blocks=num_blocks,
            kv_peak=peak,
            num_budget_tokens=self.total("token_budget"),
            num_mixed=int(((prefill > 0) & (decode > 0)).sum()) if self._is_stepwise else None,
            busy_ns=self.spent_ns("schedule_start_ns", "tokens_ns"),
            model_ns=self.spent_ns("launch_ns", "tokens_ns"),
            schedule_ns=self.spent_ns("schedule_start_ns", "schedule_end_ns"),
            recompute_ns=self._recompute_ns(),
            ranked_ns=_sum(np.where(is_ranked, np.maximum(ends - starts, 0), 0)),
            rank_waits_ns=tuple(waits_ns.astype(int).tolist()),
            num_limited=tuple(np.bincount(limits[limits >= 0], minlength=len(LIMITS)).tolist()),
        )

    def _kv(self) -> tuple[int | None, int | None, float | None]:
        """KV blocks in use and in all, summed up over steps, and the largest share in use."""
        used, ppm = self.values("kv_used"), self.values("kv_used_ppm")
        if ppm.min() != UNKNOWN:  # the engine tells shares alone
            return _sum(ppm), PPM * len(ppm), int(ppm.max()) / PPM
        num_blocks = used + self.values("kv_cached") + self.values("kv_empty")
        if used.min() == UNKNOWN or num_blocks.min() <= 0:
            return None, None, None
        return _sum(used), _sum(num_blocks), float(np.max(used / num_blocks))

    def _recompute_ns(self) -> int | None:
        """Time that went into tokens computed again; a step's time is shared among its tokens."""
        again = self.values("num_recomputed_tokens")
        if again.min() == UNKNOWN:
            return None
        chosen = again > 0
        names = ("num_prefill_tokens", "num_decode_tokens", "schedule_start_ns", "tokens_ns")
        columns = [again, *(self.values(name) for name in names)]
        rows = zip(*(column[chosen].tolist() for column in columns), strict=True)
        return sum(int(a * max(0, end - start) // (p + d)) for a, p, d, start, end in rows)


def _sum(values: Ints) -> int:
    if int(values.max()) < (1 << 62) // len(values):
        return int(values.sum())
    return sum(values.tolist())  # absurd but valid numbers would not fit into 64 bits
