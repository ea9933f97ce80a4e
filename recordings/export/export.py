"""`export`: writes a recording, or a range of it, into a file of another format.

Export to JSON lines: every message as the engine sent it, its number and wall-clock time.

Export to Perfetto's protobuf trace, for ui.perfetto.dev; needs the package perfetto. The steps are
slices on one track. Requests are drawn on slots, one track each, like the lanes of the dashboard.
When a step first computes a request, the request gets the lowest free slot and keeps it until it
ends or is preempted. This time is a slice, with prefill chunks and decoding as slices inside. An
arrow leads from the arrival of a request to its first token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.engine.protocol import wire
from stepscope.recordings.check.strip import stripped
from stepscope.recordings.export.moments import Moment, Progress, moments
from stepscope.recordings.export.mooncake import MooncakeWriter, write_mooncake
from stepscope.recordings.export.output import MissingPackage, writing
from stepscope.recordings.export.tables import Table, write_csv, write_parquet
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.state.session import SessionState, request_name

Format: TypeAlias = Literal["perfetto", "parquet", "csv", "jsonl", "mooncake"]
FORMATS: tuple[Format, ...] = get_args(Format)


class Exported(NamedTuple):
    """What an export has written: how many of which unit (rows, lines, ...), and notes to show."""

    num_written: int
    unit: str
    notes: tuple[str, ...] = ()


def export(
    recording: Recording,
    output: Path,
    target: Format,
    steps: StepRange,
    table: Table,
    progress: Progress,
    *,
    with_tokens: bool = False,
) -> Exported:
    """Write a recording, or a range of its steps, to `output` in another format.

    If an error occurs, no file is left.

    `with_tokens`: also write prompts and outputs, which only jsonl can contain. Then only the owner
    may read the file.

    Raises:
        RecordingError: `output` exists or cannot be written, or no step is in the range.
        MissingPackage: the format needs a package that is not installed.
    """
    with writing(output, is_private=with_tokens and recording.info.with_tokens) as stream:
        source = moments(recording, steps, progress)
        match target:
            case "perfetto":
                return Exported(_Tracer(_Packets(stream)).trace(source), "packets")
            case "parquet":
                return Exported(write_parquet(source, stream, table), table)
            case "csv":
                return Exported(write_csv(source, stream, table), table)
            case "jsonl":
                count = write_jsonl(source, stream, with_tokens=with_tokens)
                kept = "are in it" if with_tokens else "are left out (--with-tokens keeps them)"
                said = f"the prompts and outputs of the recording {kept}"
                return Exported(count, "messages", (said,) if recording.info.with_tokens else ())
            case "mooncake":
                written = write_mooncake(source, stream, recording.info.block_size)
                return Exported(written.num_lines, "requests", _mooncake_notes(written))


def _mooncake_notes(written: MooncakeWriter) -> tuple[str, ...]:
    book = written.reader.book
    notes = [
        "no tokens are looked at: hash_ids are equal where the engine's prefix cache showed "
        f"it ({book.num_hits:,} hits, {book.num_unknown:,} of unknown origin), and "
        "unique elsewhere"
    ]
    for count, what in (
        (len(written.reader.begun), "arrived before the first step of the range: left out"),
        (written.num_without_output, "got no token: left out"),
        (written.num_unfinished, "did not finish: with the tokens they had by then"),
    ):
        if count:
            notes.append(f"{count:,} requests {what}")
    return tuple(notes)


# JSON lines


def write_jsonl(moments: Iterable[Moment], stream: IO[bytes], *, with_tokens: bool) -> int:
    """Write the messages; rows of a batch are lists. Returns the number of lines."""
    count = 0
    for moment in moments:
        message = moment.message if with_tokens else stripped(moment.message)
        time_ns = getattr(message, "tokens_ns", None) or getattr(message, "time_ns", None)
        line = {
            "sequence": moment.sequence,
            "topic": message.topic.decode(),
            "wall_ns": None if time_ns is None else time_ns + moment.offset_ns,
            "message": message,
        }
        stream.write(msgspec.json.encode(line) + b"\n")
        count += 1
    return count


# Perfetto

ROOT, STEPS, ARRIVALS, OPERATOR = 1, 2, 3, 4  # ids of tracks; slots come after the counters
FIRST_COUNTER, FIRST_SLOT = 100, 1000
_COUNTERS = {
    "tokens scheduled": "tokens", "token budget": "tokens", "KV blocks used": "blocks",
    "KV blocks cached": "blocks", "KV blocks empty": "blocks", "requests running": "requests",
    "requests waiting": "requests",
}  # fmt: skip
MARKER_NS = 1000  # length of the slices at the ends of arrows, the shortest that is visible
_CLOCK_MONOTONIC = 3


class _Packets:
    def __init__(self, stream: IO[bytes]) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2
            from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
        except ImportError as error:
            raise MissingPackage("perfetto", "perfetto") from error
        self.number = 0
        self._protos: Any = perfetto_trace_pb2
        self._builder = StreamingTraceProtoBuilder(stream)
        first = self._protos.TracePacket()
        first.sequence_flags = first.SEQ_INCREMENTAL_STATE_CLEARED
        first.first_packet_on_sequence = True
        self._write(first)

    def track(self, track: int, name: str, unit: str | None = None) -> None:
        """Add a track; with a unit, that of a counter."""
        packet = self._protos.TracePacket(timestamp_clock_id=_CLOCK_MONOTONIC)
        told = packet.track_descriptor
        told.uuid, told.name = track, name
        if track == ROOT:
            told.child_ordering = told.EXPLICIT
        else:
            told.parent_uuid, told.sibling_order_rank = ROOT, track
        if unit is not None:
            told.counter.unit_name = unit
        self._write(packet)

    def begin(
        self, track: int, time_ns: int, name: str, args: Mapping[str, Any] = {}, **flow: Any
    ) -> None:
        """Begin a slice; an arrow begins at it (`flow_ids`) or ends (`terminating_flow_ids`)."""
        self.event("TYPE_SLICE_BEGIN", track, time_ns, args, name=name, **flow)

    def end(self, track: int, time_ns: int) -> None:
        self.event("TYPE_SLICE_END", track, time_ns)

    def event(
        self, kind: str, track: int, time_ns: int, args: Mapping[str, Any] = {}, **more: Any
    ) -> None:
        packet = self._protos.TracePacket(timestamp_clock_id=_CLOCK_MONOTONIC, timestamp=time_ns)
        event = self._protos.TrackEvent(track_uuid=track, **more)
        event.type = getattr(event, kind)
        for key, value in args.items():
            given = {"int_value" if isinstance(value, int) else "string_value": value}
            event.debug_annotations.add(name=key, **given)
        packet.track_event.CopyFrom(event)
        self._write(packet)

    def _write(self, packet: Any) -> None:
        packet.trusted_packet_sequence_id = 1  # one writer
        self._builder.write_packet(packet)
        self.number += 1


@dataclass(slots=True)
class _Stay:
    track: int
    is_decoding: bool = False
    decode_ends_ns: int = 0


class _Tracer:
    """Writes a trace of the moments of a recording, and assigns slots to requests."""

    def __init__(self, packets: _Packets) -> None:
        self._packets = packets
        self._stays: dict[int, _Stay] = {}
        self._free: list[int] = []  # tracks of slots
        self._num_slots = 0
        self._values: dict[int, int] = {}  # last value of each counter

    def trace(self, moments: Iterable[Moment]) -> int:
        """Write the moments. Returns the number of packets. Times are engine time (monotonic)."""
        packets, last_ns = self._packets, 0
        names = {ROOT: "stepscope", STEPS: "steps", ARRIVALS: "arrivals", OPERATOR: "operator"}
        for track, name in names.items():
            packets.track(track, name)
        for track, (name, unit) in enumerate(_COUNTERS.items(), FIRST_COUNTER):
            packets.track(track, name, unit)
        for moment in moments:
            message = moment.message
            if isinstance(message, wire.StepRecord):
                self._step(message, moment.state)
                last_ns = message.tokens_ns
            elif isinstance(message, wire.EngineStatus):
                self._ends(message.events, message.time_ns)
                self._arrivals(message)
            elif isinstance(message, wire.KnobsChanged):
                changes = {
                    name: f"{message.old.get(name)} -> {v}" for name, v in message.new.items()
                }
                text = ", ".join(f"{name} {value}" for name, value in changes.items())
                args = {**changes, "who": message.who, "effective_step": message.effective_step}
                at_ns, name = message.time_ns, text or "knobs"
                packets.event("TYPE_INSTANT", OPERATOR, at_ns, args, name=name)
            elif isinstance(message, wire.Mark):
                at_ns, name = message.time_ns, message.text or "mark"
                packets.event("TYPE_INSTANT", OPERATOR, at_ns, name=name)
        for request_id in list(self._stays):
            self._leave(request_id, last_ns)
        return packets.number

    def _step(self, record: wire.StepRecord, state: SessionState) -> None:
        packets, start_ns, end_ns = self._packets, record.schedule_start_ns, record.tokens_ns
        self._arrivals(record)
        # Preempted requests leave their slots before the rows of this step get theirs.
        self._ends([e for e in record.events if isinstance(e, wire.Preempted)], start_ns)
        names = ("num_prefill_tokens", "num_decode_tokens", "num_running", "num_waiting")
        args = {name.split("_")[1]: getattr(record, name) for name in names}
        packets.begin(STEPS, start_ns, f"step {record.step}", args)
        for name, begin_ns, until_ns in (
            ("schedule", start_ns, record.schedule_end_ns),
            ("model", record.launch_ns, end_ns),
        ):
            if begin_ns is not None and until_ns is not None:
                packets.begin(STEPS, begin_ns, name)
                packets.end(STEPS, until_ns)
        packets.end(STEPS, end_ns)
        for row in record.batch or ():
            self._row(row, state, start_ns, end_ns)
        kv, num_tokens = record.kv, record.num_prefill_tokens + record.num_decode_tokens
        blocks = (None,) * 3 if kv is None else (kv.used, kv.cached, kv.empty)
        values = num_tokens, record.token_budget, *blocks, record.num_running, record.num_waiting
        for track, value in enumerate(values, FIRST_COUNTER):
            if value is not None and self._values.get(track) != value:
                self._values[track] = value
                packets.event("TYPE_COUNTER", track, start_ns, counter_value=value)
        self._ends([e for e in record.events if not isinstance(e, wire.Preempted)], end_ns)

    def _row(self, row: wire.BatchRow, state: SessionState, start_ns: int, end_ns: int) -> None:
        packets = self._packets
        stay = self._stays.get(row.request_id) or self._seated(row.request_id, state, start_ns)
        if row.phase == wire.Phase.DECODE:
            if not stay.is_decoding:
                stay.is_decoding = True
                packets.begin(stay.track, start_ns, "decode")
            stay.decode_ends_ns = end_ns
            return
        self._stop_decoding(stay)
        name = "recompute" if row.phase == wire.Phase.RECOMPUTE else "prefill"
        args = {"start": row.start, "tokens": row.num_tokens, "cached": row.num_hit_tokens}
        packets.begin(stay.track, start_ns, f"{name} {row.num_tokens}", args)
        if row.flags & wire.RowFlag.FIRST_TOKEN:
            flow, begin_ns = [row.request_id + 1], max(start_ns, end_ns - MARKER_NS)
            packets.begin(stay.track, begin_ns, "first token", terminating_flow_ids=flow)
            packets.end(stay.track, end_ns)
        packets.end(stay.track, end_ns)

    def _seated(self, request_id: int, state: SessionState, start_ns: int) -> _Stay:
        if not self._free:
            heappush(self._free, FIRST_SLOT + self._num_slots)
            self._packets.track(self._free[0], f"slot {self._num_slots:3}")
            self._num_slots += 1
        stay = self._stays[request_id] = _Stay(heappop(self._free))
        view = state.requests.get(request_id)
        args: dict[str, Any] = {"request_id": request_id}
        name = request_name(request_id)
        if view is not None and not view.is_partial:
            name = f"{name} {view.client_id}"
            args |= {"client_id": view.client_id, "prompt_tokens": view.num_prompt_tokens}
        self._packets.begin(stay.track, start_ns, name, args)
        return stay

    def _arrivals(self, message: wire.StepRecord | wire.EngineStatus) -> None:
        for event in message.events:
            if isinstance(event, wire.Arrived):
                name = f"{request_name(event.request_id)} {event.client_id}"
                args = {"prompt_tokens": event.num_prompt_tokens, "max_tokens": event.max_tokens}
                at_ns, flow = event.time_ns, [event.request_id + 1]
                self._packets.begin(ARRIVALS, at_ns, name, args, flow_ids=flow)
                self._packets.end(ARRIVALS, at_ns + MARKER_NS)

    def _ends(self, events: Iterable[object], time_ns: int) -> None:
        for event in events:
            if isinstance(event, wire.Finished | wire.Aborted | wire.Preempted):
                self._leave(event.request_id, time_ns)

    def _leave(self, request_id: int, time_ns: int) -> None:
        if (stay := self._stays.pop(request_id, None)) is not None:
            self._stop_decoding(stay)
            self._packets.end(stay.track, max(time_ns, stay.decode_ends_ns))
            heappush(self._free, stay.track)

    def _stop_decoding(self, stay: _Stay) -> None:
        if stay.is_decoding:
            stay.is_decoding = False
            self._packets.end(stay.track, stay.decode_ends_ns)
