"""The request rate of `stepscope demo`: requests a second that the machine can serve."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.engine.protocol.wire import EngineInfo, StepCosts
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload import capacity
from stepscope.recordings.history.rates import Rates
from stepscope.tui.settings.setting_values import convert_flags

LOAD = 0.7  # of what its steps promise: random arrivals come in bunches, and want room for that
SHARE = f"{100 * LOAD:.0f} % of what this machine can serve"
LEAST_RATE = 0.2  # a request every few seconds, or there is nothing to watch
LEAST_BUSY_S = 0.5  # of steps, to judge by
CLEARLY = 1.4  # a rate is changed when the machine carries so many times more, or less


class DemoLoad(NamedTuple):
    """The workload that is started, and why at its rate."""

    workload: WorkloadSpec
    why: str = ""  # empty: it is the usual one
    measured: str = ""  # what it was reckoned from; empty where the engine did not try any step

    def __str__(self) -> str:
        rate = f"{self.workload.rate:g} requests/s"
        return f"{rate}, {self.why}" if self.why else rate


def asked_rate(text: str | None) -> float | None:
    """What `--rate` says.

    Raises:
        WrongUsage: no rate that a workload may have.
    """
    if text is None:
        return None
    rate: float = convert_flags(WorkloadSpec, {"rate": text})["rate"]
    return rate


def offer(usual: WorkloadSpec, info: EngineInfo, requested: float | None) -> DemoLoad:
    """The demo's workload at the requested rate, or at most at the rate that the engine carries.

    That is `LOAD` of what the engine completes, by the costs of its steps.
    """
    costs = info.step_costs
    if costs is None:
        return (
            DemoLoad(usual)
            if requested is None
            else DemoLoad(replace(usual, rate=requested), "as asked")
        )
    measured = capacity.in_words(costs)
    whole = capacity.requests_per_s(usual, costs, info.max_model_len)
    carried = _rounded(LOAD * whole)
    if requested is not None:
        more = f"; {SHARE} is about {carried:g}" if requested > whole else ""
        return DemoLoad(replace(usual, rate=requested), f"as asked{more}", measured)
    return _at_most(usual, carried, measured)


def slowness(rates: Rates, costs: StepCosts) -> float | None:
    """How many times longer steps take than the engine's first ones; None: too few to know.

    Each step is compared with the time its work should take. So a burst of prompts, or a small
    batch under a light load, does not count as a slow machine.
    """
    if rates.steps_per_s is None or rates.idle_share is None:
        return None
    if rates.prefill_tokens_per_s is None or rates.output_tokens_per_s is None:
        return None
    busy_s = 1.0 - rates.idle_share  # in a second
    reckoned_ms = capacity.reckoned_ms(
        costs, rates.steps_per_s, rates.prefill_tokens_per_s, rates.output_tokens_per_s
    )
    if busy_s * rates.seconds < LEAST_BUSY_S or not reckoned_ms:
        return None
    return 1000.0 * busy_s / reckoned_ms


def next_offer(
    now: DemoLoad, usual: WorkloadSpec, info: EngineInfo, rates: Rates
) -> DemoLoad | None:
    """The load for an engine as slow as its steps show; None: about the load it has.

    It is the rate of the start (`offer`), by steps that take so many times longer. What the mix
    asks for is known, whatever part of it the steps of `rates` happened to hold.
    """
    costs = info.step_costs
    if costs is None or (times := slowness(rates, costs)) is None:
        return None
    carried = LOAD * capacity.requests_per_s(usual, costs, info.max_model_len) / times
    found = _at_most(usual, _rounded(carried), "")
    if now.workload.rate / CLEARLY < found.workload.rate < now.workload.rate * CLEARLY:
        return None
    # Of another seed: the same prompts again would be found in the prefix cache.
    return found._replace(workload=replace(found.workload, seed=now.workload.seed + 1))


def _at_most(usual: WorkloadSpec, carried: float, measured: str) -> DemoLoad:
    if carried >= usual.rate:
        return DemoLoad(usual, "", measured)
    if carried < LEAST_RATE:
        why = f"though {SHARE} is {carried:g}"
        return DemoLoad(replace(usual, rate=LEAST_RATE), why, measured)
    return DemoLoad(replace(usual, rate=carried), SHARE, measured)


def _rounded(rate: float) -> float:
    """Round down to two digits; more would not be accurate."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return round(math.floor(rate / unit) * unit, 12)
