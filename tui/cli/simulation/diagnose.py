"""What `stepscope tune` says about the bottleneck: the suspects, their evidence and the proof."""

from collections.abc import Iterator
from typing import Any

from stepscope.recordings.simulation.diagnosis import (
    KEPT_SHARE,
    NUM_RUNS,
    Diagnosis,
    Finding,
    Trial,
)
from stepscope.recordings.simulation.what_if import Forecast
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.settings.service_levels import said

_MAX_UNLIKE = 0.2  # share of steps unlike recorded ones; a forecast with more is a guess


def diagnosis_lines(found: Diagnosis, level: SLO) -> Iterator[str]:
    yield f"levels: {said(level)}; medians of {NUM_RUNS} simulated runs"
    yield f"as it was: {found.kept_share:.0%} of the requests keep them, {_figures(found.again)}"
    yield ""
    for each in found.findings:
        yield from _finding(each)
    yield ""
    yield from verdict_lines(found)


def _finding(found: Finding) -> Iterator[str]:
    mark = "?" if found.evidence.is_likely else "-"
    if found.trial is not None:
        mark = "!" if found.trial.helps else "-"
    yield f"{mark} {found.suspect.name}: {found.evidence.text}"
    if found.trial is not None:
        yield f"    what if {found.trial.remedy.text}: {_outcome(found.trial)}"


def _outcome(trial: Trial) -> str:
    unlike = trial.forecast.share_extrapolated
    return (
        f"{trial.kept_share:.0%} keep the levels, better in {trial.num_better} of {NUM_RUNS} runs "
        f"({_figures(trial.forecast)})"
        + (
            f"; a guess, {unlike:.0%} of the steps are unlike recorded ones"
            * (unlike > _MAX_UNLIKE)
        )
    )


def _figures(found: Forecast) -> str:
    values = found.figures
    return (
        f"goodput {values['goodput_0_per_s'].value:,.2f}/s, "
        f"TTFT p95 {values['ttft_p95_ms'].value:,.0f} ms, "
        f"ITL p95 {values['itl_p95_ms'].value:,.1f} ms"
    )


def verdict_lines(found: Diagnosis) -> Iterator[str]:
    """Yield lines on the proved bottlenecks, in the order in which to remove them."""
    if found.kept_share >= KEPT_SHARE:
        yield (
            f"no bottleneck: {found.kept_share:.0%} of the requests keep the levels "
            "(--slo-itl and --slo-ttft set others)"
        )
        return
    evidence = {each.suspect.name: each.evidence.text for each in found.findings}
    for number, each in enumerate(found.bottlenecks):
        trial, name = each.trial, each.suspect.name
        command = (
            f"stepscope set {trial.remedy.text}" if trial.remedy.is_live else trial.remedy.text
        )
        yield (
            f"{'then' if number else 'bottleneck'}: {name}: {evidence[name]}; try: {command} "
            f"({trial.kept_share:.0%} of the requests then keep the levels)"
        )
    if not found.bottlenecks or found.bottlenecks[-1].trial.kept_share < KEPT_SHARE:
        begin = "beyond that" if found.bottlenecks else "no setting is the bottleneck:"
        yield (
            f"{begin} the machine is too slow for this load at these levels ('stepscope tune' "
            "finds the load that would do)"
        )


def diagnosis_document(found: Diagnosis, level: SLO) -> dict[str, Any]:
    def figures(forecast: Forecast) -> dict[str, Any]:
        return {name: each._asdict() for name, each in forecast.figures.items()}

    def trial(each: Trial) -> dict[str, Any]:
        return {
            "remedy": each.remedy.text,
            "changes": each.remedy.changes,
            "is_live": each.remedy.is_live,
            "helps": each.helps,
            "kept_share": each.kept_share,
            "gain": each.gain,
            "num_better": each.num_better,
            "share_extrapolated": each.forecast.share_extrapolated,
            "figures": figures(each.forecast),
        }

    return {
        "levels": level._asdict(),
        "num_runs": NUM_RUNS,
        "kept_share": found.kept_share,
        "figures": figures(found.again),
        "findings": [
            {
                "suspect": each.suspect.name,
                "is_likely": each.evidence.is_likely,
                "evidence": each.evidence.text,
                "trial": each.trial and trial(each.trial),
            }
            for each in found.findings
        ],
        "bottlenecks": [
            {"suspect": each.suspect.name, "trial": trial(each.trial)} for each in found.bottlenecks
        ],
        "verdict": " ".join(verdict_lines(found)),
    }
