"""`Received`: a live source; a busy history for one; `every_message` of an engine."""

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import ReplayFrom
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.replies import Replayed
from stepscope.engine.protocol.wire import TOPICS, Telemetry, TelemetryMessage, decode, encode
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, SourceStatus
from stepscope.recordings.state.latency import SLO
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.copied import copied


class Received:
    """A live source whose messages the test passes in, if any; implements `Source`."""

    is_live = True

    def __init__(self, history: History, name: str = "engine") -> None:
        self.history, self.name = history, name
        self.tap = FrameTap()
        self.status: SourceStatus = "live"
        self.error: str | None = None

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def take(self, sequence: int, message: Telemetry) -> None:
        payload = encode(message)
        self.history.append(sequence, payload)
        self.tap.send(TOPICS[type(message)], sequence, payload)


_KNOBS = Knobs(max_num_batched_tokens=1024, max_num_seqs=32)


def busy_messages(
    num_steps: int,
    change_at: int | None = None,
    knobs: Knobs = _KNOBS,
    seed: int = 3,
) -> list[tuple[int, Telemetry]]:
    """A session with preemptions and prefix hits. `change_at`: step of a smaller budget."""
    return simulate(
        seed=seed,
        num_steps=num_steps,
        knobs=knobs,
        changes={} if change_at is None else {change_at: {"max_num_batched_tokens": 512}},
        workload=SimulatedWorkload(
            rate=9.0, document_share=0.12, document_tokens=2600, output_tokens=140
        ),
        cost=CostModel(floor_ms=12.0, token_us=25.0, context_ns=4.0),
        num_blocks=512,
    )


@copied
def busy_history(num_steps: int) -> History:
    history = History(SLO(ttft_ms=500.0, itl_ms=30.0))
    for sequence, message in busy_messages(num_steps, num_steps - 60):
        history.append(sequence, message)
    return history


def every_message(client: ControlClient, since: int = 0) -> list[TelemetryMessage]:
    """All messages from number `since` on that the engine still keeps."""
    messages: list[TelemetryMessage] = []
    while True:
        replayed = client.ask(ReplayFrom(sequence=since))
        assert isinstance(replayed, Replayed)
        if not replayed.frames:
            return messages
        messages += [decode(frame.payload) for frame in replayed.frames]
        since = replayed.frames[-1].sequence + 1
