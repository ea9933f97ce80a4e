"""Records of steps that end every 10 ms and take 8, and the numbers that stand in their rows."""

from typing import Any

from stepscope.engine.protocol.wire import BatchRow, Phase, RowFlag, StepRecord

MS = 1_000_000
LAST, FIRST = int(RowFlag.LAST_CHUNK), int(RowFlag.LAST_CHUNK | RowFlag.FIRST_TOKEN)
PREFILL, DECODE, RECOMPUTE = int(Phase.PREFILL), int(Phase.DECODE), int(Phase.RECOMPUTE)


def step(number: int, rows: list[BatchRow] | None = None, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": number,
        "schedule_start_ns": number * 10 * MS + 2 * MS,
        "tokens_ns": number * 10 * MS + 10 * MS,
        "num_prefill_tokens": sum(r.num_tokens for r in rows or () if r.phase != DECODE),
        "num_decode_tokens": sum(r.num_tokens for r in rows or () if r.phase == DECODE),
        "batch": rows,
        "num_running": len(rows or ()),
        "num_waiting": 0,
    }
    return StepRecord(**(fields | changes))
