"""The words and glyphs on the screen and what they mean: one table for `?` and docs/glossary.md."""

from collections.abc import Mapping
from typing import TypeAlias

from stepscope.recordings.attribution.causes import WORDS
from stepscope.tui.views.theme import CAUSE_GLYPHS, KV_LEGEND, LEGEND

Meaning: TypeAlias = tuple[str, str, str]  # a glyph, its style, and what it stands for

TERMS: Mapping[str, str] = {
    "TTFT":
        "time to first token: from the arrival of a request to its first token. Queueing and "
        "prefill are part of it.",
    "ITL": "inter-token latency: the time between two tokens of one request.",
    "TPOT":
        "time per output token: the mean ITL of one finished request, that is (E2E - TTFT) / "
        "(output tokens - 1).",
    "E2E": "end-to-end latency: from the arrival of a request to its last token.",
    "service level":
        "the bounds an operator promises: a longest TTFT and a longest ITL. Key b sets them. A "
        "latency above its bound is a breach (!).",
    "goodput":
        "requests a second that finished and kept every service level, or their share of all that"
        " finished. Throughput counts the others too.",
    "step":
        "one forward pass of the model. It computes prefill tokens of some requests and one "
        "decode token each of others.",
    "prefill": "computing the tokens of a prompt and storing their keys and values.",
    "decode": "computing the next output token of a request; one token a step.",
    "mixed step": "a step that prefills and decodes. Its decodes wait for its prefill.",
    "chunk":
        "the part of a prompt that one step prefills. Chunked prefill cuts a long prompt into "
        "several, so that decodes need not wait for all of it.",
    "budget":
        "max_num_batched_tokens: the most tokens that one step may compute. A lower budget means "
        "shorter steps, hence lower ITL and higher TTFT.",
    "knee":
        "the tokens from which on a step is bound by compute. With fewer it takes as long, "
        "because it reads all weights: a lower budget wastes the device, a far higher one gains "
        "little.",
    "CUDA graph":
        "the kernels of a step, recorded once and launched as one. A step of more tokens than the "
        "largest graph has its kernels launched one by one.",
    "seats": "max_num_seqs: how many requests may run at a time. The others wait.",
    "KV block":
        "a fixed number of token slots (16 by default) in the memory of keys and values. A "
        "request takes blocks as its context grows.",
    "prefix hit":
        "prompt tokens whose KV blocks another request left in the cache. They are not computed "
        "again. The hit rate is their share of all prompt tokens.",
    "preemption":
        "the engine takes back the KV blocks of a running request, because others need them. The "
        "request waits until there is room again.",
    "recompute":
        "the prefill a preempted request repeats, over its prompt and the output it had, before "
        "it decodes again. The recompute tax is its share of the time in steps.",
    "held up":
        "a step that took several times as long as others with the same work: the machine or the "
        "engine was busy with something else.",
    "rank":
        "a worker of an engine that several devices share: it computes a part of each layer (tp) "
        "or some of the layers (pp, a pipeline stage). The others wait for the slowest.",
    "stall": "a token that came later than the ITL of the service level allows.",
    "overlap":
        "the next step is launched before the tokens of the last one have reached the CPU, so "
        "that the device does not idle between steps.",
    "gap":
        "in the header and for an engine: messages that were lost on their way here. In a lane: a"
        " time without a token.",
    "lane": "the row of one request on the main screen; a column is a step or a time.",
}  # fmt: skip

# Glyphs of figures, lists and badges. Those of charts come from the tables used to draw them.
_OTHERS = (
    ("▲", "caution", "rises, or is higher than in other engines or run A; in events: "
     "what an operator did, or what happened to the engine"),
    ("▼", "good", "falls, or is lower than in other engines or run A"),
    ("≈", "text", "an estimate: from the buckets of a histogram, or from a sample"),
    ("–", "muted", "a figure that the engine does not report (also — and -)"),
    ("…", "muted", "cut off here; more is there"),
    ("▶", "text", "the selected line"),
    ("◂", "muted", "text of the prompt"),
    ("▸", "muted", "text of the output"),
    ("▔", "prefill", "run B of a comparison: its bars hang from the axis (also ▀)"),
)  # fmt: skip

GLYPHS: Mapping[str, tuple[Meaning, ...]] = {
    "Charts and lanes": LEGEND,
    "KV map": KV_LEGEND,
    "Why a token was late": tuple((*g, WORDS[cause].label) for cause, g in CAUSE_GLYPHS.items()),
    "Figures and lists": _OTHERS,
}
