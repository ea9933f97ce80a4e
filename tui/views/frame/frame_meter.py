"""`FrameMeter`: what drawing costs the dashboard itself. Belongs to the UI thread.

A frame is made in two parts: its lines (`drawing`), and what of them is written to the terminal
(`writing`), a little later and only where something has changed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_WINDOW_S = 2.0  # that a load is taken over
_NUM_FRAMES = 1_000  # whose times are kept


class DrawingLoad(NamedTuple):
    """The dashboard over the last seconds."""

    fps: float  # frames written
    cpu_share: float  # of one core, all threads of this process
    num_dropped: int  # frames that were due and never drawn, since the dashboard began


class FrameMeter:
    """Counts frames.

    Args:
        clock: seconds, of frames that are due.
        cost_clock: seconds, of what a frame takes.
        cpu_clock: seconds of processor time of this process.
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
        self._drawn_s = 0.0  # what the frame that is not written yet has cost
        self._ticked_s: float | None = None
        self._num_frames = 0
        self._num_dropped = 0
        self._began = (clock(), cpu_clock(), 0)  # time, processor time and frames, of the window
        self._load: DrawingLoad | None = None

    @property
    def frame_times_s(self) -> list[float]:
        """What the last frames took, oldest first."""
        return list(self._took_s)

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def tick(self, fps: float) -> None:
        """A frame is due, as it is so many times a second; called late, some before it were too."""
        now_s = self._clock()
        if self._ticked_s is not None:
            self._num_dropped += max(0, round((now_s - self._ticked_s) * fps) - 1)
        self._ticked_s = now_s

    def rest(self) -> None:
        """Nothing is due until the next tick."""
        self._ticked_s = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The lines of a frame are made in here."""
        start_s = self._cost_clock()
        try:
            yield
        finally:
            self._drawn_s += self._cost_clock() - start_s

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What has changed is written in here; that ends the frame, if one was drawn."""
        start_s = self._cost_clock()
        try:
            yield
        finally:
            if self._drawn_s:
                self._num_frames += 1
                self._took_s.append(self._drawn_s + self._cost_clock() - start_s)
                self._drawn_s = 0.0

    def load(self) -> DrawingLoad | None:
        """The load over the last two seconds; None before the first two are over."""
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
