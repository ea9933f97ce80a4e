"""What limited a step: the reason why the engine did not compute more tokens in it.

The scheduler publishes why requests wait. If no request waits, the step itself shows whether the
running requests got all the tokens they could use.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.state.outcome import Outcome

# In order: the token budget; max_num_seqs; KV blocks; a batching mode that admits no request or
# leaves out running ones; long_prefill_token_threshold; a pause by the operator; nothing, as all
# requests got all the tokens they could use; LoRA slots; grammars that are being compiled; keys and
# values from elsewhere; the encoder budget; a step kept free of prefills.
Limit: TypeAlias = Literal[
    "budget", "seats", "kv", "mode", "threshold", "paused", "work",
    "lora", "grammar", "remote_kv", "encoder", "cadence",
]  # fmt: skip

LIMITS: tuple[Limit, ...] = get_args(Limit)
# What only another engine's requests wait for; no simulation lifts it.
NAMED_WAITS: tuple[Limit, ...] = ("lora", "grammar", "remote_kv", "encoder")
UNKNOWN = -1  # in any column of numbers; callers get None
_BUDGET, _SEATS, _KV, _MODE, _THRESHOLD, _PAUSED, _WORK = range(7)
_LORA, _GRAMMAR, _REMOTE_KV, _ENCODER, _CADENCE = range(7, len(LIMITS))
_OF_REASON: Mapping[str, int] = {
    "budget": _BUDGET,
    "seats": _SEATS,
    "kv_blocks": _KV,
    "preemption": _KV,
    "batch": _MODE,
    "cadence": _CADENCE,
    "paused": _PAUSED,
    "lora": _LORA,
    "grammar": _GRAMMAR,
    "remote_kv": _REMOTE_KV,
    "deferred": UNKNOWN,
    "encoder": _ENCODER,
    # The requests wait for another engine, which is no limit of this one.
    "transfer": UNKNOWN,
    "decode_engine": UNKNOWN,
}


def limit_of(record: StepRecord, outcome: Outcome, num_rows: int | None) -> int:
    """Index in `LIMITS` of what limited a step; `UNKNOWN` if the records do not tell.

    If an operator's pause right before the step lasted longer than the step, the pause is the
    limit.

    `num_rows`: number of rows in its batch; None if the engine does not publish them.
    """
    if outcome.paused_ns > record.tokens_ns - record.schedule_start_ns:
        return _PAUSED
    if record.held_prefills:
        return _CADENCE
    reasons = record.waiting_reasons
    if reasons:
        for reason in reasons:
            if (limit := _OF_REASON.get(reason)) is not None:
                return limit
    budget, seats = record.token_budget, record.max_num_seqs
    if reasons is None and record.num_waiting and seats and record.num_running >= seats:
        return _SEATS
    if budget is None:
        return UNKNOWN
    padded = record.num_padded_tokens or 0
    if record.num_prefill_tokens + record.num_decode_tokens + padded >= budget:
        return _BUDGET
    if num_rows is None or (reasons is None and record.num_waiting):
        return UNKNOWN
    if padded or record.num_running > num_rows:
        return _MODE
    return _THRESHOLD if outcome.num_cut_rows else _WORK
