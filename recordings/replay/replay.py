"""`ReplaySource`: plays a recording into a `History`, at any speed, from any step.

Its thread owns the position in the file and carries out the calls of other threads. A seek fills a
separate history and swaps it in, so that readers never see a half-filled history. It first fills a
short history with the last steps, which is quick. Then it fills one with all steps that the screen
needs.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from stepscope.engine.protocol.wire import Mark
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.seek import WINDOW_STEPS, Playhead, Reach, Tempo, excerpt

MIN_SPEED, MAX_SPEED = 0.1, 64.0
_TICK_S = 0.02
# Time for drawing after a seek before other work. The first drawing also needs imports.
_BREATH_S = 0.08
_FIRST_BREATH_S = 0.5


class ReplaySource:
    """Fills `history` from a recording; implements `Source`.

    The newest step of the history is the position of the replay.

    Args:
        recording: the recording. `stop` closes it.
        speed: recorded seconds per second.
        playing: whether to play at once, instead of standing at the first step.
    """

    is_live = False

    def __init__(
        self,
        recording: Recording,
        history: History | None = None,
        speed: float = 1.0,
        playing: bool = True,
        marks: Sequence[Mark] = (),
    ) -> None:
        self.recording = recording
        self.name = recording.path.name
        self.history = history if history is not None else History()
        self.history.known_since_ns = recording.known_since_ns
        self.history.carried = recording.metadata
        self.tap = FrameTap()
        self.file_index = FileIndex(
            recording.path, lambda: self._busy, self.history.know_baseline, marks
        )
        self._marks = marks
        # Called on this thread when the result of a seek is shown. It must not block or raise.
        self.on_found: Callable[[], None] | None = None
        self._wake = threading.Condition()
        self._tempo = Tempo(speed)
        self._playing = playing
        self._at_end = False
        self._wanted: int | None = recording.first_step or 0  # step to seek
        self._skips = 0  # steps to move after the seek
        self._is_seeking = False
        self._reach = Reach(recording, self.history)
        self._busy = True  # whether a call by another thread is not carried out yet
        self._stopping = False
        self._breath_s = _FIRST_BREATH_S
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)
        # Used by the thread only:
        self._head = Playhead(recording)
        first, last = (self._wall_ns(each) for each in self.extent or (0, 0))
        # Wall time of the first and last step; if they are unreadable, of the messages.
        self.extent_ns = first or recording.start_ns, last or recording.end_ns

    # From any thread

    @property
    def status(self) -> Literal["playing", "paused", "ended"]:
        if self._at_end and self._wanted is None:
            return "ended"
        return "playing" if self._playing else "paused"

    @property
    def error(self) -> str | None:
        return self._error or self.recording.message

    @property
    def speed(self) -> float:
        return self._tempo.speed

    @property
    def extent(self) -> tuple[int, int] | None:
        """First and last step of the file; None if it has no step."""
        first, last = self.recording.first_step, self.recording.last_step
        return None if first is None or last is None else (first, last)

    @property
    def is_seeking(self) -> bool:
        """Whether a seek was requested whose result is not shown yet."""
        return self._is_seeking or self._wanted is not None or self._skips != 0

    def start(self) -> None:
        self._thread.start()
        self.file_index.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self.file_index.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self.recording.close()

    def step_in(self, step: int, ns: int) -> int | None:
        """The last step recorded by the time of `step` plus `ns`, which may be negative.

        None if that time is outside the file.
        """
        recording, since_ns = self.recording, self._wall_ns(step)
        if since_ns is None or not recording.start_ns <= since_ns + ns <= recording.end_ns:
            return None
        return recording.step_before(recording.find_time(since_ns + ns + 1))

    def _wall_ns(self, step: int) -> int | None:
        frame = self.recording.frame_before(self.recording.find_step(step) or Position(0, 0))
        return None if frame is None else frame.log_ns

    def play(self, speed: float | None = None) -> None:
        with self._wake:
            if speed is not None:
                self._tempo.speed = min(max(speed, MIN_SPEED), MAX_SPEED)
            self._tempo.restart()
            self._playing = True
            self._wake.notify_all()

    def pause(self) -> None:
        with self._wake:
            self._playing = False
            self._wake.notify_all()

    def seek(self, step: int) -> None:
        """Go to `step`, or to the last recorded step before it. Returns at once."""
        with self._wake:
            self._wanted = step
            self._skips = 0
            self._busy = True
            self._wake.notify_all()

    def skip(self, num_steps: int) -> None:
        """Move on by a number of recorded steps (back, if negative), and pause."""
        with self._wake:
            self._playing = False
            self._skips += num_steps
            self._busy = True
            self._wake.notify_all()

    def show(self, num_steps: int) -> None:
        """Set how many steps are on the screen, which the history must cover."""
        if num_steps == self._reach.num_shown:
            return
        with self._wake:
            if self._reach.note_shown(num_steps):
                self._busy = True
                self._wake.notify_all()

    def look_at(self, step: int | None) -> None:
        """Extend the history to what a screen at this step needs (None: the newest)."""
        with self._wake:
            if self._reach.note_look(step):
                self._busy = True
                self._wake.notify_all()

    def has_room_at(self, step: int) -> bool:
        """Whether memory has room for all that a screen at a step needs, beside the newest."""
        return self._reach.covers(step) or self._reach.has_room(step)

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Wait until all calls are carried out. Returns False on timeout."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._busy or self._stopping, timeout_s)

    # The thread

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._stopping:
                    return
                wanted, skips = self._wanted, self._skips
                has_sought = self._is_seeking
                self._is_seeking = wanted is not None or skips != 0
                self._wanted, self._skips = None, 0
                if has_sought and not self._is_seeking and self.on_found is not None:
                    self.on_found()
                is_short = self._reach.is_short and not self._is_seeking
                if is_short and self._wake.wait(self._breath_s):
                    continue
                if is_short:
                    self._breath_s = _BREATH_S
                if not self._is_seeking and not is_short:
                    if self._busy:
                        self._busy = False
                        self._wake.notify_all()
                    if not self._playing or self._at_end:
                        self._wake.wait()
                        continue
                    if (due_s := self._due_s()) > 0:
                        self._wake.wait(due_s)
                        continue
            try:
                if wanted is not None:
                    self._go_to(wanted)
                if skips:
                    self._skip(skips)
                if is_short:
                    self._reach.extend(
                        self._head.position, lambda: self._is_interrupted() or self._skips != 0
                    )
                if self._is_seeking or is_short:
                    self._tempo.restart()
                else:
                    self._play_due()
                for mark in self._marks:
                    if mark.step <= (self.history.last_step or 0):
                        self.history.add_mark(mark)
            except (RecordingError, msgspec.DecodeError) as error:
                self._error = str(error)
                self._at_end = True

    def _due_s(self) -> float:
        frame = self._head.next
        return 0.0 if frame is None else self._tempo.due_s(frame.log_ns)

    def _play_due(self) -> None:
        """Append the messages whose time has come, for at most one tick."""
        until_s = time.monotonic() + _TICK_S
        while self._head.peek() is not None and self._due_s() <= 0 and time.monotonic() < until_s:
            self._take_next()
        self._at_end = self._head.peek() is None

    def _take_next(self) -> bytes:
        """Append the next message. Returns its topic; b"" at the end."""
        frame = self._head.take()
        if frame is not None:
            self.history.append(frame.sequence, frame.payload)
        self._at_end = self._head.is_at_end  # only now: others look at both
        return b"" if frame is None else frame.topic

    def _read_from(self, position: Position, sequence: int) -> None:
        self._head.put(position, sequence)
        self._at_end = self._head.is_at_end

    def _is_interrupted(self) -> bool:
        return self._wanted is not None or self._stopping

    def _skip(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self._take_next() not in (b"step", b""):
                pass
        if num_steps < 0 and (last_step := self.history.last_step) is not None:
            self._go_to(self.history.neighbour(last_step, num_steps))

    def _go_to(self, step: int) -> None:
        recording, history = self.recording, self.history
        if recording.first_step is None or recording.last_step is None:
            snapshot, begin = recording.keyframe_before(Position(0, 0))
            history.reset(snapshot)
            self._read_from(begin, snapshot.sequence)
            return
        step = min(max(step, recording.first_step), recording.last_step)
        target = recording.find_step(step) or Position(0, 0)
        newest = history.last_step
        num_steps = min(self._reach.num_shown, WINDOW_STEPS)
        first = history.first_step
        if first is not None and newest is not None:
            if newest <= step <= newest + num_steps and not self._at_end:
                while self._head.is_before(target) and not self._is_interrupted():
                    self._take_next()
                return
            is_held = first <= step - num_steps or first == recording.first_step
            if is_held and step < newest and history.rewind(history.neighbour(step + 1, -1)):
                self._read_from(target, history.last_sequence or 0)
                self._reach.note_rewound()
                return
        begin = recording.find_step(step - num_steps) or Position(0, 0)
        fresh = excerpt(recording, history, begin, target, lambda: not self._is_interrupted())
        if fresh is None:
            return  # interrupted: keep the shown history
        self._reach.show(fresh, is_short=begin > Position(0, 0))
        self._read_from(target, fresh.last_sequence or 0)
