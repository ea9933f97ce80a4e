"""`LaneKeeper`: feeds a `LaneBoard` from a timeline as readers ask for lanes.

A live view asks for nearly the same steps again and again: only the new ones are decoded.
"""

import threading

from stepscope.engine import wire
from stepscope.engine.wire import StepRecord
from stepscope.recordings.lanes import Lane, LaneBoard
from stepscope.recordings.ring import replayed
from stepscope.recordings.timeline import Timeline

MAX_STEPS = 8192  # on the board
_BATCH = 256  # messages taken out of the ring at a time


class LaneKeeper:
    """Lanes of one timeline.

    Args:
        lock: guards the timeline.
    """

    def __init__(self, lock: "threading.RLock", timeline: Timeline) -> None:
        self._lock = lock
        self._timeline = timeline
        self._board: LaneBoard | None = None
        self._board_lock = threading.Lock()  # held while decoding: `lock` is not

    def view(self, first: int, last: int) -> list[Lane]:
        """See `History.lanes`."""
        with self._board_lock:
            board = self._board = self._board_from(first)
            if board is None:
                return []
            self._extend(board, last)
            lanes = board.view(first, last)
            if board.end - board.first > MAX_STEPS:
                board.forget_before(max(board.first, min(first, board.end) - MAX_STEPS // 4))
            return lanes

    def _board_from(self, first: int) -> LaneBoard | None:
        """A board that begins at `first` or before; None without any step."""
        with self._lock:
            ring, steps = self._timeline.ring, self._timeline.columns.steps
            if not steps:
                return None
            found = ring.locate(min(max(first, steps[0]), steps[-1]))
            assert found is not None
            segment, place = found
            first = segment.steps[segment.step_places.index(place)]
            board = self._board
            if (
                board is not None
                and board.first <= first <= board.end + _BATCH
                and board.next_number >= ring.segments[0].first_number
            ):
                return board
            payloads = segment.payloads[:place]
            number = segment.first_number + place
        return LaneBoard(replayed(segment.keyframe, payloads), first, number)

    def _extend(self, board: LaneBoard, last: int) -> None:
        while True:
            with self._lock:
                payloads = self._timeline.ring.payloads_from(board.next_number, _BATCH)
            if not payloads:
                return
            for payload in payloads:
                message = wire.decode(payload)
                if isinstance(message, StepRecord) and message.step > last:
                    return
                board.extend(message)
                board.next_number += 1
