"""The `stepscope` command: one table of commands, each run by a module of its own.

Nothing heavy is imported here: a command imports what it needs when it runs.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.tui.cli_errors import DONE, INTERRUPTED, WRONG_USAGE, report
from stepscope.tui.cli_options import with_options

app = typer.Typer(
    name="stepscope",
    help="See and steer every forward step of an LLM inference engine, in a terminal.",
    epilog="\b\nExample:\n  stepscope demo\n\nExit codes: 0 done, 1 it failed, 2 wrong usage.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

bench = typer.Typer(
    help="Measure an engine on this machine.",
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
app.add_typer(bench, name="bench")

Endpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="ENDPOINT",
        help="name of a local engine, ipc://PATH or tcp://HOST:PORT (default: the only local one)",
    ),
]


def _example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join("  " + line for line in lines)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stepscope {version('stepscope')}")
        raise typer.Exit


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@app.command(
    epilog=_example(
        "stepscope demo",
        "stepscope demo --headless --record out.mcap --screenshot out.svg",
    )
)
@with_options("dashboard")
def demo(
    model: Annotated[
        str, typer.Option(metavar="TEXT", help="what to serve, as in 'stepscope serve'")
    ] = "demo",
    headless: Annotated[
        bool, typer.Option("--headless", help="without a terminal; prints a summary at the end")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="how long, with --headless (20)")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="record the session (MCAP)")
    ] = None,
    screenshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw the last moment (SVG), with --headless"),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Watch a real engine at work; all of it ends with the dashboard."""
    from stepscope.tui import cli_demo

    cli_demo.demo(model, headless, seconds, record, screenshot, flags)


