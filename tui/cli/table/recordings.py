"""Commands that write, check and read recordings, without a screen."""

from typing import Annotated

import typer

from stepscope.tui.cli.table.shared import (
    Endpoint,
    FirstStep,
    LastStep,
    RecordingFile,
    Wait,
    example,
    with_key,
)

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog=example(
        "stepscope record -o session.mcap --seconds 60",
        "stepscope record -o incident.mcap --past 300 --seconds 1",
        "stepscope record engine-0 -o week.mcap --rotate 1GB --keep 48h",
        "stepscope record engine-0 --incidents kept --keep 2GB",
    )
)
@with_key
def record(
    endpoint: Endpoint = None,
    *,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="the file to write (MCAP)"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="how long to record (default: until Ctrl-C)"),
    ] = None,
    past: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="begin with this much of the engine's past, as far as it keeps it",
        ),
    ] = 0.0,
    rotate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,AGE",
            help="begin a new file at this size, age or both (1GB, 1h or 1GB,1h), and when the "
            "engine restarts; files are named FILE-TIME-NUMBER.mcap, and each opens alone",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,AGE",
            help="with --rotate: delete this recorder's files beyond this age or total size: 48h, "
            "100GB; with --incidents a size: the last 5 stay",
        ),
    ] = None,
    incidents: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="hold the newest steps in memory, and write a file into DIR only when a rule "
            "fires; without prompts and outputs",
        ),
    ] = None,
    when: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="with --incidents: FIGURE COMPARISON VALUE [for TIME]; may be given several times "
            "(default: [[alerts]] of the config file, else a built-in set)",
        ),
    ] = None,
    before: Annotated[
        str,
        typer.Option(metavar="TIME", help="with --incidents: time to keep before the rule fires"),
    ] = "30s",
    after: Annotated[
        str, typer.Option(metavar="TIME", help="with --incidents: time to keep after it ends")
    ] = "10s",
    on_incident: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="with --incidents: run COMMAND PATH for each file, with a summary as JSON on its "
            "standard input",
        ),
    ] = None,
    slo_itl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="service level to store in the file: a longer gap between two tokens is a breach",
        ),
    ] = None,
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="service level to store in the file: a later first token is a breach",
        ),
    ] = None,
    wait: Wait = True,
) -> None:
    """Record every step of an engine to a file, without a screen.

    The file stores the service levels of these options, or else of [dashboard] in the config file.
    Commands that open the file judge breaches by them.
    """
    from stepscope.tui.cli.recordings import record as command
    from stepscope.tui.cli.recordings.incidents import IncidentOptions

    options = None
    if incidents is not None:
        options = IncidentOptions(incidents, before, after, keep, when or (), on_incident)
    command.record(endpoint, output, seconds, rotate, keep, slo_itl, slo_ttft, past, options, wait)


@commands.command(
    epilog=example(
        "stepscope repair session.mcap.part", "stepscope repair broken.mcap -o mended.mcap"
    )
)
def repair(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a cut or damaged recording")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="the new file (default: named after the old one)"
        ),
    ] = None,
    strip_tokens: Annotated[
        bool,
        typer.Option(
            "--strip-tokens",
            help="leave out all prompts and outputs, also of an undamaged recording",
        ),
    ] = False,
) -> None:
    """Make a complete recording from one that is cut or damaged.

    The old file is only read; the new one has a new index. Says what was kept and what was lost.
    A file that is still being written is left alone (exit code 1): its recorder completes it.
    """
    from stepscope.tui.cli.recordings import repair as command

    command.repair_file(file, output, strip_tokens)


@commands.command(epilog=example("stepscope verify session.mcap", "stepscope verify f.mcap --json"))
def verify(
    file: RecordingFile,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> int:
    """Check a recording from its bytes to its KV accounting.

    Checksums, lost messages, the order of steps and their times; then the moves of KV blocks are
    replayed, and every count and reference is checked against them. Ends with 1 when anything is
    wrong. A file that is still being written is not an error.
    """
    from stepscope.tui.cli.recordings import verify as command

    return command.verify_file(file, as_json)


@commands.command(
    epilog=example(
        "stepscope export session.mcap -o session.pftrace",
        "stepscope export session.mcap -o r.csv --table requests --from 100 --until 200",
        "stepscope export session.mcap -o work.jsonl --format mooncake",
    )
)
def export(
    file: RecordingFile,
    target: Annotated[
        str | None,
        typer.Option(
            "--format",
            "--to",
            metavar="FORMAT",
            help="perfetto, parquet, csv, jsonl or mooncake (default: by the file's ending: "
            ".pftrace, .parquet, .csv or .jsonl)",
            show_default=False,
        ),
    ] = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="the file to write")
    ],
    first: FirstStep = None,
    last: LastStep = None,
    table: Annotated[
        str,
        typer.Option(metavar="TABLE", help="for csv and parquet: steps, rows or requests"),
    ] = "steps",
    with_tokens: Annotated[
        bool,
        typer.Option(
            "--with-tokens",
            help="also write prompts and outputs, if the recording has them (jsonl)",
        ),
    ] = False,
) -> None:
    """Convert a recording to the format of another program."""
    from stepscope.tui.cli.recordings import export as command

    command.export_file(file, target, output, first, last, table, with_tokens)
