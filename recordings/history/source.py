"""`Source`: where a session comes from. A live engine and a recording look alike to the UI."""

import threading
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Mark
from stepscope.recordings.history.history import History

# A live one is starting (does not listen yet), connecting, live, stale (silent for some seconds) or
# down (does not answer); a recording is playing, paused, or at its end.
SourceStatus: TypeAlias = Literal[
    "starting", "connecting", "live", "stale", "down", "playing", "paused", "ended"
]
# No engine answers, so nothing can be recorded or changed.
NO_ENGINE: frozenset[SourceStatus] = frozenset({"starting", "connecting", "down"})

# Topic, sequence number and payload of a message that has just become part of the history. Called
# on the source's thread (marks: on the caller's); it must not wait and not raise.
FrameListener: TypeAlias = Callable[[bytes, int, bytes], None]


class Source(Protocol):
    """Fills a `History` from its own thread."""

    history: History
    name: str
    is_live: bool
    tap: "FrameTap"

    @property
    def num_bad(self) -> int:
        """Messages that could not be read."""
        ...

    @property
    def status(self) -> SourceStatus: ...

    @property
    def error(self) -> str | None:
        """The current problem, in one line for people; None without one."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the thread; the history stays. A source cannot be started twice."""
        ...


class FrameTap:
    """Passes every message of a source to what is attached, such as a recorder."""

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
    """Add a note at a step (None: the newest), also to the recording if there is one.

    From any thread.
    """
    history = source.history
    if step is None:
        step = history.last_step or 0
    summary = history.summary(step)
    time_ns = history.state.time_ns if summary is None else summary.tokens_ns
    mark = Mark(step=step, time_ns=time_ns, text=text, who=who)
    history.add_mark(mark)
    source.tap.send(wire.TOPICS[Mark], history.last_sequence or 0, wire.encode(mark))
    return mark
