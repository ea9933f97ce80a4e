"""What waits for tokens came to: how long each was, and what the late ones were made of."""

from bisect import bisect_right
from operator import attrgetter

from stepscope.engine.wire import StepRecord
from stepscope.recordings.causes import Late, Piece
from stepscope.recordings.waits import Wait, blocking_reason

_PRUNE_AT = 4096


class Waited:
    """Waits that have ended.

    Attributes:
        itl_counts, ttft_counts: wait -> tokens, without the operator's pauses.

    Args:
        itl_bound_ns, ttft_bound_ns: a longer wait is late.
    """

    def __init__(self, itl_bound_ns: float, ttft_bound_ns: float) -> None:
        self.late: list[Late] = []
        self.itl_counts: dict[int, int] = {}
        self.ttft_counts: dict[int, int] = {}
        self._itl_bound_ns = itl_bound_ns
        self._ttft_bound_ns = ttft_bound_ns

    def count(self, request: Wait, ns: int, end_ns: int) -> bool:
        """Count the wait that a request has ended; whether it is late.

        Args:
            ns: without the operator's pauses.
        """
        counts = self.itl_counts if request.num_output else self.ttft_counts
        counts[ns] = counts.get(ns, 0) + 1
        assert request.start_ns is not None
        return end_ns - request.start_ns > self._bound_ns(request)

    def add_late(
        self, request_id: int, request: Wait, step: int, end_ns: int, pieces: tuple[Piece, ...]
    ) -> None:
        """Keep a late one, which ended in `step`."""
        assert request.start_ns is not None
        self.late.append(
            Late(
                request_id,
                request.client_id,
                request.num_output,
                step,
                request.start_ns,
                end_ns,
                round(self._bound_ns(request)),
                pieces,
            )
        )

    def _bound_ns(self, request: Wait) -> float:
        return self._itl_bound_ns if request.num_output else self._ttft_bound_ns


class QueueTime:
    """What the time was spent on while somebody waited in the queue, in order of time."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, between: list[Piece], record: StepRecord, start_ns: int, end_ns: int) -> bool:
        """A step, and the time before it; whether much has come together by now."""
        self._pieces += between
        detail = blocking_reason(record)
        self._pieces.append(
            Piece("queued", start_ns, end_ns - start_ns, record.step, 1, detail),
        )
        return len(self._pieces) % _PRUNE_AT == 0

    def since(self, time_ns: int) -> list[Piece]:
        """What there was from a time on; the first may have begun before it."""
        return self._pieces[self._place(time_ns) :]

    def forget_before(self, time_ns: int) -> None:
        del self._pieces[: self._place(time_ns)]

    def clear(self) -> None:
        self._pieces.clear()

    def _place(self, time_ns: int) -> int:
        first = bisect_right(self._pieces, time_ns, key=attrgetter("start_ns"))
        return max(0, first - 1)
