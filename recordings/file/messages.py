"""`messages`: the one reader of a recording's messages, each once and in order.

`indexes`: its indexes, in order; made from its messages where it has none.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot, Telemetry
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.session.index import Index, Open, decode_index
from stepscope.recordings.session.indexer import Indexer
from stepscope.recordings.state.clocks import lost_before
from stepscope.recordings.state.session import SessionState


class Told(NamedTuple):
    """A message of a recording."""

    message: Telemetry
    sequence: int
    position: Position
    after_gap: bool


def messages(
    recording: Recording, position: Position | None = None, sequence: int | None = None
) -> Iterator[Told]:
    """Yield all messages from a position on (None: all).

    Of the keyframes, which repeat the state, only those that tell something new: the first one if
    reading begins with it, and the next one after messages that are missing. Messages that cannot
    be decoded are missing; 'stepscope verify' reports them.

    `sequence`: number of the last message before that position; None if unknown.
    """
    engine_id: str | None = None
    last, needs_keyframe = sequence, sequence is None
    for frame, after in recording.frames(position, sequence or 0):
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            continue
        number = frame.sequence
        if isinstance(message, Mark):  # by an observer: its number is not the engine's
            yield Told(message, number, after, after_gap=False)
            continue
        info = message.info if isinstance(message, Snapshot) else message
        if isinstance(info, EngineInfo) and info.engine_id != engine_id:
            if engine_id is not None:
                last, needs_keyframe = None, True
            engine_id = info.engine_id
        num_lost = lost_before(number, message, last, is_unsure=needs_keyframe)
        if num_lost is None:
            continue
        needs_keyframe = not isinstance(message, Snapshot) and (needs_keyframe or num_lost > 0)
        last = number
        yield Told(message, number, after, num_lost > 0)


_MADE_STEPS = 4096  # at most in an index made from messages, give or take one chunk
_TURN_MESSAGES = 64

Turn = Callable[[], None]


def indexes(recording: Recording, turn: Turn = lambda: None) -> Iterator[tuple[int, Index]]:
    """Yield the indexes of all chunks, each with the number of the chunk after it.

    `turn`: called after every few messages that were decoded; it may raise to end the reading.

    Raises RecordingError: no keyframe can be read.
    """
    maker: _Maker | None = None
    open: list[Open] = []  # at the end of the chunk before
    for number in range(recording.num_chunks):
        if (index := stored_index(recording, number)) is not None:
            if maker is not None and maker.indexer.num_steps:
                yield number, maker.indexer.cut()
            maker, open = None, index.open
            yield number + 1, index
            continue
        maker = maker or _Maker(recording, number, open)
        maker.read(number, turn)
        if maker.indexer.num_steps >= _MADE_STEPS:
            yield number + 1, maker.indexer.cut()
    if maker is not None:
        yield recording.num_chunks, maker.indexer.cut()


def stored_index(recording: Recording, number: int) -> Index | None:
    """The stored index of a chunk; None if there is none or it is damaged."""
    with contextlib.suppress(ValueError, LookupError):
        payload = recording.chunks.stored_index(number)
        return None if payload is None else decode_index(payload)
    return None


class _Maker:
    """Reads messages into an `Indexer`, from the begin of a chunk on.

    `open`: the requests that are open there, as the index before tells.
    """

    def __init__(self, recording: Recording, number: int, open: list[Open]) -> None:
        # The keyframe before the chunk; at the begin of the file, the first one.
        snapshot, begin = recording.keyframe_before(Position(number, 0))
        state, since_ns = SessionState.from_snapshot(snapshot), recording.known_since_ns
        self.indexer = Indexer(state, snapshot.sequence, since_ns, open)
        self._frames = recording.frames(begin, snapshot.sequence)
        self._next = next(self._frames, None)
        if begin.chunk < number:
            self.read(number - 1, lambda: None)
            self.indexer.cut()
            self.indexer.follow(open)

    def read(self, number: int, turn: Turn) -> None:
        """Read up to the end of a chunk."""
        while self._next is not None and self._next[1].chunk <= number:
            frame, after = self._next
            with contextlib.suppress(msgspec.DecodeError):  # 'stepscope verify' reports it
                self.indexer.take(frame.sequence, wire.decode(frame.payload))
            if after.message % _TURN_MESSAGES == 0:
                turn()
            self._next = next(self._frames, None)
