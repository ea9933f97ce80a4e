"""`diagnose`: finds the bottleneck of a session, proved by simulations with that limit lifted.

The step records tell which settings may hold the engine back: the suspects. For each suspect, the
recorded work is simulated with the suspect's limit lifted. The simulated machine and the random
seeds are those of the simulation with the limit in place. The bottleneck is the suspect whose
change lets most requests keep their service levels. With this limit lifted, the search continues
for the next bottleneck.

`SUSPECTS` is a table of these settings. Each says what of the records speaks for or against it, and
yields changes (remedies), which a simulation tries.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from stepscope.engine.protocol.knobs import ConfigError, Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel
from stepscope.engine.simulation.virtual_session import SimulatedSetup
from stepscope.recordings.compare.advice import MIN_LATE_SHARE
from stepscope.recordings.compare.side import Side
from stepscope.recordings.simulation.basis import WhatIfBasis
from stepscope.recordings.simulation.what_if import Forecast, forecast
from stepscope.recordings.state.audit_text import typed_text
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import NAMED_WAITS, Limit

_MIN_SHARE = 0.02  # of the steps: a limit that held fewer of them is no bottleneck


class Remedy(NamedTuple):
    """A change of knobs or of the engine's setup that lifts a limit."""

    text: str  # arguments for 'stepscope set', or in words
    setup: SimulatedSetup  # the changed engine, with the recorded knobs
    changes: Mapping[str, KnobValue]
    is_live: bool  # whether a running engine can be changed so


class Seen(NamedTuple):
    basis: WhatIfBasis
    shares: Mapping[Limit, float]  # of the steps whose limit is known, those that it held back
    prefill_late_share: float  # of gaps: late mainly due to prefills of others


class Suspect(NamedTuple):
    """A setting that may hold the engine back.

    `told_by`: what of the records speaks for it: how many steps a limit held, or how many gaps were
    late beside prompts of others; None: nothing does, and each of its remedies is tried.
    `remedies`: yields the changes of a setup that may help.
    """

    name: str
    told_by: Limit | Literal["late"] | None
    remedies: Callable[[SimulatedSetup], Iterator[Remedy]]

    def is_likely(self, seen: Seen) -> bool:
        if self.told_by == "late":
            return seen.prefill_late_share >= MIN_LATE_SHARE
        return self.told_by is None or seen.shares[self.told_by] >= _MIN_SHARE

    def evidence(self, seen: Seen) -> str:
        if self.told_by == "late":
            late = seen.prefill_late_share
            return f": {late:.1%} of the gaps between tokens were late beside prompts of others"
        limit = self.told_by
        return "" if limit is None else f": it limited {seen.shares[limit]:.0%} of the steps"


def seen_of(side: Side, basis: WhatIfBasis) -> Seen:
    num_known = max(1, side.sums().num_known_limits)
    shares = {limit: each.num_records / num_known for limit, each in side.limited.items()}
    return Seen(basis, shares, side.share_late_beside_prefill)


def chunks_for(knobs: Knobs) -> Iterator[dict[str, KnobValue]]:
    """Yield changes that cut prompts into chunks beside decodes; none if they are cut already."""
    if knobs.batching == "chunked" and knobs.enable_chunked_prefill:
        return
    chunks: dict[str, KnobValue] = {"batching": "chunked", "enable_chunked_prefill": True}
    recorded = knobs.as_dict()
    for budget in (256, 128, 512, 2048):  # among equals the first is named, as in the advice
        changes = {**chunks, "max_num_batched_tokens": budget}
        yield {name: value for name, value in changes.items() if value != recorded[name]}


# Remedies for simulations


def _live(setup: SimulatedSetup, **changes: KnobValue) -> Iterator[Remedy]:
    """Yield a remedy with these knobs, or nothing if they are incompatible or unchanged."""
    values = setup.knobs.as_dict()
    if all(values[name] == value for name, value in changes.items()):
        return
    try:
        setup.knobs.changed(changes, setup.limits)
    except ConfigError:
        return
    text = " ".join(f"{name}={typed_text(value)}" for name, value in changes.items())
    yield Remedy(text, setup, changes, is_live=True)


def _scaled(name: str, setup: SimulatedSetup) -> Iterator[Remedy]:
    """Beyond the value with which an engine was started, a remedy needs a restart."""
    for times in (2, 4):
        value = times * getattr(setup.knobs, name)
        most = getattr(setup.limits, name)
        if value <= most:
            yield from _live(setup, **{name: value})
            continue
        limits = msgspec.structs.replace(setup.limits, **{name: value})
        larger = msgspec.structs.replace(setup, limits=limits)
        text = f"{name}={value} (a restart: {most} is its start value)"
        yield Remedy(text, larger, {name: value}, is_live=False)


def _values(name: str, values: Sequence[KnobValue], setup: SimulatedSetup) -> Iterator[Remedy]:
    for value in values:
        yield from _live(setup, **{name: value})


def _budget_parts(name: str, parts: Sequence[int], setup: SimulatedSetup) -> Iterator[Remedy]:
    budget = setup.knobs.max_num_batched_tokens
    return _values(name, [budget // part for part in parts], setup)


def _chunked(setup: SimulatedSetup) -> Iterator[Remedy]:
    for changes in chunks_for(setup.knobs):
        yield from _live(setup, **changes)


def _more_kv(setup: SimulatedSetup) -> Iterator[Remedy]:
    for times in (2, 4):
        larger = msgspec.structs.replace(setup, num_blocks=times * setup.num_blocks)
        words = {2: "twice", 4: "four times"}[times]
        text = f"{words} the KV blocks (a restart with more memory, or a smaller KV dtype)"
        yield Remedy(text, larger, {}, is_live=False)


def _no_host(setup: SimulatedSetup) -> Iterator[Remedy]:
    faster = msgspec.structs.replace(setup, model=_WithoutHost(setup.model))
    text = "the host's work hidden (overlap, or a faster CPU)"
    yield Remedy(text, faster, {}, is_live=False)


class _WithoutHost(NamedTuple):
    """A `StepTimeModel` with the times of another model, but no CPU time between steps."""

    model: StepTimeModel

    def step_time(self, shape: StepShape) -> StepTime:
        return self.model.step_time(shape)._replace(host_s=0.0)


SUSPECTS = (
    Suspect("batching", None, _chunked),
    Suspect("seats (max_num_seqs)", "seats", partial(_scaled, "max_num_seqs")),
    Suspect("small token budget", "budget", partial(_scaled, "max_num_batched_tokens")),
    Suspect(
        "large token budget", "late", partial(_budget_parts, "max_num_batched_tokens", (2, 4, 8))
    ),
    Suspect(
        "limit for one prompt (long_prefill_token_threshold)",
        "threshold",
        partial(_values, "long_prefill_token_threshold", (0,)),
    ),
    Suspect(
        "prefill cadence (prefill_schedule_interval)",
        "late",
        partial(_values, "prefill_schedule_interval", (1, 2, 4, 8)),
    ),
    Suspect(
        "long prompts ahead of short ones",
        None,
        partial(_budget_parts, "long_prefill_token_threshold", (2, 4)),
    ),
    Suspect("KV memory", "kv", _more_kv),
    Suspect("KV reservation", None, partial(_values, "reserve", ("none", "prompt", "output"))),
    Suspect("prefix cache", None, partial(_values, "enable_prefix_caching", (True,))),
    Suspect("host time between steps", None, _no_host),
)


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
