"""Messages by hand: steps that end every 10 ms and take 8, and numbers that stand in their rows."""

from collections.abc import Iterable
from typing import Any

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import BatchRow, Phase, RowFlag, StepRecord
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO

MS = 1_000_000
SOME_LEVELS = SLO(ttft_ms=500.0, itl_ms=30.0)
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


def info(engine_id: str = "one", **changes: Any) -> wire.EngineInfo:
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "name": "engine-0",
        "software_version": "0",
        "model": "none",
        "num_blocks": 8,
        "block_size": 16,
        "monotonic_ns": 0,
        "wall_ns": 1_700_000_000_000_000_000,
    }
    return wire.EngineInfo(**(fields | changes))


def arrived(request_id: int, num_prompt_tokens: int = 20, time_ns: int = 0) -> wire.Arrived:
    return wire.Arrived(
        request_id=request_id,
        client_id=f"chat-{request_id}",
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=5,
        priority=0,
        time_ns=time_ns,
    )


def history_of(messages: Iterable[tuple[int, wire.Telemetry]], slo: SLO = SOME_LEVELS) -> History:
    history = History(slo)
    for sequence, message in messages:
        history.append(sequence, message)
    return history
