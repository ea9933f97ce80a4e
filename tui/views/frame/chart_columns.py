"""Chart columns: the steps that each column of the screen stands for, merged into one.

A column is one step, several steps, or a slice of time. A merged column shows the worst of its
steps. Columns whose steps no longer change are computed only once.

A late step that took far longer than the others on the screen takes several columns also on the
axis of steps: in one column nobody would see that everything stood still.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.recordings.history.history import History
from stepscope.recordings.state.limits import Limit
from stepscope.tui.views.view import View

COLUMN_NS = 10_000_000  # width of a column of the time axis at zoom 1
_MAX_MERGED = 8192
_WIDE = 4  # times the median step on the screen: a late step that takes longer is drawn wide


class ChartColumn(NamedTuple):
    """The steps `first` to `last` merged into one column.

    It shows the worst of the steps, not an average.
    """

    first: int
    last: int
    start_ns: int | None  # where the column begins
    num_prefill_tokens: int
    num_decode_rows: int
    token_budget: int | None
    has_preemption: bool = False
    has_knob_change: bool = False
    has_mark: bool = False
    has_breach: bool = False  # a request waited for a token longer than the ITL bound
    is_slow: bool = False  # a step took longer than that, so all that decoded in it waited
    is_lost: bool = False  # none of its steps was received
    is_pending: bool = False  # its last step has not produced its tokens yet: a later column does
    longest_ns: int = 0  # of its steps
    usual_ns: int = 0  # the median of them
    is_wide: bool = False  # it took far longer than the others on the screen
    num_padded_tokens: int = 0
    is_open: bool = False  # a step in flight, which has no record yet
    limit: Limit | None = None


class ChartColumns:
    """Makes and caches the visible columns. Use it only on the UI thread."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._merged: dict[tuple[int, int], ChartColumn] = {}
        self._merged_for: tuple[str | None, int] = (None, 0)

    def visible(self, view: View, width: int, last_step: int | None) -> list[ChartColumn | None]:
        """Return `width` columns, the last of them at the right edge of `view`.

        A column is None if it lies before the first step in memory. On the time axis it is also
        None if no step ran in its time.

        `last_step`: the last one to show, so that all parts of a picture show the same moment.
        """
        history = self._history
        first_step = history.first_step
        if first_step is None or last_step is None or width <= 0:
            return [None] * max(0, width)
        info = history.info
        current = (None if info is None else info.engine_id, len(history.marks))
        if current != self._merged_for:
            self._merged.clear()
            self._merged_for = current
        right = last_step if view.right is None else max(first_step, min(last_step, view.right))
        if view.axis == "step":
            columns = self._by_step(first_step, last_step, right, view.zoom, width)
        else:
            columns = self._by_time(first_step, last_step, right, view.zoom, width)
        return _with_wide(columns, view.axis == "step")

    def _by_step(
        self, first_step: int, last_step: int, right: int, zoom: int, width: int
    ) -> list[ChartColumn | None]:
        columns: list[ChartColumn | None] = []
        for column in range(right // zoom - width + 1, right // zoom + 1):
            first = max(first_step, column * zoom)
            last = min(last_step, column * zoom + zoom - 1)
            columns.append(self._merge(first, last, last_step) if first <= last else None)
        return columns

    def _by_time(
        self, first_step: int, last_step: int, right: int, zoom: int, width: int
    ) -> list[ChartColumn | None]:
        history = self._history
        right_summary = history.summary(right)
        first_summary = history.summary(first_step)
        if right_summary is None or first_summary is None:
            return [None] * width
        column_ns = COLUMN_NS * zoom
        last_column = (right_summary.tokens_ns - 1) // column_ns
        start_ns = (last_column - width + 1) * column_ns
        ended = history.step_at(start_ns) if start_ns >= first_summary.tokens_ns else None
        columns: list[ChartColumn | None] = []
        for column in range(last_column - width + 1, last_column + 1):
            end_ns = (column + 1) * column_ns
            first = first_step if ended is None else ended + 1
            ended = history.step_at(end_ns) if end_ns >= first_summary.tokens_ns else None
            last = first_step - 1 if ended is None else ended
            beyond = history.summary(last + 1) if last < last_step else None
            is_pending = beyond is not None and beyond.schedule_start_ns < end_ns
            last += is_pending
            merged = self._merge(first, last, last_step) if first <= last else None
            if merged is not None:
                merged = merged._replace(start_ns=column * column_ns, is_pending=is_pending)
            columns.append(merged)
        return columns

    def _merge(self, first: int, last: int, last_step: int) -> ChartColumn:
        if (known := self._merged.get((first, last))) is not None:
            return known
        merged = self._merge_now(first, last)
        # The newest step may still get a flag, and a lost one may be recovered.
        if last < last_step and not merged.is_lost:
            if len(self._merged) >= _MAX_MERGED:
                self._merged.clear()
            self._merged[first, last] = merged
        return merged

    def _merge_now(self, first: int, last: int) -> ChartColumn:
        span = self._history.span(first, last)
        if span is None:
            return ChartColumn(first, last, None, 0, 0, None, is_lost=True)
        bound_ns = self._history.slo.itl_ms * 1e6
        is_slow = not self._history.state.is_summed_up and span.longest_ns > bound_ns
        return ChartColumn(
            *(first, last, span.start_ns),
            *(span.max_prefill_tokens, span.max_decode_tokens, span.token_budget),
            *(span.has_preemption, span.has_knob_change, span.has_mark),
            *((span.max_itl_ns or 0) > bound_ns, is_slow),
            longest_ns=span.longest_ns, usual_ns=span.usual_ns,
            num_padded_tokens=span.max_padded_tokens, limit=span.limit,
        )  # fmt: skip


def usual_ns(columns: Sequence[ChartColumn | None]) -> int:
    """Return about the median of the steps on the screen; 0 without steps."""
    took = {each.last: each for each in columns if each is not None and each.usual_ns}
    left = sum(each.last + 1 - each.first for each in took.values()) // 2
    for each in sorted(took.values(), key=lambda each: each.usual_ns):
        left -= each.last + 1 - each.first
        if left < 0:
            return each.usual_ns
    return 0


def cells_of(took_ns: int, usual: int, most: int) -> int:
    """Return how many columns a late step takes on the axis of steps, `most` at most.

    It takes two more columns each time that it is twice as long.
    """
    if not usual or took_ns < _WIDE * usual:
        return 1
    return max(2, min(most, 2 * (took_ns // usual).bit_length() - 4))


def _with_wide(columns: list[ChartColumn | None], by_step: bool) -> list[ChartColumn | None]:
    """Return as many columns; those in which everything stood still say so.

    On the axis of steps each of these takes several columns. All of them but the last are pending,
    as its tokens came at its end. The columns at the left make room.
    """
    usual, width = usual_ns(columns), len(columns)
    least_ns = max(1, _WIDE * usual)
    told = [
        each._replace(is_wide=True)
        if each is not None and each.is_slow and each.longest_ns >= least_ns
        else each
        for each in columns
    ]
    num_wide = sum(each is not None and each.is_wide for each in told)
    if not by_step or not num_wide:
        return told
    most = min(width // 8, width // 2 // num_wide)
    found: list[ChartColumn | None] = []
    for column in reversed(told):
        found.append(column)
        if column is not None and column.is_wide:
            num_more = cells_of(column.longest_ns, usual, most) - 1
            found += [column._replace(is_pending=True)] * num_more
    return found[width - 1 :: -1]
