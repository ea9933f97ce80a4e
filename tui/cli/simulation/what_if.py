"""`stepscope what-if`: predicts what a recorded session would have been with other knobs."""

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.what_if import NUM_RUNS, ForecastStopped, Predicted, WhatIf
from stepscope.recordings.simulation.what_if import what_if as forecasts
from stepscope.recordings.simulation.writing import write_what_if
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.shared.arguments import find_recording, output_path, variants_of
from stepscope.tui.cli.shared.levels import level_of
from stepscope.tui.cli.shared.options import AsJson, RecordingFile, argument, command, option
from stepscope.tui.cli.shared.output import Progress, note, plain, say, text_table, told, write_json
from stepscope.tui.cli.shared.process import StopSignals
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import said
from stepscope.tui.views.format import three_digits

_SHOWN = {
    f"{kind}_{rank}_ms": f"{kind.upper()} {rank} ms"
    for kind in ("ttft", "itl", "e2e")
    for rank in ("p50", "p99")
} | {"goodput_per_s": "goodput /s"}
_DISTURBED = 0.1  # with more drift than this, forecasts were far too slow (docs/simulate.md)


@command(
    "stepscope what-if session.mcap max_num_batched_tokens=1024",
    "stepscope what-if session.mcap max_num_seqs=8,16 batching=static",
    "stepscope what-if s.mcap max_num_batched_tokens=64..8192",
    "stepscope what-if s.mcap max_num_seqs=8 -o 8.mcap",
    sections=("levels",),
)
def what_if(
    file: RecordingFile,
    words: list[str] | None = argument(
        "KNOB=VALUE,...", "knobs to change; commas try several values, FIRST..LAST a range"
    ),
    output: str | None = option(
        "FILE", "of one variant: only write a simulated session (.mcap)", "--output", "-o"
    ),
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Say what a recorded session would have been with other knobs.

    The arrivals, lengths and prefix hits are those of the recording, and step times are fitted on
    it. Beside each forecast stand what was recorded and the same knobs simulated.
    """
    path = find_recording(file)
    variants = variants_of(words or ())
    if not variants:
        raise WrongUsage("give knobs, such as max_num_batched_tokens=256,1024 or =64..8192")
    session = None if output is None else output_path(output)
    if session is not None and session.suffix != ".mcap":
        raise WrongUsage(f"--output: expected a name that ends in .mcap, got {output}")
    if session is not None and len(variants) != 1:
        raise WrongUsage("--output: a recording is of one variant; give one value of each knob")
    stop = StopSignals()
    with stop, Progress() as progress, Recording(path) as recording:
        level = level_of(flags, recording)
        basis = basis_of(recording, level, lambda share: progress(f"reading {file}", share))
        for text, changes in variants:
            try:
                basis.setup.knobs.changed(changes, basis.setup.limits)
            except ConfigError as error:
                of = f"{text}, with the other knobs as recorded"
                raise WrongUsage(f"{of}: {error}") from error
        cases = variants[0][0] if len(variants) == 1 else f"{len(variants)} variants"
        num_requests = len(basis.work.requests)

        def on_run(share: float) -> bool:
            progress(f"simulating {cases}", share)
            return bool(stop)

        if session is not None:
            write_what_if(
                basis, *variants[0], levels_of(level), session, lambda n: on_run(n / num_requests)
            )
            if stop:
                raise Interrupted(f"interrupted; {session} holds the session up to there")
            note(f"wrote {session}", "")
            return
        try:
            found = forecasts(basis, variants, level, on_run)
        except ForecastStopped as error:
            raise Interrupted("interrupted before the runs were done") from error
    if as_json:
        write_json(document(found, basis, level))
    else:
        say(*report(found, basis, level))


def report(found: WhatIf, basis: WhatIfBasis, level: SLO) -> Iterator[str]:
    yield basis.model.in_words()
    yield (
        f"each case is the median of {NUM_RUNS} runs (in brackets where nine in ten sessions "
        f"should lie); the machine drifted by {found.drift:.1%} between windows"
    )
    yield ""
    lines = _table(found, _cell)
    columns = shutil.get_terminal_size().columns
    if sys.stdout is not None and sys.stdout.isatty() and max(map(len, lines)) > columns:
        lines = _table(found, lambda each: _number(each and each.value))
        lines.append("a wider terminal, or a pipe, has the brackets too")
    yield from lines
    yield ""
    yield f"recorded: of the {basis.work.figures.num_requests:,} requests that finished"
    yield f"goodput: requests a second that keep {said(level)}"
    work = basis.work
    if found.drift > _DISTURBED:
        yield (
            f"note: the machine's speed changed by {found.drift:.0%} while it was recorded, as if "
            "something else ran on it; a session that is not disturbed may take half as long: "
            "record again"
        )
    for case in found.variants:
        if case.share_extrapolated > 0.01:
            yield (
                f"note: {case.share_extrapolated:.0%} of the steps with {case.text} are unlike any "
                "in the recording; record once with such knobs for some seconds"
            )
    if work.num_begun:
        yield f"note: {work.num_begun} requests that began before the recording are left out"
    if work.num_unfinished:
        yield (
            f"note: {work.num_unfinished} requests did not finish; each is simulated with the "
            "tokens it had"
        )
    if work.num_unknown_hits:
        is_all = work.num_unknown_hits == work.num_hits
        yield (
            f"note: of {work.num_hits} prefix hits {work.num_unknown_hits} are of unknown origin: "
            + ("simulated as if they shared one prefix" if is_all else "simulated as misses")
        )


def _table(found: WhatIf, cell: Callable[[Predicted | None], str]) -> list[str]:
    rows = [["recorded", *(_number(found.recorded.get(name)) for name in _SHOWN)]]
    for case in (found.again, *found.variants):
        text = "simulated" if case is found.again else case.text
        rows.append([text, *(cell(case.figures.get(name)) for name in _SHOWN)])
    return text_table(["", *_SHOWN.values()], rows)


def _cell(predicted: Predicted | None) -> str:
    if predicted is None:
        return "-"
    return f"{_number(predicted.value)} ({_number(predicted.low)} to {_number(predicted.high)})"


def _number(value: float | None) -> str:
    return "-" if value is None else three_digits(value)


def document(found: WhatIf, basis: WhatIfBasis, level: SLO) -> dict[str, Any]:
    return {
        **told(found, "recorded", "variants", "drift"),
        "simulated": plain(found.again),
        "median_error": basis.model.median_error,
        "levels": level._asdict(),
        "num_requests": len(basis.work.requests),
        "num_unknown_hits": basis.work.num_unknown_hits,
    }
