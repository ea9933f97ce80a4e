"""The surroundings of an `EngineCore` in a test: a client, a telemetry sink, a workload."""

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.replies import AnyReply, Output
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.telemetry.step_draft import StepDraft


class Client:
    """A client that keeps its replies."""

    def __init__(self) -> None:
        self.replies: list[AnyReply] = []

    def reply(self, message: AnyReply) -> None:
        self.replies.append(message)

    @property
    def outputs(self) -> list[Output]:
        return [reply for reply in self.replies if isinstance(reply, Output)]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


class Sink:
    """A sink that keeps messages as a subscriber gets them."""

    def __init__(self) -> None:
        self.next_sequence = self.num_dropped = 0
        self.messages: list[Telemetry] = []

    def publish(self, message: Telemetry) -> None:
        payload = wire.encode(message)
        received = wire.decode(payload)
        if isinstance(message, StepDraft):
            assert wire.encode(received) == payload  # to the byte, as a `StepRecord`
        self.messages.append(received)
        self.next_sequence += 1

    @property
    def records(self) -> list[StepRecord]:
        return [message for message in self.messages if isinstance(message, StepRecord)]


class GivenWorkload:
    """An engine's own workload that only keeps the specifications it gets."""

    def __init__(self) -> None:
        self.given: list[WorkloadSpec | None] = []

    @property
    def spec(self) -> WorkloadSpec | None:
        return self.given[-1] if self.given else None

    def set(self, spec: WorkloadSpec | None) -> None:
        self.given.append(spec)
