"""`NewRows`: the rows of steps as they come, in the tables of an index."""

from array import array
from typing import TYPE_CHECKING

from stepscope.recordings.session.index import (
    FINISHED_COLUMNS,
    KINDS,
    STORED_COLUMNS,
    WAIT_COLUMNS,
    Index,
    IndexRows,
)
from stepscope.recordings.session.steps import UNKNOWN, StepTable
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.series.latency import waits_in
from stepscope.recordings.state.series.latency_samples import bounded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class NewRows:
    """The tables of the steps that were appended."""

    def __init__(self) -> None:
        self._steps = StepTable()
        self._waits = [array("q") for _ in WAIT_COLUMNS]
        self._finished = [array("q") for _ in FINISHED_COLUMNS]

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, applied: AppliedStep) -> None:
        """Add a step, the waits and the requests that ended in it.

        Its waits are without the operator's pauses, and `RequestWatch` added the requests.
        """
        place = len(self._steps)
        for kind, ns, number, request_id in waits_in(applied):
            of = UNKNOWN if request_id is None else bounded(request_id)
            values = place, KINDS.index(kind), bounded(ns), number, of
            for column, value in zip(self._waits, values, strict=True):
                column.append(value)
        for each in applied.outcome.finished:
            for column, value in zip(
                self._finished, (place, each.ttft_ns, each.worst_itl_ns), strict=True
            ):
                column.append(bounded(value))
        self._steps.append(applied)

    def tables(self) -> "dict[str, dict[str, NDArray[np.int64]]]":
        """Table -> name -> column. Append no more steps while they are in use."""
        import numpy as np

        steps = [self._steps.column(name) for name in STORED_COLUMNS]
        tables = {
            "steps": zip(STORED_COLUMNS, steps, strict=True),
            "waits": zip(WAIT_COLUMNS, self._waits, strict=True),
            "finished": zip(FINISHED_COLUMNS, self._finished, strict=True),
        }
        return {
            table: {name: np.frombuffer(column, dtype=np.int64) for name, column in columns}
            for table, columns in tables.items()
        }

    def rows(self) -> IndexRows:
        """The tables as those of an index. Append no more steps."""
        tables = self.tables()
        known: dict[tuple[str, str], NDArray[np.int64]] = {}
        for table, columns in tables.items():
            known |= {(table, name): column for name, column in columns.items()}
        numbers = {table: len(next(iter(columns.values()))) for table, columns in tables.items()}
        index = Index(tables={table: (number, {}) for table, number in numbers.items()})
        return IndexRows(index, known, self._steps)
