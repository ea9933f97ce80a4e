"""Prints a comparison: as a table for people, as one JSON document for programs."""

import math
from collections.abc import Sequence
from typing import Any

from stepscope.recordings.compare.bootstrap import CONFIDENCE
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load import LoadDifference
from stepscope.recordings.compare.side.side import Side
from stepscope.tui.cli.shared.levels import advice_lines, limits_document, limits_text
from stepscope.tui.cli.shared.output import text_table, told
from stepscope.tui.views.frame import compare_text as words

_OF_RUN = (
    *("request_id", "num_prompt_tokens", "num_output_tokens", "num_preemptions"),
    *("ttft_ns", "worst_itl_ns", "worst_step"),
)


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
        f"{letter}  {name}: {words.work_text(work)}"
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
        bound = found.slo.itl_ms if kind == "ITL" else found.slo.ttft_ms
        for side in words.SIDES:
            why = words.causes_of(found, kind, side)
            lines.append(f"{kind + f' >{bound:g} ms':<14} {side.upper()}: {why}")
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
                **told(figure, "a", "b", "ratio", "better", "verdict", "num_a", "num_b"),
                "interval": _interval(figure),
            }
            for figure in found.figures
        },
        "settings": [each._asdict() for each in found.settings],
        "late": [told(share) for share in found.causes],
        "requests": {
            **told(found.requests, "by", "only_a", "only_b"),
            "num_not_kept": found.num_unlisted,
            "better": [each._asdict() for each in found.paired],
            "pairs": [
                {"name": pair.name, "a": told(pair.a, *_OF_RUN), "b": told(pair.b, *_OF_RUN)}
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
