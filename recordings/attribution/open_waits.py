"""Waits that are still in progress, divided step by step into pieces with one cause each."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.attribution.baseline import STILL_SLOW, SlowStep
from stepscope.recordings.attribution.causes import HELD_FOR, HOLD_UPS, Piece
from stepscope.recordings.state.ranks import late_rank

_DECODE = int(wire.Phase.DECODE)
_RECOMPUTE = int(wire.Phase.RECOMPUTE)

_OTHERS = frozenset({"queued", "between", "idle", "held_up", "rank"})

WaitStatus: TypeAlias = Literal["waiting", "out", "running"]


class StepSpan(NamedTuple):
    """The time of a step: its work, then what held it up."""

    record: wire.StepRecord
    start_ns: int
    work_end_ns: int
    excess: list[Piece]  # from there to `end_ns`, with one cause each
    end_ns: int
    load: wire.Admitted | None  # what it loaded, if that is more than its largest prefill


def span_of(
    record: wire.StepRecord,
    prefills: Sequence[wire.BatchRow],
    slow: SlowStep | None,
    start_ns: int,
    end_ns: int,
) -> StepSpan:
    """Divide the time of a step, with what held it up at its end.

    In a slow step that is at most its excess over the usual duration; the rest of that is
    `held_up`, if the step was slow without what is known.
    """
    load = _load_in(record)
    largest = None
    if load is not None and (not prefills or load.num_loaded_tokens > prefills[0].num_tokens):
        slow, largest = None, load  # it is no step like others
    room_ns = end_ns - start_ns if slow is None else slow.took_ns - slow.baseline_ns
    found: list[Piece] = []
    rows = _hold_ups(record, start_ns, end_ns)
    # Of a wait for a processor only the sum is known. It may be usual, as may be that this thread
    # stands still while another one collects garbage: they count only in slow steps.
    for _, ns, row in sorted(rows, key=lambda each: each[2].kind == "descheduled"):
        ns = min(ns, room_ns)
        if ns and (slow is not None or row.kind not in ("descheduled", "gc_elsewhere")):
            found.append(Piece(HOLD_UPS[row.kind], 0, ns, record.step, 1, row.detail))
            room_ns -= ns
    if (late := late_rank(record)) is not None:
        rank, ns = late
        ns = min(ns, end_ns - start_ns - sum(piece.ns for piece in found))
        found.append(Piece("rank", 0, ns, record.step, 1, rank))
        room_ns -= ns
    if slow is not None and room_ns > 0:
        rest_ns, usual_ns = slow.took_ns - sum(piece.ns for piece in found), slow.baseline_ns
        if not found or rest_ns >= STILL_SLOW * usual_ns:
            rest = Piece("held_up", 0, 0, record.step, 1, took_ns=rest_ns, baseline_ns=usual_ns)
            rest = rest if load is None else _loaded(load, record, 0)
            found.append(rest._replace(ns=room_ns))
    at_ns = work_end_ns = end_ns - sum(piece.ns for piece in found)
    for i, piece in enumerate(found):
        found[i] = piece._replace(start_ns=at_ns)
        at_ns += piece.ns
    return StepSpan(record, start_ns, work_end_ns, found, end_ns, largest)


def _hold_ups(
    record: wire.StepRecord, begin_ns: int, end_ns: int
) -> Iterator[tuple[int, int, wire.HoldUp]]:
    """Start and duration of what held it up, in order; only waits for a processor overlap."""
    known = [row for row in record.hold_ups or () if row.kind in HOLD_UPS]
    last_ns = begin_ns
    for row in sorted(known, key=attrgetter("start_ns")):
        start_ns = max(row.start_ns, begin_ns if row.kind == "descheduled" else last_ns)
        stop_ns = min(row.start_ns + row.ns, end_ns)
        if stop_ns > start_ns:
            yield start_ns, stop_ns - start_ns, row
            if row.kind != "descheduled":
                last_ns = stop_ns


def with_hold_ups(pieces: list[Piece], record: wire.StepRecord) -> list[Piece]:
    """Cut what held up the engine before a step out of the pieces of that time."""
    if not record.hold_ups:
        return pieces
    found = []
    for piece in pieces:
        begin_ns, end_ns = piece.start_ns, piece.start_ns + piece.ns
        is_work = piece.cause not in ("between", "idle")
        for start_ns, ns, row in () if is_work else _hold_ups(record, begin_ns, end_ns):
            stop_ns, start_ns = start_ns + ns, max(start_ns, begin_ns)
            if stop_ns > start_ns and (piece.cause, row.kind) != ("idle", "gc_elsewhere"):
                cause, ns = HOLD_UPS[row.kind], stop_ns - start_ns
                found.append(piece._replace(start_ns=begin_ns, ns=start_ns - begin_ns))
                found.append(Piece(cause, start_ns, ns, record.step, detail=row.detail))
                begin_ns = stop_ns
        found.append(piece._replace(start_ns=begin_ns, ns=end_ns - begin_ns))
    return [piece for piece in found if piece.ns]


@dataclass(slots=True, eq=False)
class Wait:
    """The current wait of a request for its next token.

    `pieces` are the parts from `start_ns` to `covered_ns`, with one cause each.
    """

    status: WaitStatus
    start_ns: int | None  # None: unknown, because it was first seen while running
    num_output: int = 0  # tokens before this wait
    pieces: list[Piece] = field(default_factory=list)
    held: str = ""  # why the engine holds the request back; then it waits for nothing else
    preempted_for: str = ""  # empty: its blocks were needed
    num_before: int = 0  # pieces from before `queued_ns`
    queued_ns: int | None = field(init=False)  # when it came into the queue last, if that is known
    covered_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.queued_ns = self.start_ns if self.status == "waiting" else None
        self.covered_ns = 0 if self.start_ns is None else self.start_ns

    def add(self, piece: Piece, end_ns: int) -> None:
        """Explain the time up to `end_ns` with `piece`, and a hole before it as `unknown`."""
        if piece.start_ns > self.covered_ns:
            self.pieces.append(
                Piece("unknown", self.covered_ns, piece.start_ns - self.covered_ns, piece.step)
            )
            self.covered_ns = piece.start_ns
        if end_ns > self.covered_ns:
            if piece.start_ns != self.covered_ns or piece.ns != end_ns - self.covered_ns:
                piece = piece._replace(start_ns=self.covered_ns, ns=end_ns - self.covered_ns)
            self.pieces.append(piece)
            self.covered_ns = end_ns

    def add_step(self, piece: Piece, span: StepSpan) -> None:
        """Explain the time of a step: `piece` for its work, then what held it up."""
        self.add(piece, span.work_end_ns)
        for each in span.excess:
            self.add(each, each.start_ns + each.ns)

    def fill(self, spans: Iterable[Piece], until_ns: int, step: int) -> None:
        """Explain the rest up to `until_ns` with `spans`. Holes between them become `unknown`."""
        is_out, held = self.status == "out", self.held
        pieces = self.pieces
        for span in spans:
            if held and (span.cause in _OTHERS or span.cause in HOLD_UPS):
                span = span._replace(cause="queued", detail=held)
            if is_out and span.cause == "queued":
                span = span._replace(cause="preempted")
            begin_ns, ns = span.start_ns, span.ns
            if begin_ns == self.covered_ns and 0 < ns <= until_ns - begin_ns:  # nearly always
                pieces.append(span)
                self.covered_ns = begin_ns + ns
            else:
                self.add(span, min(begin_ns + ns, until_ns))
        if self.covered_ns < until_ns:
            self.add(Piece("unknown", self.covered_ns, 0, step), until_ns)


def prefills_of(record: wire.StepRecord) -> list[wire.BatchRow]:
    """The rows of a step that are not decodes, the largest first."""
    rows = [row for row in record.batch or () if row.phase != _DECODE]
    return sorted(rows, key=attrgetter("num_tokens"), reverse=True)


def loads_of(record: wire.StepRecord, start_ns: int) -> list[Piece]:
    """Pieces for the time in which a step copied in the KV blocks of handed-over requests."""
    pieces = []
    for event in record.events:
        if isinstance(event, wire.Admitted) and event.load_ns:
            pieces.append(_loaded(event, record, start_ns)._replace(ns=event.load_ns))
            start_ns += event.load_ns
    return pieces


def _load_in(record: wire.StepRecord) -> wire.Admitted | None:
    loads = [
        event
        for event in record.events
        if isinstance(event, wire.Admitted)
        and event.num_loaded_tokens
        and not (event.load_ns or event.is_loaded_early)
    ]
    return max(loads, key=lambda event: event.num_loaded_tokens, default=None)


def _loaded(load: wire.Admitted, record: wire.StepRecord, start_ns: int) -> Piece:
    return Piece(
        *("transfer", start_ns, 0, record.step, 1, "load"),
        request_id=load.request_id,
        num_tokens=load.num_loaded_tokens,
    )


def own(
    row: wire.BatchRow,
    record: wire.StepRecord,
    prefills: list[wire.BatchRow],
    load: wire.Admitted | None,
    start_ns: int,
) -> Piece:
    """What a request with a row in a step waited for; `load`: see `StepSpan`."""
    step = record.step
    if load is not None and (row.phase == _DECODE or row.request_id == load.request_id):
        return _loaded(load, record, start_ns)
    if row.phase == _RECOMPUTE:
        return Piece("recompute", start_ns, 0, step, 1, num_tokens=row.num_tokens)
    if row.phase != _DECODE:
        return Piece("prompt", start_ns, 0, step, 1, num_tokens=row.num_tokens)
    if not prefills:
        return Piece("step", start_ns, 0, step, 1)
    return _beside("prefill", prefills, start_ns, step)


def _beside(
    cause: Literal["prefill", "budget", "left_out"],
    prefills: list[wire.BatchRow],
    start_ns: int,
    step: int,
    detail: str = "",
) -> Piece:
    if not prefills:
        return Piece(cause, start_ns, 0, step, 1, detail)
    largest = prefills[0]
    others = sum(row.num_tokens for row in prefills[1:])
    return Piece(
        cause, start_ns, 0, step, 1, detail, largest.request_id, largest.num_tokens, others
    )


def left_out(record: wire.StepRecord, prefills: list[wire.BatchRow], start_ns: int) -> Piece:
    """Why a running request without a row in a step had to wait for that step, as a piece."""
    budget = record.token_budget
    spent = record.num_prefill_tokens + record.num_decode_tokens + (record.num_padded_tokens or 0)
    if budget is not None and spent >= budget:
        return _beside("budget", prefills, start_ns, record.step)
    if record.held_prefills:
        return Piece("left_out", start_ns, 0, record.step, 1, "cadence")
    detail = "" if record.num_decode_tokens else "prompts"
    return _beside("left_out", prefills, start_ns, record.step, detail)


def blocking_reason(record: wire.StepRecord) -> str:
    """What blocked the queue in a step: "" if unpublished, "step" if nobody waited as it began."""
    reasons = record.waiting_reasons
    if reasons is None:
        return ""
    common = {reason: count for reason, count in reasons.items() if reason not in HELD_FOR}
    blocking = {reason: count for reason, count in common.items() if reason != "queued"}
    if len(blocking) > 1:
        blocking.pop("encoder", None)  # vLLM 0.33 passes over those that wait for it
    return max(blocking, key=blocking.__getitem__, default="queued" if common else "step")


def wait_of(view: wire.RequestView | None) -> Wait:
    """The current wait of a request. Its start is None if that is unknown."""
    if view is None or view.status == "finished":  # it was not seen to arrive
        return Wait("running", None)
    start_ns = view.last_token_ns
    if start_ns is None and not view.is_partial:
        start_ns = view.arrival_ns
    status: WaitStatus = "out" if view.status == "preempted" else view.status
    return Wait(status, start_ns, view.num_output_tokens, held=view.held)


def without_step(
    pauses: PauseTrail, begin_ns: int, end_ns: int, step: int, *, had_work: bool
) -> list[Piece]:
    """Pieces for the time before `step` in which no step ran."""
    cause: Literal["between", "idle"] = "between" if had_work else "idle"
    spans = []
    for pause_ns, resume_ns in pauses.parts(begin_ns, end_ns):
        if pause_ns > begin_ns:
            spans.append(Piece(cause, begin_ns, pause_ns - begin_ns, step))
        spans.append(Piece("paused", pause_ns, resume_ns - pause_ns, step))
        begin_ns = resume_ns
    if begin_ns < end_ns:
        spans.append(Piece(cause, begin_ns, end_ns - begin_ns, step))
    return spans
