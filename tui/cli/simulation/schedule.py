"""What `stepscope simulate` prints of a workload that counts in steps, and of several cases.

Such a workload needs no step times. A case is a batching mode with values of knobs.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue, Phase
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.dry_run import (
    ScheduleLine,
    ScheduleReplay,
    ScheduleWorkload,
    parse_workload,
)
from stepscope.engine.simulation.step_time import StepTimeModel, shape_of
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.simulation.figures import flat
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.errors import say, writing_output
from stepscope.tui.cli.shared.knob_words import variants_of
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.report import Interval, intervals
from stepscope.tui.cli.simulation.report import text as interval_text
from stepscope.tui.cli.simulation.runs import (
    EngineOptions,
    RunOptions,
    choose_step_times,
    open_work,
    run_once,
)
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

_Value: TypeAlias = float | Interval | None
STDIN = "-"
ALL = "all"
_TIMED = (".csv", ".jsonl", ".mcap", PART_SUFFIX)
_SHOWN = {
    "ttft_p50_steps": "TTFT p50 steps", "ttft_p99_steps": "p99", "itl_p50_steps": "ITL p50 steps",
    "itl_p99_steps": "p99", "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99", "e2e_p50_ms": "E2E p50 ms",
    "e2e_p99_ms": "p99", "output_tokens_per_s": "out tok/s", "num_steps": "steps",
    "num_padded_tokens": "padded", "num_recomputed_tokens": "recomputed",
    "num_preemptions": "preempted",
}  # fmt: skip


class ScheduleCase(NamedTuple):
    """A batching mode to run, with the knobs that differ from those of the options.

    Attributes:
        name: "" if nothing differs.
    """

    name: str
    changes: Mapping[str, KnobValue]


def cases_of(modes: str | None, sweep: str | None) -> list[ScheduleCase]:
    """Return every mode of `--modes` with every value of `--sweep`; empty if neither is given."""
    known = get_args(Batching)
    names = [] if modes is None else list(known) if modes == ALL else modes.split(",")
    for name in names:
        if name not in known:
            raise WrongUsage(f"--modes: expected all, or some of {', '.join(known)}, got {name!r}")
    cases = [ScheduleCase(name, {"batching": name}) for name in names]
    if sweep is None:
        return cases
    return [
        ScheduleCase(f"{case.name} {text}".strip(), {**case.changes, **changes})
        for case in cases or [ScheduleCase("", {})]
        for text, changes in variants_of((), sweep)
    ]


def dry_run(
    file: str,
    cases: Sequence[ScheduleCase],
    prints_steps: bool,
    engine: EngineOptions,
    options: RunOptions,
    flags: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run the scheduler, and print a JSON line for each step, or a summary of each case.

    Args:
        file: path of a workload; '-' reads it from standard input.
        flags: knobs as the user typed them.
    """
    if prints_steps and (cases or as_json):
        raise WrongUsage("--steps: each step is a line of JSON; leave out --json, --modes, --sweep")
    if options.num_runs > 1:
        raise WrongUsage(
            "--runs: a workload that counts in steps has no chance in it; leave it out"
        )
    if Path(file).suffix in _TIMED:
        raise WrongUsage("--steps: the steps of a trace or a recording: -o FILE.mcap")
    workload = parse_workload(_read(file), _source(file), _overrides(engine, flags))
    if prints_steps:
        _print_lines(ScheduleReplay(workload).lines())
        return
    model = _model(engine)
    if not cases and not as_json:
        say(*table(summarized(ScheduleReplay(workload), workload, model)))
        return
    found = {
        case.name: summarized(_replay(workload, case), workload, model).figures()
        for case in cases or [ScheduleCase("", {})]
    }
    _say_all(found, as_json)


def _replay(workload: ScheduleWorkload, case: ScheduleCase) -> ScheduleReplay:
    knobs = msgspec.structs.replace(workload.knobs, **case.changes)
    return ScheduleReplay(msgspec.structs.replace(workload, knobs=knobs))


