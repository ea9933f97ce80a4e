"""`stepscope tune`: finds the knobs with the highest goodput that keep the service levels."""

from collections.abc import Iterator
from typing import Annotated, Any

from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.simulation.diagnosis import diagnose
from stepscope.recordings.simulation.suspects import Seen
from stepscope.recordings.simulation.tuning import (
    KEPT_SHARE,
    Candidate,
    Tuned,
    Tuning,
    changes_text,
)
from stepscope.recordings.simulation.what_if import NUM_RUNS
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.series.limits import LIMITS
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.options import As, SloItl, SloTtft, Target, command, flag, option
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.autopilot import hold
from stepscope.tui.cli.simulation.diagnose import diagnosis_document, diagnosis_lines, verdict_lines
from stepscope.tui.cli.simulation.studied import studied
from stepscope.tui.settings.cli_errors import DONE, FAILED, WrongUsage
from stepscope.tui.settings.service_levels import said

_LIMIT_NAMES = {
    "budget": "the token budget", "seats": "max_num_seqs", "kv": "the number of KV blocks",
    "mode": "the batching mode", "threshold": "long_prefill_token_threshold",
}  # fmt: skip
_SHOWN = (
    ("TTFT p95 ms", "ttft_p95_ms"),
    ("ITL p95 ms", "itl_p95_ms"),
    ("goodput /s", "goodput_0_per_s"),
)


@command(
    "stepscope tune session.mcap --slo-itl 50ms --slo-ttft 1s",
    "stepscope tune engine-0 --slo-itl 30ms --seconds 120",
    "stepscope tune freeze --bottleneck",
    "stepscope tune engine-0 --hold itl=50ms --as night-shift",
    takes_key=True,
)
def tune(
    target: Target = None,
    *,
    seconds: Annotated[
        float | None,
        option(
            "NUMBER",
            "how long to watch an engine (default: 60), or to hold (default: until Ctrl-C)",
        ),
    ] = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    bottleneck: Annotated[
        bool, flag("only name the bottleneck, and prove it", "--bottleneck")
    ] = False,
    held: Annotated[
        str | None,
        option(
            "itl[=TIME]",
            "of an engine: keep 95 % of the gaps between tokens within this level, by moving "
            "its token budget, until Ctrl-C",
            "--hold",
        ),
    ] = None,
    shadow: Annotated[bool, flag("with --hold: only say what it would do", "--shadow")] = False,
    name: As = None,
    as_json: Annotated[
        bool, flag("print one JSON document, with --hold one a line", "--json")
    ] = False,
) -> int:
    """Find the knobs that keep the service levels best.

    Names the bottleneck first: the steps show which settings may hold the engine back, and the
    recorded requests are simulated with each limit lifted. Then sets of knobs are simulated, as in
    'stepscope what-if'. Nothing is changed. Says why, and which load would do, if no knobs keep the
    levels (exit code 1).

    --hold is an autopilot: it predicts step times with a model fitted on the engine's own steps,
    and also limits the running requests if the budget alone is not enough. Every move is in the
    engine's audit with its reason. The old values of the knobs are restored when it ends, dies or
    loses the telemetry. It ends when somebody else sets one of its knobs.
    """
    if held is not None:
        if bottleneck or (target or "").endswith(RECORDING_SUFFIXES):
            raise WrongUsage("--hold: only of an engine that runs, and without --bottleneck")
        itl = _level_to_hold(held, slo_itl)
        return hold(target, itl, seconds, name, is_shadow=shadow, as_json=as_json)
    if shadow or name is not None:
        raise WrongUsage("--shadow and --as: only with --hold")
    with studied(target, seconds, "tune", slo_itl, slo_ttft) as work:
        level, basis, seen = work.level, work.basis, work.seen()
        diagnosis = diagnose(seen, level, work.on_run)
        found = None if bottleneck else Tuning(basis, level, work.on_run).run()
    if found is None:
        if as_json:
            write_json(diagnosis_document(diagnosis, level))
        else:
            say(basis.model.in_words()[0], *diagnosis_lines(diagnosis, level))
        return DONE
    if as_json:
        document = _document(found, basis, level, _limit(seen))
        write_json({**document, "diagnosis": diagnosis_document(diagnosis, level)})
    else:
        say(
            basis.model.in_words()[0],
            *verdict_lines(diagnosis),
            "",
            *_report(found, basis, level, _limit(seen)),
        )
    return DONE if found.candidates[0].keeps else FAILED


def _level_to_hold(text: str, slo_itl: str | None) -> str | None:
    """Return the ITL level of `--hold`, else that of `--slo-itl`; None if neither has one."""
    kind, equals, level = text.partition("=")
    if kind != "itl" or (equals and not level):
        raise WrongUsage(f"--hold: expected itl=TIME such as itl=50ms, got {text!r}")
    return level or slo_itl


