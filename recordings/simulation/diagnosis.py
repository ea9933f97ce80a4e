"""`diagnose`: finds the bottleneck of a session, proved by simulations with that limit lifted.

The step records tell which settings may hold the engine back: the suspects. For each suspect, the
recorded work is simulated with the suspect's limit lifted. The simulated machine and the random
seeds are those of the simulation with the limit in place. The bottleneck is the suspect whose
change lets most requests keep their service levels. With this limit lifted, the search continues
for the next bottleneck.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from stepscope.recordings.simulation.suspects import SUSPECTS, Remedy, Seen, Suspect
from stepscope.recordings.simulation.what_if import Forecast, forecast
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import NAMED_WAITS, Limit

NUM_RUNS = 8
KEPT_SHARE = 0.95  # if so many requests keep their levels, there is no bottleneck
_MIN_GAIN = 0.02  # least gain, as a share of the requests
_EQUAL_GAIN = 0.02  # if the gains of two remedies differ by less, the smaller change wins
_MAX_ROUNDS = 3


class Trial(NamedTuple):
    remedy: Remedy
    forecast: Forecast
    kept_share: float  # of the requests, with this and all earlier bottlenecks lifted
    gain: float  # `kept_share` minus the share without this remedy
    num_better: int  # how many of `NUM_RUNS` runs were better

    @property
    def helps(self) -> bool:
        """Whether the remedy lets more requests keep their service levels, beyond chance.

        By chance alone, at least 7 of 8 runs are better in only 1 of 28 cases.
        """
        return self.gain >= _MIN_GAIN and self.num_better >= NUM_RUNS - 1


class Finding(NamedTuple):
    suspect: Suspect
    is_likely: bool  # if False, it is not simulated
    evidence: str
    trial: Trial | None  # of its best remedy; None if not simulated


class Diagnosis(NamedTuple):
    again: Forecast  # simulation of the session as recorded
    kept_share: float  # share of its requests that keep their levels
    findings: list[Finding]  # for every suspect: simulated ones first, then by gain
    bottlenecks: list[tuple[Suspect, Trial]]  # in the order in which they must be lifted
    held: Mapping[Limit, float]  # limits that no simulation lifts, and the share of steps they held


def diagnose(seen: Seen, level: SLO, on_run: Callable[[str, float], bool]) -> Diagnosis:
    """Simulate the session with the limits of the suspects lifted, and return the bottlenecks.

    `on_run`: called with what is being simulated and the share of its runs done. If it returns
    True, the diagnosis ends with `ForecastStopped`.
    """

    def simulated(remedy: Remedy, what: str) -> Forecast:
        basis, report = seen.basis._replace(setup=remedy.setup), partial(on_run, what)
        return forecast(basis, remedy.text, remedy.changes, level, report, NUM_RUNS)

    def best_trial(suspect: Suspect) -> Trial | None:
        """The trial of its best remedy, together with what is lifted already.

        A remedy tried later must be better by more than `_EQUAL_GAIN`.
        """
        knobs = lifted.setup.knobs.changed(lifted.changes, lifted.setup.limits)
        best = None
        for remedy in suspect.remedies(msgspec.structs.replace(lifted.setup, knobs=knobs)):
            both = remedy._replace(changes={**lifted.changes, **remedy.changes})
            trial = _trial(both, simulated(both, f"trying {suspect.name}"), now)
            if best is None or trial.gain > best.gain + _EQUAL_GAIN:
                best = trial
        return best

    lifted = Remedy("as recorded", seen.basis.setup, {}, is_live=True)
    again = now = simulated(lifted, "simulating it as it was")
    likely = [each for each in SUSPECTS if each.is_likely(seen)]
    first: dict[str, Trial] = {}
    bottlenecks: list[tuple[Suspect, Trial]] = []
    while _kept(now) < KEPT_SHARE and len(bottlenecks) < _MAX_ROUNDS:
        tried = [(each, trial) for each in likely if (trial := best_trial(each)) is not None]
        first = first or {suspect.name: trial for suspect, trial in tried}
        suspect, best = max(tried, key=lambda each: each[1].gain, default=(None, None))
        if suspect is None or best is None or not best.helps:
            break
        lifted, now = best.remedy, best.forecast
        bottlenecks.append((suspect, best))
        # Work that this one held back may now meet limits that no recorded step has met.
        likely = [each for each in SUSPECTS if each is not suspect]
    findings = [
        Finding(each, each.is_likely(seen), each.evidence(seen), first.get(each.name))
        for each in SUSPECTS
    ]
    findings.sort(
        key=lambda each: (each.is_likely, each.trial.gain if each.trial else 0.0), reverse=True
    )
    held = {limit: seen.shares[limit] for limit in NAMED_WAITS if seen.shares[limit] >= _MIN_GAIN}
    return Diagnosis(again, _kept(again), findings, bottlenecks, held)


def _trial(remedy: Remedy, found: Forecast, before: Forecast) -> Trial:
    pairs = list(zip(map(_kept_in, found.runs), map(_kept_in, before.runs), strict=True))
    now, was = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Trial(remedy, found, now, now - was, sum(after > earlier for after, earlier in pairs))


def _kept(found: Forecast) -> float:
    return statistics.median(map(_kept_in, found.runs))


def _kept_in(run: Mapping[str, float | None]) -> float:
    return (run["goodput_per_s"] or 0.0) / max(run["requests_per_s"] or 0.0, 1e-9)
