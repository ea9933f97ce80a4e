"""`stepscope compare`: two runs side by side, on the screen, as a table or as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.recordings.compare.bootstrap import CONFIDENCE
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.comparison import compare as compare_sides
from stepscope.recordings.compare.division import Landmark, find_landmark, landmarks
from stepscope.recordings.compare.side import Side
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said, slo_of
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.samples import SHOWS
from stepscope.tui.cli.dashboards.dashboard import dashboard_options, need_terminal, new_history
from stepscope.tui.cli.recordings.measured import read_side
from stepscope.tui.cli.shared.arguments import find_recording, picture_path, picture_size
from stepscope.tui.cli.shared.levels import (
    advice_lines,
    chosen_for,
    limits_document,
    limits_text,
    note_others,
    note_own,
    own_levels,
)  # fmt: skip
from stepscope.tui.cli.shared.options import AsJson, argument, command, flag, option
from stepscope.tui.cli.shared.output import note, plain, say, text_table, told, write_json
from stepscope.tui.cli.shared.process import running
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings
from stepscope.tui.settings.terminal import no_terminal
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.frame.compare_choices import Origin, split_origins

_ALIGN: Align = "time"  # the screen can align the runs in other ways


@command(
    "stepscope compare freeze chunked",
    "stepscope compare before.mcap after.mcap -o compare.svg --size 160x48",
    "stepscope compare s.mcap --mark 'new budget' --json | jq .figures",
    "stepscope compare s.mcap --client result.json",
    sections=("dashboard",),
)
def compare(
    a: str = argument("A", f"a recording, or a shipped sample ({', '.join(SHOWS)})", default=...),
    b: str | None = argument("B", "a recording or sample to compare with A"),
    mark: str | None = option(
        "MARK",
        "instead of B: A before and after a mark or a knob change, up to the next one, or a step",
    ),
    client: str | None = option(
        "FILE", "instead of B: what the requests of a load generator's result waited for"
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
    counts only if it is unlikely to be chance, and if the load was the same. The service levels in
    the recordings apply, A's if both have them, unless an option sets others.
    """
    if as_table + as_json + (output is not None) > 1:
        raise WrongUsage("--table, --json and --output: give one of them")
    if client is not None:
        if b is not None or mark is not None or output is not None:
            raise WrongUsage("--client: leave out B, --mark and --output")
        from stepscope.tui.cli.recordings.other_tools import print_split  # loads more

        print_split(a, client, as_json)
        return
    if (b is None) == (mark is None):
        what = "either B or --mark" if b else "B, --client, or --mark for before and after"
        raise WrongUsage(f"nothing to compare {a} with: give {what}")
    settings = resolve(DashboardSettings, "dashboard", flags)
    settings = _compared_as(settings, flags, [a] if b is None else [a, b])
    slo = slo_of(own_levels(settings))

    def origin(file: str) -> Origin:
        return Origin(Path(file).name.removesuffix(".mcap"), slo, path=find_recording(file))

    if b is not None:
        origins = origin(a), origin(b)
    else:
        with Recording(find_recording(a)) as recording:
            origins = split_origins(origin(a), *split_at(recording, mark or ""))
    if output is None and (as_table or as_json or no_terminal() is not None):
        sides = read_side(origins[0].feed()), read_side(origins[1].feed())
        found = compare_sides(*sides)
        if as_json:
            write_json(document(found, sides))
        else:
            both = list(zip("AB", sides, strict=True))
            limits = [f"{'limited by':<14} {letter}: {limits_text(side)}" for letter, side in both]
            advised = [f"{letter}  {line}" for letter, side in both for line in advice_lines(side)]
            say(*_summary(found), *limits, *advised, *_figures(found))
        return
    with Recording(find_recording(a)) as recording:
        note(recording.message)
        source = ReplaySource(recording, new_history(settings), playing=False)
        shown = origins[0]._replace(is_shown=True), origins[1]._replace(is_shown=b is None)
        with running(source):
            if output is None:
                need_terminal("'--table', '--json' and '-o' work without one")
                from stepscope.tui.app.run import run_dashboard

                options = dashboard_options(settings)
                run_dashboard(source, compared=(*shown, _ALIGN), **options)
                return
            from stepscope.tui.app.picture import screenshot  # loads Textual

            path = picture_path(output, ".svg", ".txt")
            screenshot(
                source, path, picture_size(size), theme=settings.theme,
                ascii=bool(settings.ascii), compared=(*shown, _ALIGN),
            )  # fmt: skip
            say(f"{path}: {a} and {b or 'itself, before and after'}, {size}")