def _report(found: Tuned, basis: WhatIfBasis, level: SLO, limit: str) -> Iterator[str]:
    yield (
        f"each line is the median of {NUM_RUNS} runs (from the 5th to the 95th percentile); "
        f"levels: {said(level)}"
    )
    yield ""
    rows = [_row(each) for each in found.candidates]
    heading = ["", "keep levels", *(label for label, _ in _SHOWN), "unlike steps"]
    yield from text_table(heading, rows, "<" + ">" * (len(heading) - 1))
    yield ""
    yield verdict(found, basis, level, limit)
    if found.promising is not None:
        unlike = found.promising.forecast.share_extrapolated
        yield (
            f"note: {changes_text(found.promising.changes)} promises more, but {unlike:.0%} of its "
            "steps are unlike any in the recording; record with such knobs for some seconds"
        )


def _row(each: Candidate) -> list[str]:
    cells = []
    for _, name in _SHOWN:
        predicted = each.forecast.figures.get(name)
        cells.append(
            "-"
            if predicted is None
            else f"{predicted.value:,.4g} ({predicted.low:,.4g} to {predicted.high:,.4g})"
        )
    unlike = f"{each.forecast.share_extrapolated:.0%}"
    return [changes_text(each.changes), f"{each.kept_share:.0%}", *cells, unlike]


def verdict(found: Tuned, basis: WhatIfBasis, level: SLO, limit: str) -> str:
    """Return a line on which knobs to set, or why no knobs keep the service levels.

    Args:
        limit: what limited most of the recorded steps, in words.
    """
    best = found.candidates[0]
    if best.keeps and not best.changes:
        return "the recorded knobs keep the levels; none that was tried has a higher goodput"
    if best.keeps:
        return f"best: stepscope set {changes_text(best.changes)}"
    share = f"only {best.kept_share:.0%} of the requests keep them with {_named(best)}"
    why = f"{_why(found, basis, level)}; {limit}"
    return f"cannot be kept, because {why} ({share}; {KEPT_SHARE:.0%} must)"


def _limit(seen: Seen) -> str:
    """Return what limited most of the recorded steps; pauses of the operator are left out."""
    most = max((limit for limit in LIMITS if limit != "paused"), key=seen.share)
    share = f"{seen.share(most):.0%} of the recorded steps"
    if most == "work":
        return f"no setting limited {share}, only the speed of the machine"
    return f"{_LIMIT_NAMES[most]} limited {share}"


def _named(best: Candidate) -> str:
    return changes_text(best.changes) if best.changes else "the recorded knobs, which are the best"


def _why(found: Tuned, basis: WhatIfBasis, level: SLO) -> str:
    load = found.load_per_s
    if not found.at_load.keeps:
        step_ms = basis.model.seconds[0] * 1e3
        return (
            f"{_late(found.at_load, level)} even at {found.load_share:.0%} of the load, where a "
            f"step takes {step_ms:,.3g} ms and more"
        )
    return (
        f"{_late(found.candidates[0], level)} at {load:,.3g} requests/s; "
        f"{found.load_share * load:,.3g} requests/s ({found.load_share:.0%} of the load) would do"
    )


def _late(each: Candidate, level: SLO) -> str:
    """Return a text with the p95 latency (TTFT or ITL) that misses its service level by more."""
    ttft, itl = (each.forecast.figures[f"{name}_p95_ms"].value for name in ("ttft", "itl"))
    if itl / level.itl_ms > ttft / level.ttft_ms:
        return f"p95 ITL is {itl:,.4g} of {level.itl_ms:,g} ms"
    return f"p95 TTFT is {ttft:,.4g} of {level.ttft_ms:,g} ms"


def _document(found: Tuned, basis: WhatIfBasis, level: SLO, limit: str) -> dict[str, Any]:
    def candidate(each: Candidate) -> dict[str, Any]:
        figures = {name: predicted._asdict() for name, predicted in each.forecast.figures.items()}
        return {
            "changes": each.changes,
            "kept_share": each.kept_share,
            "keeps": each.keeps,
            "share_extrapolated": each.forecast.share_extrapolated,
            "figures": figures,
        }

    best = found.candidates[0]
    return {
        "levels": level._asdict(),
        "best": candidate(best) if best.keeps else None,
        "promising": found.promising and candidate(found.promising),
        "verdict": verdict(found, basis, level, limit),
        "load_per_s": found.load_per_s,
        "load_that_keeps_per_s": (
            found.load_share * found.load_per_s if found.at_load.keeps else None
        ),
        "candidates": [candidate(each) for each in found.candidates],
    }
