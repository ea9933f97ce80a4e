"""What `stepscope simulate` prints of several cases, and of a workload that counts in steps.

A case is a batching mode with values of knobs.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.dry_run import ScheduleReplay, ScheduleWorkload, parse_workload
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.knob_words import variants_of
from stepscope.tui.cli.shared.output import Progress, say, text_table, write_json, writing_output
from stepscope.tui.cli.shared.paths import sample_named
from stepscope.tui.cli.simulation.runs import (
    MIX,
    STDIN,
    EngineOptions,
    Interval,
    RunOptions,
    intervals,
    open_work,
    run_once,
)
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

Cases: TypeAlias = Mapping[str, Mapping[str, KnobValue]]
"""The name of each case, and the knobs that differ from those of the options."""

_ALL = "all"
_SHOWN = {
    "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99", "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "p99", "e2e_p50_ms": "E2E p50 ms", "e2e_p99_ms": "p99",
    "output_tokens_per_s": "out tok/s", "num_steps": "steps", "num_preemptions": "preempted",
}  # fmt: skip


def cases_of(modes: str | None, sweep: str | None) -> Cases:
    """Return every mode of `--modes` with every value of `--sweep`; empty if neither is given."""
    known = get_args(Batching)
    names = [] if modes is None else list(known) if modes == _ALL else modes.split(",")
    for name in names:
        if name not in known:
            raise WrongUsage(f"--modes: expected all, or some of {', '.join(known)}, got {name!r}")
    cases: Cases = {name: {"batching": name} for name in names}
    if sweep is None:
        return cases
    return {
        f"{name} {text}".strip(): {**case, **changes}
        for name, case in (cases or {"": {}}).items()
        for text, changes in variants_of((), sweep)
    }


def print_steps(
    file: str | None, engine: EngineOptions, flags: Mapping[str, Any], *, is_alone: bool
) -> None:
    """Run the scheduler alone on a workload that counts in steps; print a JSON line a step."""
    if file is None:
        raise WrongUsage("--steps: name a workload that counts in steps (.json, or - for stdin)")
    if not is_alone or engine.gpu is not None or engine.step_time is not None:
        raise WrongUsage(
            "--steps: prints a line of JSON a step, which needs no step times; leave out --json, "
            "--modes, --sweep, --runs, --output, --gpu and --step-time"
        )
    if Path(file).suffix != ".json" and (file == MIX or sample_named(file) is not None):
        raise WrongUsage(
            f"--steps: {file} counts in seconds, not in steps: -o FILE.mcap writes its steps"
        )
    source = "standard input" if file == STDIN else file
    workload = parse_workload(_read(file), source, _overrides(engine, flags))
    encoder = msgspec.json.Encoder()
    with writing_output():
        for line in ScheduleReplay(workload).lines():
            sys.stdout.buffer.write(encoder.encode(line) + b"\n")


def compare_cases(
    source: str,
    cases: Cases,
    engine: EngineOptions,
    options: RunOptions,
    spec: WorkloadSpec,
    levels: Sequence[SLO],
    flags: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Simulate a trace, a recording or a mix in each case, and print the figures."""
    work, setup = open_work(source, engine, options, spec, flags)
    found: dict[str, Mapping[str, Interval]] = {}
    with Progress() as progress:
        for number, (name, changes) in enumerate(cases.items()):
            made = msgspec.structs.replace(setup, knobs=setup.knobs.changed(changes, setup.limits))
            runs = []
            for at in range(options.num_runs):
                progress(f"simulating {name}", (number + at / options.num_runs) / len(cases))
                seed = spec.seed + at
                model = DrawnStepTimes(made.model, seed)
                runs.append(run_once(made, model, work.requests(seed), levels, options))
            found[name] = intervals(runs)
    if as_json:
        is_one = options.num_runs == 1
        write_json(
            {
                name: {key: each.median if is_one else each._asdict() for key, each in of.items()}
                for name, of in found.items()
            }
        )
        return
    rows = [[mode, *(_text(each[name]) for name in _SHOWN)] for mode, each in found.items()]
    say(*text_table(["mode", *_SHOWN.values()], rows))


def _text(value: Interval) -> str:
    is_whole = all(each is not None and each == int(each) for each in value)
    return value.text(",.0f" if is_whole else ",.1f")


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