@app.command(
    epilog=_example(
        "stepscope serve --model demo --max-num-batched-tokens 512",
        "stepscope serve --http 127.0.0.1:8000",
    )
)
@with_options("serve", "knobs", "http")
def serve(
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Run an engine, and publish every step of it.

    Every option is also a key of the config file (sections [serve], [knobs] and [http]) and a
    variable: STEPSCOPE_SERVE_MODEL, STEPSCOPE_KNOBS_ORDER, STEPSCOPE_HTTP_BIND (--http). Flags win
    over variables, those over the file.
    """
    from stepscope.tui import cli_serve

    cli_serve.serve(flags, exit_with_stdin)


@app.command(epilog=_example("stepscope http engine-0 --bind 127.0.0.1:8000"))
@with_options("http")
def http(
    endpoint: Endpoint = None,
    inherited: Annotated[int | None, typer.Option("--inherited-socket", hidden=True)] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve the OpenAI API over HTTP for an engine that runs, or will."""
    from stepscope.tui import cli_http

    cli_http.http(endpoint, inherited, flags)


@app.command(epilog=_example("stepscope top", "stepscope top tcp://127.0.0.1:5555 --readonly"))
@with_options("dashboard")
def top(endpoint: Endpoint = None, *, flags: dict[str, Any]) -> None:
    """Watch and steer a running engine."""
    from stepscope.tui import cli_top

    cli_top.top(endpoint, flags)


@app.command(
    epilog=_example(
        "stepscope load --rate 2 --document-share 0.2 --seconds 60",
        "stepscope load engine-0 --trace trace.csv --time-scale 0.1 --limit 200",
    )
)
@with_options("load")
def load(
    endpoint: Endpoint = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="replay a trace: Azure CSV or Mooncake JSONL", metavar="FILE", show_default=False
        ),
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(help="multiply the trace's times: 0.1 is ten times as fast", metavar="NUMBER"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="only the first so many requests of the trace", metavar="INT")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="send for so long, then wait for the rest", metavar="NUMBER"),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Send work to an engine: a synthetic mix, or a real trace."""
    from stepscope.tui import cli_load

    cli_load.load(endpoint, trace, time_scale, limit, seconds, flags)


@app.command(
    epilog=_example(
        "stepscope record -o session.mcap --seconds 60",
        "stepscope record engine-0 -o week.mcap --rotate 1GB --keep 48h",
    )
)
def record(
    endpoint: Endpoint = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="the file to write (MCAP)")
    ],
    seconds: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="for so long (default: until Ctrl-C)"),
    ] = None,
    rotate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,AGE",
            help="begin a new file at this size or age, or both: 1GB, 1h or 1GB,1h; they are "
            "named FILE-TIME-NUMBER.mcap, each opens alone, and another engine gets another file",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,AGE",
            help="with --rotate: delete this recorder's older files beyond this: 48h, 100GB",
        ),
    ] = None,
) -> None:
    """Record every step of an engine to a file, without a screen."""
    from stepscope.tui import cli_record

    cli_record.record(endpoint, output, seconds, rotate, keep)


@app.command(
    epilog=_example(
        "stepscope repair session.mcap.part", "stepscope repair broken.mcap -o mended.mcap"
    )
)
def repair(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a recording that is not whole")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="the new file (default: named after the old one)"
        ),
    ] = None,
) -> None:
    """Make a whole recording of one that is cut or damaged.

    The old file is only read; the new one has a new index. Says what was kept and what was lost.
    """
    from stepscope.tui import cli_repair

    cli_repair.repair_file(file, output)


@app.command(
    epilog=_example(
        "stepscope export session.mcap --to perfetto -o session.pftrace",
        "stepscope export session.mcap --to csv --table requests --from 100 --until 200 -o r.csv",
    )
)
def export(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a recording, or the name of a shipped sample")
    ],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            "--format",
            metavar="FORMAT",
            help="perfetto, chrome, parquet, csv, jsonl or mooncake",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="the file to write")
    ],
    first: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="the first step of it")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--until", metavar="STEP", help="the last step of it")
    ] = None,
    table: Annotated[
        str,
        typer.Option(metavar="TABLE", help="for csv and parquet: steps, rows or requests"),
    ] = "steps",
) -> None:
    """Write a recording in the format of another program."""
    from stepscope.tui import cli_export

    cli_export.export_file(file, target, output, first, last, table)


@app.command(epilog=_example("stepscope verify session.mcap", "stepscope verify f.mcap --json"))
def verify(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a recording, or the name of a shipped sample")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> int:
    """Check a recording from its bytes to its KV accounting.

    Checksums, lost messages, the order of steps and their times; then the moves of KV blocks are
    replayed, and every count and reference is held against them. Ends with 1 when anything is
    wrong.
    """
    from stepscope.tui import cli_verify

    return cli_verify.verify_file(file, as_json)


@app.command(
    epilog=_example("stepscope replay session.mcap --speed 4", "stepscope replay chunked --at 120")
)
@with_options("dashboard")
def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a recording, or the name of a shipped sample")
    ],
    speed: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="2 is twice as fast  [default: 1]")
    ] = None,
    at: Annotated[
        int | None, typer.Option(metavar="STEP", help="stand at this step instead of playing")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Show a recording in the dashboard."""
    from stepscope.tui import cli_top

    cli_top.replay(file, speed, at, flags)


@app.command(
    epilog=_example(
        "stepscope explain session.mcap --slo-itl 50ms",
        "stepscope explain freeze --json | jq '.late[] | {step, ms, cause}'",
    )
)
def explain(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a recording, or the name of a shipped sample")
    ],
    slo_itl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="a longer gap between two tokens is late (default: twice the median)",
        ),
    ] = None,
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="a later first token is late (default: twice the median)"
        ),
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="only this request, such as r12")
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="INT", help="so many of the longest waits, 0 for all")
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="everything as one JSON document")
    ] = False,
) -> None:
    """Say why tokens of a recording were late, cause by cause."""
    from stepscope.tui import cli_explain

    cli_explain.explain(file, slo_itl, slo_ttft, request, limit, as_json)


