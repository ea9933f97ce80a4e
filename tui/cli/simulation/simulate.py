"""`stepscope simulate`: runs a workload through the real scheduler, with modelled step times.

A case is a set of knobs.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.dry_run import ScheduleReplay, ScheduleWorkload, parse_workload
from stepscope.engine.simulation.replica import Replica
from stepscope.engine.simulation.virtual_requests import DrawnStepTimes
from stepscope.engine.simulation.virtual_session import SimulatedSession, run_requests
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_of, slo_of
from stepscope.recordings.simulation.figures import RunFigures, RunSums
from stepscope.recordings.simulation.writing import RecordingSink
from stepscope.tui.cli.shared.arguments import (
    find_recording,
    output_path,
    sample_named,
    variants_of,
)
from stepscope.tui.cli.shared.levels import chosen_levels, level_of
from stepscope.tui.cli.shared.options import AsJson, Like, argument, command, flag, option
from stepscope.tui.cli.shared.output import (
    Progress,
    plain,
    say,
    text_table,
    told,
    write_json,
    writing_output,
)
from stepscope.tui.cli.shared.process import StopSignals
from stepscope.tui.cli.simulation.runs import (
    LONGEST,
    MIX,
    EngineOptions,
    Interval,
    choose_step_times,
    figure_lines,
    intervals,
    is_recording_name,
    open_source,
    setup_of,
)
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags, resolve
from stepscope.tui.views.format import file_size

_DEFAULTS = {"rate": 8.0, "num_requests": 300}
_STDIN = "-"
_SHOWN = {
    "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99", "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "p99", "e2e_p50_ms": "E2E p50 ms", "e2e_p99_ms": "p99",
    "output_tokens_per_s": "out tok/s", "num_steps": "steps", "num_preemptions": "preempted",
}  # fmt: skip


@command(
    "stepscope simulate --gpu h100",
    "stepscope simulate trace.csv --gpu h100 --model qwen3-8b --runs 5",
    "stepscope simulate session.mcap -o again.mcap",
    "stepscope simulate chunked --sweep max_num_seqs=8..64 --runs 5",
    "stepscope simulate workload.json --steps | head",
    sections=("knobs", "load", "levels"),
    defaults=_DEFAULTS,
)
def simulate(
    source: str = argument(
        "TRACE|FILE|mix",
        "a trace (Azure CSV, Mooncake JSONL), a recording or sample, or 'mix': the load of the "
        "options below; with --steps a workload (.json, or - for stdin)",
        default=MIX,
    ),
    gpu: str | None = option("NAME", "the GPU: h100, h200, a100, l40s, b200, mi300x, ..."),
    model: str | None = option(
        "NAME|PATH", "the model on it: a known name, or a config.json  [default: llama-3.1-8b]"
    ),
    step_time: str | None = option(
        "FILE", "instead of --gpu: step times of a recording, or points that were measured (CSV)"
    ),
    tensor_parallel: int = option("INT", "GPUs that share the model", min=1, default=1),
    like: Like = None,
    num_blocks: int | None = option(
        "INT", "KV blocks (default: what the GPU has room for, or as recorded)", min=1
    ),
    block_size: int | None = option("INT", "tokens in a KV block  [default: 16]", min=1),
    max_model_len: int | None = option("INT", "longest request; longer ones are cut", min=2),
    overlap: Literal["on", "off"] | None = option(
        "on|off",
        "schedule each step while the one before it runs (default: as recorded; on with --like)",
    ),
    runs: int = option("INT", "runs, with seeds from --seed on", min=1, default=1),
    time_scale: float = option(
        "NUMBER", "multiply the arrivals' times: 0.5 doubles the load", default=1.0, min=0
    ),
    prints_steps: bool = flag(
        "of a workload that counts in steps: who would be in each, one JSON line a step", "--steps"
    ),
    sweep: list[str] | None = option(
        "KNOB=FIRST..LAST|KNOB=VALUE,...", "a table of these values; again: of each with each"
    ),
    limit: int | None = option("INT", "take only so many requests from the start", min=1),
    output: str | None = option("FILE", "write the first run as a recording", "--output", "-o"),
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Run a workload on a GPU that is not here.

    The scheduler and the KV cache are the engine's own; only time is a model. A recording that is
    written opens everywhere (replay, compare, explain, plot) and is marked as simulated.

    --steps dry-runs the scheduler on a workload that counts in steps: a JSON object with
    num_blocks, requests (arrival_step, prompt_len, output_len each) and any knob by its name.
    """
    engine = EngineOptions(
        gpu, model, step_time, tensor_parallel, like, num_blocks, block_size, max_model_len,
        None if overlap is None else overlap == "on",
    )  # fmt: skip
    cases = dict(variants_of(sweep or ()))
    if prints_steps:
        if cases or output or runs > 1 or as_json or gpu or step_time:
            raise WrongUsage(
                "--steps: prints a line of JSON a step, which needs no step times; leave out "
                "--json, --sweep, --runs, --output, --gpu and --step-time"
            )
        print_steps(source, engine, flags)
        return
    if source == _STDIN or source.endswith(".json"):
        raise WrongUsage(f"{source} counts in steps: --steps prints who would be in each")
    if output is not None and cases:
        raise WrongUsage("--output: a recording is of one engine; leave out --sweep")
    spec = resolve(WorkloadSpec, "load", flags, _DEFAULTS)
    level = slo_of(chosen_levels(flags), {})
    if is_recording_name(source):
        if gpu is None and step_time is None:
            engine = engine._replace(step_time=source)  # as fast as the recorded engine
        with Recording(find_recording(source)) as recording:
            level = level_of(flags, recording)
    path = None if output is None else output_path(output)
    chosen = choose_step_times(engine)
    num_slots = (num_blocks or 0) * (block_size or 16) or chosen.num_kv_tokens
    longest = max_model_len or min(LONGEST, num_slots or LONGEST)
    work = open_source(source, spec, longest, time_scale, limit)
    setup = setup_of(engine, chosen, convert_flags(Knobs, flags), work.text, work.recorded)
    seeds = range(spec.seed, spec.seed + runs)
    found: dict[str, list[RunFigures]] = {}
    num_extrapolated = 0
    written = ""
    stop = StopSignals()
    with stop, Progress() as progress:
        watch = partial(_shown, progress, stop, work.num_requests)
        for name, changes in (cases or {"": {}}).items():
            knobs = setup.knobs.changed(changes, setup.limits) if changes else setup.knobs
            case = msgspec.structs.replace(setup, knobs=knobs)
            for seed in seeds:
                times, sums = DrawnStepTimes(case.model, seed), RunSums(level)
                replica = Replica(case.scheduler(), times, sums, overlap=case.overlap)
                on_request = watch(f"simulating {name}" if name else f"simulating, seed {seed}")
                run_requests(replica, work.requests(seed), on_request=on_request)
                if stop:
                    break
                found.setdefault(name, []).append(sums.result())
                num_extrapolated += times.num_extrapolated
        if path is not None and not stop:
            with RecordingSink(path, levels_of(level)) as sink:
                session = SimulatedSession(setup, spec.seed, sink)
                sink.begin(session.snapshot())
                on_request = watch(f"recording seed {spec.seed}")
                run_requests(session, work.requests(spec.seed), on_request=on_request)
            size = file_size(sink.writer.num_bytes)
            written = f"{path} ({sink.writer.num_steps:,} steps, {size})"
    if not found:
        raise Interrupted("interrupted before a run was done")
    of_cases = {name: intervals(of) for name, of in found.items()} if cases else {}
    if cases and as_json:
        write_json(plain(of_cases))
    elif cases:
        rows = [[name, *(_text(of[key]) for key in _SHOWN)] for name, of in of_cases.items()]
        say(*text_table(["with", *_SHOWN.values()], rows))
    elif as_json:
        write_json(
            {
                **told(setup, "simulated", "num_blocks", "block_size", "overlap"),
                "model": setup.model_name,
                "work": work.text,
                "knobs": setup.knobs.as_dict(),
                "levels": level._asdict(),
                "seeds": list(seeds[: len(found[""])]),
                "runs": found[""],
                "figures": plain(intervals(found[""])),
            }
        )
    else:
        say(f"{setup.simulated}: {work.text}", *figure_lines(found[""], level))
        if source == MIX:
            mix = f"a mix of {work.num_requests:,} requests (--num-requests, --rate)"
            say(f"chosen     {mix}; a trace or a recording may be named instead")
        if num_extrapolated:
            say(f"note       {num_extrapolated:,} steps are unlike any the model has seen")
        if written:
            say(f"recording  {written}")
    if stop:
        num_done = sum(map(len, found.values()))
        raise Interrupted(f"interrupted after {num_done} of {max(1, len(cases)) * runs} runs")


