"""Turns a comparison into one JSON document for programs."""

import math
from collections.abc import Mapping
from typing import Any

from stepscope.recordings.compare.columns import Align, stretches
from stepscope.recordings.compare.comparison import Comparison, SideWork
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.load_difference import LoadDifference
from stepscope.recordings.compare.side.advice import advice
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair, RequestRun
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.limits import LIMITS


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
