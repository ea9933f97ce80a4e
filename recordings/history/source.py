"""`Source`: fills a history from a live engine or a recording, which look alike to the UI.

`Numbered`: numbers and forwards messages that a source creates itself.
"""

import threading
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot, Telemetry
from stepscope.recordings.history.history import History
from stepscope.recordings.state.session import SessionState

# A live engine is starting (does not listen yet), connecting, live, stale (silent for some seconds)
# or down (does not answer). A recording is playing, paused, or ended.
SourceStatus: TypeAlias = Literal[
    "starting", "connecting", "live", "stale", "down", "playing", "paused", "ended"
]
# In these states no engine answers, so nothing can be recorded or changed.
NO_ENGINE: frozenset[SourceStatus] = frozenset({"starting", "connecting", "down"})

# Called with topic, sequence number and payload of a message that was just added to the history. It
# runs on the source's thread (for marks, on the caller's), and must not block or raise.
FrameListener: TypeAlias = Callable[[bytes, int, bytes], None]


class Source(Protocol):
    """Fills a `History` from its own thread."""

    history: History
    name: str
    is_live: bool
    tap: "FrameTap"

    @property
    def status(self) -> SourceStatus: ...

    @property
    def error(self) -> str | None:
        """The current problem as one line for people; None if there is none."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the thread. The history stays. A source cannot be started again."""
        ...


class FrameTap:
    """Passes every message of a source to the attached listeners, such as a recorder."""

    def __init__(self) -> None:
        self._listeners: tuple[FrameListener, ...] = ()
        self._lock = threading.Lock()

    def attach(self, listener: FrameListener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def detach(self, listener: FrameListener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        for listener in self._listeners:
            listener(topic, sequence, payload)


def add_mark(source: Source, text: str, who: str, step: int | None = None) -> Mark:
    """Add a mark (a note) at a step (None: the newest), also to a recording in progress.

    Any thread may call it.
    """
    history = source.history
    if step is None:
        step = history.last_step or 0
    summary = history.summary(step)
    time_ns = history.state.time_ns if summary is None else summary.tokens_ns
    mark = Mark(step=step, time_ns=time_ns, text=text, who=who)
    history.add_mark(mark)
    source.tap.send(mark.topic, history.last_sequence or 0, wire.encode(mark))
    return mark


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
        self._tap.send(snapshot.topic, self._sequence, wire.encode(snapshot))

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
    state = SessionState(info=info, time_ns=info.monotonic_ns, state="running")
    snapshot = state.snapshot(sequence)
    assert snapshot is not None
    return snapshot
