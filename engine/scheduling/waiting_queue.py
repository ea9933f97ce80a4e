"""`WaitingQueue`: the requests that wait for admission, in order.

With the policy `fcfs`, preempted requests come before all others. With `priority`, the lowest
priority number comes first, then the earliest arrival. Every operation that the scheduler needs in
a step is O(1) or O(log n), including removal from the middle.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from stepscope.engine.protocol.settings.knobs import Policy
from stepscope.engine.scheduling.request import Request, RequestStatus

Rank: TypeAlias = tuple[int, int, int]


def rank(request: Request) -> Rank:
    """Return the sort key of the policy `priority`: a lower one is served first, preempted last."""
    return request.priority, request.arrival_ns, request.request_id


class WaitingQueue:
    """The waiting requests; iterates in the order in which they will be admitted."""

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        # In order of service under fcfs; under priority only the index into the heap.
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._heap: list[tuple[Rank, Request]] = []  # may hold requests that have left

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        if self.policy == "fcfs":
            return iter(self._requests.values())
        return iter(sorted(self._requests.values(), key=rank))

    def append(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        if self.policy == "priority":
            heapq.heappush(self._heap, (rank(request), request))

    def prepend(self, request: Request) -> None:
        """Add a preempted request: first under `fcfs`, by its rank under `priority`."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the next request to admit. Raises LookupError when no request is waiting."""
        if self.policy == "fcfs":
            for request in self._requests.values():
                return request
        while self._heap:
            request = self._heap[0][1]
            if request.request_id in self._requests:
                return request
            heapq.heappop(self._heap)
        raise LookupError("no request is waiting")

    def pop(self) -> Request:
        """Take the next request out of the queue. Raises LookupError when no request is waiting."""
        request = self.peek()
        del self._requests[request.request_id]
        if self.policy == "priority":
            heapq.heappop(self._heap)
        return request

    def remove(self, request: Request) -> None:
        """Remove any request. Raises KeyError if it is not in the queue."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._rebuild(list(self._requests.values()))

    def reorder(self, policy: Policy) -> None:
        """Switch to another policy. Under `fcfs`, preempted requests come first."""
        if policy == self.policy:
            return
        self.policy = policy
        self._rebuild(sorted(self._requests.values(), key=_arrival_order))

    def _rebuild(self, requests: list[Request]) -> None:
        self._requests = OrderedDict((request.request_id, request) for request in requests)
        self._heap = []
        if self.policy == "priority":
            self._heap = [(rank(request), request) for request in requests]
            heapq.heapify(self._heap)


def _arrival_order(request: Request) -> tuple[bool, int, int]:
    return request.status is not RequestStatus.PREEMPTED, request.arrival_ns, request.request_id
