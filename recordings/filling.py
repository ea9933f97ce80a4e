"""`Filler`: puts what a file holds of a session into a history, without looking at every row.

The messages between two places of a file become what `History.append` would make of them, one by
one, at a sixth of the price: see `FastForward`.
"""

from collections.abc import Iterator

import msgspec

from stepscope.engine import wire
from stepscope.engine.wire import StepRecord
from stepscope.recordings.fast_forward import FastForward, PackedRecord, decode_packed
from stepscope.recordings.history import History
from stepscope.recordings.loaded_chunk import Frame
from stepscope.recordings.reader import Position, Recording, whole_sequence

# Of damage that checksums did not find, or of a file that somebody else has written.
DAMAGE = (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


class Filler:
    """Fills one history from one place on. Nobody else may touch it meanwhile.

    Args:
        history: of a state and nothing else, which is the one at `position`.
        forward: has brought that state there; None: there is a keyframe just before `position`.
        sequence: of the message before `position`.
    """

    def __init__(
        self,
        recording: Recording,
        history: History,
        forward: FastForward | None,
        position: Position,
        sequence: int,
    ) -> None:
        self._recording = recording
        self._history = history
        self._forward = forward or history.forward()
        self._position = position
        self._sequence = sequence
        self._last: StepRecord | None = None

    def fill(self, end: Position) -> Iterator[None]:
        """Append all messages before `end`; gives a turn after each of them.

        The history is right once this has ended, not before.

        Raises:
            One of `DAMAGE`: it has to be done message by message; the history is of no use.
        """
        recording = self._recording
        for number in range(self._position.chunk, min(end.chunk + 1, recording.num_chunks)):
            chunk = recording.chunk(number)
            first = self._position.message if number == self._position.chunk else 0
            last = min(end.message, len(chunk)) if number == end.chunk else len(chunk)
            for place in range(first, last):
                frame = chunk.frames[place]
                self._sequence = whole_sequence(frame.sequence, self._sequence)
                if not (chunk.is_packed(place) and self._take_ahead(frame)):
                    whole = chunk.frame(place)
                    if whole is None:
                        raise ValueError("a packed step that does not fit the one before it")
                    self._append(whole)
                yield
        self._forward.settle()
        if isinstance(self._last, PackedRecord):
            self._last = self._last.spelled_out(self._forward.rows())
        if self._last is not None:
            self._history.remember(self._last)  # whoever looks, looks at the last one first

    def _take_ahead(self, frame: Frame) -> bool:
        record = decode_packed(frame.payload)
        if not self._history.take_ahead(self._sequence, record, frame.payload, self._forward):
            return False
        self._last = record
        return True

    def _append(self, frame: Frame) -> None:
        message = wire.decode(frame.payload)
        self._forward.settle()
        self._history.append(self._sequence, message, frame.payload)
        if not self._history.is_state(self._forward.state):  # another engine, or another clock
            self._forward = self._history.forward()
        self._forward.note(message)
        if isinstance(message, StepRecord):
            self._last = message
