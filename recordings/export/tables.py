"""Tables of a session: its steps, the rows of their batches, its requests; as CSV and Parquet."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import DraftRow, Phase, RequestView, RowFlag, StepRecord
from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.output import missing
from stepscope.recordings.state.outcome import Outcome

Table: TypeAlias = Literal["steps", "rows", "requests"]
TABLES: tuple[Table, ...] = ("steps", "rows", "requests")
TABLE_FORMATS = ("csv", "parquet")


class ExportColumn(NamedTuple):
    """The name and type of a column. Any value may be None if it is unknown."""

    name: str
    kind: Literal["int", "float", "bool", "text"] = "int"


# Draft tokens of n-gram speculation; None without drafts.
_DRAFTS = (ExportColumn("num_drafted_tokens"), ExportColumn("num_accepted_tokens"))
STEP_COLUMNS = (
    ExportColumn("step"),
    ExportColumn("wall_ns"),
    ExportColumn("after_gap", "bool"),
    *(
        ExportColumn(f"{name}_ns")
        for name in ("schedule_start", "schedule_end", "launch", "tokens")
    ),
    ExportColumn("device_ns"),
    ExportColumn("knobs_version"),
    ExportColumn("token_budget"),
    ExportColumn("max_num_seqs"),
    *(ExportColumn(f"num_{name}_tokens") for name in ("prefill", "recomputed", "decode", "padded")),
    *(ExportColumn(f"num_{name}_tokens") for name in ("cached", "output")),
    *(
        ExportColumn(f"num_{name}")
        for name in ("rows", "running", "waiting", "arrived", "finished")
    ),
    ExportColumn("num_preempted"),
    *(ExportColumn(f"kv_{name}") for name in ("used", "cached", "empty", "evicted")),
    ExportColumn("queried_tokens"),
    ExportColumn("hit_tokens"),
    ExportColumn("max_itl_ns"),
    ExportColumn("hidden_ns"),
    ExportColumn("num_wasted_tokens"),
    ExportColumn("token_limit"),
    *_DRAFTS,
    ExportColumn("cuda_graph", "text"),
)
ROW_COLUMNS = (
    ExportColumn("step"),
    ExportColumn("tokens_ns"),
    ExportColumn("request_id"),
    ExportColumn("phase", "text"),
    ExportColumn("start"),
    ExportColumn("num_tokens"),
    ExportColumn("num_cached_tokens"),
    ExportColumn("num_blocks"),
    ExportColumn("last_chunk", "bool"),
    ExportColumn("first_token", "bool"),
    ExportColumn("resumed", "bool"),
    *_DRAFTS,
)
REQUEST_COLUMNS = (
    ExportColumn("request_id"),
    ExportColumn("client_id", "text"),
    ExportColumn("status", "text"),
    ExportColumn("finish_reason", "text"),
    ExportColumn("arrival_ns"),
    ExportColumn("arrival_wall_ns"),
    ExportColumn("first_token_ns"),
    ExportColumn("last_token_ns"),
    ExportColumn("finish_ns"),
    ExportColumn("finish_step"),
    ExportColumn("num_prompt_tokens"),
    ExportColumn("num_cached_tokens"),
    ExportColumn("num_output_tokens"),
    ExportColumn("max_tokens"),
    ExportColumn("priority"),
    ExportColumn("num_preemptions"),
    ExportColumn("ttft_ms", "float"),
    ExportColumn("tpot_ms", "float"),
)
COLUMNS: dict[Table, tuple[ExportColumn, ...]] = {
    "steps": STEP_COLUMNS,
    "rows": ROW_COLUMNS,
    "requests": REQUEST_COLUMNS,
}
_PHASES = {int(phase): phase.name.lower() for phase in Phase}


def table_rows(table: Table, moments: Iterable[Moment]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table, with values in the order of its columns.

    The row of a request comes when the request ends. Requests still live at the end of the range
    come last.
    """
    if table == "requests":
        yield from _requests(moments)
        return
    for moment in moments:
        record, outcome = moment.message, moment.outcome
        if not isinstance(record, StepRecord) or outcome is None:
            continue
        if table == "steps":
            yield _step(record, outcome, moment)
        else:
            yield from _rows(record)


