"""Explains a whole recording: every late token, and how much each cause contributed."""

import math
from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.attribution.affected import Affected, RequestCounts
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.causes import Cause, Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.messages import messages_in
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.series.distribution import percentiles
from stepscope.recordings.state.session import request_name
from stepscope.recordings.state.unserved import NeverServed, Unserved

MEDIANS = 2.0  # without a service level, a wait of more medians than this is late


class Bound(NamedTuple):
    """From which length on an ITL (or a TTFT) is late, and what was measured."""

    bound_ms: float | None  # None: no measurement to derive it from
    is_given: bool  # by the operator or the file; else derived from the median
    num_waits: int
    median_ms: float | None
    num_late: int  # without waits that only the operator's pauses made late


class CauseShare(NamedTuple):
    """How much one cause contributed to all late waits."""

    cause: Cause
    num_late: int  # late waits with this as the largest cause
    ns: int  # time of this cause in all late waits


class Explanation(NamedTuple):
    """What `explain_recording` found. `late` is in order of time."""

    info: EngineInfo
    num_steps: int
    itl: Bound
    ttft: Bound
    late: list[Late]
    shares: list[CauseShare]  # the largest first
    affected: Affected
    never_served: NeverServed  # they have no late token that would show them
    request_id: int | None = None  # explains this one alone; None: all

    def wall_ns(self, time_ns: int) -> int:
        """Wall-clock time (Unix) of an engine time."""
        return self.info.wall_ns + time_ns - self.info.monotonic_ns


def explain_recording(
    recording: Recording,
    slo_itl_ms: float | None = None,
    slo_ttft_ms: float | None = None,
    request_id: int | None = None,
) -> Explanation:
    """Explain all late tokens of a recording. Reads the file once or twice.

    The file is read again if a bound must be derived from the median, or if a step was slow:
    medians and baselines are known only at the end.

    Args:
        slo_itl_ms, slo_ttft_ms: a longer wait is late; None: twice the median of the recording.
        request_id: explain this request alone; None: all.

    Raises:
        msgspec.DecodeError, RecordingError: the recording cannot be read.
        NotInRecording: there is no such request.
    """
    itl_ns = None if slo_itl_ms is None else slo_itl_ms * 1e6
    ttft_ns = None if slo_ttft_ms is None else slo_ttft_ms * 1e6
    baseline = Baseline()
    is_learnt = False
    if itl_ns is None or ttft_ns is None:
        is_learnt = True
        measured = _read(recording, math.inf, math.inf, learns=baseline)
        if itl_ns is None:
            itl_ns = _twice_the_median(measured.itl_counts)
        if ttft_ns is None:
            ttft_ns = _twice_the_median(measured.ttft_counts)
    requests = RequestCounts()
    unserved = Unserved(request_id)
    explainer = _read(
        recording,
        itl_ns,
        ttft_ns,
        request_id,
        requests,
        unserved,
        baseline if is_learnt else None,
        None if is_learnt else baseline,
    )
    if not is_learnt and baseline.has_slow:
        explainer = _read(recording, itl_ns, ttft_ns, request_id, baseline=baseline)
    late = _unrecorded_apart(explainer.late, explainer.first_step_ns)
    affected = requests.affected(late)
    if request_id is not None and request_id not in (seen := requests.ids):
        known = f"{request_name(min(seen))} to {request_name(max(seen))}" if seen else "it has none"
        raise NotInRecording(f"there is no request {request_name(request_id)} ({known})")
    return Explanation(
        recording.info,
        explainer.num_steps,
        _bound(explainer.itl_counts, itl_ns, slo_itl_ms is not None),
        _bound(explainer.ttft_counts, ttft_ns, slo_ttft_ms is not None),
        late,
        _shares(late),
        affected if request_id is None else affected._replace(num_requests=1),
        unserved.found(),
        request_id,
    )


def _read(
    recording: Recording,
    itl_bound_ns: float,
    ttft_bound_ns: float,
    request_id: int | None = None,
    requests: RequestCounts | None = None,
    unserved: Unserved | None = None,
    baseline: Baseline | None = None,
    learns: Baseline | None = None,
) -> Explainer:
    explainer = Explainer(itl_bound_ns, ttft_bound_ns, request_id, baseline=baseline, learns=learns)
    for message, is_lost in messages_in(recording):
        explainer.take(message, is_lost)
        if unserved is not None:
            unserved.take(message, is_lost)
        if requests is not None:
            requests.take(message)
    return explainer


def _unrecorded_apart(late: list[Late], begin_ns: int | None) -> list[Late]:
    """Mark unknown time before the recording as `unrecorded`.

    So it can be told from time that is unknown because messages were lost.
    """
    if begin_ns is None:
        return late
    return [
        each._replace(
            pieces=tuple(
                piece._replace(detail="unrecorded")
                if piece.cause == "unknown" and piece.start_ns + piece.ns <= begin_ns
                else piece
                for piece in each.pieces
            )
        )
        if each.start_ns < begin_ns
        else each
        for each in late
    ]


def _median(counts: dict[int, int]) -> int | None:
    if not counts:
        return None
    return percentiles(sorted(counts.items()), sum(counts.values()), (50,))[0]


def _twice_the_median(counts: dict[int, int]) -> float:
    median_ns = _median(counts)
    return math.inf if median_ns is None else median_ns * MEDIANS


def _bound(counts: dict[int, int], bound_ns: float, is_given: bool) -> Bound:
    median_ns = _median(counts)
    return Bound(
        None if math.isinf(bound_ns) else bound_ns / 1e6,
        is_given,
        sum(counts.values()),
        None if median_ns is None else median_ns / 1e6,
        sum(count for wait_ns, count in counts.items() if wait_ns > bound_ns),
    )


def _shares(late: list[Late]) -> list[CauseShare]:
    numbers: dict[Cause, int] = {}
    spent: dict[Cause, int] = {}
    for each in late:
        numbers[each.cause] = numbers.get(each.cause, 0) + 1
        for piece in each.pieces:
            spent[piece.cause] = spent.get(piece.cause, 0) + piece.ns
    shares = [CauseShare(cause, numbers.get(cause, 0), ns) for cause, ns in spent.items()]
    return sorted(shares, key=lambda share: -share.ns)