def _compared_as(
    settings: DashboardSettings, flags: Mapping[str, Any], files: Sequence[str]
) -> DashboardSettings:
    """Return the settings with the levels that judge both runs: the first that are stored."""
    first: tuple[str, Levels] | None = None
    for file in files:
        with Recording(find_recording(file)) as recording:
            if first is not None:
                note_others(flags, file, recording, first[1], first[0])
            elif carried := levels_said(recording.info, recording.metadata):
                own = chosen_for(flags, recording)
                note_own(own, carried)
                first = file, {**carried, **own}
    return settings if first is None else msgspec.structs.replace(settings, **first[1])


def split_at(recording: Recording, mark: str) -> tuple[Landmark, list[Landmark]]:
    """Return the landmark at which to split a session, and all that were found in it."""
    first, last = recording.first_step, recording.last_step
    step = mark.replace(",", "")
    if step.isdecimal() and first is not None and last is not None:
        if first < int(step) <= last:
            return Landmark(int(step), f"step {int(step):,}", "step"), []
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
    return chosen, found


# The report

_OF_RUN = (
    *("request_id", "num_prompt_tokens", "num_output_tokens", "num_preemptions"),
    *("ttft_ns", "worst_itl_ns", "worst_step"),
)


def _summary(found: Comparison) -> list[str]:
    names = found.names
    lines = [
        f"{letter}  {name}: {words.work_text(work)}"
        for letter, name, work in zip("AB", names, found.works, strict=True)
    ]
    why = words.load(found)
    if why is not None:
        lines.append(f"{' ' if found.load.other_work is None else '!'}  {why}")
    lines += ["", words.headline(found)]
    settings = [words.setting_text(each) for each in found.settings]
    sections: Sequence[tuple[str, list[str]]] = (
        words.outcome(found, "b"),
        words.outcome(found, "a"),
        ("not sure", words.unclear(found)),
        ("set", settings or [words.SAME_SETTINGS]),
    )
    for heading, phrases in sections:
        for number, phrase in enumerate(phrases):
            lines.append(f"{heading if not number else '':<9} {phrase}".rstrip())
    for kind in ("ITL", "TTFT"):
        bound = found.slo.itl_ms if kind == "ITL" else found.slo.ttft_ms
        for side in words.SIDES:
            why = words.causes_of(found, kind, side)
            lines.append(f"{kind + f' >{bound:g} ms':<14} {side.upper()}: {why}")
    return lines


def _figures(found: Comparison) -> list[str]:
    rows = [
        [
            each.label + (" ms" if each.unit == "ms" else ""),
            *(words.value(each, value) for value in (each.a, each.b)),
            *(said(each) for said in (words.ratio, words.between, words.verdict)),
        ]
        for each in found.figures
    ]
    return ["", *text_table(["", "A", "B", "B/A", f"{CONFIDENCE:.0%} sure", ""], rows, "<>>>><")]


def document(found: Comparison, sides: tuple[Side, Side]) -> dict[str, Any]:
    """Return what `--json` writes; an infinite number becomes null, as JSON cannot say it."""
    both = {
        letter: {"name": name, **work._asdict(), **limits_document(side)}
        for letter, name, work, side in zip("ab", found.names, found.works, sides, strict=True)
    }
    figures = {
        figure.key: {
            **told(figure, "a", "b", "ratio", "better", "verdict", "num_a", "num_b"),
            "interval": None
            if figure.interval is None
            else [figure.interval.low or None, figure.interval.high],
        }
        for figure in found.figures
    }
    return {
        **both,
        "different_work": found.load.other_work,
        "load": told(found.load),
        **told(found, "slo", "percentile_error", "settings"),
        "figures": figures,
        "late": plain(found.causes),
        "requests": {
            **told(found.requests, "by", "only_a", "only_b"),
            "num_not_kept": found.num_unlisted,
            "pairs": [
                {"name": pair.name, "a": told(pair.a, *_OF_RUN), "b": told(pair.b, *_OF_RUN)}
                for pair in found.requests.pairs
            ],
        },
    }