def _step(record: StepRecord, outcome: Outcome, moment: Moment) -> tuple[Any, ...]:
    kv = record.kv
    return (
        record.step,
        record.tokens_ns + moment.offset_ns,
        moment.after_gap,
        record.schedule_start_ns,
        record.schedule_end_ns,
        record.launch_ns,
        record.tokens_ns,
        record.device_ns,
        record.knobs_version,
        record.token_budget,
        record.max_num_seqs,
        record.num_prefill_tokens,
        outcome.num_recomputed_tokens,
        record.num_decode_tokens,
        record.num_padded_tokens,
        outcome.num_cached_tokens,
        outcome.num_output_tokens,
        None if record.batch is None else len(record.batch),
        record.num_running,
        record.num_waiting,
        outcome.num_arrived,
        outcome.num_finished,
        outcome.num_preempted,
        *((None,) * 4 if kv is None else (kv.used, kv.cached, kv.empty, kv.evicted)),
        outcome.num_queried_tokens,
        outcome.num_hit_tokens,
        outcome.max_gap_ns,
        record.hidden_ns,
        record.num_wasted_tokens,
        record.token_limit,
        *_sums(record.drafts),
        record.cuda_graph,
    )


def _sums(drafts: Sequence[DraftRow] | None) -> tuple[int | None, int | None]:
    if not drafts:
        return None, None
    return sum(each.num_drafted for each in drafts), sum(each.num_accepted for each in drafts)


def _rows(record: StepRecord) -> Iterator[tuple[Any, ...]]:
    drafts = {each.request_id: each for each in record.drafts or ()}
    for row in record.batch or ():
        draft = drafts.get(row.request_id)
        yield (
            record.step,
            record.tokens_ns,
            row.request_id,
            _PHASES.get(row.phase, str(row.phase)),
            row.start,
            row.num_tokens,
            row.num_hit_tokens,
            row.num_blocks,
            bool(row.flags & RowFlag.LAST_CHUNK),
            bool(row.flags & RowFlag.FIRST_TOKEN),
            bool(row.flags & RowFlag.RESUMED),
            *_sums(None if draft is None else [draft]),
        )


def _requests(moments: Iterable[Moment]) -> Iterator[tuple[Any, ...]]:
    moment: Moment | None = None
    for moment in moments:
        for event in getattr(moment.message, "events", ()):
            view = moment.state.requests.get(event.request_id)
            if view is not None and _ends(event) and view.status == "finished":
                yield _request(view, moment)
    if moment is not None:
        for view in moment.state.requests.values():
            if view.status != "finished":
                yield _request(view, moment)


def _ends(event: object) -> bool:
    return type(event).__name__ in ("Finished", "Aborted")


def _request(view: RequestView, moment: Moment) -> tuple[Any, ...]:
    """Return the row of a request.

    Latencies are without the operator's pauses; None if they began before `moment.since_ns`.
    """
    offset_ns, since_ns, paused = moment.offset_ns, moment.since_ns, moment.state.pauses
    first_ns, last_ns = view.first_token_ns, view.last_token_ns
    is_known = not view.is_partial
    ttft_ms = tpot_ms = None
    if first_ns is not None and is_known and view.arrival_ns >= since_ns:
        ttft_ns = first_ns - view.arrival_ns - paused.within(view.arrival_ns, first_ns)
        ttft_ms = ttft_ns / 1e6
    num_gaps = view.num_output_tokens - 1
    if first_ns is not None and last_ns is not None and num_gaps > 0 and first_ns >= since_ns:
        decode_ns = last_ns - first_ns - paused.within(first_ns, last_ns)
        tpot_ms = decode_ns / num_gaps / 1e6
    return (
        view.request_id,
        view.client_id if is_known else None,
        view.status,
        view.finish_reason,
        view.arrival_ns if is_known else None,
        view.arrival_ns + offset_ns if is_known else None,
        first_ns,
        last_ns,
        view.finish_ns,
        view.finish_step,
        view.num_prompt_tokens,
        view.num_cached_tokens,
        view.num_output_tokens,
        view.max_tokens if is_known else None,
        view.priority,
        view.num_preemptions,
        ttft_ms,
        tpot_ms,
    )


ROW_GROUP = 64 * 1024


def write_parquet(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows.

    Raises:
        MissingPackage: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing("pyarrow", "parquet") from error

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
