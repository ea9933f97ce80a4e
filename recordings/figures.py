"""`FIGURES`: the one table of all figures of a session.

All commands, screens, alerts and checks use its names.
`FigureBound`: a figure with a bound, as people write it: `itl_p99 > 50ms`. `figures_of`: all values
of a sum of steps and waits.
"""

import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple, TypeAlias, cast

from stepscope.recordings.session.sums import Sums, per, plus
from stepscope.recordings.state.distribution import SPREAD_RANKS, LatencySpread
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.latency_samples import KeptLevels
from stepscope.recordings.state.limits import LIMIT_SPECS, LIMITS

FigureUnit: TypeAlias = Literal["ms", "s", "share", "tokens/s", "/s", "/min", ""]
Better: TypeAlias = Literal["lower", "higher"]

KINDS: dict[LatencyKind, str] = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "served_ttft": "served TTFT",
    "served_itl": "served ITL",
    "step": "step time",
}
RANKS: dict[int, str] = {rank: f"p{rank}" for rank in SPREAD_RANKS} | {100: "max"}

_MEANINGS: dict[LatencyKind, str] = {
    "ttft": "time to first token: from a request's arrival to its first token",
    "itl": "inter-token latency: from one token of a request to its next",
    "tpot": "time per output token: a request's mean ITL, when it has finished",
    "e2e": "end to end: from a request's arrival to its last token",
    "served_ttft": "from HTTP to the first chunk that the front end had written, if it tells",
    "served_itl": "from one chunk of an answer to its next, as the front end wrote them",
    "step": "from the start of scheduling to the tokens of the step",
}


class FigureSpec(NamedTuple):
    name: str
    label: str
    unit: FigureUnit  # unit of its value. A "share" is 0 to 1 and shown in percent.
    better: Better | None  # whether higher or lower is better; None if neither
    meaning: str


def latency_name(kind: LatencyKind, rank: int) -> str:
    """Return the figure's name for a percentile of a latency. Rank 100 is the maximum."""
    return f"{kind}_{RANKS[rank]}"


_LATENCIES = [
    FigureSpec(latency_name(kind, rank), f"{label} {name}", "ms", "lower", _MEANINGS[kind])
    for kind, label in KINDS.items()
    for rank, name in RANKS.items()
]
_REST = [
    FigureSpec("ttft_within_slo", "TTFT within level", "share", "higher",
               "first tokens that came within the TTFT level"),
    FigureSpec("itl_within_slo", "ITL within level", "share", "higher",
               "next tokens that came within the ITL level"),
    FigureSpec("goodput", "goodput", "share", "higher",
               "finished requests that kept all their levels: the first token in time, then each "
               "next one; of those seen from arrival to end"),
    FigureSpec("goodput_per_s", "goodput/s", "/s", "higher",
               "requests a second that finished and kept all their levels"),
    FigureSpec("finished_per_s", "finished/s", "/s", "higher", "requests a second that finished"),
    FigureSpec("finished", "finished", "", None, "requests that finished"),
    FigureSpec("arrived", "arrived", "", None, "requests that arrived"),
    FigureSpec("out_tokens_per_s", "output tokens/s", "tokens/s", "higher",
               "output tokens a second"),
    FigureSpec("in_tokens_per_s", "input tokens/s", "tokens/s", "higher",
               "prompt tokens a second, from the prefix cache or computed for the first time"),
    FigureSpec("prefix_hit_rate", "prefix hits", "share", "higher",
               "prompt tokens that came from the prefix cache, of those looked up in it"),
    FigureSpec("prefix_new", "prefix new", "share", None,
               "prompt tokens looked up that no remembered prompt had"),
    FigureSpec("prefix_diverged", "prefix diverged", "share", None,
               "prompt tokens after the place where the prompt departs from a remembered one"),
    FigureSpec("prefix_evicted", "prefix evicted", "share", "lower",
               "prompt tokens looked up that the cache had evicted"),
    FigureSpec("prefix_hit_rate_1_5x", "prefix hits, 1.5x pool", "share", None,
               "prefix hits if the pool of KV blocks were 1.5 times as large"),
    FigureSpec("prefix_hit_rate_2x", "prefix hits, 2x pool", "share", None,
               "prefix hits if the pool of KV blocks were twice as large"),
    FigureSpec("prefix_thrash", "prefix thrash", "share", "lower",
               "computed prompt tokens that a pool twice as large would still have held"),
    FigureSpec("preemptions", "preemptions", "", "lower", "requests that lost their KV blocks"),
    FigureSpec("preemptions_per_min", "preemptions/min", "/min", "lower",
               "preemptions per minute"),
    FigureSpec("recomputed_share", "recomputed", "share", "lower",
               "prefill tokens that were computed again after a preemption"),
    FigureSpec("recompute_tax", "recompute tax", "share", "lower",
               "time in steps that went into tokens computed again after a preemption"),
    FigureSpec("evictions", "evictions", "", "lower",
               "blocks of the prefix cache that were given up"),
    FigureSpec("draft_acceptance", "drafts accepted", "share", "higher",
               "drafts of speculation that were right, of those checked"),
    FigureSpec("tokens_per_decode", "tokens/decode", "", "higher",
               "output tokens that a decoding request got in a step"),
    FigureSpec("waiting", "waiting", "", "lower", "requests in the queue, mean over steps"),
    FigureSpec("kv_used", "KV used", "share", None, "KV blocks in use, mean over steps"),
    FigureSpec("kv_peak", "KV peak", "share", None, "KV blocks in use at most"),
    FigureSpec("budget_used", "budget used", "share", None,
               "tokens computed, padding included, of the token budgets of all steps"),
    FigureSpec("mixed_steps", "mixed steps", "share", None,
               "steps that held prefill and decode"),
    FigureSpec("busy", "time in steps", "share", None, "time in which a step was under way"),
    FigureSpec("device_busy", "device busy", "share", None,
               "time in which the GPU ran the model, where that is measured"),
    *(
        FigureSpec(f"limit_{limit}", f"limit: {limit}", "share", None, spec.meaning)
        for limit, spec in LIMIT_SPECS.items()
    ),
    FigureSpec("rank_wait", "waited for a rank", "share", "lower",
               "time in steps that the ranks waited for the one with most to do"),
    FigureSpec("steps_per_s", "steps/s", "/s", None, "steps a second"),
    FigureSpec("steps", "steps", "", None, "steps"),
    FigureSpec("seconds", "seconds", "s", None,
               "engine time from the start of the first step to the end of the last"),
]  # fmt: skip

