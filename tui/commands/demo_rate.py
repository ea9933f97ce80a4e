"""How many requests a second `stepscope demo` gives its engine: what the machine carries."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.engine.capacity import in_words, requests_per_s
from stepscope.engine.commands import WorkloadSpec
from stepscope.engine.wire import EngineInfo
from stepscope.recordings.rates import Rates
from stepscope.tui.commands.options import convert_flags

LOAD = 0.7  # of what the engine's first steps promise: they were run without anybody watching
NUM_BUSY = 8  # of twelve seats: random arrivals come in bunches, and want room for that
LEAST_RATE = 0.2  # a request every few seconds, or there is nothing to watch
CLEARLY = 1.5  # a rate is changed when the machine carries so many times more, or less


class Offer(NamedTuple):
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


def offer(usual: WorkloadSpec, info: EngineInfo, asked: float | None) -> Offer:
    """The usual workload, at the rate that was asked for, else at no more than is carried.

    That is `LOAD` of what the engine completes, by the costs of its steps.
    """
    costs = info.step_costs
    if costs is None:
        return Offer(usual) if asked is None else Offer(replace(usual, rate=asked), "as asked")
    measured = in_words(costs)
    capacity = requests_per_s(usual, costs, info.max_model_len)
    carried = _rounded(LOAD * capacity)
    if asked is not None:
        more = f"; this machine carries about {carried:g}" if asked > capacity else ""
        return Offer(replace(usual, rate=asked), f"as asked{more}", measured)
    return _at_most(usual, carried, measured)


def next_offer(now: Offer, usual: WorkloadSpec, rates: Rates) -> Offer | None:
    """What the engine carries by the steps that it ran; None: about as much as it is given.

    Every step gives each running request a token, so with `NUM_BUSY` of them that many tokens come
    out of a step, and so many requests a second are completed, and may arrive (Little, 1961).
    """
    if not rates.steps_per_s or rates.idle_share is None or rates.idle_share >= 1.0:
        return None
    steps_per_s = rates.steps_per_s / (1.0 - rates.idle_share)
    found = _at_most(usual, _rounded(NUM_BUSY * steps_per_s / usual.output_tokens), "")
    if now.workload.rate / CLEARLY < found.workload.rate < now.workload.rate * CLEARLY:
        return None
    # Of another seed: the same prompts again would be found in the prefix cache.
    return found._replace(workload=replace(found.workload, seed=now.workload.seed + 1))


def _at_most(usual: WorkloadSpec, carried: float, measured: str) -> Offer:
    if carried >= usual.rate:
        return Offer(usual, "", measured)
    if carried < LEAST_RATE:
        why = f"though this machine carries {carried:g}"
        return Offer(replace(usual, rate=LEAST_RATE), why, measured)
    return Offer(replace(usual, rate=carried), "what this machine carries", measured)


def _rounded(rate: float) -> float:
    """Down to two figures; nobody believes more of them."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return round(math.floor(rate / unit) * unit, 12)
