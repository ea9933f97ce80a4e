"""Advice on which knobs to change: a table of rules, each with evidence from the records.

A rule applies if many steps had the same limit (such as the token budget) while another resource
was free. It does not predict the effect of the change; `stepscope compare` shows that afterwards.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.history.history_view import HistoryView
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.series.limits import Limit
from stepscope.recordings.state.session import SessionState

_WINDOW_S = 60.0
_MOST_LATE_STEPS = 256  # that are looked at


class RecentRun:
    """The minute up to the step of a state. Implements `Run`."""

    def __init__(self, history: HistoryView, state: SessionState) -> None:
        self.slo = history.slo
        self._history = history
        self._end_ns = state.time_ns
        self._start_ns = state.time_ns - round(_WINDOW_S * 1e9)
        changed = {
            name
            for each in history.knob_changes
            if self._start_ns < each.time_ns <= self._end_ns
            for name in each.new
        }
        self.knob_values: Mapping[str, list[KnobValue]] = {
            name: [value] for name, value in state.knobs.items() if name not in changed
        }

    @property
    def limited(self) -> Mapping[Limit, Sums]:
        return self._history.windows.limited(self._end_ns, _WINDOW_S)

    @property
    def share_late_beside_prefill(self) -> float:
        """See `Side`; of a minute with very many late tokens, only the last of them count."""
        history, num_late = self._history, 0
        for each in history.windows.breaches(history.step_at(self._end_ns), _MOST_LATE_STEPS):
            if each.kind == "ITL" and each.time_ns > self._start_ns:
                late = history.stall(each.step)
                is_beside = late is not None and late.main and late.main.cause == "prefill"
                num_late += each.num_tokens if is_beside else 0
        return num_late / max(1, history.windows.latency(self._end_ns).itl.num_samples)

    def figures(self) -> dict[str, float | None]:
        return self._history.windows.figures(self._end_ns, _WINDOW_S)


MIN_STEPS = 100  # with fewer steps there is no advice
MIN_SHARE = 0.3  # least share of steps that a limit must have held
MIN_LATE_SHARE = 0.002  # of gaps: one late gap in a few hundred spoils a request
_HALF = 0.5
_FULL_KV = 0.8


class Advice(NamedTuple):
    limit: Limit
    evidence: str
    text: str


class _Evidence(NamedTuple):
    share: float  # share of the steps that this limit held
    steps: Sums  # over these steps
    figures: Mapping[str, float | None]
    knobs: Mapping[str, KnobValue]
    itl_ms: float  # the service level
    share_late: Callable[[], float]  # of gaps between tokens: late mainly due to prompts of others


class Run(Protocol):
    """What advice rests on: `Side` or `FileRun`.

    Attributes:
        limited: for each limit, the sums over the steps that had it.
        knob_values: the values of each knob in force during the run, in order.
    """

    slo: SLO

    @property
    def limited(self) -> Mapping[Limit, Sums]: ...

    @property
    def knob_values(self) -> Mapping[str, list[KnobValue]]: ...

    @property
    def share_late_beside_prefill(self) -> float: ...

    def figures(self) -> dict[str, float | None]: ...


def advice(side: Run) -> list[Advice]:
    """Advice from the records of a run, for the most frequent limit first."""
    limited = side.limited
    known = sum(each.num_records for each in limited.values())
    if known < MIN_STEPS:
        return []
    figures = side.figures()
    knobs = {name: values[-1] for name, values in side.knob_values.items() if len(values) == 1}
    found: list[tuple[float, Advice]] = []
    for limit, steps in limited.items():
        share = steps.num_records / known
        if share < MIN_SHARE or limit not in _RULES:
            continue
        said = _RULES[limit](
            _Evidence(
                share,
                steps,
                figures,
                knobs,
                side.slo.itl_ms,
                lambda: side.share_late_beside_prefill,
            )
        )
        if said is not None:
            found.append((share, Advice(limit, *said)))
    return [each for _, each in sorted(found, key=lambda each: -each[0])]


def _seats(seen: _Evidence) -> tuple[str, str] | None:
    kv_used, free = seen.steps.kv_used, _free_budget(seen)
    if free is None or kv_used is None or kv_used > _FULL_KV:
        return None
    evidence = f"seats limited {seen.share:.0%} of the steps, while {free}"
    return f"{evidence} and {1 - kv_used:.0%} of the KV blocks were free", "raise max_num_seqs"


def _free_budget(seen: _Evidence) -> str | None:
    """Say how much of the token budget was free; None if it was less than half."""
    used = seen.steps.budget_used
    return None if used is None or used > _HALF else f"{1 - used:.0%} of their token budget"


def _budget(seen: _Evidence) -> tuple[str, str] | None:
    late = _late_for_short_gaps(seen)
    evidence = f"the token budget limited {seen.share:.0%} of the steps, {late}"
    return None if late is None else (evidence, "raise max_num_batched_tokens")


def _cadence(seen: _Evidence) -> tuple[str, str] | None:
    late = _late_for_short_gaps(seen)
    evidence = f"{seen.share:.0%} of the steps were kept free of prefills, {late}"
    return None if late is None else (evidence, "lower prefill_schedule_interval")


def _late_for_short_gaps(seen: _Evidence) -> str | None:
    """Say that first tokens are late while gaps could be longer; None if it is not so."""
    itl, ttft = seen.figures["itl_p99"], seen.figures["ttft_within_slo"]
    if itl is None or ttft is None or itl > seen.itl_ms * _HALF or ttft >= 0.95:
        return None
    late = f"{1 - ttft:.0%} of the first tokens were late"
    return f"{late}, and p99 ITL was {itl:.3g} of {seen.itl_ms:g} ms"


def _kv(seen: _Evidence) -> tuple[str, str] | None:
    kv_used, preemptions = seen.steps.kv_used, seen.figures["preemptions"]
    if kv_used is None:
        return None
    evidence = f"KV blocks limited {seen.share:.0%} of the steps, with {kv_used:.0%} of them in use"
    recomputed = seen.figures["recomputed_share"] or 0.0
    if preemptions and recomputed >= 0.05 and seen.knobs.get("reserve") in ("none", "prompt"):
        return (
            f"{evidence}, and {recomputed:.0%} of the prefill was computed again after "
            f"{preemptions:,.0f} preemptions",
            "set reserve=output, or give the KV cache more memory (--kv-memory)",
        )
    if kv_used < _FULL_KV:
        reserve = seen.knobs.get("reserve")
        if reserve != "output":
            return None
        return evidence + ", the rest reserved for output to come", "set reserve=prompt"
    return evidence, "give the KV cache more memory (--kv-memory)"


def _mode(seen: _Evidence) -> tuple[str, str] | None:
    mode = seen.knobs.get("batching")
    if mode is None or mode == "chunked":
        return None
    return f"batching={mode} limited {seen.share:.0%} of the steps", "set batching=chunked"


def _threshold(seen: _Evidence) -> tuple[str, str] | None:
    threshold, free = seen.knobs.get("long_prefill_token_threshold"), _free_budget(seen)
    itl = seen.figures["itl_p99"]
    if not threshold or free is None or itl is None or itl > seen.itl_ms:
        return None  # longer chunks make gaps longer
    what = f"long_prefill_token_threshold={threshold} limited {seen.share:.0%} of the steps"
    return f"{what}, while {free} was free", "raise long_prefill_token_threshold"


def _lora(seen: _Evidence) -> tuple[str, str] | None:
    if (free := _free_budget(seen)) is None:
        return None
    what = f"requests waited for a LoRA slot in {seen.share:.0%} of the steps"
    return f"{what}, while {free} was free", "start the engine with a larger max_loras"


def _work(seen: _Evidence) -> tuple[str, str] | None:
    is_whole = seen.knobs.get("enable_chunked_prefill") is False
    if not is_whole or (share_late := seen.share_late()) < MIN_LATE_SHARE:
        return None
    return (
        f"prompts were prefilled whole, and {share_late:.1%} of the gaps between tokens were "
        "late beside them",
        "set enable_chunked_prefill=true max_num_batched_tokens=256",
    )


_RULES: Mapping[Limit, Callable[[_Evidence], tuple[str, str] | None]] = {
    "seats": _seats, "budget": _budget, "kv": _kv, "mode": _mode, "threshold": _threshold,
    "lora": _lora, "cadence": _cadence, "work": _work,
}  # fmt: skip
