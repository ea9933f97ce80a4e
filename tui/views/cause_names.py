"""Glyphs, styles and names of the causes of a request's time, such as those of late tokens."""

from collections.abc import Mapping

from stepscope.recordings.attribution.causes import Cause

# Glyph, style, name for legends and short lines, full name. If a cell has several causes, the one
# that is last here is shown.
_CAUSES: Mapping[Cause, tuple[str, str, str, str]] = {
    "idle": ("–", "muted", "engine idle", "engine idle"),
    "between": ("┊", "muted", "between steps", "between steps"),
    "step": ("━", "decode", "decode", "steps of decodes alone"),
    "prompt": ("▓", "prefill", "own prompt", "its own prompt"),
    "prefill": ("▚", "caution", "beside a prefill", "shared a step with a prefill"),
    "recompute": ("▒", "prefill", "recomputed", "preempted, recomputed"),
    "budget": ("╌", "caution", "budget spent", "left out, budget spent"),
    "left_out": ("┄", "caution", "left out", "left out of a step"),
    "transfer": ("→", "prefill", "handed over", "KV transfer, own or another's"),
    "front_end": ("‹", "muted", "front end", "front end: HTTP, tokenising"),
    "delivery": ("›", "muted", "delivery", "delivery by the front end"),
    "queued": ("·", "idle", "queued", "waited in the queue"),
    "unknown": ("?", "muted", "unknown", "unknown, no records of it"),
    "held_up": ("≠", "caution", "held up", "machine or engine held up"),
    "descheduled": ("¦", "caution", "no processor", "no processor for the engine"),
    "gc": ("◊", "caution", "garbage", "Python's garbage collector"),
    "jit": ("ƒ", "caution", "compiling", "kernel compiled while serving"),
    "stopped": ("■", "caution", "stopped", "engine's process stopped"),
    "rank": ("≡", "caution", "slow rank", "waited for a slow rank"),
    "paused": ("‖", "mark", "paused", "engine paused by the operator"),
    "preempted": ("✗", "preempted", "preempted", "preempted, out"),
}
CAUSE_GLYPHS = {cause: (glyph, style) for cause, (glyph, style, _, _) in _CAUSES.items()}
SHORT_CAUSE_NAMES = {cause: name for cause, (_, _, name, _) in _CAUSES.items()}
CAUSE_NAMES = {cause: name for cause, (*_, name) in _CAUSES.items()}
