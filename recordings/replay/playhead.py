"""`Playhead`: the position of a replay in a recording, and the next message.

`Tempo`: maps recorded time to the host's clock, to tell when to play each message.
"""

import time
from collections.abc import Iterator

from stepscope.recordings.file.chunk_cache import MessageFrame
from stepscope.recordings.file.reader import Position, Recording

MIN_SPEED, MAX_SPEED = 0.1, 64.0


class Tempo:
    """Tells when to play each message. Belongs to the playing thread, except `restart`."""

    def __init__(self, speed: float) -> None:
        self.speed = speed  # recorded seconds per second
        self._origin: tuple[float, int] | None = None  # host and recorded time of one instant

    def restart(self, speed: float | None = None) -> None:
        """Let the next message be played at once, and change the speed if one is given."""
        if speed is not None:
            self.speed = min(max(speed, MIN_SPEED), MAX_SPEED)
        self._origin = None

    def due_s(self, log_ns: int) -> float:
        origin = self._origin  # another thread may call `restart`
        if origin is None:
            origin = self._origin = (time.monotonic(), log_ns)
        started_s, started_ns = origin
        return started_s + (log_ns - started_ns) / 1e9 / self.speed - time.monotonic()


class Playhead:
    """The position of a replay in its file, of one thread. It reads nothing until `peek`."""

    def __init__(self, recording: Recording) -> None:
        self.position = Position(0, 0)
        self.next: MessageFrame | None = None
        self._recording = recording
        self._after = self.position  # the next message
        self._reader: Iterator[tuple[MessageFrame, Position]] = iter(())

    def put(self, position: Position, sequence: int) -> None:
        """Move to `position`, so that the message after it is the next."""
        self.position = position
        self.next = None
        self._reader = self._recording.frames(position, sequence)

    @property
    def is_at_end(self) -> bool:
        """Whether no message follows, as far as can be told without reading."""
        return self.next is None and self.position >= self._recording.end

    def peek(self) -> MessageFrame | None:
        """Read the next message without moving; None at the end."""
        if self.next is None:
            self.next, self._after = next(self._reader, (None, self.position))
        return self.next

    def take(self) -> MessageFrame | None:
        """Return the next message (None at the end) and move past it."""
        frame = self.peek()
        self.position, self.next = self._after, None
        return frame

    def is_before(self, position: Position) -> bool:
        return self.peek() is not None and self._after <= position
