"""The accuracy of forecasts from recorded pairs: errors, coverage, and the intervals needed."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.basis import basis_of
from stepscope.recordings.simulation.what_if import Predicted, WhatIf, family, what_if, widening
from stepscope.recordings.state.series.latency import SLO

FIGURES = [f"{name}_p{rank}_ms" for name in ("ttft", "itl", "e2e") for rank in (50, 95, 99)]
_SHARE = 0.9


class Pair(NamedTuple):
    """One figure of a real run, and its forecast from another run."""

    round: str
    figure: str
    truth: float
    forecast: Predicted
    is_varied: bool = False  # the recording that it is made from

    @property
    def error(self) -> float:
        return abs(self.forecast.value / self.truth - 1)

    @property
    def is_covered(self) -> bool:
        return self.forecast.low <= self.truth <= self.forecast.high

    @property
    def score(self) -> float:
        """How many times the unwidened interval reaches to the truth."""
        times = widening(self.figure, is_varied=self.is_varied)
        width = math.log(self.forecast.high / self.forecast.value) / times
        return abs(math.log(self.truth / self.forecast.value)) / width


def forecasts(folder: Path, knob: str, budgets: Sequence[int]) -> dict[str, WhatIf]:
    """Forecasts from each recording, by the stem of its name, under each budget."""
    found = {}
    for path in sorted(folder.glob("*.mcap")):
        with Recording(path) as recording:
            basis = basis_of(recording, SLO())
        variants = [(str(budget), {knob: budget}) for budget in budgets]
        result = what_if(basis, variants, SLO())
        assert result is not None
        found[path.stem] = result
    return found


def report(runs: Mapping[str, WhatIf], budgets: Sequence[int]) -> Iterator[str]:
    """Tables of the recordings in `runs`, named as by `bench_what_if.py record`."""
    rounds = sorted({stem.partition("-")[0] for stem in runs})
    structure = [
        Pair("", figure, run.recorded[figure] or math.nan, run.again.figures[figure])
        for run in runs.values()
        for figure in FIGURES
    ]
    sources = {
        "from the varied budget": ["varied"],
        "from the other budget": [f"{{other}}-{again}" for again in "ab"],
    }
    equal = list(_equal_runs(runs, rounds, budgets))
    yield f"{len(runs)} runs in {len(rounds)} rounds; median errors in %"
    yield _row("", [figure.removesuffix("_ms") for figure in FIGURES])
    yield _errors("recorded knobs simulated", structure)
    yield _errors("two equal runs differ", equal)
    for name, stems in sources.items():
        pairs = list(_pairs(runs, rounds, budgets, stems))
        yield _errors(f"forecast {name}", pairs)
        yield _row("  over equal runs, times", [
            f"{_median(pairs, figure) / _median(equal, figure):.2f}" for figure in FIGURES
        ])  # fmt: skip
        yield _row("  covered, %", [
            f"{_covered(pairs, figure):.0f}" for figure in FIGURES
        ])  # fmt: skip
        if len(rounds) > 1:
            yield from _calibrated(pairs, rounds)


def _pairs(
    runs: Mapping[str, WhatIf], rounds: Sequence[str], budgets: Sequence[int], stems: Sequence[str]
) -> Iterator[Pair]:
    """Each forecast beside both runs with its budget."""
    for number in rounds:
        for place, budget in enumerate(budgets):
            for stem in stems:
                source = runs[f"{number}-{stem.format(other=budgets[1 - place])}"]
                figures = source.variants[place].figures
                for again in "ab":
                    truth = runs[f"{number}-{budget}-{again}"].recorded
                    for figure in FIGURES:
                        real = truth[figure]
                        assert real is not None
                        yield Pair(number, figure, real, figures[figure], stem == "varied")


def _equal_runs(
    runs: Mapping[str, WhatIf], rounds: Sequence[str], budgets: Sequence[int]
) -> Iterator[Pair]:
    for number in rounds:
        for budget in budgets:
            one, other = (runs[f"{number}-{budget}-{again}"].recorded for again in "ab")
            for figure in FIGURES:
                first, second = one[figure], other[figure]
                assert first is not None
                assert second is not None
                yield Pair(number, figure, second, Predicted(first, first, first))


def _calibrated(pairs: Sequence[Pair], rounds: Sequence[str]) -> Iterator[str]:
    """The widening that the pairs need, and the coverage of each round by that of all others."""
    found: dict[str, float] = {}
    covered: dict[str, list[bool]] = {figure: [] for figure in FIGURES}
    for kind in ("ttft", "itl", "e2e"):
        own = [pair for pair in pairs if family(pair.figure) == kind]
        found[kind] = _conformal([pair.score for pair in own])
        for number in rounds:
            limit = _conformal([pair.score for pair in own if pair.round != number])
            for pair in own:
                if pair.round == number:
                    covered[pair.figure].append(pair.score <= limit)
    yield _row("  with others' widening, %", [
        f"{100 * statistics.fmean(each):.0f}" for each in covered.values()
    ])  # fmt: skip
    yield (
        f"  {len(pairs) // len(FIGURES)} pairs; all figures: "
        f"{statistics.fmean(pair.is_covered for pair in pairs):.1%} covered; with the widening of "
        f"the other rounds {statistics.fmean(chain(*covered.values())):.1%}"
    )
    half = statistics.median(pair.forecast.high / pair.forecast.value - 1 for pair in pairs)
    yield f"  intervals reach {half:.0%} above the forecast (median)"
    yield "  widening: " + ", ".join(f"{kind} {value:.2f}" for kind, value in found.items())


def _conformal(scores: Sequence[float]) -> float:
    place = math.ceil((len(scores) + 1) * _SHARE) - 1
    return sorted(scores)[min(place, len(scores) - 1)]


def _errors(name: str, pairs: Sequence[Pair]) -> str:
    return _row(name, [f"{_median(pairs, figure):.1%}".rstrip("%") for figure in FIGURES])


def _median(pairs: Sequence[Pair], figure: str) -> float:
    return statistics.median(pair.error for pair in pairs if pair.figure == figure)


def _covered(pairs: Sequence[Pair], figure: str) -> float:
    return 100 * statistics.fmean(pair.is_covered for pair in pairs if pair.figure == figure)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<32}" + "".join(f"{cell:>9}" for cell in cells)
