"""`FinishedRequests`: how many requests met their service levels, for any window and any levels.

A request meets the levels if its first token came within the TTFT level and each later token within
the ITL level. Only requests that were observed from arrival to end are judged. Time in which an
operator had paused the engine does not count.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stepscope.recordings.state.outcome import FinishedRequest, Outcome
from stepscope.recordings.state.series.latency_samples import TimedRows
from stepscope.recordings.state.session import SessionState

_SPARE = 1024  # entries beyond the live requests before stale ones are removed


class KeptLevels(NamedTuple):
    """How many finished requests of a window were judged, and how many met the service levels."""

    num_judged: int
    num_kept: int


class FinishedRequests(TimedRows):
    """One row per finished request: its TTFT, longest gap, and the floor of gaps."""

    def __init__(self) -> None:
        super().__init__(len(FinishedRequest._fields))

    def kept(self, ttft_ms: float, itl_ms: float) -> KeptLevels:
        """Count the requests that were judged, and those that met these service levels.

        Gaps are recorded only above the ITL level that was set when the request was served. So if
        `itl_ms` is lower, requests without longer gaps are not judged.
        """
        ttft_ns, itl_ns = ttft_ms * 1e6, itl_ms * 1e6
        num_judged = num_kept = 0
        for _, ttft, worst, floor in self:
            if ttft > ttft_ns or worst > itl_ns:
                num_judged += 1
            elif floor <= itl_ns:
                num_judged += 1
                num_kept += 1
        return KeptLevels(num_judged, num_kept)


class RequestWatch:
    """Records the TTFT and the longest gap between tokens of each request until it ends.

    Whether a request met its service levels is decided later, by `FinishedRequests`.
    """

    def __init__(self, itl_ms: float) -> None:
        self._floor_ns = round(itl_ms * 1e6)  # gaps up to it are not recorded
        self._ttft_ns: dict[int, int] = {}  # of requests that were observed from their arrival
        self._worst_ns: dict[int, int] = {}  # their longest gap above the floor

    def begin(self, state: SessionState) -> None:
        """Restart from a state.

        Requests in progress are not recorded: their earlier gaps are unknown.
        """
        state.table.late_ns = self._floor_ns
        self._ttft_ns.clear()
        self._worst_ns.clear()

    def open(self) -> list[tuple[int, int, int]]:
        """The requests that it follows and that have a token: id, TTFT, longest gap so far."""
        return [(each, ns, self._worst_ns.get(each, 0)) for each, ns in self._ttft_ns.items()]

    def go_on_with(self, followed: Iterable[tuple[int, int, int]]) -> None:
        """Follow these requests further, see `open`."""
        for request_id, ttft_ns, worst_ns in followed:
            self._ttft_ns[request_id], self._worst_ns[request_id] = ttft_ns, worst_ns

    def set_floor(self, itl_ms: float, state: SessionState) -> None:
        """Change the length above which gaps are recorded.

        If it becomes lower, requests in progress are no longer recorded: their shorter gaps are
        unknown.
        """
        floor_ns = round(itl_ms * 1e6)
        is_lower, self._floor_ns = floor_ns < self._floor_ns, floor_ns
        if is_lower:
            self.begin(state)
        state.table.late_ns = floor_ns

    def take(self, outcome: Outcome, state: SessionState, now_ns: int) -> None:
        """Add to `outcome` the requests that finished in its step, and longest gaps.

        The operator's pauses must be left out of it. The tokens of the step were known at `now_ns`.
        """
        for request_id, ns in outcome.ttft_ns:
            self._ttft_ns[request_id] = ns
        worst_ns, longer = self._worst_ns, []
        last_ns = paused_ns = 0
        for request_id, gap_ns in outcome.late_gaps:
            if gap_ns != last_ns:  # those who decode side by side have equal gaps
                last_ns, paused_ns = gap_ns, state.pauses.within(now_ns - gap_ns, now_ns)
            ns = gap_ns - paused_ns
            if ns > worst_ns.get(request_id, self._floor_ns):
                worst_ns[request_id] = ns
                longer.append((request_id, ns))
        outcome.longer = longer
        for request_id, _ in outcome.e2e_ns:
            ttft_ns = self._ttft_ns.pop(request_id, None)
            longest_ns = worst_ns.pop(request_id, 0)
            if ttft_ns is not None:
                finished = FinishedRequest(ttft_ns, longest_ns, self._floor_ns)
                outcome.finished = [*outcome.finished, finished]
        if len(self._ttft_ns) + len(self._worst_ns) > 2 * len(state.requests) + _SPARE:
            for known in (self._ttft_ns, self._worst_ns):
                for request_id in [each for each in known if each not in state.requests]:
                    del known[request_id]