@app.command("set", epilog=_example("stepscope set max_num_batched_tokens=512 order=arrival"))
def set_(
    assignments: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="knobs and their new values")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="the engine (default: the only local one)", metavar="ENDPOINT"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only check whether the engine would take it")
    ] = False,
    expect_version: Annotated[
        int | None,
        typer.Option(help="fail if the knobs are not at this version any more", metavar="INT"),
    ] = None,
) -> None:
    """Change knobs of a running engine; print the step of effect."""
    from stepscope.tui import cli_set

    cli_set.set_knobs(assignments, endpoint, dry_run, expect_version)


@app.command(
    epilog=_example(
        "stepscope schedule workload.json --batching static --summary",
        "stepscope schedule workload.json --max-num-batched-tokens 256 | head",
    )
)
@with_options("knobs")
def schedule(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a workload (JSON), or - for standard input")
    ],
    summary: Annotated[
        bool, typer.Option("--summary", help="what the steps come to, instead of the steps")
    ] = False,
    num_blocks: Annotated[
        int | None, typer.Option(metavar="INT", help="KV blocks, one of which is never used")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="INT", help="tokens of one KV block")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Dry-run the scheduler, without a model: one JSON line a step.

    A workload is an object with num_blocks, requests (arrival_step, prompt_len, output_len each)
    and any knob by its name.
    """
    from stepscope.tui import cli_schedule

    settings = {"num_blocks": num_blocks, "block_size": block_size}
    cli_schedule.schedule(file, summary, settings, flags)


@bench.command(
    epilog=_example(
        "stepscope bench throughput",
        "stepscope bench throughput --num-requests 256 --json out.json",
        "stepscope bench throughput --num-requests 32 --input-len 512 --output-len 64",
    )
)
@with_options("serve", "knobs")
def throughput(
    num_requests: Annotated[
        int | None, typer.Option(metavar="INT", help="requests  [default: 256, on a CPU 32]")
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="tokens of a prompt, drawn evenly; or one number"),
    ] = "100:1024",
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="tokens of an output, drawn evenly; or one number"),
    ] = "100:1024",
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", help="of the sampling; 0 is greedy")
    ] = 0.0,
    warmup: Annotated[
        int, typer.Option(metavar="INT", help="requests before the clock starts")
    ] = 2,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="also write everything measured to this file"),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Run fixed requests through an engine, as fast as it goes.

    The engine is that of 'stepscope serve', in this process. All requests are there at once, their
    token ids are random, and no end token ends them. The defaults are the usual yardstick: 256
    requests, prompts and outputs of 100 to 1024 tokens, seed 0; on a CPU only the first 32 of them.
    --seed draws lengths and token ids too.
    """
    from stepscope.tui import cli_bench

    cli_bench.throughput(num_requests, input_len, output_len, temperature, warmup, json_file, flags)


@app.command(epilog=_example("stepscope snapshot --json | jq .kv"))
def snapshot(
    endpoint: Endpoint = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the whole snapshot as one JSON document")
    ] = False,
) -> None:
    """Show what an engine is doing right now, once."""
    from stepscope.tui import cli_snapshot

    cli_snapshot.snapshot(endpoint, as_json)


@app.command(epilog=_example("stepscope doctor"))
def doctor() -> None:
    """Say what is installed, what will be used, what is missing.

    Ends with 1 when an engine could not run here.
    """
    from stepscope.tui import cli_doctor

    cli_doctor.doctor()


def main() -> None:
    """Entry point of the console script; ends the process."""
    try:
        result = app(prog_name="stepscope", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough ('| head').
        sys.stdout = None
        sys.exit(DONE)
    except Exception as error:  # noqa: BLE001 - the one place where errors meet a person
        sys.exit(report(error))
    sys.exit(result if isinstance(result, int) else DONE)


if __name__ == "__main__":
    main()
