"""`stepscope compare`: two runs side by side, on the screen, as a table or as JSON."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.recordings.compare.columns import ALIGNMENTS, Align
from stepscope.recordings.compare.comparer import Comparer
from stepscope.recordings.compare.division import divide
from stepscope.recordings.compare.side.feed import Stretch
from stepscope.recordings.compare.side.recording_feed import RecordingFeed
from stepscope.recordings.export.output import MissingPackage
from stepscope.recordings.file.landmarks import Landmark, find_landmark, landmarks
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said, levels_text, slo_of
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.dashboards.compare_report import document, lines
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.levels import judged_as, note_own, own_levels
from stepscope.tui.cli.shared.options import AsJson, argument, command, flag, option
from stepscope.tui.cli.shared.output_path import picture_path, picture_size
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.settings.terminal import no_terminal
from stepscope.tui.views.frame.compare_choices import Split


@command(
    "stepscope compare freeze chunked",
    "stepscope compare freeze chunked --align request --table",
    "stepscope compare before.mcap after.mcap -o compare.svg --size 160x48",
    "stepscope compare s.mcap --mark 'new budget' --json | jq .figures",
    sections=("dashboard",),
)
def compare(
    a: Annotated[str, argument("A", "a recording, a shipped sample, or a live engine")],
    b: Annotated[str | None, argument("B", "a recording or sample to compare with A")] = None,
    mark: Annotated[
        str | None,
        option(
            "MARK",
            "instead of B: compare A before and after a mark or knob change (back to the "
            "change before it, on to the next), or all of A before and after a step",
        ),
    ] = None,
    align: Annotated[
        str | None,
        option(
            "time|step|request",
            "how to align the two runs; the table then also shows what both did there",
        ),
    ] = None,
    as_table: Annotated[bool, flag("print a table, even on a terminal", "--table")] = False,
    as_json: AsJson = False,
    limit: Annotated[int, option("INT", "number of requests in the table, 0 for all")] = 20,
    output: Annotated[
        str | None, option("FILE", "draw the screen into a .svg or .txt", "--output", "-o")
    ] = None,
    size: Annotated[str, option("COLUMNSxROWS", "size of the screen to draw")] = "120x40",
    *,
    flags: dict[str, Any],
) -> None:
    """Say which of two runs is better, in what, and why.

    On a terminal it opens the dashboard, elsewhere it prints. A ratio is B against A. A difference
    counts only if it is unlikely to be chance, and if the load was the same.

    The service levels in the recordings apply, A's if both have them, unless an option sets others.
    """
    alignment = _alignment(align)
    if limit < 0:
        raise WrongUsage(f"--limit: expected 0 (all) or more, got {limit}")
    if as_table + as_json + (output is not None) > 1:
        raise WrongUsage("--table, --json and --output: give one of them")
    if (b is None) == (mark is None):
        what = "either B or --mark" if b is not None else "B, or --mark for before and after"
        raise WrongUsage(f"nothing to compare {a} with: give {what}")
    settings = resolve(DashboardSettings, "dashboard", flags)
    draws = output is not None
    prints = not draws and (as_table or as_json or no_terminal() is not None)
    found = {name: endpoint_of(name) for name in (a, b) if name is not None}
    live = {name: endpoint for name, endpoint in found.items() if endpoint is not None}
    for name in live:
        if prints or draws:
            raise WrongUsage(
                f"{name} is a live engine: compare it on the screen, or record it first "
                f"('stepscope record {name} -o FILE')"
            )
        if mark is not None:
            raise WrongUsage(
                f"--mark is for recordings; while you watch {name}, key c compares its past"
            )
    if not live:  # with a live engine, its levels or the operator's own count
        settings = _compared_as(settings, flags, list(found))
    if prints:
        slo = slo_of(own_levels(settings))
        _print(Comparer(*open_feeds(a, b, mark, slo)), alignment, limit, as_json)
        return
    from stepscope.tui.cli.dashboards.compare_screen import run_compare

    split = None
    if mark is not None:
        with Recording(find_recording(a)) as recording:
            split = split_at(recording, mark)
    if output is None:
        run_compare(a, b, split, alignment or "time", settings, live)
    else:
        _draw(a, b, split, alignment or "time", settings, output, size)


def _compared_as(
    settings: DashboardSettings, flags: Mapping[str, Any], files: Sequence[str]
) -> DashboardSettings:
    """Return the settings, with the service levels by which both runs are judged.

    These are the levels stored in the first recording that has any, unless an option or the
    environment overrides them. If the other recording has other levels, a line on stderr says which
    recording counts.

    Raises:
        CommandFailed, RecordingError: a file is not a recording.
    """
    carried: dict[str, Levels] = {}
    own: dict[str, Levels] = {}
    for file in files:
        with Recording(find_recording(file)) as recording:
            if levels := levels_said(recording.info, recording.metadata):
                carried[file] = levels
                own[file] = own_levels(judged_as(settings, flags, recording))
    if not carried:
        return settings
    first = next(iter(carried))
    note_own(own[first], carried[first])
    chosen = {**carried[first], **own[first]}
    for name, levels in carried.items():
        if {**levels, **own[name]} != chosen:
            print(
                f"stepscope: note: {first} carries the service levels "
                f"{levels_text(carried[first])}, {name} {levels_text(levels)}; both are judged by "
                f"those of {first} (--slo-ttft and --slo-itl set others)",
                file=sys.stderr,
            )
    return msgspec.structs.replace(settings, **chosen)


def _draw(
    a: str,
    b: str | None,
    split: "Split | None",
    align: Align,
    settings: DashboardSettings,
    output: str,
    size: str,
) -> None:
    from stepscope.tui.cli.dashboards.compare_screen import draw_compare

    path = picture_path(output)
    try:
        draw_compare(a, b, split, align, settings, path, picture_size(size))
    except MissingPackage as error:
        raise CommandFailed(f"{error}; {path.stem}.svg needs none") from error
    say(f"{path}: {a} and {b or 'itself, before and after'}, {size}")


def endpoint_of(name: str) -> Endpoint | None:
    """Return the endpoint of the running engine with this name.

    Returns None if no engine has the name, or if a file or a sample recording has it too: that
    wins.
    """
    if name.startswith(("ipc://", "tcp://")):
        return Endpoint.parse(name)
    try:
        find_recording(name)
    except CommandFailed:
        return next((each for each in find_local() if each.name == name), None)
    return None


def _print(comparer: Comparer, align: Align | None, limit: int, as_json: bool) -> None:
    try:
        with Progress() as progress:
            _read(comparer, progress)
        for note in comparer.notes:
            print(f"stepscope: note: {note}", file=sys.stderr)
        found, sides = comparer.comparison, comparer.sides
        if found is None or sides is None:
            raise CommandFailed("there is nothing to compare: no step could be read")
        if as_json:
            write_json(document(found, sides, align))
        else:
            say(*lines(found, sides, align, limit))
    finally:
        comparer.stop()


def _alignment(align: str | None) -> Align | None:
    for known in ALIGNMENTS:
        if align == known:
            return known
    if align is not None:
        raise WrongUsage(f"--align: expected {', '.join(ALIGNMENTS)}, got {align!r}")
    return None


def open_feeds(
    a: str, b: str | None, mark: str | None, slo: SLO
) -> tuple[RecordingFeed, RecordingFeed]:
    """Open two recordings, or the two parts of one recording before and after a mark.

    Raises:
        RecordingError: a file is not a recording.
        WrongUsage: there is no such mark.
    """
    path = find_recording(a)
    if b is not None:
        other = find_recording(b)
        return (
            RecordingFeed(Recording(path), _name(a), slo, Stretch()),
            RecordingFeed(Recording(other), _name(b), slo, Stretch()),
        )
    assert mark is not None
    with Recording(path) as recording:
        split = split_at(recording, mark)
    before, after = divide(*split)
    return (
        RecordingFeed(Recording(path), before.name, slo, before.stretch),
        RecordingFeed(Recording(path), after.name, slo, after.stretch),
    )


def _name(file: str) -> str:
    return Path(file).name.removesuffix(".mcap")


def split_at(recording: Recording, mark: str) -> Split:
    first, last = recording.first_step, recording.last_step
    step = mark.replace(",", "")
    if step.isdecimal() and first is not None and last is not None:
        if first < int(step) <= last:
            return Split(Landmark(int(step), f"step {int(step):,}", "step"), [])
        raise WrongUsage(
            f"--mark: expected a step from {first + 1:,} to {last:,}, or a mark; got {mark}"
        )
    found = list(landmarks(recording))
    named = [each for each in found if each.kind != "workload"]
    chosen = find_landmark(named, mark)
    if chosen is None:
        known = ", ".join(dict.fromkeys(each.text for each in named)) or "none"
        raise WrongUsage(
            f"--mark: there is no mark or knob change {mark!r}; there are: {known} "
            "(marks from before the recording began are not in it)"
        )
    if first is not None and last is not None and not first < chosen.step <= last:
        raise WrongUsage(
            f"--mark: {chosen.text!r} is at step {chosen.step:,}, and the file holds steps "
            f"{first:,} to {last:,}: one of the two parts is empty"
        )
    return Split(chosen, found)


def _read(comparer: Comparer, progress: Progress) -> None:
    """Read first run A, then run B, and then compare them."""
    for feed in comparer.feeds:
        while not feed.is_done:
            feed.read(time.monotonic() + 0.2)
            if not feed.is_done:
                progress(f"reading {feed.name}", feed.share)
    if comparer.sides is not None:
        comparer.renew()
