"""Tables of a session: its steps, the rows of their batches, its requests; as CSV and Parquet.

CSV has a header line, and unknown values are empty.
"""

import codecs
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire_events import Aborted, Finished
from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.output import MissingPackage
from stepscope.recordings.state.latency_samples import RequestWatch
from stepscope.recordings.state.limits import LIMITS, UNKNOWN, Limit, limit_of

Table: TypeAlias = Literal["steps", "rows", "requests"]
TABLES: tuple[Table, ...] = ("steps", "rows", "requests")
TABLE_FORMATS = ("csv", "parquet")


class ExportColumn(NamedTuple):
    """A column of a table, and how to get its value; None if that is unknown."""

    name: str
    value: Callable[[Any], Any]
    kind: Literal["int", "float", "bool", "text"] = "int"


class _Row(NamedTuple):
    moment: Moment
    row: wire.BatchRow
    drafts: Sequence[wire.DraftRow]

    def has(self, flag: wire.RowFlag) -> bool:
        return bool(self.row.flags & flag)


class _Ended(NamedTuple):
    view: wire.RequestView
    moment: Moment
    longest_ns: int | None  # gap between two tokens; None if its first token was not seen

    def said(self, name: str) -> Any:
        """Return what the arrival says; None if that was not seen."""
        return None if self.view.is_partial else getattr(self.view, name)

    def ms(self, start_ns: int | None, end_ns: int | None, num: int = 1) -> float | None:
        """A time without pauses, divided by `num`; None if pauses are not known, or an end."""
        moment = self.moment
        if start_ns is None or end_ns is None or start_ns < moment.since_ns or num < 1:
            return None
        return (end_ns - start_ns - moment.state.pauses.within(start_ns, end_ns)) / 1e6 / num

    @property
    def arrival_wall_ns(self) -> int | None:
        return None if self.view.is_partial else self.view.arrival_ns + self.moment.offset_ns

    @property
    def tpot_ms(self) -> float | None:
        view = self.view
        return self.ms(view.first_token_ns, view.last_token_ns, view.num_output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        is_over = self.view.status == "finished"
        return self.ms(self.said("arrival_ns"), self.view.last_token_ns) if is_over else None


def _of(part: str, *names: str) -> Iterator[ExportColumn]:
    return (ExportColumn(name, attrgetter(f"{part}.{name}")) for name in names)


def _sum(drafts: Sequence[wire.DraftRow] | None, name: str) -> int | None:
    return sum(getattr(each, name) for each in drafts) if drafts else None


def _kv(name: str) -> ExportColumn:
    return ExportColumn(f"kv_{name}", lambda step: getattr(step.message.kv, name, None))


def _limited_by(step: Moment) -> Limit | None:
    record, outcome = step.message, step.outcome
    assert isinstance(record, wire.StepRecord)
    assert outcome is not None
    place = limit_of(record, outcome)
    return None if place == UNKNOWN else LIMITS[place]


def _simulated(of: Callable[[Any], Any]) -> ExportColumn:
    return ExportColumn("simulated", lambda it: of(it).state.info.simulated is not None, "bool")


_PHASES = {int(phase): phase.name.lower() for phase in wire.Phase}
COLUMNS: dict[Table, tuple[ExportColumn, ...]] = {
    "steps": (
        *_of("message", "step"),
        ExportColumn("wall_ns", lambda step: step.message.tokens_ns + step.offset_ns),
        ExportColumn("after_gap", attrgetter("after_gap"), "bool"),
        *_of("message", "schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns"),
        *_of("message", "device_ns", "knobs_version", "token_budget", "max_num_seqs"),
        *_of("message", "num_prefill_tokens"),
        *_of("outcome", "num_recomputed_tokens"),
        *_of("message", "num_decode_tokens", "num_padded_tokens"),
        *_of("outcome", "num_cached_tokens", "num_output_tokens"),
        ExportColumn(
            "num_rows", lambda step: None if step.message.batch is None else len(step.message.batch)
        ),
        *_of("message", "num_running", "num_waiting"),
        *_of("outcome", "num_arrived", "num_finished", "num_preempted"),
        *(_kv(name) for name in ("used", "cached", "empty", "evicted")),
        ExportColumn("queried_tokens", attrgetter("outcome.num_queried_tokens")),
        ExportColumn("hit_tokens", attrgetter("outcome.num_hit_tokens")),
        ExportColumn("max_itl_ns", attrgetter("outcome.max_gap_ns")),
        *_of("message", "hidden_ns", "num_wasted_tokens", "token_limit"),
        # Draft tokens of n-gram speculation; None without drafts.
        ExportColumn("num_drafted_tokens", lambda step: _sum(step.message.drafts, "num_drafted")),
        ExportColumn("num_accepted_tokens", lambda step: _sum(step.message.drafts, "num_accepted")),
        ExportColumn("cuda_graph", attrgetter("message.cuda_graph"), "text"),
        *_of("message", "num_graph_padding"),
        ExportColumn("limited_by", _limited_by, "text"),
        _simulated(lambda step: step),
    ),
    "rows": (
        *_of("moment.message", "step", "tokens_ns"),
        *_of("row", "request_id"),
        ExportColumn("phase", lambda it: _PHASES.get(it.row.phase, str(it.row.phase)), "text"),
        *_of("row", "start", "num_tokens"),
        ExportColumn("num_cached_tokens", attrgetter("row.num_hit_tokens")),
        *_of("row", "num_blocks"),
        ExportColumn("last_chunk", lambda it: it.has(wire.RowFlag.LAST_CHUNK), "bool"),
        ExportColumn("first_token", lambda it: it.has(wire.RowFlag.FIRST_TOKEN), "bool"),
        ExportColumn("resumed", lambda it: it.has(wire.RowFlag.RESUMED), "bool"),
        ExportColumn("num_drafted_tokens", lambda it: _sum(it.drafts, "num_drafted")),
        ExportColumn("num_accepted_tokens", lambda it: _sum(it.drafts, "num_accepted")),
        _simulated(attrgetter("moment")),
    ),
    "requests": (
        *_of("view", "request_id"),
        ExportColumn("client_id", lambda ended: ended.said("client_id"), "text"),
        ExportColumn("status", attrgetter("view.status"), "text"),
        ExportColumn("finish_reason", attrgetter("view.finish_reason"), "text"),
        ExportColumn("arrival_ns", lambda ended: ended.said("arrival_ns")),
        ExportColumn("arrival_wall_ns", attrgetter("arrival_wall_ns")),
        *_of("view", "first_token_ns", "last_token_ns", "finish_ns", "finish_step"),
        *_of("view", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
        ExportColumn("max_tokens", lambda ended: ended.said("max_tokens")),
        *_of("view", "priority", "num_preemptions"),
        ExportColumn(
            "ttft_ms", lambda it: it.ms(it.said("arrival_ns"), it.view.first_token_ns), "float"
        ),
        ExportColumn("tpot_ms", attrgetter("tpot_ms"), "float"),
        ExportColumn("itl_max_ms", lambda it: it.longest_ns and it.longest_ns / 1e6, "float"),
        ExportColumn("e2e_ms", attrgetter("e2e_ms"), "float"),
        _simulated(attrgetter("moment")),
    ),
}


def table_rows(table: Table, moments: Iterable[Moment]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table, with values in the order of its columns.

    The row of a request comes when the request ends. Requests still live at the end of the range
    come last.
    """
    sources = {"steps": _steps, "rows": _rows, "requests": _requests}
    values = [column.value for column in COLUMNS[table]]
    for each in sources[table](moments):
        yield tuple([value(each) for value in values])


def _steps(moments: Iterable[Moment]) -> Iterable[Moment]:
    return (moment for moment in moments if isinstance(moment.message, wire.StepRecord))


def _rows(moments: Iterable[Moment]) -> Iterator[_Row]:
    for moment in _steps(moments):
        assert isinstance(moment.message, wire.StepRecord)
        drafts = {each.request_id: (each,) for each in moment.message.drafts or ()}
        for row in moment.message.batch or ():
            yield _Row(moment, row, drafts.get(row.request_id, ()))


def _requests(moments: Iterable[Moment]) -> Iterator[_Ended]:
    moment: Moment | None = None
    watch: RequestWatch | None = None
    longest_ns: dict[int, int] = {}  # of requests whose first token was seen
    for moment in moments:
        if watch is None:
            watch = RequestWatch(0.0, moment.state)
        if isinstance(moment.message, wire.StepRecord) and moment.outcome is not None:
            watch.take(moment.outcome, moment.state, moment.message.tokens_ns)
            longest_ns |= dict.fromkeys((each for each, _ in moment.outcome.ttft_ns), 0)
            longest_ns |= {each: ns for each, ns in moment.outcome.longer if each in longest_ns}
        for event in getattr(moment.message, "events", ()):
            if isinstance(event, Finished | Aborted):
                view = moment.state.requests.get(event.request_id)
                if view is not None and view.status == "finished":
                    yield _Ended(view, moment, longest_ns.pop(event.request_id, 0) or None)
    if moment is not None:
        for view in moment.state.requests.values():
            if view.status != "finished":
                yield _Ended(view, moment, longest_ns.get(view.request_id, 0) or None)


def write_csv(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows."""
    writer = csv.writer(codecs.getwriter("utf-8")(stream))
    writer.writerow(column.name for column in COLUMNS[table])
    count = 0
    for row in table_rows(table, moments):
        writer.writerow(row)
        count += 1
    return count


ROW_GROUP = 64 * 1024  # rows


def write_parquet(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackage("pyarrow", "parquet") from error

    kinds: dict[str, Any] = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "text": pyarrow.string(),
    }
    columns = COLUMNS[table]
    schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
    count = 0
    rows = table_rows(table, moments)
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROW_GROUP)):
            arrays = [
                pyarrow.array(values, kinds[column.kind])
                for column, values in zip(columns, zip(*group, strict=True), strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(group)
    return count
