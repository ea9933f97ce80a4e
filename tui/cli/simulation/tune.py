"""`stepscope tune`: names the bottleneck, and finds the knobs that keep the service levels best.

With `--hold` it holds an ITL level by changing the token budget of a running engine.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.recordings.autopilot.live_pilot import LivePilot, Moved
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.diagnosis import NUM_RUNS as NUM_TRIALS
from stepscope.recordings.simulation.diagnosis import Diagnosis, Seen, Trial, diagnose, seen_of
from stepscope.recordings.simulation.tuning import (
    KEPT_SHARE,
    MAX_UNLIKE,
    Candidate,
    Tuned,
    Tuning,
    changes_text,
)
from stepscope.recordings.simulation.what_if import NUM_RUNS, Forecast, ForecastStopped
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import LIMIT_SPECS, LIMITS
from stepscope.tui.cli.recordings.measured import recorded, side_of
from stepscope.tui.cli.shared.connect import choose, connect, is_recorded
from stepscope.tui.cli.shared.levels import level_of, level_of_engine
from stepscope.tui.cli.shared.options import Target, command, flag, seconds_option
from stepscope.tui.cli.shared.output import (
    Progress,
    plain,
    say,
    text_table,
    told,
    write_json,
    write_json_line,
)
from stepscope.tui.cli.shared.process import StopSignals
from stepscope.tui.session.who import who
from stepscope.tui.settings.cli_errors import DONE, FAILED, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import said
from stepscope.tui.views.format import plural

_SHOWN = (
    ("TTFT p95 ms", "ttft_p95_ms"),
    ("ITL p99 ms", "itl_p99_ms"),
    ("goodput /s", "goodput_per_s"),
)


@command(
    "stepscope tune session.mcap --slo-itl 50ms --slo-ttft 1s",
    "stepscope tune engine-0 --slo-itl 30ms --seconds 120",
    "stepscope tune freeze --bottleneck",
    "stepscope tune engine-0 --hold --slo-itl 50ms",
    sections=("levels",),
    takes_key=True,
)
def tune(
    target: Target = None,
    *,
    seconds: float | None = seconds_option(
        "of an engine: how much of its past (default: 60; with --hold until Ctrl-C)"
    ),
    bottleneck: bool = flag("only name the bottleneck, and prove it", "--bottleneck"),
    holds: bool = flag(
        "of an engine: move its token budget to keep 95 % of the gaps within the ITL level",
        "--hold",
    ),
    shadow: bool = flag("with --hold: only say what it would do", "--shadow"),
    as_json: bool = flag("print one JSON document, with --hold one a line", "--json"),
    flags: dict[str, Any],
) -> int:
    """Find the knobs that keep the service levels best.

    Names the bottleneck first: the recorded requests are simulated with each limit lifted. Then
    sets of knobs are simulated, as in 'stepscope what-if'. Says why, and which load would do, if no
    knobs keep the levels (exit code 1). Nothing is changed without --hold.

    --hold is an autopilot: it predicts step times from the engine's own steps, and moves the token
    budget, then max_num_seqs. Every move is in the audit with its reason. The knobs are restored
    when it ends, dies or loses the telemetry. It ends when somebody else sets one of them.
    """
    if holds:
        if bottleneck or (target is not None and is_recorded(target)):
            raise WrongUsage("--hold: only of an engine that runs, and without --bottleneck")
        return hold(target, flags, seconds, is_shadow=shadow, as_json=as_json)
    if shadow:
        raise WrongUsage("--shadow: only with --hold")
    if seconds is not None and target is not None and is_recorded(target):
        raise WrongUsage("--seconds: only for an engine; a recording is taken whole")
    with (
        recorded(target, seconds, flags, "stepscope tune {}") as (name, recording),
        StopSignals() as stop,
        Progress() as progress,
    ):
        level = level_of(flags, recording)
        basis = basis_of(recording, level, lambda share: progress(f"reading {name}", share))
        seen = seen_of(side_of(recording.path, name, level), basis)

        def on_run(what: str, share: float) -> bool:
            progress(what, share)
            return bool(stop)

        try:
            diagnosis = diagnose(seen, level, on_run)
            found = None if bottleneck else Tuning(basis, level, on_run).run()
        except ForecastStopped as error:
            raise Interrupted("interrupted before the runs were done") from error
    fit = basis.model.in_words()
    if found is None:
        if as_json:
            write_json(_diagnosis_document(diagnosis, level))
        else:
            say(fit, *_diagnosis_lines(diagnosis, level))
        return DONE
    verdict = _verdict(found, basis, level, seen)
    if as_json:
        candidates = [told(each, "changes", "keeps") | _case(each) for each in found.candidates]
        kept_load = found.load_share * found.load_per_s if found.at_load.keeps else None
        write_json(
            {
                "levels": level._asdict(),
                "best": candidates[0] if found.candidates[0].keeps else None,
                "verdict": verdict,
                "load_per_s": found.load_per_s,
                "load_that_keeps_per_s": kept_load,
                "candidates": candidates,
                "diagnosis": _diagnosis_document(diagnosis, level),
            }
        )
    else:
        say(fit, *_bottlenecks(diagnosis), "", *_report(found, level), "", verdict)
    return DONE if found.candidates[0].keeps else FAILED


# The best knobs


def _report(found: Tuned, level: SLO) -> Iterator[str]:
    yield (
        f"each line is the median of {NUM_RUNS} simulated runs (from the 5th to the 95th "
        f"percentile); levels: {said(level)}"
    )
    yield ""
    rows = []
    for each in found.candidates:
        figures = [each.forecast.figures.get(name) for _, name in _SHOWN]
        cells = [
            f"{of.value:,.4g} ({of.low:,.4g} to {of.high:,.4g})" if of else "-" for of in figures
        ]
        text = changes_text(each.changes) if each.changes else "as recorded, simulated"
        guessed = f"{each.forecast.share_extrapolated:.0%}"
        rows.append([f"{each.kept_share:.0%}", *cells, guessed, text])
    heading = ["keep levels", *(label for label, _ in _SHOWN), "guessed", "with"]
    yield from text_table(heading, rows, ">>>>><")
    yield (
        "guessed: the share of simulated steps that are unlike any in the recording; where it is "
        f"above {MAX_UNLIKE:.0%}, record with such knobs for some seconds"
    )


def _verdict(found: Tuned, basis: WhatIfBasis, level: SLO, seen: Seen) -> str:
    best = found.candidates[0]
    if best.keeps and not best.changes:
        return "the recorded knobs keep the levels; none that was tried has a higher goodput"
    if best.keeps:
        return f"best: stepscope set {changes_text(best.changes)}"
    # What limited most of the recorded steps; pauses of the operator are left out.
    most = max((limit for limit in LIMITS if limit != "paused"), key=seen.shares.__getitem__)
    steps = f"{seen.shares[most]:.0%} of the recorded steps"
    limit = f"{LIMIT_SPECS[most].words} limited {steps}"
    if most == "work":
        limit = f"no setting limited {steps}, only the speed of the machine"
    load, share = found.load_per_s, found.load_share
    why = f"{_late(best, level)} at {load:,.3g} requests/s; {share * load:,.3g} requests/s "
    why += f"({share:.0%} of the load) would do"
    if not found.at_load.keeps:
        step_ms = basis.model.seconds[0] * 1e3
        why = f"{_late(found.at_load, level)} even at {share:.0%} of the load, where a step takes "
        why += f"{step_ms:,.3g} ms and more"
    knobs = changes_text(best.changes) if best.changes else "the recorded knobs, which are the best"
    kept = f"only {best.kept_share:.0%} of the requests keep them with {knobs}"
    return f"cannot be kept, because {why}; {limit} ({kept}; {KEPT_SHARE:.0%} must)"


def _late(each: Candidate, level: SLO) -> str:
    """Return a text with the p95 latency (TTFT or ITL) that misses its service level by more."""
    ttft, itl = (each.forecast.figures[f"{name}_p95_ms"].value for name in ("ttft", "itl"))
    if itl / level.itl_ms > ttft / level.ttft_ms:
        return f"p95 ITL is {itl:,.4g} of {level.itl_ms:,g} ms"
    return f"p95 TTFT is {ttft:,.4g} of {level.ttft_ms:,g} ms"


# The bottleneck


def _diagnosis_lines(found: Diagnosis, level: SLO) -> Iterator[str]:
    yield f"levels: {said(level)}; medians of {NUM_TRIALS} simulated runs"
    kept = f"{found.kept_share:.0%} of the requests keep them"
    yield f"as it was, simulated: {kept}, {_figures(found.again)}"
    yield ""
    for each in found.findings:
        if (trial := each.trial) is None:
            yield f"{'?' if each.is_likely else '-'} {each.suspect.name}{each.evidence}"
            continue
        yield f"{'!' if trial.helps else '-'} {each.suspect.name}{each.evidence}"
        unlike = trial.forecast.share_extrapolated
        guess = f"; a guess, {unlike:.0%} of the steps are unlike recorded ones"
        yield (
            f"    what if {trial.remedy.text}: {trial.kept_share:.0%} keep the levels, better in "
            f"{trial.num_better} of {NUM_TRIALS} runs ({_figures(trial.forecast)})"
            f"{guess if unlike > MAX_UNLIKE else ''}"
        )
    yield ""
    yield from _bottlenecks(found)


def _figures(found: Forecast) -> str:
    values = found.figures
    return (
        f"goodput {values['goodput_per_s'].value:,.2f}/s, "
        f"TTFT p95 {values['ttft_p95_ms'].value:,.0f} ms, "
        f"ITL p95 {values['itl_p95_ms'].value:,.1f} ms"
    )


def _bottlenecks(found: Diagnosis) -> Iterator[str]:
    """Yield lines on the proved bottlenecks, in the order in which to remove them."""
    if found.kept_share >= KEPT_SHARE:
        yield f"no bottleneck: {found.kept_share:.0%} of the requests keep the levels"
        return
    evidence = {each.suspect.name: each.evidence for each in found.findings}
    for number, (suspect, trial) in enumerate(found.bottlenecks):
        begin = "stepscope set " if trial.remedy.is_live else ""
        yield (
            f"{'then' if number else 'bottleneck'}: {suspect.name}{evidence[suspect.name]}; try: "
            f"{begin}{trial.remedy.text} ({trial.kept_share:.0%} of the requests then keep the "
            "levels, simulated)"
        )
    if not found.bottlenecks or found.bottlenecks[-1][1].kept_share < KEPT_SHARE:
        begin = "beyond that" if found.bottlenecks else "no setting is the bottleneck:"
        for limit, share in found.held.items():
            held = f"{LIMIT_SPECS[limit].words} limited {share:.0%} of the recorded steps"
            yield f"{begin} {held}, which no simulation lifts"
        if not found.held:
            yield f"{begin} the machine is too slow for this load at these levels"


def _diagnosis_document(found: Diagnosis, level: SLO) -> dict[str, Any]:
    def trial(each: Trial | None) -> dict[str, Any] | None:
        if each is None:
            return None
        remedy = {**told(each.remedy, "changes", "is_live"), "remedy": each.remedy.text}
        return {**remedy, **told(each, "helps", "gain", "num_better"), **_case(each)}

    return {
        "levels": level._asdict(),
        "num_runs": NUM_TRIALS,
        "kept_share": found.kept_share,
        "figures": plain(found.again.figures),
        "findings": [
            {
                "suspect": each.suspect.name,
                "is_likely": each.is_likely,
                "evidence": each.evidence.removeprefix(": "),
                "trial": trial(each.trial),
            }
            for each in found.findings
        ],
        "bottlenecks": [
            {"suspect": suspect.name, "trial": trial(best)} for suspect, best in found.bottlenecks
        ],
        "verdict": " ".join(_bottlenecks(found)),
    }


def _case(each: Trial | Candidate) -> dict[str, Any]:
    return told(each, "kept_share") | told(each.forecast, "share_extrapolated", "figures")


# The autopilot

_TICK_S = 0.2


def hold(
    target: str | None,
    flags: Mapping[str, Any],
    seconds: float | None,
    *,
    is_shadow: bool,
    as_json: bool,
) -> int:
    """Run the autopilot until a signal, then restore the knobs; exit code 1 if it ended itself."""
    chosen = choose(target, "stepscope tune {} --hold")
    with connect(chosen) as client:
        itl_ms = level_of_engine(flags, client.info()).itl_ms
    if not as_json:
        what = "says what it would do, changes nothing" if is_shadow else "moves the budget"
        say(
            f"{chosen.name}: holds 95 % of the gaps between tokens within {itl_ms:g} ms; "
            f"{what}; Ctrl-C ends it"
        )
    num_moves, begun_s = 0, time.monotonic()
    with StopSignals() as stop:
        pilot = LivePilot(chosen, itl_ms, who(), is_shadow=is_shadow)
        try:
            for _ in stop.ticks(_TICK_S, seconds):
                if (moved := pilot.tick(time.monotonic())) is not None:
                    num_moves += 1
                    _print_move(chosen.name, moved, as_json)
                if pilot.ended is not None:
                    break
        finally:
            given_back = pilot.close()
    elapsed_s, late = time.monotonic() - begun_s, pilot.late_share
    if as_json:
        fields = {"late_share": late, "given_back": given_back, "seconds": elapsed_s}
        write_json_line(engine=chosen.name, kind="end", why=pilot.ended, **fields)
    else:
        kept = "no gap between tokens was seen" if late is None else f"{late:.1%} of the gaps late"
        say(
            *([] if pilot.ended is None else [f"ended: {pilot.ended}"]),
            *(f"given back: {name}={typed_text(value)}" for name, value in given_back.items()),
            f"{plural(num_moves, 'move')} in {elapsed_s:.0f} s; {kept}",
        )
    return DONE if pilot.ended is None else FAILED


def _print_move(engine: str, moved: Moved, as_json: bool) -> None:
    before, (changes, reason), step = moved
    if as_json:
        fields = {"old": before, "new": changes, "reason": reason, "step": step}
        write_json_line(engine=engine, kind="move", **fields)
        return
    when = "would set" if step is None else f"step {step:,}:"
    for name, value in changes.items():
        old = typed_text(before[name])
        say(f"{time.strftime('%H:%M:%S')} {when} {name} {old} -> {value} ({reason})")
