"""`stepscope compare`: two runs side by side, on the screen, as a table or as JSON."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.endpoints import Endpoint, find_local
from stepscope.recordings.comparer import Comparer
from stepscope.recordings.comparison import Comparison, Work
from stepscope.recordings.comparison_columns import ALIGNMENTS, Align, axis_of
from stepscope.recordings.comparison_feed import Stretch
from stepscope.recordings.comparison_points import Point
from stepscope.recordings.comparison_requests import Pair, RequestRun
from stepscope.recordings.comparison_side import Side
from stepscope.recordings.landmarks import Landmark, find_landmark, landmarks
from stepscope.recordings.latency import SLO
from stepscope.recordings.reader import Recording
from stepscope.recordings.recording_feed import RecordingFeed
from stepscope.tui import compare_text as words
from stepscope.tui import format as fmt
from stepscope.tui.cli_errors import CommandFailed, WrongUsage, say, writing_output
from stepscope.tui.cli_explain import milliseconds
from stepscope.tui.cli_options import resolve
from stepscope.tui.cli_progress import Progress
from stepscope.tui.cli_top import find_recording
from stepscope.tui.settings import DashboardSettings

NUM_STRETCHES = 20  # of an aligned table


def compare(
    a: str,
    b: str | None,
    mark: str | None,
    align: str | None,
    limit: int,
    as_table: bool,
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    """On a terminal the screen, elsewhere (or if asked for) a table or JSON.

    Raises:
        RecordingError: a file is none.
        EngineUnreachable: nobody listens at an address.
        WrongUsage: an option that cannot be.
    """
    alignment = _alignment(align)
    if limit < 0:
        raise WrongUsage(f"--limit: expected 0 (all) or more, got {limit}")
    if as_table and as_json:
        raise WrongUsage("--table and --json: give one of both")
    if (b is None) == (mark is None):
        what = "one of both, B or --mark" if b is not None else "B, or --mark for before and after"
        raise WrongUsage(f"what is {a} to be compared with? Give {what}")
    settings = resolve(DashboardSettings, "dashboard", _milliseconds(flags))
    prints = as_table or as_json or not is_terminal()
    found = {name: endpoint_of(name) for name in (a, b) if name is not None}
    live = {name: endpoint for name, endpoint in found.items() if endpoint is not None}
    for name in live:
        if prints:
            raise WrongUsage(
                f"{name} is a live engine: compare it on the screen, or record it first "
                f"('stepscope record {name} -o FILE')"
            )
        if mark is not None:
            raise WrongUsage(f"--mark is for recordings; watching {name}, c compares its past")
    if prints:
        slo = SLO(settings.slo_ttft_ms, settings.slo_itl_ms)
        _print(Comparer(*open_feeds(a, b, mark, slo)), alignment, limit, as_json)
        return
    from stepscope.tui.compare_screen import run_compare

    split = None
    if mark is not None:
        with Recording(find_recording(a)) as recording:
            split = split_at(recording, mark)
    run_compare(a, b, split, alignment or "time", settings, live)


def endpoint_of(name: str) -> Endpoint | None:
    """The live engine that is meant; None for a file or a sample, which go first."""
    if name.startswith(("ipc://", "tcp://")):
        return Endpoint.parse(name)
    try:
        find_recording(name)
    except CommandFailed:
        return next((each for each in find_local() if each.name == name), None)
    return None


def is_terminal() -> bool:
    """Whether there is one to draw on."""
    return all(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )


def _milliseconds(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Durations may have a unit here, as in 'explain'."""
    return {
        name: milliseconds(f"--{name.removesuffix('_ms').replace('_', '-')}", value)
        if name.startswith("slo_")
        else value
        for name, value in flags.items()
    }


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
            encoded = msgspec.json.encode(_document(found, sides, align))
            with writing_output():
                sys.stdout.buffer.write(msgspec.json.format(encoded, indent=2) + b"\n")
        else:
            say(*_summary(found), *_figures(found), *_aligned(found, sides, align, limit))
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
    """Two recordings, or the two parts of one.

    Raises:
        RecordingError: a file is none.
        WrongUsage: a mark that there is not.
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
    before = Stretch(None, split.step - 1)
    return (
        RecordingFeed(Recording(path), f"before {split.text}", slo, before),
        RecordingFeed(Recording(path), f"after {split.text}", slo, Stretch(split.step, None)),
    )


def _name(file: str) -> str:
    return Path(file).name.removesuffix(".mcap")


def split_at(recording: Recording, mark: str) -> Landmark:
    first, last = recording.first_step, recording.last_step
    step = mark.replace(",", "")
    if step.isdigit() and first is not None and last is not None:
        if first < int(step) <= last:
            return Landmark(int(step), f"step {int(step):,}", "step")
        raise WrongUsage(
            f"--mark: expected a step from {first + 1:,} to {last:,}, or a mark; got {mark}"
        )
    found = list(landmarks(recording))
    chosen = find_landmark(found, mark)
    if chosen is None:
        known = ", ".join(dict.fromkeys(each.text for each in found)) or "none"
        raise WrongUsage(f"--mark: there is no mark or knob change {mark!r}; there are: {known}")
    return chosen


def _read(comparer: Comparer, progress: Progress) -> None:
    """One side after the other."""
    for feed in comparer.feeds:
        while not feed.is_done:
            feed.read(time.monotonic() + 0.2)
            if not feed.is_done:
                progress(f"reading {feed.name}", feed.share)
    if comparer.sides is not None:
        comparer.renew()


# For people


def _summary(found: Comparison) -> list[str]:
    names = found.names
    lines = [
        f"{letter}  {name}: {words.work_text(work)}"
        for letter, name, work in zip("AB", names, found.works, strict=True)
    ]
    if found.different_work is not None:
        lines.append(f"!  not the same work: {found.different_work}")
    lines.append("")
    sides: Sequence[tuple[str, list[str]]] = (
        ("B better", words.better_in(found, "b")),
        ("A better", words.better_in(found, "a")),
        ("unclear", words.unclear(found)),
        ("differs", [words.setting_text(each) for each in found.settings]),
    )
    for heading, phrases in sides:
        for number, phrase in enumerate(phrases or ["—"]):
            lines.append(f"{heading if not number else '':<9} {phrase}".rstrip())
    for kind in ("ITL", "TTFT"):
        bound = words.bound_of(found, kind)
        for letter, side in (("A", "a"), ("B", "b")):
            why = words.causes_of(found, kind, "a" if side == "a" else "b")
            lines.append(f"{kind + f' >{bound:g} ms':<14} {letter}: {why}")
    return lines


def _figures(found: Comparison) -> list[str]:
    rows = [
        [
            figure.label + (" ms" if figure.unit == "ms" else ""),
            words.value(figure, figure.a),
            words.value(figure, figure.b),
            words.ratio(figure),
            words.verdict(figure),
        ]
        for figure in found.figures
    ]
    return ["", *table(["", "A", "B", "B/A", ""], rows, "<>>><")]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Columns as wide as their widest cell; `sides` has < or > for each."""
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    ]


