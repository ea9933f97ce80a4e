"""`PrefillCadence`: which steps leave prefills out, by the knob `prefill_schedule_interval`.

The rules are those of vLLM 0.33 (pull requests 44558 and 54627):
- The interval counts steps from the last one that computed prompt tokens.
- Prefills are held only while a request decodes, which then has the step for itself.
- If a step that took prefills leaves requests in the queue, prefills are held no more until one
  empties it: else a queue that grows would be served in one step of each interval alone.
"""

from collections.abc import Collection, Iterable

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow


class PrefillCadence:
    """The steps since the last prefill, and whether the queue was emptied then."""

    def __init__(self) -> None:
        self._num_steps: int | None = None  # since the last with prefills; None: there was none
        self._is_backed_up = False

    def holds(self, interval: int, running: Iterable[Request], ending: Collection[Request]) -> bool:
        """Whether the next step leaves prefills out.

        Args:
            ending: requests of `running` that get no row in it.
        """
        if interval == 1 or self._is_backed_up or self._num_steps is None:
            return False
        return self._num_steps + 1 < interval and any(
            request.is_decoding for request in running if request not in ending
        )

    def note(self, rows: Iterable[ScheduledRow], *, has_queue: bool | None) -> None:
        """Take account of a step that was scheduled.

        Args:
            rows: may be empty if none computes prompt tokens. A request that is admitted with a
                single token left counts as a decode.
            has_queue: whether requests still wait after it; None if it admitted none on purpose.
        """
        if has_queue is not None:
            self._is_backed_up = has_queue
        if any(
            row.num_tokens > 1 or not row.samples or row.start > row.request.num_cached_tokens
            for row in rows
            if row.phase is not Phase.DECODE
        ):
            self._num_steps = 0
        elif self._num_steps is not None:
            self._num_steps += 1

    def skip(self, num_steps: int, interval: int, *, has_queue: bool) -> None:
        """Take account of steps without prefills that were not scheduled one by one."""
        if self._num_steps is not None:
            self._num_steps += num_steps
        is_free = self._num_steps is None or self._num_steps >= interval
        if is_free or self._is_backed_up:  # at least one of them would have taken prefills
            self._is_backed_up = has_queue
