"""`FileLatency`: finds late tokens and lost messages in a whole file, not only in memory.

It computes the waits for tokens of every step, message by message. Its thread has its own file
handle and begins at the position of the replay. It works a third of the time, a millisecond or two
at once, so that it delays nothing else. Its results can be used with any service levels.
"""

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from pathlib import Path

from stepscope.recordings.attribution.baseline import ENOUGH_STEPS, Baseline
from stepscope.recordings.attribution.longest import Breach
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.replay.chunk_latency import waits_in
from stepscope.recordings.replay.file_events import FileSearch
from stepscope.recordings.replay.seek import DAMAGE
from stepscope.recordings.replay.worst_wait_index import WorstWaitIndex
from stepscope.recordings.state.series.events import SessionEvent, breach_event
from stepscope.recordings.state.series.latency import SLO

MAX_KEPT = 1_500_000  # entries of 40 bytes; a busy week has 1.2 million
_FIRST_PAUSE_S = 0.6  # the screen and `FileEvents` come first
_BUSY_S = 0.02  # seconds between calls of `is_busy`
_REST = 2.0  # rest, as a multiple of the time it worked
_NEVER, _SEARCHED, _UNREADABLE = 0, 1, 2
_NO_FIRST, _NO_LAST = 2**62, -1  # of a chunk without a step


