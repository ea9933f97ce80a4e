"""`stepscope diagnose`: finds the setting that is the bottleneck, and proves it by simulation."""

from collections.abc import Iterator
from typing import Any

import msgspec
import typer

from stepscope.recordings.simulation.diagnosis import (
    KEPT_SHARE,
    NUM_RUNS,
    Diagnosis,
    Finding,
    Trial,
    diagnose,
)
from stepscope.recordings.simulation.what_if import Forecast
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.arguments import (
    AsJson,
    SloItl,
    SloTtft,
    Target,
    WatchSeconds,
    example,
    with_key,
)
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.simulation.studied import studied
from stepscope.tui.settings.service_levels import said

commands = typer.Typer(rich_markup_mode=None)


_MAX_UNLIKE = 0.2  # share of steps unlike recorded ones; a forecast with more is a guess


@commands.command(
    "diagnose",
    epilog=example(
        "stepscope diagnose session.mcap",
        "stepscope diagnose engine-0 --slo-itl 30ms --slo-ttft 1s --seconds 120",
    ),
)
@with_key
def run(
    target: Target = None,
    *,
    seconds: WatchSeconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> None:
    """Find the setting that is the bottleneck, and prove it.

    The steps show which settings may hold the engine back: seats, budget, KV memory and its
    reservation, the batching mode, long prompts, the prefix cache, the host. The recorded requests
    are then simulated with each limit lifted. Nothing is changed.
    """
    with studied(target, seconds, "diagnose", slo_itl, slo_ttft) as work:
        level, basis = work.level, work.basis
        found = diagnose(work.seen(), level, work.on_run)
    if as_json:
        say(_document(found, level))
    else:
        say(basis.model.in_words()[0], *_report(found, level))


def _report(found: Diagnosis, level: SLO) -> Iterator[str]:
    yield f"levels: {said(level)}; medians of {NUM_RUNS} simulated runs"
    yield f"as it was: {found.kept_share:.0%} of the requests keep them, {_figures(found.again)}"
    yield ""
    for each in found.findings:
        yield from _finding(each)
    yield ""
    yield from verdict(found)


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


def verdict(found: Diagnosis) -> Iterator[str]:
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


def _document(found: Diagnosis, level: SLO) -> str:
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

    document = {
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
            {
                "suspect": each.suspect.name,
                "trial": trial(each.trial),
            }
            for each in found.bottlenecks
        ],
        "verdict": " ".join(verdict(found)),
    }
    return msgspec.json.encode(document).decode()