FIGURES: dict[str, FigureSpec] = {spec.name: spec for spec in [*_LATENCIES, *_REST]}


Relation: TypeAlias = Literal[">=", "<=", ">", "<", "="]
_HOLDS: dict[Relation, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq,
}  # fmt: skip

_HEAD = re.compile(r"\s*(\w*)\s*(>=|<=|[><=])?\s*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
# Unit of a figure -> suffix that may follow a number -> factor to convert it to the unit.
_SUFFIXES: dict[FigureUnit, dict[str, float]] = {
    "ms": {"ms": 1.0, "s": 1000.0, "us": 0.001, "": 1.0},
    "s": {"s": 1.0, "ms": 0.001, "": 1.0},
    "share": {"%": 0.01, "": 1.0},
    "tokens/s": {"": 1.0, "tokens/s": 1.0, "/s": 1.0},
    "/s": {"": 1.0, "/s": 1.0},
    "/min": {"": 1.0, "/min": 1.0},
    "": {"": 1.0},
}


class BoundError(Exception):
    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text!r}: {problem}")


class FigureBound(NamedTuple):
    figure: FigureSpec
    relation: Relation
    value: float  # in the unit of the figure
    end: int  # index of the character after the bound in the text, where other parsers may continue

    def holds(self, measured: float) -> bool:
        """Whether a measured value makes the bound true: `itl_p99 > 50ms` holds for 60."""
        return _HOLDS[self.relation](measured, self.value)


def parse_bound(
    text: str, *, is_whole: bool = True, figures: Mapping[str, FigureSpec] = FIGURES
) -> FigureBound:
    """Read `itl_p99 > 50ms`, `itl_p99=50ms`, `goodput < 95%`, `ttft_p95 >= 1.5s`, `preemptions=0`.

    A latency without a unit is in milliseconds; a share is 0.95 or 95%.

    `is_whole`: whether nothing may follow the bound.

    Raises BoundError: the text is invalid; the message tells what was expected.
    """
    head = _HEAD.match(text)
    assert head is not None  # it also matches the empty string
    name, relation = head[1], cast(Relation | None, head[2])
    figure = figures.get(name)
    if figure is None:
        near = ", ".join(get_close_matches(name, figures, n=3) or ["itl_p99", "goodput"])
        known = f"no figure is called {name}; there is {near}"
        raise BoundError(text, known if name else "expected the name of a figure, like itl_p99")
    if relation is None:
        raise BoundError(text, f"after {name}, expected one of > >= < <= =")
    number = _NUMBER.match(text, head.end())
    if number is None:
        raise BoundError(text, f"after {relation}, expected a number")
    factors = _SUFFIXES[figure.unit]
    for unit in sorted(factors, key=len, reverse=True):
        found = re.compile(rf"\s*{re.escape(unit)}(?![\w%/])").match(text, number.end())
        if found is not None:
            break
    else:
        units = " or ".join(each for each in factors if each) or "no unit"
        raise BoundError(text, f"{name} takes {units}, got {text[number.end() :].strip()}")
    value = float(number[0]) * factors[unit]
    if figure.unit == "share" and not unit and value > 1:
        raise BoundError(text, f"{name} is a share: write {value:g}% or a number up to 1")
    if is_whole and (rest := text[found.end() :].strip()):
        raise BoundError(text, f"nothing may follow the value, got {rest!r}")
    return FigureBound(figure, relation, value, found.end())


