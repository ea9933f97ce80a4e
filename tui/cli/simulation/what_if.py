"""`stepscope what-if`: predicts what a recorded session would have been with other knobs."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepscope.recordings.export.output import MissingPackage, writing
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.plot.frontier import frontier_figure
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.what_if import WhatIf, what_if
from stepscope.recordings.simulation.writing import write_what_if
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.arguments import AsJson, RecordingFile, example, option
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.knob_words import Variant, variants_of
from stepscope.tui.cli.shared.levels import level_of
from stepscope.tui.cli.shared.output_path import output_path, picture_path
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.cli.simulation.report import levels_of_options
from stepscope.tui.cli.simulation.what_if_report import document, frontier, report
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    "what-if",
    epilog=example(
        "stepscope what-if session.mcap max_num_batched_tokens=1024",
        "stepscope what-if session.mcap max_num_seqs=8,16 batching=static",
        "stepscope what-if s.mcap --sweep max_num_batched_tokens=64..8192 -o s.svg",
        "stepscope what-if s.mcap max_num_seqs=8 -o 8.mcap",
    ),
)
def run(
    file: RecordingFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KNOB=VALUE,...",
            help="the knobs of one change; commas try several values of a knob",
        ),
    ] = None,
    sweep: Annotated[
        str | None, option("KNOB=FIRST..LAST", "try a range of values, evenly in ratio")
    ] = None,
    slo: Annotated[
        list[str] | None,
        option(
            "LEVELS",
            "service levels to count goodput by ('ttft=500 itl=50'; default: those of the "
            "recording)",
        ),
    ] = None,
    output: Annotated[
        str | None,
        option(
            "FILE",
            "of one variant: a simulated session as a recording, and nothing else (.mcap); of "
            "--sweep: also TTFT against ITL (.svg, .png or .pdf)",
            "--output",
            "-o",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a recorded session would have been with other knobs.

    The arrivals, lengths and prefix hits are those of the recording, and step times are fitted on
    it. Beside each forecast stand what was recorded and the same knobs simulated.
    """
    path = find_recording(file)
    variants = variants_of(words or (), sweep)
    if not variants:
        raise WrongUsage("give knobs, such as max_num_batched_tokens=256,1024, or --sweep")
    session = picture = None
    if output is not None and output.endswith(".mcap"):
        if sweep is not None or len(variants) != 1:
            raise WrongUsage("--output: a recording is of one variant; give one value of each knob")
        session = output_path(output)
    elif output is not None and sweep is None:
        raise WrongUsage("--output: a figure shows a sweep; give --sweep KNOB=FIRST..LAST")
    elif output is not None:
        if any("," in word for word in words or ()):
            raise WrongUsage("--output: a figure shows one sweep; give one value of other knobs")
        picture = picture_path(output, (".svg", ".png", ".pdf"))
    stop = StopSignals(signal.SIGINT, signal.SIGTERM)
    with stop, Progress() as progress, Recording(path) as recording:
        levels = levels_of_options(slo or ()) or [level_of({}, recording)]
        basis = basis_of(recording, levels, lambda share: progress("reading", share))
        if session is not None:
            _write(session, basis, variants[0], levels[0], progress, stop)
            return

        def on_run(share: float) -> bool:
            progress("simulating", share)
            return bool(stop)

        found = what_if(basis, variants, levels, on_run)
    if found is None:
        raise Interrupted("interrupted before the runs were done")
    if as_json:
        say(document(found, basis, levels))
    else:
        say(*report(found, basis, levels))
    if picture is not None and sweep is not None:
        by = sweep.partition("=")[0] + (f" with {' '.join(words)}" if words else "")
        _draw(picture, found, by, path.stem)


def _write(
    path: Path,
    basis: WhatIfBasis,
    variant: Variant,
    level: SLO,
    progress: Progress,
    stop: StopSignals,
) -> None:
    num_requests = len(basis.work.requests)

    def on_request(number: int) -> bool:
        progress("simulating", number / num_requests)
        return bool(stop)

    write_what_if(basis, *variant, levels_of(level), path, on_request)
    if stop:
        raise Interrupted(f"interrupted; {path} holds the session up to the interruption")
    print(f"stepscope: wrote {path}", file=sys.stderr)


def _draw(picture: Path, found: WhatIf, by: str, name: str) -> None:
    points, recorded = frontier(found)
    details = (
        f"forecast from {name}; bars: where nine in ten sessions should lie; full points: no other "
        "value has both a lower TTFT p99 and a lower ITL p99"
    )
    try:
        content = frontier_figure(
            points, recorded, f"TTFT against ITL by {by}", details, picture.suffix[1:].lower()
        )
    except MissingPackage as error:
        raise CommandFailed(str(error)) from error
    with writing(picture, replace=True) as stream:
        stream.write(content)
    print(f"stepscope: wrote {picture}", file=sys.stderr)
