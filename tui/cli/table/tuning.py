"""Commands that say which knobs would serve a session or an engine better, and the autopilot."""

from typing import Annotated

import typer

from stepscope.tui.cli.table.shared import (
    As,
    AsJson,
    Endpoint,
    RecordingFile,
    SloItl,
    SloTtft,
    Target,
    example,
    with_key,
)

commands = typer.Typer(rich_markup_mode=None)

_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", help="how long to watch an engine  [default: 60]", show_default=False
    ),
]


@commands.command(
    "what-if",
    epilog=example(
        "stepscope what-if session.mcap max_num_batched_tokens=1024",
        "stepscope what-if session.mcap max_num_seqs=8,16 batching=static",
        "stepscope what-if s.mcap --sweep max_num_batched_tokens=64..8192 -o s.svg",
        "stepscope what-if s.mcap max_num_seqs=8 -o 8.mcap",
    ),
)
def what_if(
    file: RecordingFile,
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KNOB=VALUE,...",
            help="the knobs of one change; commas try several values of a knob",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KNOB=FIRST..LAST", help="try a range of values, evenly in ratio"),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVELS",
            help="service levels to count goodput by ('ttft=500 itl=50'; default: those of the "
            "recording)",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="of one variant: a simulated session as a recording, and nothing else (.mcap); of "
            "--sweep: also TTFT against ITL (.svg, .png or .pdf)",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a recorded session would have been with other knobs.

    The arrivals, lengths and prefix hits are those of the recording, and step times are fitted on
    it. Beside each forecast stand what was recorded and the same knobs simulated.
    """
    from stepscope.tui.cli.simulation import what_if as command

    command.run(file, variants or (), sweep, slo or (), output, as_json)


@commands.command(
    epilog=example(
        "stepscope tune session.mcap --slo-itl 50ms --slo-ttft 1s",
        "stepscope tune engine-0 --slo-itl 30ms --seconds 120",
    )
)
@with_key
def tune(
    target: Target = None,
    *,
    seconds: _Seconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> int:
    """Find the knobs that keep the service levels best.

    Candidates are simulated with the recorded requests, as in 'stepscope what-if'. Nothing is
    changed. Says why, and which load would do, if no knobs keep the levels (exit code 1).
    """
    from stepscope.tui.cli.simulation import tune as command

    return command.run(target, seconds, slo_itl, slo_ttft, as_json)


@commands.command(
    epilog=example(
        "stepscope diagnose session.mcap",
        "stepscope diagnose engine-0 --slo-itl 30ms --slo-ttft 1s --seconds 120",
    )
)
@with_key
def diagnose(
    target: Target = None,
    *,
    seconds: _Seconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> None:
    """Find the setting that is the bottleneck, and prove it.

    The steps show which settings may hold the engine back: seats, budget, KV memory and its
    reservation, the batching mode, long prompts, the prefix cache, the host. The recorded requests
    are then simulated with each limit lifted. Nothing is changed.
    """
    from stepscope.tui.cli.simulation import diagnose as command

    command.run(target, seconds, slo_itl, slo_ttft, as_json)


@commands.command(
    epilog=example(
        "stepscope autopilot --slo-itl 50ms --shadow",
        "stepscope autopilot engine-0 --slo-itl 30ms --as night-shift",
    )
)
@with_key
def autopilot(
    endpoint: Endpoint = None,
    *,
    slo_itl: SloItl = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="only say what it would do; change nothing")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="how long (default: until Ctrl-C)")
    ] = None,
    name: As = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON document a line")] = False,
) -> int:
    """Hold an ITL level by moving the token budget of an engine.

    Keeps 95 % of the gaps between tokens within the level. It predicts step times with a model
    fitted on the engine's own steps, and also limits the running requests if the budget alone is
    not enough. Every move is in the engine's audit with its reason. The old values of the knobs
    are restored when the autopilot ends, dies or loses the telemetry. It ends when somebody else
    sets one of its knobs.
    """
    from stepscope.tui.cli.simulation import autopilot as command

    return command.run(endpoint, slo_itl, shadow, seconds, name, as_json)