def _aligned(
    found: Comparison, sides: tuple[Side, Side], align: Align | None, limit: int
) -> list[str]:
    if align is None:
        return []
    if align == "request":
        return _requests(found, limit)
    rows = []
    for start, a, b in _stretches(sides, align):
        where = f"{start:,}" if align == "step" else f"{start / 1e9:.1f} s"
        rows.append([where, *_cells(a), *_cells(b)])
    unit = "step from" if align == "step" else "from"
    heading = [unit, *(f"{side} {name}" for side in "AB" for name in _POINT_COLUMNS)]
    return ["", *table(heading, rows, ">" * len(heading))]


_POINT_COLUMNS = ("prefill", "budget", "decode", "wait ms")


def _cells(point: Point | None) -> list[str]:
    if point is None:
        return ["", "", "", ""]
    wait = None if point.longest_us is None else point.longest_us / 1000
    return [
        f"{point.num_prefill_tokens:,}",
        fmt.count(point.token_budget),
        f"{point.num_decode_tokens:,}",
        fmt.milliseconds(wait),
    ]


def _stretches(
    sides: tuple[Side, Side], align: Align
) -> list[tuple[int, Point | None, Point | None]]:
    """The largest of equal stretches of both runs, in order."""
    axis = axis_of(align, *sides, None)
    width = max(axis.unit, -(-(axis.end - axis.start) // NUM_STRETCHES))
    return [
        (
            start,
            axis.column(axis.a, start, start + width),
            axis.column(axis.b, start, start + width),
        )
        for start in range(axis.start, axis.end, width)
    ]


def _requests(found: Comparison, limit: int) -> list[str]:
    matched = found.requests
    pairs = matched.pairs[: limit or None]
    rows = [
        [
            pair.name,
            f"{pair.a.num_prompt_tokens:,}" + ("" if pair.has_same_prompt else " ≠"),
            _ms(pair.a.ttft_ns),
            _ms(pair.b.ttft_ns),
            _ms(pair.a.worst_itl_ns),
            _ms(pair.b.worst_itl_ns),
            f"r{pair.a.request_id}",
            f"r{pair.b.request_id}",
        ]
        for pair in pairs
    ]
    heading = [
        "request", "prompt", "TTFT A", "TTFT B", "worst ITL A", "worst ITL B", "in A", "in B",
    ]  # fmt: skip
    rest = len(matched.pairs) - len(pairs)
    notes = [f"and {rest:,} more: --limit 0 shows all"] if rest else []
    if matched.only_a or matched.only_b:
        notes.append(f"without a partner: {matched.only_a:,} in A, {matched.only_b:,} in B")
    lines = ["", f"{len(matched.pairs):,} requests in both, by {matched.by}; milliseconds"]
    return [*lines, *table(heading, rows, "<>>>>>>>"), *notes]


def _ms(ns: int | None) -> str:
    return "—" if ns is None else f"{ns / 1e6:,.1f}"


# For programs


def _document(found: Comparison, sides: tuple[Side, Side], align: Align | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "a": _work(found.names[0], found.works[0]),
        "b": _work(found.names[1], found.works[1]),
        "different_work": found.different_work,
        "slo": found.slo._asdict(),
        "resolution_ns": found.resolution_ns,
        "figures": {
            figure.key: {
                "a": figure.a,
                "b": figure.b,
                "ratio": figure.ratio,
                "better": figure.better,
                "verdict": figure.verdict,
                "num_a": figure.num_a or None,
                "num_b": figure.num_b or None,
            }
            for figure in found.figures
        },
        "settings": [
            {"name": each.name, "a": each.a, "b": each.b, "is_knob": each.is_knob}
            for each in found.settings
        ],
        "late": [
            {
                "kind": share.kind,
                "cause": share.cause,
                "a_ms": share.a_ns / 1e6,
                "b_ms": share.b_ns / 1e6,
                "num_a": share.num_a,
                "num_b": share.num_b,
            }
            for share in found.causes
        ],
        "requests": {
            "by": found.requests.by,
            "only_a": found.requests.only_a,
            "only_b": found.requests.only_b,
            "num_not_kept": found.num_unlisted,
            "pairs": [_pair(pair) for pair in found.requests.pairs],
        },
    }
    if align in ("time", "step"):
        unit = "step" if align == "step" else "ms"
        document["aligned"] = [
            {unit: start if align == "step" else start / 1e6, "a": _point(a), "b": _point(b)}
            for start, a, b in _stretches(sides, align)
        ]
    return document


def _work(name: str, work: Work) -> dict[str, Any]:
    return {"name": name, **work._asdict()}


def _pair(pair: Pair) -> dict[str, Any]:
    return {"name": pair.name, "a": _run(pair.a), "b": _run(pair.b)}


def _run(run: RequestRun) -> Mapping[str, Any]:
    return {
        "request_id": run.request_id,
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_output_tokens": run.num_output_tokens,
        "num_preemptions": run.num_preemptions,
        "ttft_ms": None if run.ttft_ns is None else run.ttft_ns / 1e6,
        "worst_itl_ms": None if run.worst_itl_ns is None else run.worst_itl_ns / 1e6,
        "worst_step": run.worst_step,
    }


def _point(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else point._asdict()