def compare_cases(
    source: str,
    cases: Sequence[ScheduleCase],
    engine: EngineOptions,
    options: RunOptions,
    spec: WorkloadSpec,
    levels: Sequence[SLO],
    flags: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Simulate a trace, a recording or a mix in each case, and print the figures."""
    work, setup = open_work(source, engine, options, spec, flags)
    found: dict[str, Mapping[str, _Value]] = {}
    with Progress() as progress:
        for number, case in enumerate(cases):
            knobs = setup.knobs.changed(case.changes, setup.limits)
            made = msgspec.structs.replace(setup, knobs=knobs)
            runs = []
            for at in range(options.num_runs):
                progress(f"simulating {case.name}", (number + at / options.num_runs) / len(cases))
                seed = spec.seed + at
                model = DrawnStepTimes(made.model, seed)
                runs.append(run_once(made, model, work.requests(seed), levels, options))
            found[case.name] = intervals(runs) if options.num_runs > 1 else flat(runs[0])
    _say_all(found, as_json)


def _say_all(found: Mapping[str, Mapping[str, _Value]], as_json: bool) -> None:
    """Print the figures of all cases, as a table with a row for each case, or as JSON.

    A figure of several runs is its median with the lowest and the highest value.
    """
    if as_json:
        plain = {
            name: {
                figure: value._asdict() if isinstance(value, Interval) else value
                for figure, value in each.items()
            }
            for name, each in found.items()
        }
        say(msgspec.json.encode(plain).decode())
        return
    first = next(iter(found.values()))
    names = [name for name in _SHOWN if name in first]
    heading = ["mode", *(_SHOWN.get(name, name) for name in names)]
    rows = [[mode, *(_number(each[name]) for name in names)] for mode, each in found.items()]
    say(*text_table(heading, rows, "<" + ">" * len(names)))


def _number(value: _Value) -> str:
    if isinstance(value, Interval):
        is_whole = all(each is not None and each == int(each) for each in value)
        return interval_text(value, ",.0f" if is_whole else ",.1f")
    return "-" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _model(engine: EngineOptions) -> StepTimeModel | None:
    if engine.gpu is None and engine.step_time is None:
        return None
    return choose_step_times(engine.gpu, engine.model, engine.step_time, 1).model


def _overrides(engine: EngineOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
    given = {name: value for name, value in settings.items() if value is not None}
    like = {} if engine.like is None else defaults_like(engine.like).knobs
    return {**like, **convert_flags(ScheduleWorkload, given), **convert_flags(Knobs, flags)}


def _source(file: str) -> str:
    return "standard input" if file == STDIN else file


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


_LATENCIES = ("ttft_steps", "itl_steps", "ttft_ms", "itl_ms")


@dataclass
class Summary:
    """Counts and latencies of a run. `num_steps` counts only steps that had work."""

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
    ttft_ms: list[float] = field(default_factory=list)  # empty without a model of step times
    itl_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float | None]:
        """Return name -> value of each figure; latencies as p50 and p99."""
        found = {name: value for name, value in asdict(self).items() if name not in _LATENCIES}
        for name in _LATENCIES:
            samples = sorted(getattr(self, name))
            kind, _, unit = name.partition("_")
            for rank in (50, 99):
                value = samples[_place(len(samples), rank)] if samples else None
                if value is not None or unit == "steps":
                    found[f"{kind}_p{rank}_{unit}"] = value
        return found


def summarized(
    replay: ScheduleReplay, workload: ScheduleWorkload, model: StepTimeModel | None = None
) -> Summary:
    """Run the scheduler to the end of the workload, and return a summary.

    Args:
        model: gives the time of each step; a step without work takes no time.
    """
    summary = Summary(num_requests=len(workload.requests))
    scheduler = replay.scheduler
    last_token: dict[int, int] = {}  # request -> step
    now_ms = 0.0
    began_ms: list[float] = []  # step -> when it began
    ended_ms: dict[int, float] = {}  # request -> when its last token came
    for line in replay.lines():
        began_ms.append(now_ms)
        if not replay.rows and not line.preempted:
            continue
        if model is not None:
            step = ScheduledStep(line.step, replay.rows, scheduler.num_padded_tokens)
            now_ms += model.step_time(shape_of(step)).cycle_s * 1e3
        summary.num_steps += 1
        summary.num_budgeted_tokens += scheduler.knobs.max_num_batched_tokens
        summary.num_prefill_tokens += scheduler.num_prefill_tokens
        summary.num_decode_tokens += scheduler.num_decode_tokens
        summary.num_padded_tokens += scheduler.num_padded_tokens
        summary.num_preemptions += len(line.preempted)
        summary.num_hit_tokens += sum(scheduler.admitted_now.values())
        summary.num_hit_tokens -= sum(scheduler.resumed_now.values())
        for row in replay.rows:
            number = row.request.request_id
            if row.phase is Phase.RECOMPUTE:
                known = row.request.high_water - row.start
                summary.num_recomputed_tokens += min(row.num_tokens, known)
            if not row.samples:
                continue
            if number in last_token:
                summary.itl_steps.append(line.step - last_token[number])
                if model is not None:
                    summary.itl_ms.append(now_ms - ended_ms[number])
            else:
                arrival = workload.requests[number].arrival_step
                summary.ttft_steps.append(line.step - arrival + 1)
                if model is not None:
                    summary.ttft_ms.append(now_ms - began_ms[arrival])
            last_token[number] = line.step
            ended_ms[number] = now_ms
    return summary


def table(summary: Summary) -> list[str]:
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
    if summary.ttft_ms:
        rows.append(("TTFT ms", _milliseconds(summary.ttft_ms)))
        rows.append(("ITL ms", _milliseconds(summary.itl_ms)))
    return [f"{name:<12} {text}" for name, text in rows]


def _percentiles(steps: list[int]) -> str:
    """Return a text with p50, p99 and maximum; percentiles are by nearest rank."""
    if not steps:
        return "no sample"
    ordered = sorted(steps)
    p50, p99 = (ordered[_place(len(ordered), rank)] for rank in (50, 99))
    return f"p50 {p50:,}  p99 {p99:,}  max {ordered[-1]:,} steps"


def _milliseconds(samples: list[float]) -> str:
    if not samples:
        return "no sample"
    ordered = sorted(samples)
    p50, p99 = (ordered[_place(len(ordered), rank)] for rank in (50, 99))
    return f"p50 {p50:,.1f}  p99 {p99:,.1f}  max {ordered[-1]:,.1f} ms"


def _place(count: int, rank: int) -> int:
    """Return the index of percentile `rank` in `count` ordered samples, by nearest rank."""
    return -(-count * rank // 100) - 1
