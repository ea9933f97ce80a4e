"""Prints a comparison: as a table for people, as one JSON document for programs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.recordings.compare.columns import Align, stretches
from stepscope.recordings.compare.comparison import Comparison, SideWork
from stepscope.recordings.compare.estimate import CONFIDENCE
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load_difference import LoadDifference
from stepscope.recordings.compare.side.advice import advice
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair, RequestRun
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.limits import LIMITS
from stepscope.tui.cli.shared.limits_text import advice_lines, limits_text
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame import compare_sides as sides_text
from stepscope.tui.views.frame import compare_text as words

SURE = f"{CONFIDENCE:.0%} sure"


def lines(
    found: Comparison, sides: tuple[Side, Side], align: Align | None, limit: int
) -> list[str]:
    """Return the comparison as lines of text.

    Args:
        align: how to align the two runs side by side; None leaves that part out.
        limit: rows of requests, 0 for all.
    """
    return [
        *_summary(found),
        *_limits(sides),
        *_figures(found),
        *_aligned(found, sides, align, limit),
    ]


def _limits(sides: tuple[Side, Side]) -> list[str]:
    lines = []
    for letter, side in zip("AB", sides, strict=True):
        lines.append(f"{'limited by':<14} {letter}: {limits_text(side)}")
    for letter, side in zip("AB", sides, strict=True):
        lines += [f"{letter}  {line}" for line in advice_lines(side)]
    return lines


def _summary(found: Comparison) -> list[str]:
    names = found.names
    lines = [
        f"{letter}  {name}: {sides_text.work_text(work)}"
        for letter, name, work in zip("AB", names, found.works, strict=True)
    ]
    why = words.load(found)
    if why is not None:
        lines.append(f"{' ' if found.different_work is None else '!'}  {why}")
    lines.append("")
    settings = [words.setting_text(each) for each in found.settings]
    sections: Sequence[tuple[str, list[str]]] = (
        words.outcome(found, "b"),
        words.outcome(found, "a"),
        ("requests", words.paired(found)),
        ("not sure", words.unclear(found)),
        ("set", settings or [words.SAME_SETTINGS]),
    )
    for heading, phrases in sections:
        for number, phrase in enumerate(phrases):
            lines.append(f"{heading if not number else '':<9} {phrase}".rstrip())
    for kind in ("ITL", "TTFT"):
        bound = sides_text.bound_of(found, kind)
        for letter, side in (("A", "a"), ("B", "b")):
            why = sides_text.causes_of(found, kind, "a" if side == "a" else "b")
            lines.append(f"{kind + f' >{bound:g} ms':<14} {letter}: {why}")
    return lines


def _figures(found: Comparison) -> list[str]:
    rows = [
        [
            figure.label + (" ms" if figure.unit == "ms" else ""),
            words.value(figure, figure.a),
            words.value(figure, figure.b),
            words.ratio(figure),
            words.between(figure),
            words.verdict(figure),
        ]
        for figure in found.figures
    ]
    return ["", *text_table(["", "A", "B", "B/A", SURE, ""], rows, "<>>>><")]


def _aligned(
    found: Comparison, sides: tuple[Side, Side], align: Align | None, limit: int
) -> list[str]:
    if align is None:
        return []
    if align == "request":
        return _requests(found, limit)
    rows = []
    for start, a, b in stretches(*sides, align):
        where = f"{start:,}" if align == "step" else f"{start / 1e9:.1f} s"
        rows.append([where, *_cells(a), *_cells(b)])
    unit = "step from" if align == "step" else "from"
    heading = [unit, *(f"{side} {name}" for side in "AB" for name in _POINT_COLUMNS)]
    return ["", *text_table(heading, rows, ">" * len(heading))]


_POINT_COLUMNS = ("prefill", "budget", "decode", "wait ms")


def _cells(point: StepPoint | None) -> list[str]:
    if point is None:
        return ["", "", "", ""]
    wait = None if point.longest_us is None else point.longest_us / 1000
    return [
        f"{point.num_prefill_tokens:,}",
        fmt.count(point.token_budget),
        f"{point.num_decode_tokens:,}",
        fmt.milliseconds(wait),
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
    return [*lines, *text_table(heading, rows, "<>>>>>>>"), *notes]


def _ms(ns: int | None) -> str:
    return "—" if ns is None else f"{ns / 1e6:,.1f}"


def document(found: Comparison, sides: tuple[Side, Side], align: Align | None) -> dict[str, Any]:
    found_all: dict[str, Any] = {
        "a": _work(found.names[0], found.works[0]),
        "b": _work(found.names[1], found.works[1]),
        "different_work": found.different_work,
        "load": _load(found.load),
        "slo": found.slo._asdict(),
        "percentile_error": found.percentile_error,
        "figures": {
            figure.key: {
                "a": figure.a,
                "b": figure.b,
                "ratio": figure.ratio,
                "better": figure.better,
                "verdict": figure.verdict,
                "num_a": figure.num_a or None,
                "num_b": figure.num_b or None,
                "interval": _interval(figure),
                "covered": figure.covered,
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
            "better": [each._asdict() for each in found.paired],
            "pairs": [_pair(pair) for pair in found.requests.pairs],
        },
    }
    for letter, side in zip("ab", sides, strict=True):
        figures = side.figures()
        found_all[letter]["limits"] = {limit: figures[f"limit_{limit}"] for limit in LIMITS}
        found_all[letter]["advice"] = [each._asdict() for each in advice(side)]
    if align in ("time", "step"):
        unit = "step" if align == "step" else "ms"
        found_all["aligned"] = [
            {unit: start if align == "step" else start / 1e6, "a": _point(a), "b": _point(b)}
            for start, a, b in stretches(*sides, align)
        ]
    return found_all


def _load(load: LoadDifference) -> dict[str, Any]:
    more = {name: _number(getattr(load, name)) for name in ("more_a", "more_b")}
    return {**load._asdict(), **more}


def _interval(figure: ComparedFigure) -> list[float | None] | None:
    """Return the confidence interval of the ratio B / A; None for an end that is unknown."""
    if figure.interval is None:
        return None
    low, high = figure.interval
    return [low or None, _number(high)]


def _number(value: float) -> float | None:
    """Return the number, or None if it is infinite, which JSON cannot say."""
    return value if math.isfinite(value) else None


def _work(name: str, work: SideWork) -> dict[str, Any]:
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


def _point(point: StepPoint | None) -> dict[str, Any] | None:
    return None if point is None else point._asdict()
