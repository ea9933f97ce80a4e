"""What limited a step: the reason why the engine did not compute more tokens in it.

The scheduler publishes why requests wait. If no request waits, the step itself shows whether the
running requests got all the tokens they could use.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.state.outcome import Outcome

# In order, which files keep: append only.
Limit: TypeAlias = Literal[
    "budget", "seats", "kv", "mode", "threshold", "paused", "work",
    "lora", "grammar", "remote_kv", "encoder", "cadence",
]  # fmt: skip


class LimitSpec(NamedTuple):
    """A limit of steps, in all the words for it but the letters of charts."""

    words: str  # what limited the steps
    bound: str  # what the engine is; empty where that says nothing
    meaning: str  # which steps have it
    reasons: tuple[str, ...] = ()  # those of `StepRecord.waiting_reasons` that stand for it


LIMIT_SPECS: Mapping[Limit, LimitSpec] = {
    "budget": LimitSpec("the token budget", "budget-bound",
                        "steps that the token budget limited (`max_num_batched_tokens`)",
                        ("budget",)),
    "seats": LimitSpec("max_num_seqs", "bound by max_num_seqs",
                       "steps that the seats limited (`max_num_seqs`)", ("seats",)),
    "kv": LimitSpec("the number of KV blocks", "KV-bound",
                    "steps that the number of KV blocks limited", ("kv_blocks", "preemption")),
    # It admits no request or leaves out running ones.
    "mode": LimitSpec("the batching mode", "held by the batching mode",
                      "steps that the batching mode limited", ("batch",)),
    "threshold": LimitSpec("long_prefill_token_threshold",
                           "bound by long_prefill_token_threshold",
                           "steps that `long_prefill_token_threshold` limited"),
    "paused": LimitSpec("a pause by the operator", "",
                        "steps after a pause of the operator that lasted longer than the step",
                        ("paused",)),
    "work": LimitSpec("no setting", "",
                      "steps without a limit: every request got all the tokens it could use"),
    "lora": LimitSpec("LoRA slots (max_loras)", "bound by the LoRA slots (max_loras)",
                      "steps in which requests waited for a LoRA slot and for nothing else",
                      ("lora",)),
    "grammar": LimitSpec("grammars being compiled", "held by grammars that are being compiled",
                         "steps in which requests waited for their grammar and for nothing else",
                         ("grammar",)),
    "remote_kv": LimitSpec("keys and values from elsewhere",
                           "held until keys and values come from elsewhere",
                           "steps in which requests waited for their KV and for nothing else",
                           ("remote_kv",)),
    "encoder": LimitSpec("the encoder budget", "bound by the encoder budget",
                         "steps that the encoder budget limited", ("encoder",)),
    "cadence": LimitSpec("prefill_schedule_interval", "held by prefill_schedule_interval",
                         "steps kept free of prefills that were there"
                         " (`prefill_schedule_interval`)", ("cadence",)),
}  # fmt: skip
LIMITS: tuple[Limit, ...] = get_args(Limit)
# What only another engine's requests wait for; no simulation lifts it.
NAMED_WAITS: tuple[Limit, ...] = ("lora", "grammar", "remote_kv", "encoder")
UNKNOWN = -1  # in any column of numbers; callers get None
_PLACES: Mapping[str, int] = {limit: place for place, limit in enumerate(LIMITS)}
# The requests that wait for another engine: no limit of this one.
_OF_REASON: Mapping[str, int] = dict.fromkeys(
    ("deferred", "transfer", "decode_engine"), UNKNOWN
) | {reason: _PLACES[limit] for limit, spec in LIMIT_SPECS.items() for reason in spec.reasons}


def limit_of(record: StepRecord, outcome: Outcome) -> int:
    """Index in `LIMITS` of what limited a step; `UNKNOWN` if the records do not tell.

    If an operator's pause right before the step lasted longer than the step, the pause is the
    limit.
    """
    if outcome.paused_ns > record.tokens_ns - record.schedule_start_ns:
        return _PLACES["paused"]
    if record.held_prefills:
        return _PLACES["cadence"]
    reasons = record.waiting_reasons
    if reasons:
        for reason in reasons:
            if (limit := _OF_REASON.get(reason)) is not None:
                return limit
    budget, seats = record.token_budget, record.max_num_seqs
    if reasons is None and record.num_waiting and seats and record.num_running >= seats:
        return _PLACES["seats"]
    if budget is None:
        return UNKNOWN
    padded = record.num_padded_tokens or 0
    if record.num_prefill_tokens + record.num_decode_tokens + padded >= budget:
        return _PLACES["budget"]
    if record.batch is None or (reasons is None and record.num_waiting):
        return UNKNOWN
    if padded or record.num_running > len(record.batch):
        return _PLACES["mode"]
    return _PLACES["threshold"] if outcome.num_cut_rows else _PLACES["work"]
