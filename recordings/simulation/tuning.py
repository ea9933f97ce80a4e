"""`Tuning`: finds the knobs with which a recorded session keeps its service level best.

It searches one knob after the other, with few simulated runs for each value. Knobs searched before
keep their best values. Then it simulates the best candidates and the recorded knobs in all runs of
a forecast. If no candidate keeps the service level, the same requests are spread over more time,
until the best candidate keeps it or the lowest load is reached.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.simulation.diagnosis import chunks_for
from stepscope.recordings.simulation.recorded import RecordedWork
from stepscope.recordings.simulation.what_if import NUM_RUNS, Forecast, forecast
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.latency import SLO

KEPT_SHARE = 0.95  # share of requests that must keep both levels
MAX_UNLIKE = 0.2  # share of steps unlike recorded ones; a candidate with more is a guess
_SEARCH_RUNS = 3
_NUM_FINALISTS = 4
_EQUAL_SHARE = 0.02  # goodputs that differ by less than this share are equal
_LOADS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_SEARCHED = (
    "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "reserve", "order",
    "prefill_schedule_interval", "enable_prefix_caching",
)  # fmt: skip
_LEAST = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
_CHOICES: Mapping[str, tuple[KnobValue, ...]] = {
    "long_prefill_token_threshold": (0, 128, 512),
    "reserve": ("none", "prompt", "output"),
    "order": ("decode_first", "arrival"),
    "prefill_schedule_interval": (1, 2, 4, 8),
    "enable_prefix_caching": (True,),
}
Changes = Mapping[str, KnobValue]


class Candidate(NamedTuple):
    changes: dict[str, KnobValue]  # relative to the recorded knobs
    kept_share: float  # share of requests that keep both levels
    goodput_per_s: float
    strain: float  # the larger of p95 TTFT and p95 ITL, each divided by its level
    forecast: Forecast

    @property
    def is_known(self) -> bool:
        """Whether enough simulated steps resemble recorded steps to trust the forecast."""
        return self.forecast.share_extrapolated <= MAX_UNLIKE

    @property
    def keeps(self) -> bool:
        return self.kept_share >= KEPT_SHARE


class Tuned(NamedTuple):
    candidates: list[Candidate]  # the best first, including the recorded knobs
    load_per_s: float  # recorded requests per second
    load_share: float  # share of that at which the best keeps the levels, else the lowest tried
    at_load: Candidate  # the best candidate at that load


class Tuning:
    """One search for the best knobs of a recorded session.

    `on_run`: called with what is being simulated and the share of its runs done. If it returns
    True, the search ends with `ForecastStopped`.
    """

    def __init__(
        self, basis: WhatIfBasis, level: SLO, on_run: Callable[[str, float], bool]
    ) -> None:
        self._basis, self._setup = basis, basis.setup
        self._level = level
        self._on_run = on_run
        work = basis.work
        seconds = (work.requests[-1].arrival_ns - work.requests[0].arrival_ns) / 1e9
        self._found: dict[tuple[int, frozenset[tuple[str, KnobValue]]], Candidate] = {}
        self._load_per_s = len(work.requests) / max(seconds, 1e-9)

    def run(self) -> Tuned:
        """Run the search and return its result. Raises ForecastStopped: `on_run` returned True."""
        final = self._forecasts("comparing the best", self._finalists(), NUM_RUNS)
        final.sort(key=_rank, reverse=True)
        best = _best(final)
        final.insert(0, final.pop(final.index(best)))
        return Tuned(final, self._load_per_s, *self._load_that_keeps(best))

    def _finalists(self) -> list[Changes]:
        seen = self._forecasts("trying chunks", list(chunks_for(self._setup.knobs)))
        best: Changes = _best(seen).changes
        for name in _SEARCHED:
            seen += self._forecasts(f"trying {name}", list(self._variants(best, name)))
            best = _best(seen).changes
        found: list[Candidate] = []
        for each in sorted(seen, key=_rank, reverse=True):
            is_new = all(each.forecast.figures != other.forecast.figures for other in found)
            if each.changes and is_new:  # skip knobs that change nothing
                found.append(each)
        guess = max(found, key=_promise, default=None)
        finalists = found[:_NUM_FINALISTS]
        if guess is not None and guess not in finalists:
            finalists.append(guess)
        return [each.changes for each in finalists]

    def _variants(self, best: Changes, name: str) -> Iterator[Changes]:
        recorded = self._setup.knobs.as_dict()
        for value in self._values(name):
            changes = {**best, name: value}
            if value == recorded[name]:
                del changes[name]
            try:
                self._setup.knobs.changed(changes, self._setup.limits)
            except ConfigError:
                continue
            yield changes

    def _values(self, name: str) -> Sequence[KnobValue]:
        """Values of a knob to try; of sizes, powers of two up to where the step times hold."""
        if name not in _LEAST:
            return _CHOICES[name]
        most: int = getattr(self._setup.limits, name)
        bits = range(_LEAST[name].bit_length() - 1, most.bit_length())
        return sorted(
            {1 << bit for bit in bits} | {min(most, getattr(self._setup.knobs, name) * 3 // 2)}
        )

    def _forecasts(
        self, what: str, wanted: Sequence[Changes], num_runs: int = _SEARCH_RUNS
    ) -> list[Candidate]:
        def on_run(number: int, share: float) -> bool:
            return self._on_run(what, (number + share) / len(cases))

        cases: list[Changes] = [{}, *wanted]
        found = []
        for number, changes in enumerate(cases):
            key = (num_runs, frozenset(changes.items()))
            if key not in self._found:
                self._found[key] = self._forecast(changes, partial(on_run, number), num_runs)
            found.append(self._found[key])
        return found

    def _forecast(
        self,
        changes: Changes,
        on_run: Callable[[float], bool],
        num_runs: int = _SEARCH_RUNS,
        share: float = 1.0,
    ) -> Candidate:
        """Forecast at this share of the recorded load."""
        basis = self._basis._replace(work=_at_load(self._basis.work, share))
        found = forecast(basis, changes_text(changes), changes, self._level, on_run, num_runs)
        figures = {name: each.value for name, each in found.figures.items()}
        goodput, rate = figures["goodput_per_s"], figures["requests_per_s"]
        strain = max(
            figures.get("ttft_p95_ms", 0.0) / self._level.ttft_ms,
            figures.get("itl_p95_ms", 0.0) / self._level.itl_ms,
        )
        return Candidate(dict(changes), goodput / max(rate, 1e-9), goodput, strain, found)

    def _load_that_keeps(self, best: Candidate) -> tuple[float, Candidate]:
        share, found = 1.0, best
        for share in (1.0, *_LOADS):
            if share < 1.0:
                on_run = partial(self._on_run, f"at {share:.0%} of the load")
                found = self._forecast(best.changes, on_run, share=share)
            if found.keeps:
                break
        return share, found


def _rank(each: Candidate) -> tuple[bool, bool, float]:
    return each.is_known, *_promise(each)


def _promise(each: Candidate) -> tuple[bool, float]:
    return each.keeps, each.goodput_per_s


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Of nearly equal goodputs, one with p95 within the levels, then few changes, then low p95."""
    is_known, keeps, goodput = max(map(_rank, candidates))
    near = [
        each
        for each in candidates
        if (each.is_known, each.keeps) == (is_known, keeps)
        and each.goodput_per_s >= goodput * (1 - _EQUAL_SHARE)
    ]
    return max(near, key=lambda each: (each.strain <= 1.0, -len(each.changes), -each.strain))


def changes_text(changes: Changes) -> str:
    """Write changes as the arguments of `stepscope what-if`: `name=value name=value`."""
    texts = (f"{name}={typed_text(value)}" for name, value in changes.items())
    return " ".join(texts) or "as recorded"


def _at_load(work: RecordedWork, share: float) -> RecordedWork:
    """Spread the same requests and knob changes over more time, at this `share` of the load."""
    requests = [each._replace(arrival_ns=round(each.arrival_ns / share)) for each in work.requests]
    changes = [each._replace(time_ns=round(each.time_ns / share)) for each in work.changes]
    return work._replace(requests=requests, changes=changes)
