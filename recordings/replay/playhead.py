"""`Playhead`: the position of a replay in a recording, and the next message."""

from collections.abc import Iterator

from stepscope.recordings.file.loaded_chunk import MessageFrame
from stepscope.recordings.file.reader import Position, Recording


class Playhead:
    """The position of a replay in its file. It reads nothing until `peek` or `take`.

    Belongs to one thread.

    Attributes:
        position: the position before the next message.
        next: the next message if `peek` has read it, else None.
    """

    def __init__(self, recording: Recording) -> None:
        self.position = Position(0, 0)
        self.next: MessageFrame | None = None
        self._recording = recording
        self._after = self.position  # the next message
        self._reader: Iterator[tuple[MessageFrame, Position]] = iter(())

    def put(self, position: Position, sequence: int) -> None:
        """Move to `position`, so that the message after it is the next.

        Args:
            sequence: number of the message before `position`.
        """
        self.position = position
        self.next = None
        self._reader = self._recording.frames(position, sequence)

    @property
    def is_at_end(self) -> bool:
        """Whether no message follows, as far as can be told without reading."""
        return self.next is None and self._recording.is_end(self.position)

    def peek(self) -> MessageFrame | None:
        """Read the next message without moving; None at the end.

        Raises:
            OSError: the file cannot be read.
        """
        if self.next is None:
            self.next, self._after = next(self._reader, (None, self.position))
        return self.next

    def take(self) -> MessageFrame | None:
        """Return the next message (None at the end) and move past it."""
        frame = self.peek()
        self.position, self.next = self._after, None
        return frame

    def is_before(self, position: Position) -> bool:
        """Whether the next message lies before `position`."""
        return self.peek() is not None and self._after <= position
