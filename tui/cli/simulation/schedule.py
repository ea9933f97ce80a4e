"""What `stepscope simulate` prints of a workload that counts in steps, and of several cases.

Such a workload needs no step times. A case is a batching mode with values of knobs.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue, Phase
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.dry_run import ScheduleReplay, ScheduleWorkload, parse_workload
from stepscope.engine.simulation.step_time import StepTimeModel, shape_of
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes
from stepscope.recordings.simulation.figures import flat
from stepscope.recordings.state.series.distribution import Distribution
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.knob_words import variants_of
from stepscope.tui.cli.shared.output import Progress, say, text_table, write_json, writing_output
from stepscope.tui.cli.shared.paths import RECORDING_SUFFIXES, sample_named
from stepscope.tui.cli.simulation.runs import (
    MIX,
    EngineOptions,
    Interval,
    RunOptions,
    choose_step_times,
    intervals,
    open_work,
    run_once,
)
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

_Value: TypeAlias = float | Interval | None
_Cases: TypeAlias = Mapping[str, Mapping[str, KnobValue]]
"""The name of each case, and the knobs that differ from those of the options."""

STDIN = "-"
ALL = "all"
_SHOWN = {
    "ttft_p50_steps": "TTFT p50 steps", "ttft_p99_steps": "p99", "itl_p50_steps": "ITL p50 steps",
    "itl_p99_steps": "p99", "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99", "e2e_p50_ms": "E2E p50 ms",
    "e2e_p99_ms": "p99", "output_tokens_per_s": "out tok/s", "num_steps": "steps",
    "num_padded_tokens": "padded", "num_recomputed_tokens": "recomputed",
    "num_preemptions": "preempted",
}  # fmt: skip


def cases_of(modes: str | None, sweep: str | None) -> _Cases:
    """Return every mode of `--modes` with every value of `--sweep`; empty if neither is given."""
    known = get_args(Batching)
    names = [] if modes is None else list(known) if modes == ALL else modes.split(",")
    for name in names:
        if name not in known:
            raise WrongUsage(f"--modes: expected all, or some of {', '.join(known)}, got {name!r}")
    cases: _Cases = {name: {"batching": name} for name in names}
    if sweep is None:
        return cases
    return {
        f"{name} {text}".strip(): {**case, **changes}
        for name, case in (cases or {"": {}}).items()
        for text, changes in variants_of((), sweep)
    }


def dry_run(
    file: str,
    cases: _Cases,
    prints_steps: bool,
    engine: EngineOptions,
    options: RunOptions,
    flags: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run the scheduler, and print a JSON line for each step, or a summary of each case."""
    if prints_steps and (cases or as_json):
        raise WrongUsage("--steps: each step is a line of JSON; leave out --json, --modes, --sweep")
    has_times = engine.gpu is not None or engine.step_time is not None
    if prints_steps and has_times:
        raise WrongUsage("--steps: it needs no step times; leave out --gpu and --step-time")
    if options.num_runs > 1:
        raise WrongUsage(
            "--runs: a workload that counts in steps has no chance in it; leave it out"
        )
    if _is_timed(file):
        raise WrongUsage(
            f"--steps: {file} counts in seconds, not in steps: -o FILE.mcap writes its steps"
        )
    workload = parse_workload(
        _read(file), "standard input" if file == STDIN else file, _overrides(engine, flags)
    )
    if prints_steps:
        encoder = msgspec.json.Encoder()
        with writing_output():
            for line in ScheduleReplay(workload).lines():
                sys.stdout.buffer.write(encoder.encode(line) + b"\n")
        return
    model = None
    if has_times:
        model = choose_step_times(engine.gpu, engine.model, engine.step_time, 1).model
    found = {}
    for name, changes in (cases or {"": {}}).items():
        knobs = msgspec.structs.replace(workload.knobs, **changes)
        found[name] = summarized(msgspec.structs.replace(workload, knobs=knobs), model)
    if cases or as_json:
        _say_all({name: each.figures() for name, each in found.items()}, as_json)
    else:
        say(*found[""].lines())


