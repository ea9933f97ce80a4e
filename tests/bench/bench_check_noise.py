"""How often `stepscope check --baseline` fails a build that is not slower, and one that is.

Pairs of equal engines get other arrivals of the same rate (another seed); then the second one is
slower by a fifth. The aim: at most one false failure of twenty.
"""

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.simulation.step_time import CostModel
from stepscope.recordings.compare.comparison import compare
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.recordings.check import exit_code, regression_checks
from tests.support.engines.simulated_run import SimulatedWorkload, simulate

NUM_PAIRS = 20
ALLOWED = 0.1


def side_of(seed: int, slower: float = 1.0) -> Side:
    """A minute of chats with documents among them."""
    messages = simulate(
        seed=seed,
        num_steps=3000,
        knobs=Knobs(max_num_batched_tokens=1024, max_num_seqs=64),
        workload=SimulatedWorkload(
            rate=6.0, document_share=0.15, document_tokens=2600, output_tokens=100
        ),
        cost=CostModel(floor_ms=12.0 * slower, token_us=60.0 * slower, context_ns=4.0 * slower),
        num_blocks=4096,
    )
    side = Side(f"seed {seed}", SLO(), SessionState())
    for _, message in messages:
        if isinstance(message, EngineInfo):
            message = msgspec.structs.replace(message, engine_id=f"engine-{seed}")
        side.apply(message)
    return side


def main() -> None:
    for slower in (1.0, 1.2):
        codes = {0: 0, 1: 0, 3: 0}
        for pair in range(NUM_PAIRS):
            checks = regression_checks(
                compare(side_of(2 * pair), side_of(2 * pair + 1, slower)), ALLOWED
            )
            codes[exit_code(checks)] += 1
            failed = [each.name for each in checks if each.outcome == "failed"]
            if failed:
                print(f"pair {pair}: {', '.join(failed)}")
        print(
            f"{NUM_PAIRS} pairs, the second {slower:g} times as slow: {codes[1]} failed, "
            f"{codes[0]} passed, {codes[3]} with too little to say"
        )


if __name__ == "__main__":
    main()
