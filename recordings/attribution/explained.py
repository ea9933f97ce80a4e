"""A whole recording explained: every late token of it, and where the lateness comes from."""

import math
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.recordings.attribution.affected import Affected, RequestsTold
from stepscope.recordings.attribution.causes import Cause, Late
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.usual import Usual
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.series.latency import percentiles
from stepscope.recordings.state.session import request_name
from stepscope.recordings.state.tokenless import NeverServed, Tokenless

MEDIANS = 2.0  # without a service level a wait longer than so many medians is late


class Bound(NamedTuple):
    """What counts as late for one kind of wait, and what was measured of it."""

    bound_ms: float | None  # None: nothing was measured to derive one from
    is_given: bool  # by the operator or in the file; else it is derived from the median
    num_waits: int
    median_ms: float | None
    num_late: int  # the operator's pauses are not held against the engine


class CauseShare(NamedTuple):
    """How much of the lateness has one cause."""

    cause: Cause
    num_late: int  # of which it is the largest cause
    ns: int  # spent on it in all late waits


class Explanation(NamedTuple):
    """What `explain_recording` found. `late` is in order of time."""

    info: EngineInfo
    num_steps: int
    itl: Bound
    ttft: Bound
    late: list[Late]
    shares: list[CauseShare]  # the largest first
    affected: Affected
    never_served: NeverServed  # no late token tells of them
    request_id: int | None = None  # of which all this is; None: of all

    def wall_ns(self, time_ns: int) -> int:
        """Wall-clock time (Unix) of an engine time."""
        return self.info.wall_ns + time_ns - self.info.monotonic_ns


def explain_recording(
    recording: Recording,
    slo_itl_ms: float | None = None,
    slo_ttft_ms: float | None = None,
    request_id: int | None = None,
) -> Explanation:
    """Read all of it once, or twice: where a bound has to be derived from it, and where a step was
    held up, for how long it would usually have taken is known at the end.

    Args:
        slo_itl_ms, slo_ttft_ms: a longer wait is late; None: twice the median of the recording.
        request_id: explain this one alone; None: all.

    Raises:
        msgspec.DecodeError, RecordingError: it cannot be read; NotInRecording: no such request.
    """
    itl_ns = None if slo_itl_ms is None else slo_itl_ms * 1e6
    ttft_ns = None if slo_ttft_ms is None else slo_ttft_ms * 1e6
    usual = Usual()
    is_learnt = False
    if itl_ns is None or ttft_ns is None:
        is_learnt = True
        measured = _read(recording, math.inf, math.inf, learns=usual)
        if itl_ns is None:
            itl_ns = _twice_the_median(measured.itl_counts)
        if ttft_ns is None:
            ttft_ns = _twice_the_median(measured.ttft_counts)
    requests = RequestsTold()
    tokenless = Tokenless(request_id)
    explainer = _read(
        recording,
        itl_ns,
        ttft_ns,
        request_id,
        requests,
        tokenless,
        usual if is_learnt else None,
        None if is_learnt else usual,
    )
    if not is_learnt and usual.has_held:
        explainer = _read(recording, itl_ns, ttft_ns, request_id, usual=usual)
    late = _unrecorded_apart(explainer.late, explainer.first_step_ns)
    affected = requests.affected(late)
    if request_id is not None and request_id not in (seen := requests.ids):
        held = f"{request_name(min(seen))} to {request_name(max(seen))}" if seen else "it has none"
        raise NotInRecording(f"there is no request {request_name(request_id)} ({held})")
    return Explanation(
        recording.info,
        explainer.num_steps,
        _bound(explainer.itl_counts, itl_ns, slo_itl_ms is not None),
        _bound(explainer.ttft_counts, ttft_ns, slo_ttft_ms is not None),
        late,
        _shares(late),
        affected if request_id is None else affected._replace(num_requests=1),
        tokenless.found(),
        request_id,
    )


def _read(
    recording: Recording,
    itl_bound_ns: float,
    ttft_bound_ns: float,
    request_id: int | None = None,
    requests: RequestsTold | None = None,
    tokenless: Tokenless | None = None,
    usual: Usual | None = None,
    learns: Usual | None = None,
) -> Explainer:
    explainer = Explainer(itl_bound_ns, ttft_bound_ns, request_id, usual=usual, learns=learns)
    engine_id: str | None = None
    last: int | None = None
    for frame, _ in recording.frames():
        if frame.topic == wire.TOPICS[wire.Mark]:
            continue
        message = wire.decode(frame.payload)
        info = message.info if isinstance(message, Snapshot) else message
        is_new = isinstance(info, EngineInfo) and info.engine_id != engine_id
        if is_new:
            assert isinstance(info, EngineInfo)
            engine_id, last = info.engine_id, None
        expected = None if last is None else last + 1
        if isinstance(message, Snapshot):
            is_lost = last is not None and frame.sequence > last
        elif expected is not None and frame.sequence < expected:
            continue  # once more
        else:
            is_lost = expected is not None and frame.sequence > expected
        last = frame.sequence
        explainer.take(message, is_lost)
        if tokenless is not None:
            tokenless.take(message, is_lost)
        if requests is not None:
            requests.take(message)
    return explainer


def _unrecorded_apart(late: list[Late], begin_ns: int | None) -> list[Late]:
    """What was before the recording is told apart from what was lost in it."""
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