def compare_cases(
    source: str,
    cases: _Cases,
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
        for number, (name, changes) in enumerate(cases.items()):
            made = msgspec.structs.replace(setup, knobs=setup.knobs.changed(changes, setup.limits))
            runs = []
            for at in range(options.num_runs):
                progress(f"simulating {name}", (number + at / options.num_runs) / len(cases))
                seed = spec.seed + at
                model = DrawnStepTimes(made.model, seed)
                runs.append(run_once(made, model, work.requests(seed), levels, options))
            found[name] = intervals(runs) if options.num_runs > 1 else flat(runs[0])
    _say_all(found, as_json)


def _say_all(found: Mapping[str, Mapping[str, _Value]], as_json: bool) -> None:
    if as_json:
        plain = {
            name: {
                figure: value._asdict() if isinstance(value, Interval) else value
                for figure, value in each.items()
            }
            for name, each in found.items()
        }
        write_json(plain)
        return
    names = [name for name in _SHOWN if name in next(iter(found.values()))]
    rows = [[mode, *(_number(each[name]) for name in names)] for mode, each in found.items()]
    say(*text_table(["mode", *(_SHOWN[name] for name in names)], rows))


def _number(value: _Value) -> str:
    if isinstance(value, Interval):
        is_whole = all(each is not None and each == int(each) for each in value)
        return value.text(",.0f" if is_whole else ",.1f")
    return "-" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _is_timed(file: str) -> bool:
    is_known = Path(file).suffix in (".csv", ".jsonl", *RECORDING_SUFFIXES)
    return is_known or (not Path(file).exists() and (file == MIX or sample_named(file) is not None))


def _overrides(engine: EngineOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
    given = {name: value for name, value in settings.items() if value is not None}
    like = {} if engine.like is None else defaults_like(engine.like).knobs
    return {**like, **convert_flags(ScheduleWorkload, given), **convert_flags(Knobs, flags)}


def _read(file: str) -> bytes:
    if file != STDIN:
        return Path(file).read_bytes()
    if sys.stdin is None:
        raise CommandFailed("standard input is closed: give a file")
    return sys.stdin.buffer.read()


class Summary(NamedTuple):
    """Counts and latencies of a run; latencies in steps, and with step times in ns, too."""

    counts: Counter[str]
    steps: Mapping[str, Distribution]
    ns: Mapping[str, Distribution]

    def figures(self) -> dict[str, float | None]:
        """Return name -> value of each figure; latencies as p50 and p99."""
        found: dict[str, float | None] = dict(self.counts)
        for unit, scale, latencies in (("steps", 1, self.steps), ("ms", 1e6, self.ns)):
            for kind, samples in latencies.items():
                values = samples.percentiles(50, 99) or (None, None)
                for rank, value in zip((50, 99), values, strict=True):
                    if value is not None or unit == "steps":
                        scaled = value if value is None or unit == "steps" else value / scale
                        found[f"{kind}_p{rank}_{unit}"] = scaled
        return found

    def lines(self) -> list[str]:
        counts = self.counts
        num_tokens = counts["num_prefill_tokens"] + counts["num_decode_tokens"]
        rows = [
            ("requests", f"{counts['num_requests']:,}"),
            ("steps", f"{counts['num_steps']:,} with work"),
            (
                "tokens",
                f"{num_tokens:,}: {counts['num_prefill_tokens']:,} prefill, "
                f"{counts['num_decode_tokens']:,} decode",
            ),
            ("budget used", f"{num_tokens / (counts['num_budgeted_tokens'] or 1):.1%} on average"),
            ("padding", f"{counts['num_padded_tokens']:,} tokens, if the engine padded its steps"),
            ("prefix hits", f"{counts['num_hit_tokens']:,} tokens"),
            (
                "preemptions",
                f"{counts['num_preemptions']:,}, {counts['num_recomputed_tokens']:,} tokens "
                "recomputed",
            ),
        ]
        rows += [
            (kind.upper(), _spread(each, 1, ",", " steps")) for kind, each in self.steps.items()
        ]
        if any(each.count for each in self.ns.values()):
            rows += [
                (f"{kind.upper()} ms", _spread(each, 1e6, ",.1f", " ms"))
                for kind, each in self.ns.items()
            ]
        return [f"{name:<12} {text}" for name, text in rows]


def _spread(samples: Distribution, scale: float, form: str, unit: str) -> str:
    if not samples.count:
        return "no sample"
    values = samples.percentiles(50, 99, 100)
    p50, p99, most = (format(each if scale == 1 else each / scale, form) for each in values)
    return f"p50 {p50}  p99 {p99}  max {most}{unit}"


_COUNTS = ("num_requests", "num_steps", "num_prefill_tokens", "num_decode_tokens",
           "num_recomputed_tokens", "num_padded_tokens", "num_budgeted_tokens", "num_preemptions",
           "num_hit_tokens")  # fmt: skip


def summarized(workload: ScheduleWorkload, model: StepTimeModel | None = None) -> Summary:
    """Run the scheduler to the end of the workload; with a model, steps with work take time."""
    replay = ScheduleReplay(workload)
    scheduler, counts = replay.scheduler, Counter(dict.fromkeys(_COUNTS, 0))
    counts["num_requests"] = len(workload.requests)
    found = Summary(counts, *({kind: Distribution() for kind in ("ttft", "itl")} for _ in "sn"))
    last: dict[int, tuple[int, int]] = {}  # request -> step and time of its last token
    now_ns = 0
    began_ns: list[int] = []  # step -> when it began
    for line in replay.lines():
        began_ns.append(now_ns)
        if not replay.rows and not line.preempted:
            continue
        if model is not None:
            step = ScheduledStep(line.step, replay.rows, scheduler.num_padded_tokens)
            now_ns += round(model.step_time(shape_of(step)).cycle_s * 1e9)
        counts.update(
            num_steps=1,
            num_budgeted_tokens=scheduler.knobs.max_num_batched_tokens,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_padded_tokens=scheduler.num_padded_tokens,
            num_preemptions=len(line.preempted),
            num_hit_tokens=sum(scheduler.admitted_now.values())
            - sum(scheduler.resumed_now.values()),
        )
        for row in replay.rows:
            number = row.request.request_id
            if row.phase is Phase.RECOMPUTE:
                known = row.request.high_water - row.start
                counts["num_recomputed_tokens"] += min(row.num_tokens, known)
            if not row.samples:
                continue
            arrival = workload.requests[number].arrival_step
            kind = "itl" if number in last else "ttft"
            since_step, since_ns = last.get(number, (arrival - 1, began_ns[arrival]))
            found.steps[kind].add(line.step - since_step)
            if model is not None:
                found.ns[kind].add(now_ns - since_ns)
            last[number] = line.step, now_ns
    return found
