"""Explains a whole recording: every late token, and how much each cause contributed."""

import copy
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.causes import Cause, Late, known_apart
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.front import FrontSums
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.file.messages import indexes, messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.session.waits import WaitSums
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.latency import SLO, LatencyKind, waits_in
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.session import request_name


class Bound(NamedTuple):
    """Above which length an ITL (or a TTFT) is late, and what was measured."""

    bound_ms: float
    num_waits: int
    median_ms: float | None
    num_late: int  # without waits that only the operator's pauses made late


class CauseShare(NamedTuple):
    cause: Cause
    num_late: int  # late waits with this as the largest cause
    ns: int  # time of this cause in all late waits


class Affected(NamedTuple):
    """How many requests there were, and had late tokens; not those late only by a pause."""

    num_requests: int  # all that were live at some time in the recording
    num_late: int  # with a late token
    num_only_first: int  # of the late ones: only the first token was late


class NeverServed(NamedTuple):
    """Requests aborted, or still waiting at the end, without a token, and their longest wait."""

    num_requests: int
    longest_ms: float | None  # None if there are no such requests


class GraphSize(NamedTuple):
    """Steps of about the same size that ran in the same kind of graph."""

    kind: str  # full, piecewise or none
    least_tokens: int  # computed for requests, without what filled the graph up
    most_tokens: int
    num_steps: int
    share: float  # of all steps whose graph is known
    median_ms: float  # of the device, or else from the launch of the model to the tokens


