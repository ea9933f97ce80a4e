"""Short names of the causes of late tokens."""

from stepscope.recordings.attribution.causes import Cause

CAUSE_NAMES: dict[Cause, str] = {
    "queued": "waited in the queue",
    "prompt": "its own prompt",
    "prefill": "shared a step with a prefill",
    "budget": "left out, budget spent",
    "left_out": "left out of a step",
    "preempted": "preempted, out",
    "recompute": "preempted, recomputed",
    "transfer": "KV transfer, own or another's",
    "front_end": "front end: HTTP, tokenising",
    "delivery": "delivery by the front end",
    "paused": "engine paused by the operator",
    "between": "between steps",
    "idle": "engine idle",
    "step": "steps of decodes alone",
    "stopped": "engine's process stopped",
    "descheduled": "no processor for the engine",
    "gc": "Python's garbage collector",
    "jit": "kernel compiled while serving",
    "held_up": "machine or engine held up",
    "rank": "waited for a slow rank",
    "unknown": "unknown, no records of it",
}

# For legends and short lines.
SHORT_CAUSE_NAMES: dict[Cause, str] = {
    "queued": "queued",
    "prompt": "own prompt",
    "prefill": "beside a prefill",
    "budget": "budget spent",
    "left_out": "left out",
    "preempted": "preempted",
    "recompute": "recomputed",
    "transfer": "handed over",
    "front_end": "front end",
    "delivery": "delivery",
    "paused": "paused",
    "between": "between steps",
    "idle": "engine idle",
    "step": "decode",
    "stopped": "stopped",
    "descheduled": "no processor",
    "gc": "garbage",
    "jit": "compiling",
    "held_up": "held up",
    "rank": "slow rank",
    "unknown": "unknown",
}
