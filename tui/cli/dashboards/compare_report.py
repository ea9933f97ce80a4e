"""Prints a comparison: as a table for people, as one JSON document for programs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.recordings.compare.bootstrap import CONFIDENCE
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load import LoadDifference
from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.recordings.compare.side.side import Side
from stepscope.tui.cli.shared.levels import advice_lines, limits_document, limits_text
from stepscope.tui.cli.shared.output import in_ms, text_table
from stepscope.tui.views.frame import compare_sides as sides_text
from stepscope.tui.views.frame import compare_text as words


def lines(found: Comparison, sides: tuple[Side, Side]) -> list[str]:
    limits = []
    for letter, side in zip("AB", sides, strict=True):
        limits.append(f"{'limited by':<14} {letter}: {limits_text(side)}")
    for letter, side in zip("AB", sides, strict=True):
        limits += [f"{letter}  {line}" for line in advice_lines(side)]
    return [*_summary(found), *limits, *_figures(found)]


def _summary(found: Comparison) -> list[str]:
    names = found.names
    lines = [
        f"{letter}  {name}: {sides_text.work_text(work)}"
        for letter, name, work in zip("AB", names, found.works, strict=True)
    ]
    why = words.load(found)
    if why is not None:
        lines.append(f"{' ' if found.different_work is None else '!'}  {why}")
    lines += ["", words.headline(found)]
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
    return ["", *text_table(["", "A", "B", "B/A", f"{CONFIDENCE:.0%} sure", ""], rows, "<>>>><")]


def document(found: Comparison, sides: tuple[Side, Side]) -> dict[str, Any]:
    found_all: dict[str, Any] = {
        "a": {"name": found.names[0], **found.works[0]._asdict()},
        "b": {"name": found.names[1], **found.works[1]._asdict()},
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
            }
            for figure in found.figures
        },
        "settings": [each._asdict() for each in found.settings],
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
            "pairs": [
                {"name": pair.name, "a": _run(pair.a), "b": _run(pair.b)}
                for pair in found.requests.pairs
            ],
        },
    }
    for letter, side in zip("ab", sides, strict=True):
        found_all[letter] |= limits_document(side)
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


def _run(run: RequestRun) -> Mapping[str, Any]:
    return {
        "request_id": run.request_id,
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_output_tokens": run.num_output_tokens,
        "num_preemptions": run.num_preemptions,
        "ttft_ms": in_ms(run.ttft_ns),
        "worst_itl_ms": in_ms(run.worst_itl_ns),
        "worst_step": run.worst_step,
    }