class GraphSizes:
    """In which kind of CUDA graph steps of each size ran, and how long they took."""

    def __init__(self) -> None:
        # (power of two of the tokens, kind) -> tokens and time of each step, in turns.
        self._seen: dict[tuple[int, str], array[int]] = {}

    def take(self, record: wire.StepRecord) -> None:
        if record.cuda_graph is None:
            return
        tokens = record.num_prefill_tokens + record.num_decode_tokens
        start_ns = record.launch_ns or record.schedule_end_ns or record.schedule_start_ns
        size = max(0, tokens - 1).bit_length()
        of = self._seen.setdefault((size, record.cuda_graph), array("q"))
        of.extend((tokens, record.device_ns or record.tokens_ns - start_ns))

    def found(self) -> list[GraphSize]:
        """All sizes, the smallest first."""
        found, num_steps = [], sum(len(each) // 2 for each in self._seen.values())
        for (_, kind), each in sorted(self._seen.items()):
            tokens, took_ns = each[::2], each[1::2]
            share, median_ms = len(tokens) / num_steps, statistics.median(took_ns) / 1e6
            size = min(tokens), max(tokens), len(tokens)
            found.append(GraphSize(kind, *size, share, median_ms))
        return found


class Explanation(NamedTuple):
    """What `explain_recording` found. `late` is in order of time."""

    info: wire.EngineInfo
    num_steps: int
    itl: Bound
    ttft: Bound
    late: list[Late]
    shares: list[CauseShare]  # the largest first
    affected: Affected
    never_served: NeverServed  # they have no late token that would show them
    waits: Mapping[LatencyKind, Distribution]  # all, late or not
    fronts: FrontSums
    graphs: list[GraphSize]  # empty where the kind of graph is unknown
    request_id: int | None = None  # explains this one alone; None: all
    view: wire.RequestView | None = None  # that one, as it was last known


def explain_recording(recording: Recording, slo: SLO, request_id: int | None = None) -> Explanation:
    """Explain all late tokens of a recording. Reads its indexes, then its messages once.

    The indexes tell the baselines, which are known only at the end of the messages.

    `request_id`: explain this request alone; None: all.

    Raises:
        RecordingError: the recording cannot be read.
        NotInRecording: there is no such request.
    """
    learnt, baseline = WaitSums({}), Baseline()
    for _, index in indexes(recording):
        rows = IndexRows(index)
        learnt.add(rows)
        baseline.add_rows(rows.steps())
    bounds_ns = slo.itl_ms * 1e6, slo.ttft_ms * 1e6
    explainer = Explainer(*bounds_ns, request_id, baseline=baseline)
    found = _Read(explainer)
    for message, _, _, after_gap in messages(recording):
        found.take(message, after_gap)
    begin_ns = explainer.first_step_ns or 0
    late = [
        each._replace(pieces=known_apart(each.pieces, begin_ns, "unrecorded"))
        if each.start_ns < begin_ns
        else each
        for each in explainer.late
    ]
    if request_id is not None and request_id not in (seen := found.live | found.ended):
        known = f"{request_name(min(seen))} to {request_name(max(seen))}" if seen else "it has none"
        raise NotInRecording(f"there is no request {request_name(request_id)} ({known})")
    return Explanation(
        recording.info, explainer.num_steps, _bound(found.waits["itl"], slo.itl_ms),
        _bound(found.waits["ttft"], slo.ttft_ms), late, _shares(late),
        affected_by(late, len(found.live) if request_id is None else 1), found.never_served(),
        learnt.of, found.fronts, found.graphs.found(), request_id, found.view,
    )  # fmt: skip


def affected_by(late: Iterable[Late], num_requests: int) -> Affected:
    """Count the requests with late tokens among `late`, all of a session with so many requests."""
    counted = [each for each in late if not each.is_excused]
    all_late = {each.request_id for each in counted}
    between = {each.request_id for each in counted if each.token_idx}
    return Affected(num_requests, len(all_late), len(all_late - between))


class _Read:
    """What reading a recording found, besides its late tokens.

    `ended`: requests that a snapshot says are finished; they may have ended before the recording.
    """

    def __init__(self, explainer: Explainer) -> None:
        self.explainer = explainer
        self.waits: dict[LatencyKind, Distribution] = {
            "itl": Distribution(explainer.itl_bound_ns),
            "ttft": Distribution(explainer.ttft_bound_ns),
        }
        self.live: set[int] = set()  # requests that were live at some time
        self.ended: set[int] = set()
        self.fronts = FrontSums()
        self.graphs = GraphSizes()
        self.view: wire.RequestView | None = None
        self._given_up_ns: list[int] = []  # the waits of requests that ended without a token

    def take(self, message: wire.Telemetry, lost: bool) -> None:
        state = self.explainer.state
        if state.is_replaced_by(message):
            self._given_up_ns += self._unserved(state.requests, state.time_ns)
        if isinstance(message, wire.Snapshot):
            for view in message.requests:
                (self.ended if view.status == "finished" else self.live).add(view.request_id)
        elif isinstance(message, wire.StepRecord | wire.EngineStatus):
            events = message.events
            self.live.update([each.request_id for each in events if isinstance(each, wire.Arrived)])
            if gone := [each.request_id for each in events if isinstance(each, wire.Aborted)]:
                now_ns = (
                    message.time_ns if isinstance(message, wire.EngineStatus) else message.tokens_ns
                )
                self._given_up_ns += self._unserved(gone, now_ns)
        if isinstance(message, wire.StepRecord):
            self.graphs.take(message)
        outcome = self.explainer.take(message, lost)
        only = self.explainer.only
        self.fronts.take(message, state.requests)
        if only is not None and only in state.requests:
            self.view = copy.copy(state.requests[only])
        if outcome is not None and isinstance(message, wire.StepRecord):
            self.live.update([row.request_id for row in message.batch or ()])
            for kind, ns, number, _ in waits_in(AppliedStep(0, message, outcome)):
                if kind in self.waits:
                    self.waits[kind].add(ns, number)

    def never_served(self) -> NeverServed:
        """The requests without any token. Call it after the last message."""
        state = self.explainer.state
        waits = [*self._given_up_ns, *self._unserved(state.requests, state.time_ns)]
        return NeverServed(len(waits), max(waits) / 1e6 if waits else None)

    def _unserved(self, request_ids: Iterable[int], now_ns: int) -> list[int]:
        views = self.explainer.state.requests
        known = [views[each] for each in request_ids if each in views]
        return [
            now_ns - view.arrival_ns
            for view in known
            if not (view.num_output_tokens or view.is_partial or view.status == "finished")
            and self.explainer.only in (None, view.request_id)
        ]


def _bound(waits: Distribution, bound_ms: float) -> Bound:
    median_ns = next(iter(waits.percentiles(50)), None)
    median_ms = None if median_ns is None else median_ns / 1e6
    return Bound(bound_ms, waits.count, median_ms, waits.count - waits.num_within)


def _shares(late: list[Late]) -> list[CauseShare]:
    numbers = Counter(each.cause for each in late)
    spent: Counter[Cause] = Counter()
    for each in late:
        for piece in each.pieces:
            spent[piece.cause] += piece.ns
    return [CauseShare(cause, numbers[cause], ns) for cause, ns in spent.most_common()]