def value_text(figure: FigureSpec, value: float | None) -> str:
    """Return a figure's value as shown to people; a dash for None."""
    if value is None:
        return "—"
    if figure.unit == "share":
        return f"{value * 100:.4g} %"
    if figure.unit == "" and value == round(value):
        return f"{value:,.0f}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {figure.unit}".replace(" /", "/").strip()


Figures = Mapping[str, float | None]  # by name, each in its unit of the table; None is unknown


def figures_of(
    sums: Sums, spreads: Mapping[LatencyKind, LatencySpread], kept: KeptLevels
) -> dict[str, float | None]:
    """Return name -> value of each figure in `FIGURES`; None if unknown or without samples.

    `kept`: of the requests that finished in the steps, how many kept their levels.
    """
    if not sums.num_records:
        return dict.fromkeys(FIGURES) | {"steps": 0, "seconds": 0.0}
    found: dict[str, float | None] = {}
    for kind in KINDS:
        spread = spreads[kind]
        for rank in RANKS:
            ns = spread.at_ns.get(rank)
            found[latency_name(kind, rank)] = None if ns is None else ns / 1e6
    seconds, known = sums.seconds, sums.num_known_limits
    queried, hit = sums.num_queried_tokens, sums.num_hit_tokens
    new, diverged, evicted = sums.num_new_tokens, sums.num_diverged_tokens, sums.num_evicted_tokens
    # Requests of which none could be judged may have kept their levels.
    has_kept = kept.num_judged > 0 or sums.num_finished == 0
    return found | {
        "ttft_within_slo": spreads["ttft"].within_slo,
        "itl_within_slo": spreads["itl"].within_slo,
        "goodput": kept.share,
        "goodput_per_s": per(kept.num_kept, seconds) if has_kept else None,
        "finished_per_s": per(sums.num_finished, seconds),
        "finished": sums.num_finished,
        "arrived": sums.num_arrived,
        "out_tokens_per_s": sums.out_tokens_per_s,
        "in_tokens_per_s": per(sums.num_in_tokens, seconds),
        "prefix_hit_rate": sums.prefix_hit_rate,
        "prefix_new": per(new, queried),
        "prefix_diverged": per(diverged, queried),
        "prefix_evicted": per(evicted, queried),
        "prefix_hit_rate_1_5x": per(plus(hit, sums.num_more_hits_1_5x), queried),
        "prefix_hit_rate_2x": per(plus(hit, sums.num_more_hits_2x), queried),
        "prefix_thrash": per(sums.num_more_hits_2x, plus(new, diverged, evicted)),
        "preemptions": sums.num_preempted,
        "preemptions_per_min": per(sums.num_preempted, seconds / 60),
        "recomputed_share": per(sums.num_recomputed_tokens, sums.num_prefill_tokens),
        "recompute_tax": per(sums.recompute_ns, sums.busy_ns),
        "evictions": sums.num_evicted,
        "draft_acceptance": per(sums.num_accepted_tokens, sums.num_drafted_tokens),
        "tokens_per_decode": None
        if sums.num_accepted_tokens is None
        else per((sums.num_decode_rows or 0) + sums.num_accepted_tokens, sums.num_decode_rows),
        "waiting": per(sums.num_waiting, sums.num_records),
        "kv_used": sums.kv_used,
        "kv_peak": sums.kv_peak,
        "budget_used": sums.budget_used,
        "mixed_steps": per(sums.num_mixed, sums.num_steps),
        **{
            f"limit_{limit}": per(number, known)
            for limit, number in zip(LIMITS, sums.num_limited, strict=True)
        },
        "rank_wait": sums.rank_wait,
        "busy": per(sums.busy_ns, seconds * 1e9),
        "device_busy": per(sums.device_ns, seconds * 1e9),
        "steps_per_s": sums.steps_per_s,
        "steps": sums.num_steps,
        "seconds": seconds,
    }
