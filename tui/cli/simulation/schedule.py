"""`stepscope schedule`: runs the scheduler over a workload, without running a language model.

A workload file counts time in steps; by default every step is printed. A trace or a recording has
times in seconds, so it needs a model of step times, and only a summary is printed.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.batching import SpendBudget
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.dry_run import (
    ScheduleLine,
    ScheduleReplay,
    ScheduleWorkload,
    parse_workload,
)
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual.drawn import DrawnStepTimes
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.simulation.figures import flat
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.errors import say, writing_output
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.mode_file import load_mode
from stepscope.tui.cli.simulation.schedule_summary import summarized, table
from stepscope.tui.cli.simulation.simulate import (
    DEFAULT_LEN,
    EngineOptions,
    RunOptions,
    make_setup,
    run_once,
)
from stepscope.tui.cli.simulation.source import open_source
from stepscope.tui.cli.simulation.step_times import choose_step_times
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

STDIN = "-"
ALL = "all"
_TRACES = (".csv", ".jsonl", ".mcap", PART_SUFFIX)
_SHOWN = {
    "ttft_p50_steps": "TTFT p50 steps", "ttft_p99_steps": "p99", "itl_p50_steps": "ITL p50 steps",
    "itl_p99_steps": "p99", "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99", "e2e_p50_ms": "E2E p50 ms",
    "e2e_p99_ms": "p99", "output_tokens_per_s": "out tok/s", "num_steps": "steps",
    "num_padded_tokens": "padded", "num_recomputed_tokens": "recomputed",
    "num_preemptions": "preempted",
}  # fmt: skip


class ScheduleOptions(NamedTuple):
    """What to print, and for which batching modes, as the user typed it."""

    summary: bool = False
    modes: str | None = None
    mode_file: str | None = None
    as_json: bool = False


class _Mode(NamedTuple):
    """A batching mode to run.

    Attributes:
        name: "" for the mode that the knobs name.
        own: the user's function, for a mode loaded from a file.
    """

    name: str
    own: SpendBudget | None = None


def schedule(
    file: str, options: ScheduleOptions, engine: EngineOptions, flags: dict[str, Any]
) -> None:
    """Run the scheduler, and print a JSON line for each step, or a summary of each mode.

    Args:
        file: path of a workload, a trace or a recording; '-' reads a workload from standard input.
        flags: knobs as the user typed them.
    """
    modes = _modes(options)
    has_times = file != STDIN and Path(file).suffix in _TRACES
    if options.as_json and not options.summary:
        raise WrongUsage("--json goes with --summary; without it every step is a line of JSON")
    if len(modes) > 1 and not options.summary:
        raise WrongUsage("--modes goes with --summary")
    if has_times:
        if not options.summary:
            raise WrongUsage(
                "the steps of a trace or a recording: stepscope simulate -o FILE.mcap; here "
                "give --summary"
            )
        _compare_modes(file, modes, engine, options.as_json, flags)
        return
    workload = parse_workload(_read(file), _source(file), _overrides(engine, flags))
    if not options.summary:
        _print_lines(ScheduleReplay(workload, modes[0].own).lines())
        return
    model = _model(engine)
    if len(modes) == 1 and not options.as_json:
        say(*table(summarized(_replay(workload, modes[0]), workload, model)))
    else:
        _say_all(
            {
                mode.name: summarized(_replay(workload, mode), workload, model).figures()
                for mode in modes
            },
            options.as_json,
        )


def _modes(options: ScheduleOptions) -> list[_Mode]:
    """Return the modes to run: those of the options, else the one that the knobs name."""
    known = get_args(Batching)
    names = [] if options.modes is None else options.modes.split(",")
    if options.modes == ALL:
        names = list(known)
    for name in names:
        if name not in known:
            raise WrongUsage(f"--modes: expected all, or some of {', '.join(known)}, got {name!r}")
    modes = [_Mode(name) for name in names]
    if options.mode_file is not None:
        modes.append(_Mode(*load_mode(options.mode_file)))
    return modes or [_Mode("")]


def _replay(workload: ScheduleWorkload, mode: _Mode) -> ScheduleReplay:
    if mode.name and mode.own is None:
        knobs = msgspec.structs.replace(workload.knobs, batching=mode.name)
        workload = msgspec.structs.replace(workload, knobs=knobs)
    return ScheduleReplay(workload, mode.own)


def _compare_modes(
    file: str,
    modes: Sequence[_Mode],
    engine: EngineOptions,
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    """Run a trace or a recording in each mode, in simulated time, and print the metrics."""
    if engine.gpu is None and engine.step_time is None and Path(file).suffix == ".mcap":
        engine = engine._replace(step_time=file)  # as fast as the recorded engine
    chosen = choose_step_times(engine.gpu, engine.model, engine.step_time, 1)
    work = open_source(file, WorkloadSpec(), DEFAULT_LEN, 1.0, None)
    setup = make_setup(engine, chosen, work, convert_flags(Knobs, flags))
    found: dict[str, dict[str, float | None]] = {}
    for mode in modes:
        knobs = setup.knobs
        if mode.name and mode.own is None:
            knobs = msgspec.structs.replace(knobs, batching=mode.name)
        made = msgspec.structs.replace(setup, knobs=knobs, own_mode=mode.own)
        model = DrawnStepTimes(made.model, 0)
        run = run_once(made, model, work.requests(0), [SLO()], RunOptions())
        found[mode.name or knobs.batching] = flat(run)
    _say_all(found, as_json)


def _say_all(found: Mapping[str, Mapping[str, float | None]], as_json: bool) -> None:
    """Print the metrics of all modes, as a table with a row for each mode, or as JSON."""
    if as_json:
        say(msgspec.json.encode(found).decode())
        return
    first = next(iter(found.values()))
    names = [name for name in _SHOWN if name in first]
    heading = ["mode", *(_SHOWN.get(name, name) for name in names)]
    rows = [[mode, *(_number(each[name]) for name in names)] for mode, each in found.items()]
    say(*text_table(heading, rows, "<" + ">" * len(names)))


def _number(value: float | None) -> str:
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
