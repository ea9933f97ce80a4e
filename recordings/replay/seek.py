"""Where a replay stands, and seeking: the state at a position, and a history for a screen.

`Playhead`: the position of a replay in a recording, and the next message.

`Reach`: right after a seek the history of a replay is short. It extends it backwards, as far as the
screen needs, when there is time.
"""

import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.file.chunk_cache import MessageFrame
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.state.session import SessionState

TURN_MESSAGES = 64  # messages between two calls of `turn`

WINDOW_S = 60.0  # window of latencies
WINDOW_STEPS = 128  # steps of lanes and charts, and the most that a seek fills at once
MAX_WINDOW_STEPS = 20_000  # most steps to fill, so that a seek stays quick
# Sleep after every few messages, so that the drawing thread can run every millisecond or two.
_YIELD_S = 0.001
_SPARE_STEPS = 1_000  # extra steps before the step looked at, for moving back step by step


def state_at(recording: Recording, position: Position) -> tuple[SessionState, int]:
    """The state after all messages before a position, and the number of the last message.

    For a position before the first keyframe, it is the state of the first keyframe.

    Raises RecordingError: no keyframe can be read.
    """
    snapshot, start = recording.keyframe_before(position)
    state, sequence = SessionState.from_snapshot(snapshot), snapshot.sequence
    for frame, after in recording.frames(start, sequence):
        if after > position:
            break
        state.apply(wire.decode(frame.payload))
        sequence = frame.sequence
    return state, sequence


def window_start(recording: Recording, step: int, num_shown: int) -> tuple[Snapshot, Position]:
    """The keyframe to read from for all that a screen at `step` needs; the position after it."""
    start = recording.find_step(step - max(num_shown, WINDOW_STEPS)) or Position(0, 0)
    frame = recording.frame_before(recording.find_step(step) or Position(0, 0))
    if frame is not None:
        # Include the last step before the window, which tells whether the engine stood still
        # between the beginning of the window and its first step.
        begin = recording.find_time(frame.log_ns - round(WINDOW_S * 1e9))
        before = recording.step_before(begin)
        if before is not None:
            begin = recording.find_step(before - 1) or Position(0, 0)
        start = min(start, begin)
    latest = recording.find_step(step - MAX_WINDOW_STEPS)
    return recording.keyframe_before(start if latest is None else max(start, latest))


# Called after every few messages; returns whether to go on.
Turn: TypeAlias = Callable[[], bool]


def excerpt(
    recording: Recording, like: History, begin: Position, end: Position, turn: Turn
) -> History | None:
    """A new history of the messages between two positions; None if `turn` ended the reading.

    `like`: the history to take service levels and limits from.
    """
    history = _empty(like)
    history.begin(*state_at(recording, begin))
    return _filled(recording, history, begin, end, turn)


def windows(
    recording: Recording, like: History, step: int, num_shown: int, end: Position, turn: Turn
) -> History | None:
    """A new history of all steps that the charts and latencies of a screen need at `step`.

    None if `turn` ended the reading (see `excerpt`), or if `like` has these steps already.
    """
    snapshot, begin = window_start(recording, step, num_shown)
    first_step = like.first_step
    if first_step is not None and first_step <= snapshot.step + 1:
        return None
    history = _empty(like)
    history.reset(snapshot)
    return _filled(recording, history, begin, end, turn)


def _empty(like: History) -> History:
    return History(like.slo, like.max_steps, like.max_bytes, like.known_since_ns)


def _filled(
    recording: Recording, history: History, begin: Position, end: Position, turn: Turn
) -> History | None:
    frames = recording.frames(begin, history.last_sequence or 0)
    for number, (frame, after) in enumerate(frames):
        if after > end:
            break
        history.append(frame.sequence, frame.payload)
        if number % TURN_MESSAGES == 0 and not turn():
            return None
    return history


