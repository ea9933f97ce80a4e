"""`stepscope schedule`: dry-runs the scheduler over a written workload, without a model."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.protocol.config import Knobs
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.dry_run import (
    ScheduleLine,
    ScheduleReplay,
    ScheduleWorkload,
    parse_workload,
)
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.tui.cli.shared.errors import say, writing_output
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.settings.setting_values import convert_flags

STDIN = "-"


def schedule(
    file: str,
    summary: bool,
    settings: dict[str, int | None],
    flags: dict[str, Any],
    like: str | None = None,
) -> None:
    """Print one JSON line a step, or a table of what they come to.

    Args:
        file: path of a workload, or '-'.
        settings: of the workload, by name; None where the file's own holds.
        flags: knobs as they were typed.
        like: the engine whose defaults replace the file's knobs.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    preset: Mapping[str, Any] = {} if like is None else defaults_like(like).knobs
    overrides = {**preset, **convert_flags(ScheduleWorkload, given), **convert_flags(Knobs, flags)}
    source = "standard input" if file == STDIN else file
    workload = parse_workload(_read(file), source, overrides)
    replay = ScheduleReplay(workload)
    if summary:
        say(*_table(_summarized(replay, workload)))
    else:
        _print_lines(replay.lines())


def _read(file: str) -> bytes:
    if file != STDIN:
        return Path(file).read_bytes()
    if sys.stdin is None:
        raise CommandFailed("standard input is closed: give a file")
    return sys.stdin.buffer.read()


def _print_lines(lines: Iterable[ScheduleLine]) -> None:
    encoder = msgspec.json.Encoder()
    with writing_output():
        for line in lines:
            sys.stdout.buffer.write(encoder.encode(line) + b"\n")


@dataclass
class _Summary:
    """Sums over a run; latencies are counted in steps that had work."""

    num_requests: int
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_padded_tokens: int = 0
    num_budgeted_tokens: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    ttft_steps: list[int] = field(default_factory=list)
    itl_steps: list[int] = field(default_factory=list)


def _summarized(replay: ScheduleReplay, workload: ScheduleWorkload) -> _Summary:
    summary = _Summary(num_requests=len(workload.requests))
    scheduler = replay.scheduler
    last_token: dict[int, int] = {}  # request -> step
    for line in replay.lines():
        if not replay.rows and not line.preempted:
            continue
        summary.num_steps += 1
        summary.num_budgeted_tokens += scheduler.knobs.max_num_batched_tokens
        summary.num_prefill_tokens += scheduler.num_prefill_tokens
        summary.num_decode_tokens += scheduler.num_decode_tokens
        summary.num_padded_tokens += scheduler.num_padded_tokens
        summary.num_preemptions += len(line.preempted)
        summary.num_hit_tokens += sum(scheduler.admitted_now.values())
        for row in replay.rows:
            number = row.request.request_id
            if row.phase is Phase.RECOMPUTE:
                known = row.request.high_water - row.start
                summary.num_recomputed_tokens += min(row.num_tokens, known)
            if not row.samples:
                continue
            if number in last_token:
                summary.itl_steps.append(line.step - last_token[number])
            else:
                arrival = workload.requests[number].arrival_step
                summary.ttft_steps.append(line.step - arrival + 1)
            last_token[number] = line.step
    return summary


def _table(summary: _Summary) -> list[str]:
    num_tokens = summary.num_prefill_tokens + summary.num_decode_tokens
    use = num_tokens / summary.num_budgeted_tokens if summary.num_budgeted_tokens else 0.0
    rows = [
        ("requests", f"{summary.num_requests:,}"),
        ("steps", f"{summary.num_steps:,} with work"),
        (
            "tokens",
            f"{num_tokens:,}: {summary.num_prefill_tokens:,} prefill, "
            f"{summary.num_decode_tokens:,} decode",
        ),
        ("budget used", f"{use:.1%} on average"),
        ("padding", f"{summary.num_padded_tokens:,} tokens, if the engine padded its steps"),
        ("prefix hits", f"{summary.num_hit_tokens:,} tokens"),
        (
            "preemptions",
            f"{summary.num_preemptions:,}, {summary.num_recomputed_tokens:,} tokens recomputed",
        ),
        ("TTFT", _percentiles(summary.ttft_steps)),
        ("ITL", _percentiles(summary.itl_steps)),
    ]
    return [f"{name:<12} {text}" for name, text in rows]


def _percentiles(steps: list[int]) -> str:
    """Nearest rank, over all samples."""
    if not steps:
        return "no sample"
    ordered = sorted(steps)
    p50, p99 = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 99))
    return f"p50 {p50:,}  p99 {p99:,}  max {ordered[-1]:,} steps"
