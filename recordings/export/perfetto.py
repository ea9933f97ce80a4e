"""Export to Perfetto's protobuf trace, for ui.perfetto.dev. Needs the package perfetto."""

from collections.abc import Iterable
from typing import IO, Any

from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.output import missing
from stepscope.recordings.export.trace_events import TraceEvent, Tracer

_SEQUENCE = 1  # one writer
_CLOCK_MONOTONIC = 3


def write_perfetto(moments: Iterable[Moment], stream: IO[bytes]) -> int:
    """Write a trace. Returns the number of packets. Times are engine time (monotonic clock).

    Raises:
        MissingPackage: the package perfetto is not installed.
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
