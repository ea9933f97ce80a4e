"""The rows of a step. A row says which tokens of one request the step computes.

Rows are built when the step is scheduled. When it ends, rows of lost requests are removed.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias, cast

import msgspec

from stepscope.engine.adapters.attached.tracked import Row, TrackedRequest, UnfinishedStep
from stepscope.engine.protocol.wire import DraftRow, Phase, RowFlag
from stepscope.engine.telemetry import batch_rows
from stepscope.engine.telemetry.batch_rows import RowFields, keep_rows, with_positions
from stepscope.engine.telemetry.step_watcher import RunningRow

_Encode: TypeAlias = Callable[
    [list[Row], Phase, type[TrackedRequest], Callable[[Row], RowFields | None]], bytes
]

# Our own engine's encoder. It reads the slots of the type passed to it, and the first fields of a
# row.
_encode = cast(_Encode, cast(Any, batch_rows.compiled or batch_rows.encode_in_python))
_fields = itemgetter(3)

DECODE, _PREFILL, _RECOMPUTE = int(Phase.DECODE), int(Phase.PREFILL), int(Phase.RECOMPUTE)
_LAST_CHUNK, _FIRST_TOKEN = int(RowFlag.LAST_CHUNK), int(RowFlag.FIRST_TOKEN)
_RESUMED = int(RowFlag.RESUMED)


def encode_rows(step: UnfinishedStep) -> None:
    """Encode `step.rows` into `step.batch`, before a later step changes the block tables."""
    step.batch = msgspec.Raw(_encode(step.rows, Phase.DECODE, TrackedRequest, _fields))


def fields_of(
    step: UnfinishedStep, tracked: TrackedRequest, start: int, num_tokens: int, num_blocks: int
) -> RowFields:
    """Return the fields of a row that is not an ordinary decode (one token, no drafts).

    Updates the prefill state of `tracked`. If this step admits it, `step.admitted` must say so.
    """
    if not tracked.is_prefilling:  # with draft tokens
        return tracked.request_id, DECODE, start, num_tokens, 0, num_blocks, _LAST_CHUNK
    flags = 0
    num_prompt = tracked.engine_request.num_prompt_tokens
    known = max(num_prompt, tracked.num_known)
    if start + num_tokens >= known:
        tracked.is_prefilling = False
        flags = _LAST_CHUNK if tracked.max_tokens else 0
        if flags and not tracked.has_first_token:
            tracked.has_first_token = True
            flags |= _FIRST_TOKEN
    num_cached = next((count for each, count in step.admitted if each is tracked), None)
    if num_cached is not None and tracked.was_preempted:
        flags |= _RESUMED
    if start < tracked.num_computed:
        phase = _RECOMPUTE
    elif start >= num_prompt and start + 1 == known:
        phase = DECODE  # resumed, and all but its newest token was still cached
    else:
        phase = _PREFILL
    tracked.num_computed = max(tracked.num_computed, start + num_tokens)
    return tracked.request_id, phase, start, num_tokens, num_cached or 0, num_blocks, flags


def drop_lost(step: UnfinishedStep, ended_now: set[TrackedRequest]) -> int:
    """Remove the rows of requests that ended or were preempted before this step ended.

    Rows of `ended_now`, which ended with this step's tokens, stay. Returns the number of tokens in
    the removed rows: the step computed them in vain.
    """
    kept, num_wasted = [], 0
    for i, row in enumerate(step.rows):
        tracked = row[0]
        if tracked not in step.lost and (not tracked.ended or tracked in ended_now):
            kept.append(i)
            continue
        num_wasted += num_tokens_of(row)
        if row[3] is not None and row[3][1] != DECODE:
            step.num_prefill_tokens -= num_tokens_of(row) - step.drafted.get(tracked, 0)
        if gives_first_token(row):
            tracked.has_first_token = False
    if num_wasted:
        step.rows = [step.rows[i] for i in kept]
        step.batch = keep_rows(step.batch, kept)
    return num_wasted


def check_drafts(step: UnfinishedStep) -> list[DraftRow] | None:
    """Set the rows of an ended step to the tokens that their requests got, and where they start.

    Returns which drafts were accepted; None if the step checked none.
    """
    if not step.drafted and not step.set_back:
        return None
    checked, found = {}, []
    for i, row in enumerate(step.rows):
        tracked, _, start, _ = row
        num_drafted, num_back = step.drafted.get(tracked, 0), step.set_back.get(tracked, 0)
        num_accepted = 0
        if num_drafted:
            num_accepted = step.num_got[tracked] - 1
            found.append(DraftRow(tracked.request_id, num_drafted, num_accepted))
        if num_drafted or num_back:
            checked[i] = start - num_back, num_tokens_of(row) - num_drafted + num_accepted
    step.batch = with_positions(step.batch, checked)
    return found or None


def running_row(row: Row) -> RunningRow:
    """Return the row in the short form that is published while its step still runs."""
    request, _, start, fields = row
    phase = DECODE if fields is None else fields[1]
    return RunningRow(request.request_id, phase, start, num_tokens_of(row))


def num_tokens_of(row: Row) -> int:
    return 1 if row[3] is None else row[3][3]


def gives_token(row: Row) -> bool:
    """Whether this step samples a token for the request."""
    return row[3] is None or bool(row[3][6] & _LAST_CHUNK)


def gives_first_token(row: Row) -> bool:
    return row[3] is not None and bool(row[3][6] & _FIRST_TOKEN)
