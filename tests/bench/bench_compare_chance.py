"""How often a comparison names a winner where there is none, and where there is one. A table.

    bench_compare_chance.py [PAIRS] [SECONDS] [FIRST SEED] [CASE...]

Each pair are two simulated runs: of requests that come at random, as before and after a mark in one
session; the same on a machine with other work to do, whose speed drifts and which stops now and
then; and there the same requests sent to both. Columns: the share of pairs in which any latency has
a winner, or any figure of like work; first tokens, by a figure or request by request, and these
alone; p99 of the waits for a token, p50 and p99 of those beside a prefill.
"""

import math
import random
import sys
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, StepRecord
from stepscope.engine.simulation.simulated import SimulatedWorkload, simulate
from stepscope.engine.simulation.step_time import CostModel, StepShape, StepTime
from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState

WORKLOAD = SimulatedWorkload(rate=6.0, document_share=0.15, document_tokens=2600, output_tokens=100)
COST = CostModel(floor_ms=12.0, token_us=60.0, context_ns=4.0)


class Noise(NamedTuple):
    """Disturbances by other work on the machine; shares are of a step's time."""

    drift: float  # standard deviation of the part that lasts for some 100 steps
    each: float  # standard deviation of the part that changes with each step
    stops: float  # share of the steps, 40 ms each on average


class Case(NamedTuple):
    """How side B differs from side A.

    Attributes:
        cost: factor on the cost of its tokens.
        noise: that of both sides.
        is_sent_again: A's requests come at A's times.
    """

    budget: int = 2048
    rate: float = 6.0
    cost: float = 1.0
    noise: Noise | None = None
    is_sent_again: bool = False


BUSY = Noise(drift=0.05, each=0.03, stops=0.005)
CASES: dict[str, Case] = {
    "the same": Case(),
    "budget 2048, then 512": Case(budget=512),
    "every token costs a fifth more": Case(cost=1.2),
    "6 requests a second, then 8": Case(rate=8.0),
    "6, then 10": Case(rate=10.0),
    "6, then 10, and budget 512": Case(budget=512, rate=10.0),
    "busy machine, the same": Case(noise=BUSY),
    "busy, budget 512": Case(budget=512, noise=BUSY),
    "busy, sent again, the same": Case(noise=BUSY, is_sent_again=True),
    "busy, sent again, budget 512": Case(budget=512, noise=BUSY, is_sent_again=True),
    "busy, sent again, costs 5 % more": Case(cost=1.05, noise=BUSY, is_sent_again=True),
}


class NoisyCost:
    """A cost model of a machine that does other work, too."""

    def __init__(self, cost: CostModel, noise: Noise, seed: int) -> None:
        self._cost, self._noise = cost, noise
        self._random = random.Random(seed)
        self._level = self._random.gauss(0, noise.drift)

    def step_time(self, shape: StepShape) -> StepTime:
        noise, kept = self._noise, 0.99
        new = self._random.gauss(0, noise.drift * math.sqrt(1 - kept**2))
        self._level = kept * self._level + new
        factor = math.exp(self._level + self._random.gauss(0, noise.each))
        stop_s = self._random.expovariate(1 / 40e-3) if self._random.random() < noise.stops else 0
        time = self._cost.step_time(shape)
        return time._replace(device_s=time.device_s * factor + stop_s)


def side_of(name: str, seed: int, noise_seed: int, seconds: float, case: Case) -> Side:
    """A run of about so many seconds, after a warm-up of the same length."""
    cost = msgspec.structs.replace(
        COST, floor_ms=COST.floor_ms * case.cost, token_us=COST.token_us * case.cost
    )
    messages = simulate(
        seed=seed,
        num_steps=round(seconds * 110),
        knobs=Knobs(max_num_batched_tokens=case.budget, max_num_seqs=64),
        workload=msgspec.structs.replace(WORKLOAD, rate=case.rate),
        cost=cost if case.noise is None else NoisyCost(cost, case.noise, noise_seed),
        num_blocks=4096,
    )
    state, side, begin_ns = SessionState(), None, 0
    skipped_s = 0.0 if case.is_sent_again else seconds / 4
    for _, message in messages:
        if isinstance(message, EngineInfo):
            message = msgspec.structs.replace(message, engine_id=name)
        if isinstance(message, StepRecord):
            begin_ns = begin_ns or message.tokens_ns
            now_s = (message.tokens_ns - begin_ns) / 1e9
            if side is None and now_s >= skipped_s:
                side = Side("run", SLO(), state)
            if side is not None and now_s > skipped_s + seconds:
                break
        if side is None:
            state.apply(message)
        else:
            side.take(message)
    assert side is not None
    return side


def found_of(pair: int, seconds: float, case: Case) -> Comparison:
    usual = Case(noise=case.noise, is_sent_again=case.is_sent_again)
    seeds = (pair, pair) if case.is_sent_again else (2 * pair, 2 * pair + 1)
    return compare(
        side_of("one", seeds[0], 2 * pair, seconds, usual),
        side_of("two" if case.is_sent_again else "one", seeds[1], 2 * pair + 1, seconds, case),
    )


def main() -> None:
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    print(f"{num_pairs} pairs of {seconds:g} s")
    heads = (
        "other load", "latency", "like work", "TTFT", "TTFT pairs", "ITL p99",
        "beside p50", "beside p99",
    )  # fmt: skip
    print(f"{'':<34}" + "".join(f"{head:>12}" for head in heads))
    for name, case in CASES.items():
        if name not in (sys.argv[4:] or CASES):
            continue
        counts = [0] * len(heads)
        for pair in range(first, first + num_pairs):
            found = found_of(pair, seconds, case)
            won = {figure.key for figure in found.figures if figure.verdict in ("a", "b")}
            latencies = {figure.key for figure in found.figures if figure.kind is not None}
            pairs = {each.what for each in found.paired if each.is_sure}
            has_ttft = any(key.startswith("ttft") for key in won)
            hits = (
                found.different_work is not None,
                bool(won & latencies or pairs),
                any(key.startswith("like_") for key in won),
                has_ttft or "TTFT" in pairs,
                "TTFT" in pairs,
                "itl_p99" in won,
                "like_itl_prefill_p50" in won,
                "like_itl_prefill_p99" in won,
            )
            counts = [count + hit for count, hit in zip(counts, hits, strict=True)]
        shares = "".join(f"{count / num_pairs:>12.0%}" for count in counts)
        print(f"{name:<34}{shares}", flush=True)


if __name__ == "__main__":
    main()
