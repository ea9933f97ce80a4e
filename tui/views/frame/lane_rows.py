"""Chooses the requests that get a lane, orders them, and fills the columns of each lane.

A lane is a row of the chart of requests and steps: what one request did, step by step.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.history.history import History
from stepscope.recordings.state.lanes import Cell, LaneName
from stepscope.recordings.state.session import SessionState, request_name
from stepscope.tui.views.frame.chart_columns import ChartColumn
from stepscope.tui.views.view import View


class LaneRow(NamedTuple):
    """One request with what it did in each visible column.

    `cells` has one byte per column: a `Cell`, or `len(Cell)` while the step that will produce the
    request's next token still runs.
    """

    request_id: int
    status: str  # WAIT, PRE, DEC, OUT, END, ABRT
    context: int | None  # tokens in the KV cache
    cells: bytes


def lane_rows(
    history: History,
    view: View,
    columns: list[ChartColumn | None],
    state: SessionState,
    num_lanes: int,
) -> tuple[list[LaneRow], int]:
    """Return the rows to show, and the number of requests that could have a row.

    `state`: the state at the cursor. What a request does in it decides the order of the rows.
    """
    shown = [column for column in columns if column is not None]
    if not shown or num_lanes <= 0:
        return [], 0
    first, last = shown[0].first, shown[-1].last
    request_ids = history.lane_ids(first, last)
    if view.filter:
        wanted, names = lane_filter(view.filter), history.lane_names(request_ids)
        found = [each for each in names if wanted(each, state.requests.get(each.request_id))]
        request_ids = [each.request_id for each in found]
    chosen, followed = _choose(request_ids, view, state, num_lanes), view.followed
    if view.first_lane is None and len(chosen) < len(request_ids):
        chosen = _with_culprits(chosen, _culprits(history, request_ids, shown))
    if followed is not None and followed not in chosen and followed in request_ids:
        chosen = [followed, *chosen[: len(chosen) - 1]]
    merge = _merger(columns, first, last)
    lanes = zip(chosen, history.lane_cells(chosen, first, last), strict=True)
    # The state drops requests that have ended: their cells up to the cursor tell how they ended.
    past = sum(column is None or column.first <= state.step for column in columns)
    known = state.requests.get
    rows = [_lane_row(each, known(each), merge(cells), past) for each, cells in lanes]
    return rows, len(request_ids)


_PREFILLS = (Cell.PREFILL, Cell.PREFILL_ALT, Cell.RECOMPUTE, Cell.RECOMPUTE_ALT)
_MAX_CULPRITS = 4


def _culprits(history: History, request_ids: list[int], columns: list[ChartColumn]) -> list[int]:
    """Return requests whose prefill made others late, in the last visible columns."""
    found: list[int] = []
    for column in reversed(columns):
        if column.has_breach and column.num_prefill_tokens and not column.is_pending:
            lanes = history.lane_cells(request_ids, column.first, column.last)
            for request_id, cells in zip(request_ids, lanes, strict=True):
                if request_id not in found and any(each in cells for each in _PREFILLS):
                    found.append(request_id)
        if len(found) >= _MAX_CULPRITS:
            break
    return found[:_MAX_CULPRITS]


def _with_culprits(chosen: list[int], culprits: list[int]) -> list[int]:
    """Return `chosen` with the culprits, in place of the first requests that are none."""
    missing = [each for each in culprits if each not in chosen]
    free = [each for each in chosen if each not in culprits][: len(missing)]
    return [*sorted(missing[: len(free)]), *(each for each in chosen if each not in free)]


# Cells that become true only at the end of a step; before it, the step of the token still runs.
_AT_THE_END = bytes((Cell.DECODE, Cell.DECODE_MULTI, Cell.FINISHED))
_BEFORE_IT = bytes.maketrans(_AT_THE_END, bytes((len(Cell),)) * len(_AT_THE_END))


def _merger(columns: list[ChartColumn | None], first: int, last: int) -> Callable[[bytes], bytes]:
    """Return a function that merges a request's cells by step into cells by column.

    A column shows the largest `Cell` value of its steps. But a step that lasts over several columns
    shows its token only in the column in which the token came.
    """
    num = last + 1 - first
    several: list[tuple[int, int, bool]] = []  # columns of several steps: begin, end, pending
    runs: list[list[int]] = []  # begin and end of columns that stand side by side in `found`
    for column in columns:
        place = 0
        if column is not None and column.first == column.last:
            place = 1 + column.first - first + num * column.is_pending
        elif column is not None:
            several.append((column.first - first, column.last + 1 - first, column.is_pending))
            place = 2 * num + len(several)
        if runs and runs[-1][1] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])

    def merged(cells: bytes) -> bytes:
        worst = [
            max(cells[begin : end - (is_pending and cells[end - 1] in _AT_THE_END)])
            for begin, end, is_pending in several
        ]
        found = b"".join((b"\0", cells, cells.translate(_BEFORE_IT), bytes(worst)))
        return b"".join([found[begin:end] for begin, end in runs])

    return merged


_QUEUED = {"waiting": "WAIT", "preempted": "OUT"}
_ENDED = frozenset({"END", "ABRT", ""})
_RANK = {"OUT": 0, "PRE": 1, "DEC": 2, "WAIT": 3, "END": 4, "ABRT": 4, "": 5}


def _choose(request_ids: list[int], view: View, state: SessionState, num_lanes: int) -> list[int]:
    """Return the requests that get a row, in the order of `view.sort`; there may be thousands."""
    requests = state.requests
    groups: tuple[list[int], list[int], list[int]] = (request_ids, [], [])
    if view.sort == "state":
        ranks = {each: _RANK[lane_status(requests.get(each))] for each in request_ids}
        ordered = sorted(request_ids, key=ranks.__getitem__)
    elif view.sort == "latest":
        ordered = request_ids[::-1]
    elif view.sort == "blocks":
        blocks = {each: view.num_blocks for each, view in requests.items()}
        ordered = sorted(request_ids, key=lambda each: -blocks.get(each, 0))
    else:
        groups = _grouped(request_ids, requests)
        ordered = [each for group in groups for each in group]
    if view.first_lane is not None:
        view.first_lane = max(0, min(view.first_lane, len(ordered) - num_lanes))
        return ordered[view.first_lane : view.first_lane + num_lanes]
    surplus = len(ordered) - num_lanes
    if surplus <= 0 or view.sort != "arrival":
        return ordered[:num_lanes]
    # Too many: first drop those that have ended, then the end of the queue, then the oldest.
    running, waiting, to_come = groups
    ended = [e for e in (*running, *to_come) if lane_status(requests.get(e)) in _ENDED][:surplus]
    dropped = set(ended)
    surplus -= len(ended)
    cut = min(surplus, max(0, len(waiting) - max(2, num_lanes // 5)))
    kept = (*running, *waiting[: len(waiting) - cut], *to_come)
    return [each for each in kept if each not in dropped][surplus - cut :]


def _grouped(
    request_ids: list[int], requests: Mapping[int, RequestView]
) -> tuple[list[int], list[int], list[int]]:
    """Split requests into three lists: running or ended, waiting, and arriving after the cursor."""
    newest = next((each for each in reversed(request_ids) if each in requests), None)
    known = len(request_ids) if newest is None else bisect_right(request_ids, newest)
    waits = {each for each, view in requests.items() if view.status == "waiting"}
    running = [each for each in request_ids[:known] if each not in waits]
    waiting = [each for each in request_ids[:known] if each in waits]
    return running, waiting, request_ids[known:]


def _lane_row(request_id: int, view: RequestView | None, cells: bytes, past: int) -> LaneRow:
    """Return the row of a request; `past`: the number of cells up to the cursor."""
    status = lane_status(view)
    if view is None and Cell.FINISHED in cells[:past]:
        status = "END"
    elif view is None and Cell.ABORTED in cells[:past]:
        status = "ABRT"
    context = None if view is None else (view.num_computed_tokens or view.num_prompt_tokens)
    return LaneRow(request_id, status, context, cells)


def lane_status(view: RequestView | None) -> str:
    """Return what a request does at the cursor, in at most four letters."""
    if view is None:
        return ""
    if view.status == "finished":
        return "ABRT" if view.finish_reason == "abort" else "END"
    running = "PRE" if view.num_computed_tokens < view.num_prompt_tokens else "DEC"
    return _QUEUED.get(view.status, running)


def lane_filter(text: str) -> Callable[[LaneName, RequestView | None], bool]:
    """Return a function that tells whether a request matches the filter `text`.

    A word of it is `state:dec`, `id:12`, `!regex`, or a part of the request's names. A request must
    match all words.

    Raises ValueError: a broken regular expression, or an unknown state.
    """
    tests = [_filter_word(word) for word in text.split()]
    return lambda lane, view: all(test(lane, view) for test in tests)


def _filter_word(word: str) -> Callable[[LaneName, RequestView | None], bool]:
    if word.startswith("!"):
        try:
            pattern = re.compile(word[1:])
        except re.error as error:
            raise ValueError(f"invalid regular expression: {error}") from error
        return lambda lane, view: pattern.search(_names(lane)) is not None
    key, separator, value = word.partition(":")
    if separator and key == "state":
        if not any(status.startswith(value.upper()) for status in _RANK if status):
            known = ", ".join(status.lower() for status in _RANK if status)
            raise ValueError(f"no state {value!r}; there are {known}")
        return lambda lane, view: lane_status(view).lower().startswith(value.lower())
    if separator and key == "id":
        number = value.removeprefix("r")
        return lambda lane, view: str(lane.request_id) == number
    return lambda lane, view: word.lower() in _names(lane).lower()


def _names(lane: LaneName) -> str:
    return f"{request_name(lane.request_id)} {lane.client_id}"
