"""Tabulates the figures of simulated runs: median, lowest and highest value over the seeds."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.recordings.simulation.figures import RANKS, RunFigures, flat
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.service_levels import parse_levels, said

_NAME_WIDTH = 10


class Interval(NamedTuple):
    """Median, lowest and highest value of a figure over the runs; all None without any value."""

    median: float | None
    low: float | None
    high: float | None


def levels_of_options(slos: Sequence[str]) -> list[SLO]:
    """Return the service levels of each `--slo`.

    Raises:
        WrongUsage: a `--slo` is not valid.
    """
    try:
        return [parse_levels(each, SLO()) for each in slos]
    except ValueError as error:
        raise WrongUsage(f"--slo: {error}") from error


def intervals(runs: Sequence[RunFigures]) -> dict[str, Interval]:
    """Return name -> median, lowest and highest value of each figure over the runs."""
    flats = [flat(run) for run in runs]
    found = {}
    for name in flats[0]:
        known = sorted(value for each in flats if (value := each[name]) is not None)
        found[name] = Interval(None, None, None)
        if known:
            found[name] = Interval(statistics.median(known), known[0], known[-1])
    return found


def table(runs: Sequence[RunFigures], levels: Sequence[SLO]) -> Iterator[str]:
    """Yield the figures of the runs as lines of text."""
    found = intervals(runs)
    first = runs[0]
    yield _row(
        "requests",
        f"{first.num_requests:,} in {first.seconds:,.1f} s of virtual time "
        f"({text(found['requests_per_s'], '.2f')}/s), {text(found['num_steps'], ',.0f')} steps",
    )
    yield _row(
        "tokens",
        f"out {text(found['output_tokens_per_s'], ',.0f')}/s, "
        f"prefill {text(found['prefill_tokens_per_s'], ',.0f')}/s, "
        f"prefix hits {text(found['hit_share'], '.1%')}",
    )
    yield _row("preempted", text(found["num_preemptions"], ",.0f"))
    for name in ("ttft", "itl", "e2e"):
        cells = [f"p{rank} {text(found[f'{name}_p{rank}_ms'], ',.1f')} ms" for rank in RANKS]
        yield _row(name.upper(), "  ".join(cells))
    for index, level in enumerate(levels):
        rate = found[f"goodput_{index}_per_s"]
        yield _row("goodput", f"{text(rate, '.2f')} requests/s keep {said(level)}")


def text(interval: Interval, form: str) -> str:
    """Return the median as text, with lowest and highest value if these look different from it."""
    median, low, high = interval
    if median is None or low is None or high is None:
        return "unknown"
    shown, lowest, highest = (format(value, form) for value in (median, low, high))
    return shown if lowest == highest else f"{shown} ({lowest} to {highest})"


def _row(name: str, value: str) -> str:
    return f"{name:<{_NAME_WIDTH}} {value}"