class FileLatency:
    """The late tokens and lost messages of one file. `search.start()` begins the search.

    The functions below are called on its own thread.

    Args:
        path: the recording.
        where: returns the step near which to search next; None if unknown.
        is_busy: returns whether the replay has more urgent work, for which the search waits.
        learnt: called once with the baseline (usual step durations), when enough steps are known
            or the file is read.

    Attributes:
        search: the searching thread.
    """

    def __init__(
        self,
        path: Path,
        where: Callable[[], int | None] = lambda: None,
        is_busy: Callable[[], bool] = lambda: False,
        learnt: Callable[[Baseline], None] = lambda baseline: None,
    ) -> None:
        self.search = FileSearch(path, "waits of the file", self._search, _FIRST_PAUSE_S)
        self._where = where
        self._is_busy = is_busy
        self._learnt = learnt
        self._baseline = Baseline()
        self._has_learnt = False
        self._worked_since_s = 0.0
        self._itl, self._ttft = WorstWaitIndex(), WorstWaitIndex()
        self._gaps: list[SessionEvent] = []  # in order of steps; replaced, never changed
        # For each chunk, once the file is open:
        self._searched = bytearray()
        self._first_steps, self._last_steps = array("q"), array("q")

    @property
    def is_done(self) -> bool:
        """Whether the search has ended. `spans` tells what was searched."""
        return self.search.is_done

    @property
    def share(self) -> float:
        """The part of the file that was searched, 0..1."""
        return self._searched.count(_SEARCHED) / max(1, len(self._searched))

    def spans(self) -> list[tuple[int, int]]:
        """First and last step of each part of the file that was searched, in order."""
        searched, found = bytes(self._searched), []
        begin = searched.find(_SEARCHED)
        while begin >= 0:
            end = begin
            while end < len(searched) and searched[end] == _SEARCHED:
                end += 1
            first, last = min(self._first_steps[begin:end]), max(self._last_steps[begin:end])
            if first <= last:
                found.append((first, last))
            begin = searched.find(_SEARCHED, end)
        return found

    def next(
        self, step: int, direction: int, kinds: Collection[str], slo: SLO
    ) -> SessionEvent | None:
        """The nearest late token or loss in a later step (direction 1) or an earlier one (-1).

        Only the part of the file that was searched counts.

        Args:
            slo: service levels that define late tokens. Only the longest late ITL and the longest
                late TTFT of each second count.
        """
        found: list[SessionEvent] = []
        if "slo" in kinds:
            for kind, waits, bound_ms in self._kinds(slo):
                if (wait := waits.next(step, direction, bound_ms * 1e6)) is not None:
                    found.append(
                        breach_event(slo, wait.step, wait.time_ns, kind, wait.ns, wait.request_id)
                    )
        if "gap" in kinds:
            gaps = self._gaps
            at = (
                bisect_right(gaps, step, key=_step)
                if direction > 0
                else bisect_left(gaps, step, key=_step) - 1
            )
            if 0 <= at < len(gaps):
                found.append(gaps[at])
        return min(found, key=lambda each: (each.step - step) * direction, default=None)

    def stalls(self, slo: SLO, limit: int) -> Stalls:
        """The longest waits above the ITL level, one per second, in the part that was searched.

        If there are none, the waits above the TTFT level instead. `num_tokens` counts the tokens
        with exactly this wait; `number` counts the seconds with a wait above the level.
        """
        for kind, waits, bound_ms in self._kinds(slo):
            if found := waits.longest(limit, bound_ms * 1e6):
                longest = [
                    Breach(each.step, each.time_ns, kind, each.ns, each.request_id, each.num_tokens)
                    for each in found
                ]
                return Stalls(longest, waits.num_above(bound_ms * 1e6))
        return Stalls([], 0)

    def _kinds(self, slo: SLO) -> list[tuple[str, WorstWaitIndex, float]]:
        return [("ITL", self._itl, slo.itl_ms), ("TTFT", self._ttft, slo.ttft_ms)]

    # The thread

    def _search(self, recording: Recording) -> None:
        number = recording.num_chunks
        self._first_steps = array("q", [_NO_FIRST]) * number
        self._last_steps = array("q", [_NO_LAST]) * number
        self._searched = bytearray(number)
        at = 0
        while number and not self.search.is_stopping:
            self._worked_since_s = time.monotonic()
            at = self._chunk_at(recording, at)
            nearest = _nearest(self._searched, at)
            if nearest is None or len(self._itl) + len(self._ttft) + len(self._gaps) > MAX_KEPT:
                break
            try:
                self._take(recording, nearest)
            except (RecordingError, *DAMAGE):
                self._searched[nearest] = _UNREADABLE  # playing it reports the damage
        if not self._has_learnt and not self.search.is_stopping:
            self._learnt(self._baseline)

    def _take(self, recording: Recording, number: int) -> None:
        found = waits_in(recording, number, self._turn)
        if found is None:
            return
        self._itl.put(found.itl)
        self._ttft.put(found.ttft)
        if found.gaps:
            at = bisect_left(self._gaps, found.gaps[0].step, key=_step)
            self._gaps = [*self._gaps[:at], *found.gaps, *self._gaps[at:]]
        if (steps := recording.steps_in(number)) is not None:
            self._first_steps[number], self._last_steps[number] = steps
        self._searched[number] = _SEARCHED
        if self._has_learnt:
            return
        for work, ns in found.steps:
            self._baseline.add(work, ns)
        if self._baseline.num_steps >= ENOUGH_STEPS:
            self._has_learnt = True
            self._learnt(self._baseline)

    def _chunk_at(self, recording: Recording, before: int) -> int:
        """Number of the chunk at the position of the replay; `before` if unknown.

        The search continues near it.
        """
        step = self._where()
        if step is None or self._first_steps[before] <= step <= self._last_steps[before]:
            return before
        found = recording.find_step(step)
        return before if found is None else found.chunk

    def _turn(self) -> bool:
        """Rest after every few messages. Returns whether to go on."""
        self.search.rest(_REST * (time.monotonic() - self._worked_since_s))
        while self._is_busy() and not self.search.rest(_BUSY_S):
            pass
        self._worked_since_s = time.monotonic()
        return not self.search.is_stopping


def _nearest(searched: bytearray, at: int) -> int | None:
    """The nearest chunk to `at` not searched yet; None if all were."""
    after, before = searched.find(_NEVER, at), searched.rfind(_NEVER, 0, at)
    if after < 0 or before < 0:
        return None if after == before else max(after, before)
    return after if after - at <= at - before else before


def _step(event: SessionEvent) -> int:
    return event.step
