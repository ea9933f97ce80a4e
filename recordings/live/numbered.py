"""`Numbered`: numbers and forwards messages that a source creates itself."""

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Snapshot, Telemetry
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap


class Numbered:
    """Gives messages sequence numbers and sends them to a history and a tap. For one thread."""

    def __init__(self, history: History, tap: FrameTap) -> None:
        self._history = history
        self._tap = tap
        self._sequence = -1

    def begin(self, info: EngineInfo) -> None:
        """Announce an engine: the first one by an empty snapshot, later ones by `EngineInfo`."""
        if self._sequence >= 0:
            self.publish(info)
            return
        self._sequence += 1
        snapshot = first_snapshot(info, self._sequence)
        self._history.reset(snapshot)
        self._tap.send(wire.TOPICS[Snapshot], self._sequence, wire.encode(snapshot))

    def lose(self, number: int) -> None:
        """Note that `number` messages were lost, so that the history shows a gap."""
        self._sequence += number

    def publish(self, message: Telemetry) -> None:
        self._sequence += 1
        payload = wire.encode(message)
        self._history.append(self._sequence, message, payload)
        self._tap.send(message.topic, self._sequence, payload)


def first_snapshot(info: EngineInfo, sequence: int) -> Snapshot:
    """The snapshot of a session of which nothing is known yet but its engine."""
    return Snapshot(
        sequence=sequence,
        step=-1,
        time_ns=info.monotonic_ns,
        info=info,
        knobs={},
        knobs_version=0,
        state="running",
        requests=[],
        blocks=None,
        kv=None,
    )
