"""`TakenStep`: a step that was applied to the state, and the conversion of many into columns."""

from array import array
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.series.latency_samples import bounded
from stepscope.recordings.state.series.limits import limit_of

_UNKNOWN = -1


class TakenStep(NamedTuple):
    """A step whose batch rows were published, and the outcome of applying it to the state."""

    sequence: int
    record: StepRecord
    outcome: Outcome
    num_rows: int


# Attributes are fetched many at once, which takes half the time of fetching them one by one.
_OF_RECORD = (
    "step",
    "schedule_start_ns",
    "schedule_end_ns",
    "launch_ns",
    "tokens_ns",
    "device_ns",
    "knobs_version",
    "token_budget",
    "max_num_seqs",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_padded_tokens",
    "num_running",
    "num_waiting",
)
_OF_OUTCOME = (
    "num_recomputed_tokens",
    "num_attended",
    "num_cached_tokens",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_output_tokens",
    "num_decode_rows",
    "num_arrived",
    "num_finished",
    "num_preempted",
)
_OF_KV = {
    "kv_used": "used",
    "kv_cached": "cached",
    "kv_empty": "empty",
    "num_evicted": "evicted",
}
_WORST = ("max_itl_ns", "max_itl_request_id", "max_ttft_ns", "max_ttft_request_id")
# Fields of a `StepSummary`, in the order in which `summary_columns` returns them.
NAMES = ("sequence", "num_rows", *_OF_RECORD, *_OF_OUTCOME, *_OF_KV, *_WORST, "limit")

_of_record = attrgetter(*_OF_RECORD)
_of_outcome = attrgetter(*_OF_OUTCOME)
_of_kv = attrgetter(*_OF_KV.values())
_NO_KV = (_UNKNOWN,) * len(_OF_KV)


def summary_columns(steps: Sequence[TakenStep]) -> "list[array[int]]":
    """Convert steps into one array for each of `NAMES`, with one entry per step; -1 is unknown."""
    rows = [
        (
            sequence,
            num_rows,
            *_of_record(record),
            *_of_outcome(outcome),
            *(_NO_KV if record.kv is None else _of_kv(record.kv)),
            *_worst(outcome),
            limit_of(record, outcome, num_rows),
        )
        for sequence, record, outcome, num_rows in steps
    ]
    return [_column(values) for values in zip(*rows, strict=True)] or [array("q") for _ in NAMES]


def _worst(outcome: Outcome) -> tuple[int, int, int, int]:
    """Longest gap and its request id, then longest TTFT and its request id."""
    gaps_ns = outcome.gaps_ns
    gap_ns = max(gaps_ns) if gaps_ns else _UNKNOWN
    request_id = outcome.gap_request_ids[gap_ns] if gaps_ns else _UNKNOWN
    if not outcome.ttft_ns:
        return gap_ns, request_id, _UNKNOWN, _UNKNOWN
    first_id, ttft_ns = max(outcome.ttft_ns, key=itemgetter(1))
    return gap_ns, request_id, ttft_ns, first_id


def _column(values: tuple[int | None, ...]) -> "array[int]":
    try:
        return array("q", values)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # unknown values, or absurd but valid ones
        return array("q", [_UNKNOWN if value is None else bounded(value) for value in values])
