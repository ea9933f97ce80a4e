"""A model on the CPU, and requests that it computes without the rest of an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.engine.execution.loading import load_runner
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep, StepResult


def load_tiny(model: Path | str, **settings: Any) -> ModelRunner:
    """Load a checkpoint in fp32 for one thread; `settings` of `EngineConfig` say what differs."""
    usual = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_memory": "4MB"}
    config = EngineConfig(model=str(model), **(usual | {"max_model_len": 256} | settings))
    return load_runner(config, lambda what, share: None)


def next_row(request: Request, most: int) -> ScheduledRow:
    """The next chunk of a request, of at most `most` tokens; its blocks are in its table."""
    start = request.num_computed_tokens
    count = min(most, request.num_tokens - start)
    phase = Phase.DECODE if start >= request.num_prompt_tokens else Phase.PREFILL
    return ScheduledRow(request, phase, start, count, start + count == request.num_tokens)


def run_rows(runner: ModelRunner, rows: Sequence[ScheduledRow]) -> StepResult:
    """Compute a step, add its tokens to their requests, and return its result."""
    result = runner.execute(ScheduledStep(0, list(rows)))
    for row, token_id in zip(rows, result.token_ids, strict=True):
        assert (token_id is not None) == row.samples
        row.request.num_computed_tokens += row.num_tokens
        if token_id is not None:
            row.request.token_ids.append(token_id)
    return result


def run_scheduled(runner: ModelRunner, scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Run requests to their ends."""
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        rows = scheduler.schedule()
        scheduler.update(rows, runner.execute(ScheduledStep(0, rows)).token_ids)
        scheduler.drain_events()
        scheduler.kv.drain_moves()
