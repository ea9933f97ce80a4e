"""`stepscope what-if`: what a recorded session would have been with other knobs."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.engine.protocol.config import Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.fitted import FittedModel, fit
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_in
from stepscope.recordings.simulation.fitting import seen_steps
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.simulation.what_if import (
    NUM_RUNS,
    Drift,
    Forecast,
    Predicted,
    WhatIf,
    drift_of,
    what_if,
)
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.report import levels_of_options
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage
from stepscope.tui.settings.service_levels import said
from stepscope.tui.settings.setting_values import convert_flags

_SHOWN = (
    ("TTFT p50 ms", "ttft_p50_ms"), ("TTFT p95 ms", "ttft_p95_ms"), ("TTFT p99 ms", "ttft_p99_ms"),
    ("ITL p50 ms", "itl_p50_ms"), ("ITL p95 ms", "itl_p95_ms"), ("ITL p99 ms", "itl_p99_ms"),
    ("E2E p50 ms", "e2e_p50_ms"), ("E2E p95 ms", "e2e_p95_ms"), ("E2E p99 ms", "e2e_p99_ms"),
    ("goodput /s", "goodput_0_per_s"),
)  # fmt: skip
_MIN_REQUESTS = 10
_MAX_SWEEP = 8
Variant = tuple[str, Mapping[str, KnobValue]]


def run(
    file: str, assignments: Sequence[str], sweep: str | None, slos: Sequence[str], as_json: bool
) -> None:
    """Print what was recorded, the same simulated, and each variant.

    Raises:
        RecordingError: the recording is too short, or its steps too much alike.
        Interrupted: by Ctrl-C.
    """
    path = find_recording(file)
    variants = _variants(assignments, sweep)
    stop = StopSignals(signal.SIGINT, signal.SIGTERM)
    with stop, Progress() as progress, Recording(path) as recording:
        levels = levels_of_options(slos) or [_level_in(recording)]
        work = recorded_work(recording, levels, lambda share: progress("reading", share))
        if work.figures.num_requests < _MIN_REQUESTS:
            raise RecordingError(
                f"{path}: {work.figures.num_requests} requests arrived and finished in it, and a "
                f"forecast needs {_MIN_REQUESTS}: record longer, under load"
            )
        steps = list(seen_steps(recording))
        model = fit([step for _, step in steps])
        drift = drift_of(steps, model)

        def on_run(share: float) -> bool:
            progress("simulating", share)
            return bool(stop)

        setup = _setup(recording, work, model)
        found = what_if(setup, work, drift, variants, levels, on_run)
    if found is None:
        raise Interrupted("interrupted before the runs were done")
    if as_json:
        say(_document(found, work, model, levels))
    else:
        say(*_report(found, work, model, drift, levels))


def _setup(recording: Recording, work: RecordedWork, model: FittedModel) -> SimulatedSetup:
    info = recording.info
    return SimulatedSetup(
        model=model,
        simulated=f"fit on {recording.path}",
        model_name=info.model,
        device=info.device or "unknown",
        knobs=work.knobs,
        limits=work.limits,
        num_blocks=work.num_blocks,
        block_size=work.block_size,
    )


def _level_in(recording: Recording) -> SLO:
    carried = levels_in(recording.metadata)
    default = SLO()
    return SLO(
        ttft_ms=carried.get("slo_ttft_ms", default.ttft_ms),
        itl_ms=carried.get("slo_itl_ms", default.itl_ms),
    )


def _variants(assignments: Sequence[str], sweep: str | None) -> list[Variant]:
    """Each argument is a variant; commas join knobs that change together."""
    found: list[Variant] = [(text, _changes(text)) for text in assignments]
    if sweep is not None:
        found += _swept(sweep)
    if not found:
        raise WrongUsage("give knobs, such as max_num_batched_tokens=1024, or --sweep")
    return found


def _changes(text: str) -> dict[str, KnobValue]:
    flags = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in Knobs.__struct_fields__:
            known = ", ".join(Knobs.__struct_fields__)
            raise WrongUsage(f"{part!r}: expected KNOB=VALUE; the knobs are {known}")
        flags[name] = value
    changes: dict[str, KnobValue] = convert_flags(Knobs, flags)
    return changes


def _swept(text: str) -> Iterator[Variant]:
    name, _, bounds = text.partition("=")
    first, dots, last = bounds.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and 0 < int(first) < int(last)):
        raise WrongUsage(f"--sweep: expected KNOB=FIRST..LAST, whole numbers, got {text!r}")
    low, high = int(first), int(last)
    num_points = min(_MAX_SWEEP, (high // low).bit_length() if high >= 2 * low else 2)
    num_points = max(num_points, 2)
    values = {round(low * (high / low) ** (at / (num_points - 1))) for at in range(num_points)}
    for value in sorted(values):
        yield f"{name}={value}", _changes(f"{name}={value}")


def _report(
    found: WhatIf, work: RecordedWork, model: FittedModel, drift: Drift, levels: Sequence[SLO]
) -> Iterator[str]:
    yield model.in_words()[0]
    yield (
        f"each case is the median of {NUM_RUNS} runs (from the 5th to the 95th percentile); the "
        f"machine drifted by {drift.spread:.1%} between windows"
    )
    yield ""
    cases = [found.again, *found.variants]
    heading = ["", "recorded", "simulated", *(case.text for case in found.variants)]
    rows = []
    for label, name in _SHOWN:
        row = [label, _number(found.recorded.get(name))]
        rows.append(row + [_cell(case.figures.get(name)) for case in cases])
    yield from text_table(heading, rows, "<" + ">" * (len(heading) - 1))
    yield ""
    yield f"goodput: requests a second that keep {said(levels[0])} on average"
    yield from _notes(found, work)


def _notes(found: WhatIf, work: RecordedWork) -> Iterator[str]:
    for case in found.variants:
        if case.share_extrapolated > 0.01:
            yield (
                f"note: {case.share_extrapolated:.0%} of the steps with {case.text} are unlike any "
                "in the recording; record once with such knobs for some seconds"
            )
    if work.num_begun:
        yield f"note: {work.num_begun} requests that were there before the recording are left out"
    if work.num_unfinished:
        yield f"note: {work.num_unfinished} requests did not finish: with the tokens they had"
    if work.num_unknown_hits:
        is_all = work.num_unknown_hits == work.num_hits
        yield (
            f"note: of {work.num_hits} prefix hits {work.num_unknown_hits} are of unknown origin: "
            + ("taken as one beginning" if is_all else "simulated as misses")
        )


def _cell(predicted: Predicted | None) -> str:
    if predicted is None:
        return "-"
    return f"{_number(predicted.value)} ({_number(predicted.low)} to {_number(predicted.high)})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _document(found: WhatIf, work: RecordedWork, model: FittedModel, levels: Sequence[SLO]) -> str:
    def case(each: Forecast) -> dict[str, Any]:
        figures = {name: predicted._asdict() for name, predicted in each.figures.items()}
        return {**each._asdict(), "figures": figures}

    document = {
        "recorded": found.recorded,
        "simulated": case(found.again),
        "variants": [case(each) for each in found.variants],
        "drift": found.drift,
        "median_error": model.median_error,
        "levels": [each._asdict() for each in levels],
        "num_requests": len(work.requests),
        "num_unknown_hits": work.num_unknown_hits,
    }
    return msgspec.json.encode(document).decode()
