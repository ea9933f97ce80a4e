"""The lanes of a session as a whole: what each request did in a range of steps."""

from typing import NamedTuple

from stepscope.recordings.history.history_view import HistoryView


class Lane(NamedTuple):
    """One request over a range of steps; `cells` has one `Cell` per step."""

    request_id: int
    client_id: str
    cells: bytes


def lanes_of(history: HistoryView, first: int, last: int) -> list[Lane]:
    request_ids = history.lane_ids(first, last)
    names = history.lane_names(request_ids)
    cells = history.lane_cells(request_ids, first, last)
    return [Lane(*name, each) for name, each in zip(names, cells, strict=True)]
