"""`FrameMeter`: measures what drawing costs the dashboard itself. Use it only on the UI thread.

A frame is made in two parts: its lines are drawn (`drawing`), and a little later the changed lines
are written to the terminal (`writing`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_WINDOW_S = 2.0  # over which a load is measured
_NUM_FRAMES = 1_000  # frames whose times are kept


class DrawingLoad(NamedTuple):
    """The load of the dashboard over the last seconds."""

    fps: float  # frames written
    cpu_share: float  # of one core, all threads of this process
    num_dropped: int  # frames that were due and never drawn, since the dashboard began


class FrameMeter:
    """Counts frames and measures their cost.

    Args:
        clock: returns seconds; tells when frames are due.
        cost_clock: returns seconds; measures how long a frame takes.
        cpu_clock: returns the processor time of this process in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cost_clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cost_clock = cost_clock
        self._cpu_clock = cpu_clock
        self._took_s: deque[float] = deque(maxlen=_NUM_FRAMES)
        self._drawn_s = 0.0  # the cost so far of the frame that is not written yet
        self._ticked_s: float | None = None
        self._num_frames = 0
        self._num_dropped = 0
        self._began = (clock(), cpu_clock(), 0)  # time, processor time and frames, of the window
        self._load: DrawingLoad | None = None

    @property
    def frame_times_s(self) -> list[float]:
        """How long the last frames took to draw and write, in seconds, oldest first."""
        return list(self._took_s)

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def tick(self, fps: float) -> None:
        """Note that a frame is due now.

        A late call counts the frames that were missed in between.
        """
        now_s = self._clock()
        if self._ticked_s is not None:
            self._num_dropped += max(0, round((now_s - self._ticked_s) * fps) - 1)
        self._ticked_s = now_s

    def rest(self) -> None:
        """Pause: no frame is due until the next tick."""
        self._ticked_s = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context manager that measures the drawing of a frame's lines."""
        start_s = self._cost_clock()
        try:
            yield
        finally:
            self._drawn_s += self._cost_clock() - start_s

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context manager that measures the writing of changed lines.

        Writing ends the frame whose lines were drawn before.
        """
        start_s = self._cost_clock()
        try:
            yield
        finally:
            if self._drawn_s:
                self._num_frames += 1
                self._took_s.append(self._drawn_s + self._cost_clock() - start_s)
                self._drawn_s = 0.0

    def load(self) -> DrawingLoad | None:
        """Return the load of the last whole window of two seconds.

        None in the first two seconds after the start.
        """
        now_s = self._clock()
        began_s, began_cpu_s, began_frames = self._began
        elapsed_s = now_s - began_s
        if elapsed_s >= _WINDOW_S:
            cpu_s = self._cpu_clock()
            self._load = DrawingLoad(
                (self._num_frames - began_frames) / elapsed_s,
                (cpu_s - began_cpu_s) / elapsed_s,
                self._num_dropped,
            )
            self._began = now_s, cpu_s, self._num_frames
        return self._load