class Reach:
    """Extends the history of a replay backwards, as far as the screen needs.

    Belongs to the replay's thread, except `note_shown`, `note_look` and `has_room`.
    """

    def __init__(self, recording: Recording, history: History) -> None:
        self.is_short = False  # whether the history may not reach as far back as it should
        self.num_shown = WINDOW_STEPS  # number of steps on the screen
        self._recording = recording
        self._history = history
        self._look: int | None = None  # the step that the user looks at; None: the newest
        # The step for which it was last extended, and the first step in memory after that.
        self._tried: tuple[int, int | None] | None = None

    def note_shown(self, num_steps: int) -> bool:
        """Note how many steps are on the screen. Returns whether the history is now too short."""
        self.num_shown = num_steps
        is_short = self._history.num_steps < min(num_steps, MAX_WINDOW_STEPS)
        self.is_short |= is_short
        return is_short

    def note_rewound(self) -> None:
        """Report that the history was rewound: its windows may now begin before its first step."""
        last_step = self._history.last_step
        self._history.is_short = last_step is not None and not self.covers(last_step)
        self.is_short = True  # perhaps; `extend` finds out

    def note_look(self, step: int | None) -> bool:
        """Note the step on the screen (None: the newest). Returns whether to read more steps."""
        self._look = step
        if step is None or self.is_short or self.covers(step) or not self.has_room(step):
            return False
        if self._tried is not None:
            tried, first_step = self._tried
            if step >= tried and first_step == self._history.first_step:
                return False  # the file has no more
        self._history.is_short = self.is_short = True
        return True

    def has_room(self, step: int) -> bool:
        """Whether memory has room for the windows of both `step` and the newest step.

        The windows of a step are the steps before it that charts and latencies cover.
        """
        last_step = self._history.last_step
        return last_step is not None and last_step - step <= MAX_WINDOW_STEPS

    def covers(self, step: int) -> bool:
        """Whether the history has all steps that a screen at `step` needs."""
        history, begin = self._history, self._recording.first_step or 0
        first_step = history.first_step
        if first_step is None or first_step <= max(begin, step - MAX_WINDOW_STEPS):
            return True
        if first_step > step - max(self.num_shown, WINDOW_STEPS):
            return False
        first, looked_at = history.summary(first_step), history.summary(step)
        if first is None or looked_at is None:
            return True  # one of these steps was lost
        return looked_at.tokens_ns - first.tokens_ns >= WINDOW_S * 1e9

    def show(self, fresh: History, *, is_short: bool) -> None:
        self._history.is_short = self.is_short = is_short
        self._history.adopt(fresh)

    def extend(self, end: Position, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Insert the steps that the screen needs at the newest step.

        Or at the step that the user looks at, if memory has room for both.

        `is_wanted_elsewhere`: called now and then. If it returns true, this stops and changes
        nothing.
        """

        def goes_on() -> bool:
            time.sleep(_YIELD_S)
            return not is_wanted_elsewhere()

        history, look, fresh = self._history, None, None
        first_step, last_step = history.first_step, history.last_step
        if first_step is not None and last_step is not None:
            wanted = self._look
            if wanted is not None and first_step <= wanted < last_step and self.has_room(wanted):
                look = wanted
            step = last_step if look is None else max(0, look - _SPARE_STEPS)
            fresh = windows(self._recording, history, step, self.num_shown, end, goes_on)
            if fresh is None and is_wanted_elsewhere():
                return
            if fresh is not None and (fresh.first_step or 0) > first_step:
                fresh = None  # memory is full before it reaches further
        if fresh is not None:
            self.show(fresh, is_short=False)
        elif history.is_short or self.is_short:
            self.is_short = False
            history.end_short()
        if look is not None:
            self._tried = look, history.first_step


class Tempo:
    """Maps recorded time to the host's clock, to tell when to play each message.

    Belongs to the playing thread, except `speed` and `restart`.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed  # recorded seconds per second
        self._origin: tuple[float, int] | None = None  # host and recorded time of one instant

    def restart(self) -> None:
        """Let the next message be played at once."""
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
