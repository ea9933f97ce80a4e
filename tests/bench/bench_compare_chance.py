"""How often a comparison names a winner where there is none, and where there is one. A table.

Each pair are two simulated runs of requests that come at random, as before and after a mark in one
session: `bench_compare_chance.py [PAIRS] [SECONDS]`. Columns: the share of pairs in which any
latency has a winner, or any figure of like work; p99 of the waits for a token, and of those beside
a prefill.
"""

import sys

import msgspec

from stepscope.engine.config import Knobs
from stepscope.engine.simulated import CostModel, SimulatedWorkload, simulate
from stepscope.engine.wire import EngineInfo, StepRecord
from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.side import Side
from stepscope.recordings.latency import SLO
from stepscope.recordings.session import SessionState

WORKLOAD = SimulatedWorkload(rate=6.0, document_share=0.15, document_tokens=2600, output_tokens=100)
COST = CostModel(floor_ms=12.0, token_us=60.0, context_ns=4.0)
CASES: dict[str, tuple[int, float, float]] = {  # budget, requests a second, tokens' cost of B
    "the same": (2048, 6.0, 1.0),
    "budget 2048, then 512": (512, 6.0, 1.0),
    "every token costs a fifth more": (2048, 6.0, 1.2),
    "6 requests a second, then 8": (2048, 8.0, 1.0),
    "6, then 10": (2048, 10.0, 1.0),
    "6, then 10, and budget 512": (512, 10.0, 1.0),
}


def side_of(seed: int, seconds: float, budget: int, rate: float, cost: float) -> Side:
    """A run of about so many seconds, after as many that are not looked at."""
    messages = simulate(
        seed=seed,
        num_steps=round(seconds * 110),
        knobs=Knobs(max_num_batched_tokens=budget, max_num_seqs=64),
        workload=msgspec.structs.replace(WORKLOAD, rate=rate),
        cost=msgspec.structs.replace(
            COST, floor_ms=COST.floor_ms * cost, token_us=COST.token_us * cost
        ),
        num_blocks=4096,
    )
    state, side, begin_ns = SessionState(), None, 0
    for _, message in messages:
        if isinstance(message, EngineInfo):
            message = msgspec.structs.replace(message, engine_id="one")
        if isinstance(message, StepRecord):
            begin_ns = begin_ns or message.tokens_ns
            now_s = (message.tokens_ns - begin_ns) / 1e9
            if side is None and now_s > seconds / 4:
                side = Side("run", SLO(), state)
            if side is not None and now_s > seconds / 4 + seconds:
                break
        if side is None:
            state.apply(message)
        else:
            side.take(message)
    assert side is not None
    return side


def found_of(pair: int, seconds: float, case: tuple[int, float, float]) -> Comparison:
    return compare(
        side_of(2 * pair, seconds, 2048, 6.0, 1.0), side_of(2 * pair + 1, seconds, *case)
    )


def main() -> None:
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    print(f"{num_pairs} pairs of {seconds:g} s")
    print(f"{'':<32}{'other load':>11}{'latency':>9}{'like work':>11}{'p99':>6}{'beside':>8}")
    for name, case in CASES.items():
        counts = [0] * 5
        for pair in range(num_pairs):
            found = found_of(pair, seconds, case)
            won = {figure.key for figure in found.figures if figure.verdict in ("a", "b")}
            latencies = {figure.key for figure in found.figures if figure.kind is not None}
            hits = (
                found.different_work is not None,
                bool(won & latencies),
                any(key.startswith("like_") for key in won),
                "itl_p99_ms" in won,
                "like_itl_prefill_p99_ms" in won,
            )
            counts = [count + hit for count, hit in zip(counts, hits, strict=True)]
        shares = [f"{count / num_pairs:.0%}" for count in counts]
        print(f"{name:<32}{shares[0]:>11}{shares[1]:>9}{shares[2]:>11}{shares[3]:>6}{shares[4]:>8}")


if __name__ == "__main__":
    main()
