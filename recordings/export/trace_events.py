"""Converts a session to tracks of slices, counters and arrows, as trace viewers draw them.

The steps are slices on one track. Requests are drawn on slots, one track each, like the lanes of
the dashboard. When a step first computes a request, the request gets the lowest free slot and keeps
it until it ends or is preempted. This time is a slice, with prefill chunks and decoding as slices
inside. An arrow leads from the arrival of a request to its first token.

Export to Perfetto's protobuf trace, for ui.perfetto.dev. Needs the package perfetto.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import IO, Any, Literal, NamedTuple

from stepscope.engine.protocol import wire
from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.output import missing
from stepscope.recordings.state.session import SessionState, request_name

Kind = Literal["track", "counter", "begin", "end", "instant", "value"]

ROOT, STEPS, ARRIVALS, OPERATOR = 1, 2, 3, 4  # ids of tracks; slots come after the counters
FIRST_COUNTER, FIRST_SLOT = 100, 1000
_COUNTERS = (
    ("tokens scheduled", "tokens"),
    ("token budget", "tokens"),
    ("KV blocks used", "blocks"),
    ("KV blocks cached", "blocks"),
    ("KV blocks empty", "blocks"),
    ("requests running", "requests"),
    ("requests waiting", "requests"),
)
MARKER_NS = 1000  # length of the slices at the ends of arrows, the shortest that is visible


class TraceEvent(NamedTuple):
    """One event on a track.

    `flow`: id of the arrow that starts at this event, or ends here if `ends_flow`.
    """

    kind: Kind
    track: int
    time_ns: int = 0
    name: str = ""
    args: dict[str, Any] | None = None
    flow: int | None = None
    ends_flow: bool = False
    value: int = 0  # value of a counter; for a new track or counter, the id of its parent track
    unit: str = ""


@dataclass(slots=True)
class _Stay:
    slot: int
    is_decoding: bool = False
    decode_ends_ns: int = 0


class Tracer:
    """Converts moments of a recording to trace events, and assigns slots to requests."""

    def __init__(self) -> None:
        self._stays: dict[int, _Stay] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._values: dict[int, int] = {}  # last value of each counter

    def events(self, moments: Iterable[Moment]) -> Iterator[TraceEvent]:
        """Yield all events. Those of one track are in order of time."""
        yield TraceEvent("track", ROOT, name="stepscope")
        for track, name in ((STEPS, "steps"), (ARRIVALS, "arrivals"), (OPERATOR, "operator")):
            yield TraceEvent("track", track, name=name, value=ROOT)
        for number, (name, unit) in enumerate(_COUNTERS):
            yield TraceEvent("counter", FIRST_COUNTER + number, name=name, value=ROOT, unit=unit)
        last_ns = 0
        for moment in moments:
            message = moment.message
            if isinstance(message, wire.StepRecord):
                yield from self._step(message, moment.state)
                last_ns = message.tokens_ns
            elif isinstance(message, wire.EngineStatus):
                yield from self._ends(message.events, message.time_ns)
                yield from self._arrivals(message)
            elif isinstance(message, wire.KnobsChanged):
                changes = {
                    name: f"{message.old.get(name)} -> {v}" for name, v in message.new.items()
                }
                text = ", ".join(f"{name} {value}" for name, value in changes.items())
                args = {**changes, "who": message.who, "effective_step": message.effective_step}
                yield TraceEvent("instant", OPERATOR, message.time_ns, text or "knobs", args)
            elif isinstance(message, wire.Mark):
                yield TraceEvent("instant", OPERATOR, message.time_ns, message.text or "mark")
        for request_id in list(self._stays):
            yield from self._leave(request_id, last_ns)

    def _step(self, record: wire.StepRecord, state: SessionState) -> Iterator[TraceEvent]:
        start_ns, end_ns = record.schedule_start_ns, record.tokens_ns
        yield from self._arrivals(record)
        # Preempted requests leave their slots before the rows of this step get theirs.
        preempted = [event for event in record.events if isinstance(event, wire.Preempted)]
        yield from self._ends(preempted, start_ns)
        num_tokens = record.num_prefill_tokens + record.num_decode_tokens
        args = {
            "prefill": record.num_prefill_tokens,
            "decode": record.num_decode_tokens,
            "running": record.num_running,
            "waiting": record.num_waiting,
        }
        yield TraceEvent("begin", STEPS, start_ns, f"step {record.step}", args)
        for name, begin_ns, until_ns in (
            ("schedule", start_ns, record.schedule_end_ns),
            ("model", record.launch_ns, end_ns),
        ):
            if begin_ns is not None and until_ns is not None:
                yield TraceEvent("begin", STEPS, begin_ns, name)
                yield TraceEvent("end", STEPS, until_ns)
        yield TraceEvent("end", STEPS, end_ns)
        for row in record.batch or ():
            yield from self._row(row, state, start_ns, end_ns)
        kv = record.kv
        yield from self._counters(
            start_ns,
            (
                num_tokens,
                record.token_budget,
                *((None,) * 3 if kv is None else (kv.used, kv.cached, kv.empty)),
                record.num_running,
                record.num_waiting,
            ),
        )
        ends = [event for event in record.events if not isinstance(event, wire.Preempted)]
        yield from self._ends(ends, end_ns)

    def _row(
        self, row: wire.BatchRow, state: SessionState, start_ns: int, end_ns: int
    ) -> Iterator[TraceEvent]:
        stay = self._stays.get(row.request_id)
        if stay is None:
            if not self._free:
                slot, self._num_slots = self._num_slots, self._num_slots + 1
                heappush(self._free, slot)
                yield TraceEvent("track", FIRST_SLOT + slot, name=f"slot {slot:3}", value=ROOT)
            stay = self._stays[row.request_id] = _Stay(heappop(self._free))
            yield self._seated(row, state, stay, start_ns)
        track = FIRST_SLOT + stay.slot
        if row.phase == wire.Phase.DECODE:
            if not stay.is_decoding:
                stay.is_decoding = True
                yield TraceEvent("begin", track, start_ns, "decode")
            stay.decode_ends_ns = end_ns
            return
        yield from self._stop_decoding(stay)
        name = "recompute" if row.phase == wire.Phase.RECOMPUTE else "prefill"
        args = {"start": row.start, "tokens": row.num_tokens, "cached": row.num_hit_tokens}
        yield TraceEvent("begin", track, start_ns, f"{name} {row.num_tokens}", args)
        if row.flags & wire.RowFlag.FIRST_TOKEN:
            flow = row.request_id + 1
            begin_ns = max(start_ns, end_ns - MARKER_NS)
            yield TraceEvent("begin", track, begin_ns, "first token", flow=flow, ends_flow=True)
            yield TraceEvent("end", track, end_ns)
        yield TraceEvent("end", track, end_ns)

    def _seated(
        self, row: wire.BatchRow, state: SessionState, stay: _Stay, start_ns: int
    ) -> TraceEvent:
        view = state.requests.get(row.request_id)
        args: dict[str, Any] = {"request_id": row.request_id}
        name = request_name(row.request_id)
        if view is not None and not view.is_partial:
            name = f"{name} {view.client_id}"
            args |= {"client_id": view.client_id, "prompt_tokens": view.num_prompt_tokens}
        return TraceEvent("begin", FIRST_SLOT + stay.slot, start_ns, name, args)

    def _arrivals(self, message: wire.StepRecord | wire.EngineStatus) -> Iterator[TraceEvent]:
        for event in message.events:
            if isinstance(event, wire.Arrived):
                name = f"{request_name(event.request_id)} {event.client_id}"
                args = {"prompt_tokens": event.num_prompt_tokens, "max_tokens": event.max_tokens}
                flow = event.request_id + 1
                yield TraceEvent("begin", ARRIVALS, event.time_ns, name, args, flow)
                yield TraceEvent("end", ARRIVALS, event.time_ns + MARKER_NS)

    def _ends(self, events: Iterable[object], time_ns: int) -> Iterator[TraceEvent]:
        for event in events:
            if isinstance(event, wire.Finished | wire.Aborted | wire.Preempted):
                yield from self._leave(event.request_id, time_ns)

    def _leave(self, request_id: int, time_ns: int) -> Iterator[TraceEvent]:
        stay = self._stays.pop(request_id, None)
        if stay is None:
            return
        yield from self._stop_decoding(stay)
        yield TraceEvent("end", FIRST_SLOT + stay.slot, max(time_ns, stay.decode_ends_ns))
        heappush(self._free, stay.slot)

    def _stop_decoding(self, stay: _Stay) -> Iterator[TraceEvent]:
        if stay.is_decoding:
            stay.is_decoding = False
            yield TraceEvent("end", FIRST_SLOT + stay.slot, stay.decode_ends_ns)

    def _counters(self, time_ns: int, values: tuple[int | None, ...]) -> Iterator[TraceEvent]:
        for number, value in enumerate(values):
            track = FIRST_COUNTER + number
            if value is not None and self._values.get(track) != value:
                self._values[track] = value
                yield TraceEvent("value", track, time_ns, value=value)


_SEQUENCE = 1  # one writer
_CLOCK_MONOTONIC = 3


def write_perfetto(moments: Iterable[Moment], stream: IO[bytes]) -> int:
    """Write a trace. Returns the number of packets. Times are engine time (monotonic clock).

    Raises MissingPackage: the package perfetto is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
            CounterDescriptor,
            TracePacket,
            TrackDescriptor,
            TrackEvent,
        )
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise missing("perfetto", "perfetto") from error

    types = {
        "begin": TrackEvent.TYPE_SLICE_BEGIN,
        "end": TrackEvent.TYPE_SLICE_END,
        "instant": TrackEvent.TYPE_INSTANT,
        "value": TrackEvent.TYPE_COUNTER,
    }
    builder = StreamingTraceProtoBuilder(stream)
    first = TracePacket()
    first.trusted_packet_sequence_id = _SEQUENCE
    first.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.first_packet_on_sequence = True
    builder.write_packet(first)
    count = 1
    for event in Tracer().events(moments):
        packet = TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.timestamp_clock_id = _CLOCK_MONOTONIC
        if event.kind in ("track", "counter"):
            track = packet.track_descriptor
            track.uuid = event.track
            track.name = event.name
            if event.value:
                track.parent_uuid = event.value
                track.sibling_order_rank = event.track
            else:
                track.child_ordering = TrackDescriptor.EXPLICIT
            if event.kind == "counter":
                track.counter.CopyFrom(CounterDescriptor(unit_name=event.unit))
        else:
            packet.timestamp = event.time_ns
            _fill(packet.track_event, event, types[event.kind])
        builder.write_packet(packet)
        count += 1
    return count


def _fill(track_event: Any, event: TraceEvent, kind: Any) -> None:
    track_event.type = kind
    track_event.track_uuid = event.track
    if event.kind == "value":
        track_event.counter_value = event.value
        return
    if event.name:
        track_event.name = event.name
    if event.flow is not None:
        (track_event.terminating_flow_ids if event.ends_flow else track_event.flow_ids).append(
            event.flow
        )
    for name, value in (event.args or {}).items():
        annotation = track_event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = str(value)