def _shown(
    progress: Progress, stop: StopSignals, num_requests: int, what: str
) -> Callable[[int], bool]:
    """Return a function for each request: it shows progress, and returns True after a signal."""

    def on_request(number: int) -> bool:
        detail = f"{number:,} of {num_requests:,} requests"
        progress(what, number / max(1, num_requests), detail)
        return bool(stop)

    return on_request


def _text(value: Interval) -> str:
    is_whole = all(each is not None and each == int(each) for each in value)
    return value.text(",.0f" if is_whole else ",.1f")


def print_steps(file: str, engine: EngineOptions, flags: Mapping[str, Any]) -> None:
    """Run the scheduler alone on a workload that counts in steps; print a JSON line a step."""
    if Path(file).suffix != ".json" and (file == MIX or sample_named(file) is not None):
        raise WrongUsage(
            f"--steps: name a workload that counts in steps (.json, or - for stdin); {file} counts "
            "in seconds, not in steps: -o FILE.mcap writes its steps"
        )
    settings = {"num_blocks": engine.num_blocks, "block_size": engine.block_size}
    given = {name: value for name, value in settings.items() if value is not None}
    like = {} if engine.like is None else defaults_like(engine.like).knobs
    own = {**like, **convert_flags(ScheduleWorkload, {**flags, **given})}
    source = "standard input" if file == _STDIN else file
    text = sys.stdin.buffer.read() if file == _STDIN else Path(file).read_bytes()
    workload = parse_workload(text, source, own)
    with writing_output():
        for line in ScheduleReplay(workload).lines():
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
