"""Commands that run an engine, send it requests, change its knobs or ask for its state."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.table.shared import As, AsJson, Endpoint, Like, Wait, example, with_key

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog=example(
        "stepscope serve --model demo --max-num-batched-tokens 512",
        "stepscope serve --http 127.0.0.1:8000",
        "stepscope serve --like vllm",
    )
)
@with_options("serve", "knobs", "http")
def serve(
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    like: Like = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Run an engine, and publish every step of it.

    Every option is also a key of the config file (sections [serve], [knobs] and [http]) and a
    variable: STEPSCOPE_SERVE_MODEL, STEPSCOPE_KNOBS_ORDER, STEPSCOPE_HTTP_BIND (--http). Options
    override variables, and variables override the file.
    """
    from stepscope.tui.cli.engines import serve as command

    command.serve(flags, exit_with_stdin, like)


@commands.command(epilog=example("stepscope http engine-0 --bind 127.0.0.1:8000"))
@with_key
@with_options("http")
def http(
    endpoint: Endpoint = None,
    inherited: Annotated[int | None, typer.Option("--inherited-socket", hidden=True)] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve the OpenAI API over HTTP for an engine, now or later."""
    from stepscope.tui.cli.engines import http as command

    command.http(endpoint, inherited, flags)


@commands.command(
    epilog=example(
        "stepscope load --rate 2 --document-share 0.2 --seconds 60",
        "stepscope load engine-0 --trace trace.csv --time-scale 0.1 --limit 200",
        "stepscope load --num-requests 200 --reset-prefix-cache",
    )
)
@with_key
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
        int | None,
        typer.Option(help="number of requests to take from the start of the trace", metavar="INT"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="send for this long, then wait for the rest", metavar="NUMBER"),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            help="seconds to wait for an engine that does not answer (stopped or cut off); a "
            "killed engine ends the command at once",
            metavar="NUMBER",
        ),
    ] = 30.0,
    reset_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--reset-prefix-cache",
            help="first empty the engine's prefix cache, so that the same requests are the same "
            "work again",
        ),
    ] = False,
    name: As = None,
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Send work to an engine: a synthetic mix, or a real trace."""
    from stepscope.tui.cli.engines import load as command

    limits = command.LoadLimits(limit, seconds, patience)
    command.load(endpoint, trace, time_scale, limits, flags, reset_prefix_cache, name, as_json)


@commands.command(
    epilog=example(
        "stepscope chat",
        "stepscope chat engine-0 --temperature 0",
        "stepscope chat --model FILE.gguf",
    )
)
@with_key
def chat(
    endpoint: Endpoint = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="start an engine with this model, as in 'stepscope serve' (default: talk to the "
            "one that runs, or start one with smollm2)",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="NUMBER", help="0 is greedy")] = 0.7,
    max_tokens: Annotated[int, typer.Option(metavar="INT", help="tokens of an answer")] = 512,
) -> None:
    """Talk to a model, and see what its tokens waited for.

    Each answer ends with its TTFT, its ITL and the causes of its slowest token. Ctrl-C stops an
    answer, Ctrl-D leaves.
    """
    from stepscope.tui.cli.engines import chat as command

    command.chat(endpoint, model, temperature, max_tokens)


@commands.command(
    "set",
    epilog=example(
        "stepscope set max_num_batched_tokens=512 order=arrival",
        "stepscope set engine-0 max_num_batched_tokens=512 --dry-run",
    ),
)
@with_key
def set_(
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="[ENDPOINT] KNOB=VALUE",
            help="one change of one or more knobs; put the engine first if there are several",
        ),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="the engine, if it is not the first argument", metavar="ENDPOINT"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only check whether the engine would accept it")
    ] = False,
    expect_version: Annotated[
        int | None,
        typer.Option(help="fail if the knobs no longer have this version", metavar="INT"),
    ] = None,
    name: As = None,
) -> None:
    """Change knobs of a running engine; print the step of effect."""
    from stepscope.tui.cli.engines import set as command

    command.set_knobs(assignments, endpoint, dry_run, expect_version, name)


@commands.command(epilog=example("stepscope snapshot --json | jq .kv"))
@with_key
def snapshot(
    endpoint: Endpoint = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="the whole snapshot and the figures of the last minute, as JSON"
        ),
    ] = False,
) -> None:
    """Show what an engine, or a server with /metrics, is doing right now, once."""
    from stepscope.tui.cli.engines import snapshot as command

    command.snapshot(endpoint, as_json)


@commands.command(
    epilog=example(
        "stepscope watch --when 'itl_p99 > 50ms for 30s' --when 'step_in_flight > 5s'",
        "stepscope watch engine-0 --once --json",
    )
)
@with_key
def watch(
    endpoint: Endpoint = None,
    *,
    when: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="FIGURE COMPARISON VALUE [for TIME]; may be given several times (default: "
            "[[alerts]] of the config file)",
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="print the state of each rule once, as soon as it is known"),
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="how long (default: until Ctrl-C)")
    ] = None,
    slo_itl: Annotated[
        str | None, typer.Option(metavar="TIME", help="ITL level, for figures that judge by it")
    ] = None,
    slo_ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="TTFT level, for figures that judge by it")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="answer Prometheus here with how the rules stand"),
    ] = None,
    wait: Wait = True,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON document a line")] = False,
) -> int:
    """Watch an engine by rules: a line when one fires or ends.

    Figures are those of the last ten seconds. A rule that fires ends when it has not held for its
    own 'for', ten seconds at least. Ends with 1 if a rule fired; with --once 3 if none fires and
    one is unknown.
    """
    from stepscope.tui.cli.engines import watch as command

    return command.watch(
        endpoint, when or [], once, as_json, seconds, slo_itl, slo_ttft, metrics, wait
    )


@commands.command(
    epilog=example("stepscope audit", "stepscope audit session.mcap --json | jq '.[] | .who'")
)
@with_key
def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="ENDPOINT|FILE",
            help="an engine, a recording or a sample (default: the only local engine)",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """Show who changed an engine, and which changes it refused.

    A name after 'key' was proved with that key. Any other name is only a claim.
    """
    from stepscope.tui.cli.engines import audit as command

    command.audit(target, as_json)


@commands.command(epilog=example("stepscope doctor"))
def doctor() -> None:
    """Show what is installed, what will be used and what is missing.

    Ends with 1 when an engine could not run here.
    """
    from stepscope.tui.cli.engines import doctor as command

    command.doctor()
