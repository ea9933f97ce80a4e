"""`RequestTable`: the requests of one engine as an observer knows them, one `RequestView` each.

The table owns its views. It changes views of running requests in place. All other views are
replaced when they change, so that copies of a table can share them.
"""

from collections import deque
from collections.abc import Iterable
from operator import add

from msgspec.structs import astuple, replace

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.state.outcome import Outcome, coarse

KEEP_FINISHED_STEPS = 256  # how many steps a finished request stays in the table

_OF_KNOWN = (wire.Admitted, wire.FirstToken, wire.Finished, wire.Preempted, wire.Aborted)
_DECODE = int(wire.Phase.DECODE)
_RECOMPUTE = int(wire.Phase.RECOMPUTE)
_LAST_CHUNK = int(wire.RowFlag.LAST_CHUNK)


class RequestTable:
    """The views of live and recently finished requests, by request id."""

    __slots__ = ("_finished", "late_ns", "running", "views")

    def __init__(self, views: Iterable[wire.RequestView] = ()) -> None:
        self.late_ns: int | None = None  # outcomes list longer gaps; None: they do not
        self.views = {view.request_id: _copied(view) for view in views}
        # The ids of those whose status is "running".
        self.running = {each for each, view in self.views.items() if view.status == "running"}
        self._finished = deque(_in_order_of_finish(self.views.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestTable) and self.views == other.views

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> "RequestTable":
        other = RequestTable()
        views = other.views = self.views.copy()
        for request_id in self.running:
            views[request_id] = _copied(views[request_id])
        other.running = self.running.copy()
        other._finished = self._finished.copy()
        return other

    def num_with_status(self, *statuses: str) -> int:
        return sum(view.status in statuses for view in self.views.values())

    def take_rows(self, batch: list[wire.BatchRow], now_ns: int, outcome: Outcome) -> None:
        """Apply the batch rows of a step to the views, and add their latencies to `outcome`."""
        views = self.views
        num_decode_rows = num_output_tokens = 0
        # Neighbouring rows mostly got their last token in the same step: count equal gaps together.
        alike_ns: int | None = None
        first_id = num_alike = 0
        late_before_ns = None if self.late_ns is None else now_ns - self.late_ns
        is_late, late = False, []
        for row in batch:
            view = views.get(row.request_id)
            if view is None or view.status != "running":
                view = self._seat(row)
            view.num_computed_tokens = end = row.start + row.num_tokens
            view.num_blocks = row.num_blocks
            num_tokens = 1  # that the request got
            if row.phase == _DECODE:
                num_decode_rows += 1
                num_tokens = row.num_tokens  # several if drafts were accepted
            else:
                outcome.num_attended += row.num_tokens * end
                outcome.num_recomputed_tokens += _num_again(row, view)
                if view.is_partial and end > view.num_prompt_tokens:
                    view.num_prompt_tokens = end
                if not row.flags & _LAST_CHUNK:
                    has_output = view.is_partial or view.max_tokens > 0
                    outcome.num_cut_rows += has_output or end < view.num_prompt_tokens
                    continue
            # Compute the number from position and prompt, which corrects it after lost steps.
            number = end + 1 - view.num_prompt_tokens
            num_output_tokens += num_tokens
            last_ns = view.last_token_ns
            if last_ns is None:
                if number == 1:
                    view.first_token_ns = now_ns
                    if not view.is_partial:
                        outcome.ttft_ns.append((row.request_id, now_ns - view.arrival_ns))
            elif number == view.num_output_tokens + num_tokens:
                if last_ns == alike_ns:
                    num_alike += 1
                else:
                    if alike_ns is not None:
                        outcome.add_gaps(max(0, now_ns - alike_ns), num_alike, first_id)
                    alike_ns, num_alike, first_id = last_ns, 1, row.request_id
                    is_late = late_before_ns is not None and last_ns < late_before_ns
                if is_late:
                    late.append((row.request_id, now_ns - last_ns))
            view.num_output_tokens = number
            view.last_token_ns = now_ns
        if alike_ns is not None:
            outcome.add_gaps(max(0, now_ns - alike_ns), num_alike, first_id)
        if late:
            outcome.late_gaps = [*outcome.late_gaps, *late]
        outcome.num_decode_rows += num_decode_rows
        outcome.num_output_tokens += num_output_tokens

    def hold(self, rows: Iterable[wire.HeldRow]) -> None:
        """Note who is held back while it waits, and why."""
        for row in rows:
            view = self.views.get(row.request_id)
            if view is not None and view.status in ("waiting", "preempted"):
                self.views[row.request_id] = held = _copied(view)
                held.held, held.num_blocks = row.reason, row.num_blocks

    def serve(self, fronts: Iterable[wire.FrontEnd], pauses: PauseTrail, outcome: Outcome) -> None:
        """Note what front ends did, and add the waits of their clients, without pauses."""
        views = self.views
        first, gaps = list(outcome.served_ttft_ns), dict(outcome.served_itl_ns)
        for front in fronts:
            for row in front.taken:
                if row.request_id in views:
                    times = wire.FrontTimes(front.number, row.http_ns, row.sent_ns, row.is_streamed)
                    self._set_front(row.request_id, times)
            for request_id, came_ns, out_ns in front.chunks():
                view = views.get(request_id)
                if view is None or view.front is None:
                    continue
                times = view.front
                last_ns = times.last_out_ns
                if last_ns is None:
                    began_ns = times.http_ns
                    if began_ns is not None and times.is_streamed:
                        wait_ns = out_ns - began_ns - pauses.within(began_ns, out_ns)
                        first.append((request_id, wait_ns))
                    times = replace(times, first_came_ns=came_ns, first_out_ns=out_ns)
                else:
                    gap_ns = max(0, out_ns - last_ns - pauses.within(last_ns, out_ns))
                    times = replace(times, worst_gap_ns=max(times.worst_gap_ns, gap_ns))
                    gap_ns = coarse(gap_ns)
                    gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
                times = replace(times, last_out_ns=out_ns, num_chunks=times.num_chunks + 1)
                self._set_front(request_id, times)
        outcome.served_ttft_ns, outcome.served_itl_ns = first, gaps

    def _set_front(self, request_id: int, times: wire.FrontTimes) -> None:
        view = self.views[request_id]
        if view.status != "running":
            view = self.views[request_id] = _copied(view)
        view.front = times

    def _seat(self, row: wire.BatchRow) -> wire.RequestView:
        """Return a running view that may be changed in place, for a request in the batch.

        No event told that it was admitted: it is unknown, or seemed to have ended.
        """
        view = self.views.get(row.request_id)
        if view is None:
            view = _partial(row.request_id)
            view.num_prompt_tokens = row.start
        else:
            if view.status == "finished":
                self._finished.remove(row.request_id)
            view = _copied(view)
            view.finish_reason = view.finish_step = view.finish_ns = None
        view.status, view.held = "running", ""
        self.views[row.request_id] = view
        self.running.add(row.request_id)
        return view

    def take_event(
        self, event: wire.RequestEvent, step: int, time_ns: int, outcome: Outcome
    ) -> None:
        if isinstance(event, wire.Arrived):
            self._take_arrival(event, outcome)
            return
        if not isinstance(event, _OF_KNOWN):
            return  # rejected requests are never in the table
        known = self.views.get(event.request_id)
        if known is not None and known.status == "finished":
            return
        has_token = known is not None and known.first_token_ns is not None
        if isinstance(event, wire.FirstToken) and has_token:
            return  # its row was applied already
        view = _copied(known) if known is not None else _partial(event.request_id)
        self.views[event.request_id] = view
        if isinstance(event, wire.Admitted):
            view.status, view.held = "running", ""
            self.running.add(view.request_id)
            view.num_computed_tokens = event.num_cached_tokens
            if not comes_back(view):
                # Not from its first row, which may come steps later.
                view.num_cached_tokens = event.num_cached_tokens
                outcome.num_cached_tokens += event.num_cached_tokens
                view.misses = event.misses
                told = () if event.misses is None else astuple(event.misses)[:4]
                added = tuple(map(add, outcome.num_missed_tokens or (), told))
                outcome.num_missed_tokens = added or None
        elif isinstance(event, wire.FirstToken):
            view.first_token_ns = view.last_token_ns = time_ns
            if not view.is_partial:
                outcome.ttft_ns.append((view.request_id, time_ns - view.arrival_ns))
        elif isinstance(event, wire.Preempted):
            outcome.num_preempted += 1
            view.status = "preempted"
            self.running.discard(view.request_id)
            view.num_preemptions += 1
            view.high_water = max(view.high_water, view.num_computed_tokens)
            view.num_computed_tokens = 0
            view.num_blocks = 0
        else:
            view.status = "finished"
            self.running.discard(view.request_id)
            view.finish_step = step
            view.finish_ns = time_ns
            view.num_blocks = 0
            self._finished.append(view.request_id)
            if isinstance(event, wire.Aborted):
                view.finish_reason = "abort"
                return
            view.finish_reason, view.handed_to = event.reason, event.handed_to
            view.num_output_tokens = event.num_output_tokens
            if event.handed_to is not None:
                return  # it goes on in the decode engine and ends there
            outcome.num_finished += 1
            if not view.is_partial:
                e2e_ns = max(0, time_ns - view.arrival_ns)
                outcome.e2e_ns = [*outcome.e2e_ns, (view.request_id, e2e_ns)]
            first_ns, last_ns = view.first_token_ns, view.last_token_ns
            num_gaps = view.num_output_tokens - 1
            if first_ns is not None and last_ns is not None and num_gaps > 0:
                tpot_ns = round(max(0, last_ns - first_ns) / num_gaps)
                outcome.tpot_ns.append((view.request_id, tpot_ns))

    def _take_arrival(self, event: wire.Arrived, outcome: Outcome) -> None:
        known = self.views.get(event.request_id)
        if event.origin is None:
            outcome.num_arrived += 1
        elif known is not None and known.status == "finished":  # handed over, then given back
            self._finished.remove(event.request_id)
            known = None
        if known is None or known.is_partial:
            self.views[event.request_id] = _arrived(event, known)

    def forget_finished(self, step: int) -> None:
        """Forget requests that finished `KEEP_FINISHED_STEPS` or more before `step`."""
        finished = self._finished
        while finished:
            view = self.views.get(finished[0])
            end = None if view is None else view.finish_step
            if end is not None and end > step - KEEP_FINISHED_STEPS:
                return
            self.views.pop(finished.popleft(), None)

    def keep_ended(self, before: "RequestTable", step: int) -> None:
        """Add the requests of an older table that are missing here.

        Requests that were still live in `before` are added as finished by `step`, with unknown
        reason.
        """
        for request_id, view in before.views.items():
            if request_id in self.views:
                continue
            if view.status != "finished":
                # Its end was not observed, so time and reason are unknown.
                view = _copied(view)
                view.status = "finished"
                view.finish_step = step
                view.num_blocks = 0
            self.views[request_id] = view
        self._finished = deque(_in_order_of_finish(self.views.values()))


def comes_back(view: wire.RequestView) -> bool:
    """Whether a request that is admitted ran before, so that its prompt is counted already."""
    return view.num_preemptions > 0 or view.num_output_tokens > 0


def _num_again(row: wire.BatchRow, view: wire.RequestView) -> int:
    """Number of tokens of a prefill row that are no new prompt tokens."""
    if view.num_output_tokens or (row.phase == _RECOMPUTE and not view.high_water):
        return row.num_tokens
    return min(row.num_tokens, max(0, view.high_water - row.start))


def _copied(view: wire.RequestView) -> wire.RequestView:
    """Copy a view like `copy.copy`, in half the time."""
    copied: wire.RequestView = view.__copy__()  # type: ignore[attr-defined]
    return copied


def _in_order_of_finish(views: Iterable[wire.RequestView]) -> list[int]:
    finished = [view for view in views if view.status == "finished"]
    finished.sort(key=lambda each: -1 if each.finish_step is None else each.finish_step)
    return [view.request_id for view in finished]


def _partial(request_id: int) -> wire.RequestView:
    return wire.RequestView(
        request_id=request_id,
        client_id="",
        status="waiting",
        arrival_ns=0,
        num_prompt_tokens=0,
        max_tokens=0,
        is_partial=True,
    )


def _arrived(event: wire.Arrived, known: wire.RequestView | None) -> wire.RequestView:
    view = _copied(known) if known is not None else _partial(event.request_id)
    view.client_id = event.client_id
    view.arrival_ns = event.time_ns
    view.num_prompt_tokens = event.num_prompt_tokens
    view.max_tokens = event.max_tokens
    view.priority = event.priority
    view.is_partial = False
    view.elsewhere = event.elsewhere
    if (origin := event.origin) is not None:
        view.origin = origin
        view.num_output_tokens = origin.num_output_tokens
        view.high_water = view.num_prompt_tokens + origin.num_output_tokens - 1
        view.first_token_ns = origin.first_token_ns
        view.last_token_ns = origin.last_token_ns
    return view
