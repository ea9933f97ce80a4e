"""`stepscope tune`: finds the knobs with the highest goodput that keep the service levels."""

from collections.abc import Iterator
from typing import Any

import msgspec
import typer

from stepscope.recordings.simulation.basis import WhatIfBasis
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
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.cli.simulation.studied import studied
from stepscope.tui.settings.cli_errors import FAILED
from stepscope.tui.settings.service_levels import said

commands = typer.Typer(rich_markup_mode=None)


_LIMIT_NAMES = {
    "budget": "the token budget", "seats": "max_num_seqs", "kv": "the number of KV blocks",
    "mode": "the batching mode", "threshold": "long_prefill_token_threshold",
}  # fmt: skip
_SHOWN = (
    ("TTFT p95 ms", "ttft_p95_ms"),
    ("ITL p95 ms", "itl_p95_ms"),
    ("goodput /s", "goodput_0_per_s"),
)


@commands.command(
    "tune",
    epilog=example(
        "stepscope tune session.mcap --slo-itl 50ms --slo-ttft 1s",
        "stepscope tune engine-0 --slo-itl 30ms --seconds 120",
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
) -> int:
    """Find the knobs that keep the service levels best.

    Candidates are simulated with the recorded requests, as in 'stepscope what-if'. Nothing is
    changed. Says why, and which load would do, if no knobs keep the levels (exit code 1).
    """
    with studied(target, seconds, "tune", slo_itl, slo_ttft) as work:
        level, basis = work.level, work.basis
        found = Tuning(basis, level, work.on_run).run()
        limit = _limit(work.seen())
    if as_json:
        say(_document(found, basis, level, limit))
    else:
        say(*_report(found, basis, level, limit))
    return 0 if found.candidates[0].keeps else FAILED


def _report(found: Tuned, basis: WhatIfBasis, level: SLO, limit: str) -> Iterator[str]:
    yield basis.model.in_words()[0]
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
        return f"best: stepscope set {changes_text(best.changes).replace(',', ' ')}"
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


def _document(found: Tuned, basis: WhatIfBasis, level: SLO, limit: str) -> str:
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
    document = {
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
    return msgspec.json.encode(document).decode()
