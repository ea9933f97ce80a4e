"""Commands that say what happened in a session, given a recording or an engine."""

from typing import Annotated

import typer

from stepscope.tui.cli.table.shared import (
    AsJson,
    LastSeconds,
    RecordingFile,
    SloItl,
    SloTtft,
    Target,
    example,
    with_key,
)

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog=example(
        "stepscope stats freeze",
        "stepscope stats engine-0 --seconds 10 --json | jq .figures.itl_p99",
    )
)
@with_key
def stats(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> None:
    """Print all figures of a recording, an engine or /metrics."""
    from stepscope.tui.cli.recordings import stats as command

    command.stats(target, seconds, slo_itl, slo_ttft, as_json)


@commands.command(
    epilog=example(
        "stepscope check run.mcap --max itl_p99=50ms --max preemptions=0 --min goodput=95%",
        "stepscope check run.mcap --baseline main.mcap --max-regression 10% --junit check.xml",
    )
)
@with_key
def check(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    most: Annotated[
        list[str] | None,
        typer.Option("--max", metavar="FIGURE=VALUE", help="fail above it; may be repeated"),
    ] = None,
    least: Annotated[
        list[str] | None,
        typer.Option("--min", metavar="FIGURE=VALUE", help="fail below it; may be repeated"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="fail where a figure is worse than in this recording, and 'stepscope compare' "
            "says that it is significant",
        ),
    ] = None,
    max_regression: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="with --baseline: how much worse is still accepted (default: 10%)",
            show_default=False,
        ),
    ] = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="also write a JUnit report")
    ] = None,
) -> int:
    """Check that a session keeps its bounds, for CI.

    docs/figures.md lists the figures.

    Ends with 0 if all bounds hold, 1 if one does not, and 3 if there is too little data to say.
    """
    from stepscope.tui.cli.recordings import check as command

    wanted = command.CheckOptions(most or [], least or [], baseline, max_regression)
    return command.check(target, seconds, wanted, slo_itl, slo_ttft, as_json, junit)


@commands.command(
    epilog=example(
        "stepscope explain session.mcap --slo-itl 50ms",
        "stepscope explain freeze --json | jq '.late[] | {step, ms, cause}'",
    )
)
def explain(
    file: RecordingFile,
    slo_itl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="a longer gap between two tokens is late; 'median': longer than twice the median "
            "(default: the recording's, else [dashboard] in the config file)",
        ),
    ] = None,
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="a later first token is late; 'median': later than twice the median",
        ),
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="only this request, such as r12")
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="INT", help="number of the longest waits to print, 0 for all")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Say why tokens of a recording were late, cause by cause."""
    from stepscope.tui.cli.recordings import explain as command

    command.explain(file, slo_itl, slo_ttft, request, limit, as_json)


@commands.command(
    epilog=example(
        "stepscope ledger session.mcap",
        "stepscope ledger engine-0 --seconds 10 --json | jq .recompute_tax",
    )
)
@with_key
def ledger(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    limit: Annotated[
        int, typer.Option(metavar="INT", help="number of rows of each table, 0 for all")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Say who waits for what, and what preemption cost.

    From the records alone, so also of an attached engine and of an old recording.
    """
    from stepscope.tui.cli.recordings import ledger as command

    command.ledger(target, seconds, limit, as_json)
