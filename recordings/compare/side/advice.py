"""Advice on which knobs to change: a table of rules, each with evidence from the records.

A rule applies if many steps had the same limit (such as the token budget) while another resource
was free. It does not predict the effect of the change; `stepscope compare` shows that afterwards.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.series.limits import Limit

MIN_STEPS = 100  # with fewer steps there is no advice
MIN_SHARE = 0.3  # least share of steps that a limit must have held
MIN_LATE_SHARE = 0.002  # of gaps: one late gap in a few hundred spoils a request
_HALF = 0.5
_FULL_KV = 0.8


class Advice(NamedTuple):
    """Which knob to change and how, and the evidence for it."""

    limit: Limit
    evidence: str
    text: str


class _Evidence(NamedTuple):
    """What a rule of `advice` looks at: the steps with its limit, and the figures of the run."""

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
    budget_used, kv_used = seen.steps.budget_used, seen.steps.kv_used
    if budget_used is None or budget_used > _HALF or kv_used is None or kv_used > _FULL_KV:
        return None
    return (
        f"seats limited {seen.share:.0%} of the steps, while {1 - budget_used:.0%} of their token "
        f"budget and {1 - kv_used:.0%} of the KV blocks were free",
        "raise max_num_seqs",
    )


def _budget(seen: _Evidence) -> tuple[str, str] | None:
    itl, ttft = seen.figures["itl_p99"], seen.figures["ttft_within_slo"]
    if itl is None or ttft is None:
        return None
    if itl > seen.itl_ms:
        return None  # a larger budget makes gaps longer
    if ttft >= 0.95 or itl > seen.itl_ms * _HALF:
        return None
    return (
        f"the token budget limited {seen.share:.0%} of the steps, {1 - ttft:.0%} of the first "
        f"tokens were late, and p99 ITL was {itl:.3g} of {seen.itl_ms:g} ms",
        "raise max_num_batched_tokens",
    )


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
    threshold, budget_used = seen.knobs.get("long_prefill_token_threshold"), seen.steps.budget_used
    if not threshold or budget_used is None or budget_used > _HALF:
        return None
    itl = seen.figures["itl_p99"]
    if itl is None or itl > seen.itl_ms:
        return None  # longer chunks make gaps longer
    return (
        f"long_prefill_token_threshold={threshold} limited {seen.share:.0%} of the steps, while "
        f"{1 - budget_used:.0%} of their token budget was free",
        "raise long_prefill_token_threshold",
    )


def _cadence(seen: _Evidence) -> tuple[str, str] | None:
    itl, ttft = seen.figures["itl_p99"], seen.figures["ttft_within_slo"]
    if itl is None or ttft is None or itl > seen.itl_ms * _HALF or ttft >= 0.95:
        return None  # prefills in more steps make gaps longer
    return (
        f"{seen.share:.0%} of the steps were kept free of prefills, {1 - ttft:.0%} of the first "
        f"tokens were late, and p99 ITL was {itl:.3g} of {seen.itl_ms:g} ms",
        "lower prefill_schedule_interval",
    )


def _lora(seen: _Evidence) -> tuple[str, str] | None:
    budget_used = seen.steps.budget_used
    if budget_used is None or budget_used > _HALF:
        return None
    return (
        f"requests waited for a LoRA slot in {seen.share:.0%} of the steps, while "
        f"{1 - budget_used:.0%} of their token budget was free",
        "start the engine with a larger max_loras",
    )


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
    "seats": _seats,
    "budget": _budget,
    "kv": _kv,
    "mode": _mode,
    "threshold": _threshold,
    "lora": _lora,
    "cadence": _cadence,
    "work": _work,
}
