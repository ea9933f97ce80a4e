"""`QueueWaits`: which requests wait for admission, and what blocked the queue meanwhile.

The time between the scheduling of two consecutive steps is charged to the reason that blocked the
queue in the first of these steps.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.attribution.ledger.queue import QueueWait
from stepscope.recordings.state.session import SessionState

MAX_ADMITTED = 1000  # how many ended waits are kept, the longest ones


@dataclass(slots=True)
class OpenWait:
    """A request in the queue.

    Attributes:
        before: ns for which each reason had blocked the queue before the request came.
    """

    request_id: int
    client_id: str
    num_prompt_tokens: int
    was_preempted: bool
    since_ns: int | None
    before: dict[str, int] = field(default_factory=dict)


class QueueWaits:
    """The requests in the queue, and the longest waits of requests that have left it.

    Args:
        state: the state right before the first message.

    Attributes:
        open: the requests in the queue, by request id.
        pauses: must be fed every message. Pauses by an operator are charged to "paused" only.
        scheduled_ns: engine time of the last scheduling.
    """

    def __init__(self, state: SessionState) -> None:
        self.open: dict[int, OpenWait] = {}
        self.pauses = state.pauses
        self.scheduled_ns = state.time_ns
        self._reason = ""  # what blocks the queue since `scheduled_ns`
        self._spent: dict[str, int] = {}  # what blocked the queue so far, in ns
        self._longest: list[tuple[int, int, QueueWait]] = []  # a heap

    def schedule(self, start_ns: int, reason: str) -> None:
        """Process the scheduling of a step at `start_ns`.

        From then on, `reason` blocks the queue.
        """
        self._charge(self._spent, self.scheduled_ns, start_ns, self._reason)
        self.scheduled_ns = max(self.scheduled_ns, start_ns)
        self._reason = reason

    def begin(self, wait: OpenWait, now_ns: int) -> None:
        """Add a request to the queue at `now_ns`.

        Its time from arrival to `now_ns`, if any, is charged to waiting for a step to end.
        """
        wait.before = self._spent.copy()
        if wait.since_ns is not None:
            self._charge(wait.before, now_ns, wait.since_ns, self._reason)
            self._charge(wait.before, wait.since_ns, now_ns, "step", sign=-1)
        self.open[wait.request_id] = wait

    def end(self, request_id: int, time_ns: int, step: int | None) -> bool:
        """End the wait of a request. Returns whether it waited and was admitted by a step."""
        wait = self.open.pop(request_id, None)
        if wait is None:
            return False
        ended = _ended(wait, self._spent, time_ns, step, len(self.open))
        waited_ns = ended.waited_ns(time_ns)
        if waited_ns is not None:
            entry = waited_ns, -request_id, ended
            if len(self._longest) < MAX_ADMITTED:
                heapq.heappush(self._longest, entry)
            else:
                heapq.heappushpop(self._longest, entry)
        return step is not None

    def keep(self, request_ids: Collection[int], now_ns: int) -> None:
        """Keep only the waits of these requests. All other requests have ended unobserved."""
        self.scheduled_ns = self.scheduled_ns or now_ns
        self.open = {each: wait for each, wait in self.open.items() if each in request_ids}

    def forget(self) -> None:
        """Forget the open waits, because another engine begins."""
        self.open, self.pauses, self.scheduled_ns = {}, PauseTrail(), 0

    # Results

    def preempted_ns(self) -> dict[int, int | None]:
        """Since when each preempted request waits, by request id."""
        return {each: wait.since_ns for each, wait in self.open.items() if wait.was_preempted}

    def until_now(self, request_ids: Sequence[int], now_ns: int) -> list[QueueWait]:
        """The waits so far of these requests, which must be given in queue order."""
        spent = self._spent.copy()
        self._charge(spent, self.scheduled_ns, now_ns, self._reason)
        num_behind = range(len(request_ids) - 1, -1, -1)
        return [
            _ended(self.open[request_id], spent, None, None, behind)
            for request_id, behind in zip(request_ids, num_behind, strict=True)
        ]

    def longest(self) -> list[QueueWait]:
        """The longest waits that have ended, longest first, at most `MAX_ADMITTED`."""
        return [wait for _, _, wait in sorted(self._longest, reverse=True)]

    def _charge(
        self, spent: dict[str, int], begin_ns: int, end_ns: int, reason: str, sign: int = 1
    ) -> None:
        """Charge the time from `begin_ns` to `end_ns` to `reason`, and its pauses to "paused"."""
        if begin_ns >= end_ns:
            return
        paused_ns = self.pauses.within(begin_ns, end_ns)
        spent[reason] = spent.get(reason, 0) + sign * (end_ns - begin_ns - paused_ns)
        if paused_ns:
            spent["paused"] = spent.get("paused", 0) + sign * paused_ns


def _ended(
    wait: OpenWait, spent: dict[str, int], end_ns: int | None, step: int | None, num_behind: int
) -> QueueWait:
    """Build a `QueueWait` from a request in the queue.

    Args:
        spent: ns for which each reason has blocked the queue since the beginning.
        end_ns: None if the request still waits.
    """
    reasons = {each: ns - wait.before.get(each, 0) for each, ns in spent.items()}
    reasons |= {each: -ns for each, ns in wait.before.items() if each not in spent}
    return QueueWait(
        wait.request_id,
        wait.client_id,
        wait.num_prompt_tokens,
        wait.was_preempted,
        wait.since_ns,
        end_ns,
        step,
        {each: ns for each, ns in reasons.items() if ns > 0},
        num_behind,
    )
