"""Advice on which knobs to change: a table of rules, with evidence from the records.

A rule applies if many steps had the same limit (such as the token budget) while another resource
was free. It does not predict the effect of the change; `stepscope compare` shows that afterwards.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.history.history_view import HistoryView
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import LIMIT_SPECS, Limit
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
_MORE_KV = "give the KV cache more memory (--kv-memory)"


class Advice(NamedTuple):
    limit: Limit
    evidence: str
    text: str


class Run(Protocol):
    """What advice rests on: `Side`, `FileRun` or `RecentRun`."""

    slo: SLO

    @property
    def limited(self) -> Mapping[Limit, Sums]: ...  # by limit, over the steps that had it

    @property
    def knob_values(self) -> Mapping[str, list[KnobValue]]: ...  # in force, in order

    @property
    def share_late_beside_prefill(self) -> float: ...

    def figures(self) -> dict[str, float | None]: ...


class _Looked(NamedTuple):
    run: Run
    steps: Sums  # that had the limit
    figures: Mapping[str, float | None]
    knobs: Mapping[str, KnobValue]

    @property
    def has_budget(self) -> bool:
        used = self.steps.budget_used
        return used is not None and used <= _HALF

    @property
    def is_kv_full(self) -> bool:
        used = self.steps.kv_used
        return used is None or used > _FULL_KV

    def keeps_itl(self, share: float) -> bool:
        """Whether p99 ITL is within this share of its level."""
        itl_ms = self.figures["itl_p99"]
        return itl_ms is not None and itl_ms <= share * self.run.slo.itl_ms

    @property
    def could_take_more(self) -> bool:
        """Whether first tokens are late while gaps could be longer."""
        ttft = self.figures["ttft_within_slo"]
        return ttft is not None and ttft < 0.95 and self.keeps_itl(_HALF)


def advice(side: Run) -> list[Advice]:
    """Advice from the records of a run, for the most frequent limit first."""
    limited = side.limited
    known = sum(each.num_records for each in limited.values())
    if known < MIN_STEPS:
        return []
    knobs = {name: values[-1] for name, values in side.knob_values.items() if len(values) == 1}
    figures, found = side.figures(), []
    for limit, steps in sorted(limited.items(), key=lambda each: -each[1].num_records):
        looked, share = _Looked(side, steps, figures, knobs), steps.num_records / known
        if share >= MIN_SHARE and limit in _RULES and (text := _RULES[limit](looked)):
            found.append(Advice(limit, _evidence(limit, share, looked), text))
    return found


def _evidence(limit: Limit, share: float, looked: _Looked) -> str:
    if limit == "work":
        late = looked.run.share_late_beside_prefill
        return f"prompts were prefilled whole, and {late:.1%} of the gaps were late beside them"
    figures, ttft = looked.figures, looked.figures["ttft_within_slo"]
    facts = {
        "token budget {:.0%} full": looked.steps.budget_used,
        "KV cache {:.0%} full": looked.steps.kv_used,
        "{:.0%} of first tokens late": None if ttft is None else 1 - ttft,
        "{:.0%} of prefill repeated": figures["recomputed_share"] or None,
    }
    told = [fact.format(value) for fact, value in facts.items() if value is not None]
    if figures["itl_p99"] is not None:
        told.append(f"p99 ITL {figures['itl_p99']:.3g} of {looked.run.slo.itl_ms:g} ms")
    words = LIMIT_SPECS[limit].words
    return f"{words} limited {share:.0%} of the steps: {', '.join(told)}"


def _kv(looked: _Looked) -> str | None:
    figures, reserve = looked.figures, looked.knobs.get("reserve")
    is_taxed = bool(figures["preemptions"]) and (figures["recomputed_share"] or 0.0) >= 0.05
    if is_taxed and reserve in ("none", "prompt"):
        return f"set reserve=output, or {_MORE_KV}"
    if looked.is_kv_full:
        return None if looked.steps.kv_used is None else _MORE_KV
    return "set reserve=prompt" if reserve == "output" else None


def _threshold(looked: _Looked) -> str | None:
    name = "long_prefill_token_threshold"  # longer chunks make gaps longer
    is_free = looked.knobs.get(name) and looked.has_budget and looked.keeps_itl(1.0)
    return f"raise {name}" if is_free else None


def _work(looked: _Looked) -> str | None:
    is_whole = looked.knobs.get("enable_chunked_prefill") is False
    if not is_whole or looked.run.share_late_beside_prefill < MIN_LATE_SHARE:
        return None
    return "set enable_chunked_prefill=true max_num_batched_tokens=256"


_RULES: Mapping[Limit, Callable[[_Looked], str | None]] = {
    "seats": lambda each: "raise max_num_seqs" if each.has_budget and not each.is_kv_full else None,
    "budget": lambda each: "raise max_num_batched_tokens" if each.could_take_more else None,
    "cadence": lambda each: "lower prefill_schedule_interval" if each.could_take_more else None,
    "kv": _kv,
    "mode": lambda each: (
        "set batching=chunked" if each.knobs.get("batching", "chunked") != "chunked" else None
    ),
    "threshold": _threshold,
    "lora": lambda each: "start the engine with a larger max_loras" if each.has_budget else None,
    "work": _work,
}
