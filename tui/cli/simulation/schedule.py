"""`stepscope schedule`: runs the scheduler over a workload, without running a language model.

A workload file counts time in steps; by default every step is printed. A trace or a recording has
times in seconds, so it needs a model of step times, and only a summary is printed.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

import msgspec
import typer

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.dry_run import (
    ScheduleLine,
    ScheduleReplay,
    ScheduleWorkload,
    parse_workload,
)
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.simulation.figures import flat
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.arguments import Like, example
from stepscope.tui.cli.shared.errors import say, writing_output
from stepscope.tui.cli.shared.knob_words import variants_of
from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import sample_named
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.report import Interval, intervals
from stepscope.tui.cli.simulation.report import text as interval_text
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

commands = typer.Typer(rich_markup_mode=None)


_Value: TypeAlias = float | Interval | None
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
    """What to print, and for which batching modes and knobs, as the user typed it."""

    summary: bool = False
    modes: str | None = None
    as_json: bool = False
    sweep: str | None = None
    num_runs: int = 1


class _ScheduleCase(NamedTuple):
    """A batching mode to run, with the knobs that differ from those of the options.

    Attributes:
        name: "" if nothing differs.
    """

    name: str
    changes: Mapping[str, KnobValue]


@commands.command(
    epilog=example(
        "stepscope schedule workload.json --batching static --summary",
        "stepscope schedule workload.json --max-num-batched-tokens 256 | head",
        "stepscope schedule trace.csv --summary --modes all --gpu h100",
        "stepscope schedule chunked --summary --sweep max_num_seqs=8..64 --runs 5",
    )
)
@with_options("knobs", defaults=dict.fromkeys(Knobs.__struct_fields__))
def schedule(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="a workload (JSON), a trace, a recording or sample, or - for stdin"
        ),
    ],
    summary: Annotated[
        bool, typer.Option("--summary", help="print a summary instead of the steps")
    ] = False,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="all|MODE,...", help="with --summary: a table of these batching modes"
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KNOB=FIRST..LAST", help="with --summary: a line for each of some values"
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            metavar="INT",
            min=1,
            help="of a trace or a recording: runs, with seeds from 0 on",
            show_default=False,
        ),
    ] = 1,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="times in ms on this GPU (h100, a100, ...)")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="... of this model")
    ] = None,
    step_time: Annotated[
        str | None, typer.Option(metavar="FILE", help="times in ms, as in 'stepscope simulate'")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(metavar="INT", help="number of KV blocks; one of them is never used"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="INT", help="tokens in a KV block")
    ] = None,
    like: Like = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --summary: print JSON")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Dry-run the scheduler, without a model: one JSON line a step.

    A workload is an object with num_blocks, requests (arrival_step, prompt_len, output_len each)
    and any knob by its name. A trace or a recording has times instead of steps: give --summary, and
    step times (those of a recording are its own).

    Options override the workload file, but budget changes in mid-run still happen. What neither
    sets is as in 'stepscope serve'.
    """
    engine = EngineOptions(
        gpu, model, step_time, like=like, num_blocks=num_blocks, block_size=block_size
    )
    options = ScheduleOptions(summary, modes, as_json, sweep, runs)
    dry_run(file, options, engine, flags)


def dry_run(
    file: str, options: ScheduleOptions, engine: EngineOptions, flags: Mapping[str, Any]
) -> None:
    """Run the scheduler, and print a JSON line for each step, or a summary of each mode.

    Args:
        file: path of a workload, a trace or a recording, or the name of a shipped sample; '-' reads
            a workload from standard input.
        flags: knobs as the user typed them.
    """
    cases = _cases(options)
    if not Path(file).exists():
        file = str(sample_named(file) or file)
    has_times = file != STDIN and Path(file).suffix in _TRACES
    if options.as_json and not options.summary:
        raise WrongUsage("--json goes with --summary; without it every step is a line of JSON")
    if len(cases) > 1 and not options.summary:
        raise WrongUsage("--modes and --sweep go with --summary")
    if options.num_runs > 1 and not has_times:
        raise WrongUsage(
            "--runs: a workload that counts in steps has no chance in it; leave it out"
        )
    if has_times:
        if not options.summary:
            raise WrongUsage(
                "the steps of a trace or a recording: stepscope simulate -o FILE.mcap; here "
                "give --summary"
            )
        _compare(file, cases, engine, options, flags)
        return
    workload = parse_workload(_read(file), _source(file), _overrides(engine, flags))
    if not options.summary:
        _print_lines(ScheduleReplay(workload).lines())
        return
    model = _model(engine)
    if len(cases) == 1 and not options.as_json:
        say(*table(summarized(_replay(workload, cases[0]), workload, model)))
    else:
        _say_all(
            {
                case.name: summarized(_replay(workload, case), workload, model).figures()
                for case in cases
            },
            options.as_json,
        )


def _cases(options: ScheduleOptions) -> list[_ScheduleCase]:
    """Return every mode of the options with every value of the sweep."""
    if options.sweep is None:
        return _modes(options)
    return [
        case._replace(name=f"{case.name} {text}".strip(), changes={**case.changes, **changes})
        for case in _modes(options)
        for text, changes in variants_of((), options.sweep)
    ]


def _modes(options: ScheduleOptions) -> list[_ScheduleCase]:
    """Return the modes of the options, else the one that the knobs name."""
    known = get_args(Batching)
    names = [] if options.modes is None else options.modes.split(",")
    if options.modes == ALL:
        names = list(known)
    for name in names:
        if name not in known:
            raise WrongUsage(f"--modes: expected all, or some of {', '.join(known)}, got {name!r}")
    modes = [_ScheduleCase(name, {"batching": name}) for name in names]
    return modes or [_ScheduleCase("", {})]


def _replay(workload: ScheduleWorkload, case: _ScheduleCase) -> ScheduleReplay:
    knobs = msgspec.structs.replace(workload.knobs, **case.changes)
    return ScheduleReplay(msgspec.structs.replace(workload, knobs=knobs))


def _compare(
    file: str,
    cases: Sequence[_ScheduleCase],
    engine: EngineOptions,
    options: ScheduleOptions,
    flags: Mapping[str, Any],
) -> None:
    """Run a trace or a recording in each case, in simulated time, and print the figures."""
    if engine.gpu is None and engine.step_time is None and Path(file).suffix == ".mcap":
        engine = engine._replace(step_time=file)  # as fast as the recorded engine
    chosen = choose_step_times(engine.gpu, engine.model, engine.step_time, 1)
    work = open_source(file, WorkloadSpec(), DEFAULT_LEN, 1.0, None)
    setup = make_setup(engine, chosen, work, convert_flags(Knobs, flags))
    found: dict[str, Mapping[str, _Value]] = {}
    with Progress() as progress:
        for number, case in enumerate(cases):
            knobs = setup.knobs.changed(case.changes, setup.limits)
            made = msgspec.structs.replace(setup, knobs=knobs)
            name = case.name or knobs.batching
            runs = []
            for seed in range(options.num_runs):
                progress(f"simulating {name}", (number + seed / options.num_runs) / len(cases))
                model = DrawnStepTimes(made.model, seed)
                runs.append(run_once(made, model, work.requests(seed), [SLO()], RunOptions()))
            found[name] = intervals(runs) if options.num_runs > 1 else flat(runs[0])
    _say_all(found, options.as_json)


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
