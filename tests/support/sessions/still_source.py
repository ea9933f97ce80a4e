"""`StillSource`: a source that receives nothing more, and a busy session for it."""

from collections.abc import Sequence

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.simulation.step_time import CostModel
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, SourceStatus
from stepscope.recordings.state.series.latency import SLO
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.copied import copied


class StillSource:
    """A live source with a finished history; implements `Source`."""

    is_live = True
    name = "still"

    def __init__(self, history: History) -> None:
        self.history = history
        self.tap = FrameTap()
        self.status: SourceStatus = "live"
        self.error: str | None = None

    def start(self) -> None:
        return

    def stop(self) -> None:
        return


def busy_messages(
    num_steps: int, change_at: int, knobs: Knobs
) -> Sequence[tuple[int, wire.Telemetry]]:
    """A session with preemptions, prefix hits, and from a step on a smaller budget."""
    return simulate(
        seed=3,
        num_steps=num_steps,
        knobs=knobs,
        changes={change_at: {"max_num_batched_tokens": 512}},
        workload=SimulatedWorkload(
            rate=9.0, document_share=0.12, document_tokens=2600, output_tokens=140
        ),
        cost=CostModel(floor_ms=12.0, token_us=25.0, context_ns=4.0),
        num_blocks=512,
    )


@copied
def busy_history(num_steps: int) -> History:
    history = History(SLO(ttft_ms=500.0, itl_ms=30.0))
    knobs = Knobs(max_num_batched_tokens=1024, max_num_seqs=32)
    for sequence, message in busy_messages(num_steps, num_steps - 60, knobs):
        history.append(sequence, message)
    return history
