"""`FIGURES`: the one table of all figures of a session.

All commands, screens, alerts and checks use its names.
"""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.state.series.distribution import SPREAD_RANKS
from stepscope.recordings.state.series.latency import LatencyKind
from stepscope.recordings.state.series.limits import LIMIT_SPECS

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
