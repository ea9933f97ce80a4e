"""`stepscope compare`: two runs side by side, on the screen, as a table or as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import compare as compare_sides
from stepscope.recordings.compare.division import Landmark, find_landmark, landmarks
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said, levels_text, slo_of
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.samples import SHOWS
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.dashboards.compare_report import document, lines
from stepscope.tui.cli.dashboards.dashboard import dashboard_options, need_terminal, new_history
from stepscope.tui.cli.recordings.measured import read_side
from stepscope.tui.cli.shared.connect import connect, is_recording
from stepscope.tui.cli.shared.levels import judged_as, note_own, own_levels
from stepscope.tui.cli.shared.options import AsJson, argument, command, flag, option
from stepscope.tui.cli.shared.output import note, say, write_json
from stepscope.tui.cli.shared.paths import find_recording, picture_path, picture_size
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.preferences import remember
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.settings.terminal import no_terminal
from stepscope.tui.views.frame.compare_choices import Origin, Split, session_origin, split_origins

_ALIGN: Align = "time"  # the screen can align the runs in other ways
_Compared: TypeAlias = "tuple[ReplaySource | Subscriber, tuple[Origin, Origin]]"


@command(
    "stepscope compare freeze chunked",
    "stepscope compare before.mcap after.mcap -o compare.svg --size 160x48",
    "stepscope compare s.mcap --mark 'new budget' --json | jq .figures",
    "stepscope compare s.mcap --client result.json",
    sections=("dashboard",),
)
def compare(
    a: str = argument(
        "A", f"a recording, a shipped sample ({', '.join(SHOWS)}), or a live engine", default=...
    ),
    b: str | None = argument("B", "a recording or sample to compare with A"),
    mark: str | None = option(
        "MARK",
        "instead of B: compare A before and after a mark or knob change (back to the "
        "change before it, on to the next), or all of A before and after a step",
    ),
    client: str | None = option(
        "FILE",
        "instead of B: say what a load generator's requests waited for before, in and after the "
        "engine that A is of (results of vllm bench serve, sglang, guidellm, aiperf, "
        "inference-perf)",
    ),
    as_table: bool = flag("print a table, even on a terminal", "--table"),
    as_json: AsJson = False,
    output: str | None = option("FILE", "draw the screen into a .svg or .txt", "--output", "-o"),
    size: str = option("COLUMNSxROWS", "size of the screen to draw", default="120x40"),
    *,
    flags: dict[str, Any],
) -> None:
    """Say which of two runs is better, in what, and why.

    On a terminal it opens the dashboard, elsewhere it prints. A ratio is B against A. A difference
    counts only if it is unlikely to be chance, and if the load was the same.

    The service levels in the recordings apply, A's if both have them, unless an option sets others.
    """
    if as_table + as_json + (output is not None) > 1:
        raise WrongUsage("--table, --json and --output: give one of them")
    if client is not None:
        if b is not None or mark is not None or output is not None:
            raise WrongUsage("--client: leave out B, --mark and --output")
        from stepscope.tui.cli.dashboards.client_report import print_split  # loads more

        print_split(a, client, as_json)
        return
    if (b is None) == (mark is None):
        what = (
            "either B or --mark" if b is not None else "B, --client, or --mark for before and after"
        )
        raise WrongUsage(f"nothing to compare {a} with: give {what}")
    settings = resolve(DashboardSettings, "dashboard", flags)
    draws = output is not None
    prints = not draws and (as_table or as_json or no_terminal() is not None)
    names = [name for name in (a, b) if name is not None]
    live = {name: Endpoint.parse(name) for name in names if not is_recording(name)}
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
        settings = _compared_as(settings, flags, names)
    if prints:
        both = file_origins(a, b, mark, slo_of(own_levels(settings)))
        sides = read_side(both[0].feed()), read_side(both[1].feed())
        found = compare_sides(*sides)
        if as_json:
            write_json(document(found, sides))
        else:
            say(*lines(found, sides))
        return
    if output is not None:
        from stepscope.tui.app.picture import screenshot  # loads Textual

        path, dimensions = picture_path(output), picture_size(size)
        with _on_screen(a, b, mark, settings, {}) as (source, origins):
            screenshot(
                source,
                source.history,
                path,
                dimensions,
                theme=settings.theme,
                ascii=bool(settings.ascii),
                compared=(*origins, _ALIGN),
            )
        say(f"{path}: {a} and {b or 'itself, before and after'}, {size}")
        return
    need_terminal("'--table', '--json' and '-o' work without one")
    if len(live) == 2:
        raise WrongUsage(
            f"{a} and {b} are both live: 'stepscope top {a} {b}' shows them side by side"
        )
    from stepscope.tui.app.run import run_dashboard

    with _on_screen(a, b, mark, settings, live) as (source, origins):
        run_dashboard(
            source,
            source.history,
            control_endpoint=source.endpoint.control if isinstance(source, Subscriber) else None,
            compared=(*origins, _ALIGN),
            **dashboard_options(settings),
        )


def _compared_as(
    settings: DashboardSettings, flags: Mapping[str, Any], files: Sequence[str]
) -> DashboardSettings:
    """Return the settings with the levels that judge both runs: the first that are stored."""
    first: tuple[str, Levels, Levels] | None = None
    for file in files:
        with Recording(find_recording(file)) as recording:
            carried = levels_said(recording.info, recording.metadata)
            own = own_levels(judged_as(settings, flags, recording))
        chosen = {**carried, **own}
        if not carried:
            continue
        if first is None:
            first = file, carried, chosen
            note_own(own, carried)
        elif chosen != first[2]:
            note(
                f"{first[0]} carries the service levels {levels_text(first[1])}, {file} "
                f"{levels_text(carried)}; both are judged by those of {first[0]} (--slo-ttft and "
                "--slo-itl set others)"
            )
    return settings if first is None else msgspec.structs.replace(settings, **first[2])


def file_origins(a: str, b: str | None, mark: str | None, slo: SLO) -> tuple[Origin, Origin]:
    """Return where to read two recordings, or the parts of one before and after a mark."""
    first = Origin(_name(a), slo, path=find_recording(a))
    if b is not None:
        return first, Origin(_name(b), slo, path=find_recording(b))
    assert mark is not None
    return split_origins(first, *_split_of(a, mark))


def _split_of(file: str, mark: str) -> Split:
    with Recording(find_recording(file)) as recording:
        return split_at(recording, mark)


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


@contextmanager
def _on_screen(
    a: str,
    b: str | None,
    mark: str | None,
    settings: DashboardSettings,
    live: Mapping[str, Endpoint],
) -> Iterator[_Compared]:
    """Start the source that the dashboard shows; yield it, and where to read runs A and B from."""
    shown = b if b is not None and b in live else a
    source = _source(shown, live, settings)
    source.start()
    try:
        session = session_origin(source)._replace(name=_name(shown))
        if b is None or mark is not None:
            yield source, split_origins(session, *_split_of(a, mark or ""))
            return
        other = a if shown is b else b
        path = find_recording(other)
        Recording(path).close()  # it can be opened
        remember(path)
        origin = Origin(_name(other), session.slo, path=path)
        yield source, (origin, session) if shown is b else (session, origin)
    finally:
        source.stop()


def _source(
    name: str, live: Mapping[str, Endpoint], settings: DashboardSettings
) -> ReplaySource | Subscriber:
    history = new_history(settings)
    if name in live:
        connect(live[name]).close()
        return Subscriber(live[name], history)
    recording = Recording(find_recording(name))
    note(recording.message)
    remember(recording.path)
    return ReplaySource(recording, history, playing=False)
