"""`View`: where the operator looks. Keys change it, the views read it; it draws nothing."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.recordings.state.series.latency import LatencyKind
from stepscope.tui.settings.page_names import PAGES, Page

Axis: TypeAlias = Literal["step", "time"]
Sort: TypeAlias = Literal["arrival", "state", "blocks", "latest"]

LATENCIES: tuple[LatencyKind, ...] = ("itl", "ttft", "tpot", "step")
ZOOMS = (1, 2, 5, 10, 20, 50)
SORTS: tuple[Sort, ...] = ("arrival", "state", "blocks", "latest")


@dataclass(slots=True)
class View:
    """Position in time and in the lanes.

    `cursor` is the step looked at, None while following the newest. `right` is the step at the
    right edge, which stays where it is while the operator scrubs inside the screen. `first_lane`
    is None while the lanes choose by themselves what is worth showing. `page` is the screen that is
    shown, `trail` where Escape leads back to, `row` the line of it that is selected: the newest
    while no `entry` is chosen.
    """

    cursor: int | None = None
    right: int | None = None
    axis: Axis = "step"
    zoom_idx: int = 0
    other_zoom_idx: int = 0  # of the axis that is not shown
    is_time_fitted: bool = False  # the zoom of the time axis was chosen for this recording
    sort: Sort = "arrival"
    filter: str = ""
    selected: int | None = None  # request id
    first_lane: int | None = None
    followed: int | None = None  # request id; has a lane wherever the others are
    page: Page = "live"
    trail: tuple[Page, ...] = ()
    row: int = 0
    entry: object = None  # what was chosen on a list that grows: its row is where that is
    kv_by_owner: bool = False
    latency: LatencyKind = "itl"
    longest_first: bool = False  # the list of breaches; else newest first
    own_load: bool = False  # the header says what the dashboard itself costs

    @property
    def live(self) -> bool:
        return self.cursor is None

    @property
    def zoom(self) -> int:
        return ZOOMS[self.zoom_idx]

    def pause(self, last_step: int | None) -> None:
        """Stay at the newest step."""
        if self.cursor is None:
            self.cursor = self.right = last_step

    def follow(self) -> None:
        """Back to the newest step, for as long as it takes."""
        self.cursor = self.right = None

    def go(self, step: int, first_step: int, last_step: int) -> None:
        """Look at `step`, or at the nearest there is."""
        self.cursor = max(first_step, min(last_step, step))
        if self.right is None:
            self.right = last_step

    def keep_visible(self, first_visible: int, last_visible: int, last_step: int) -> None:
        """Move the right edge so that the cursor is on the screen again."""
        if self.cursor is None or self.right is None:
            return
        if self.cursor < first_visible:
            # A third of the screen stays to the left, for what led up to it.
            width = last_visible - first_visible
            self.right = min(last_step, self.cursor + width - width // 3)
        elif self.cursor > self.right:
            self.right = self.cursor

    def change_zoom(self, direction: int) -> None:
        self.zoom_idx = max(0, min(len(ZOOMS) - 1, self.zoom_idx + direction))

    def next_axis(self) -> None:
        """Each axis has a zoom of its own: ten steps a column say nothing about milliseconds."""
        self.axis = "time" if self.axis == "step" else "step"
        self.zoom_idx, self.other_zoom_idx = self.other_zoom_idx, self.zoom_idx

    def fit_time(self, num_cells: float, cells_a_step: float, num_columns: int) -> None:
        """Choose the zoom of the time axis, once: all of a recording, or a step a column.

        Args:
            num_cells, cells_a_step: length of the recording and of its mean step at zoom 1.
        """
        if self.is_time_fitted:
            return
        self.is_time_fitted = True
        fitting = [n for n, zoom in enumerate(ZOOMS) if num_cells <= zoom * num_columns]
        a_step = [n for n, zoom in enumerate(ZOOMS) if cells_a_step <= zoom]
        self.zoom_idx = next(iter(fitting or a_step), len(ZOOMS) - 1)

    def next_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.first_lane = None

    def scroll_lanes(self, rows: int, num_lanes: int) -> None:
        """Take over from the automatic choice of lanes, which shows neither end; Esc gives back.

        Args:
            num_lanes: of all that there are.
        """
        if self.first_lane is None:
            self.first_lane = 0 if rows < 0 else num_lanes
        else:
            self.first_lane = max(0, self.first_lane + rows)

    # Screens

    def show(self, page: Page) -> None:
        if page != self.page:
            self.trail = (*self.trail[-len(PAGES) :], self.page) if page != "live" else ()
            self.page, self.row, self.entry = page, 0, None

    def leave(self) -> None:
        """Back to the screen before."""
        self.page = self.trail[-1] if self.trail else "live"
        self.trail, self.row, self.entry = self.trail[:-1], 0, None

    def next_order(self) -> None:
        """What `o` changes on the screen that is shown."""
        if self.page == "kv":
            self.kv_by_owner = not self.kv_by_owner
        elif self.page == "latency":
            at = LATENCIES.index(self.latency)
            self.latency = LATENCIES[(at + 1) % len(LATENCIES)]
        else:
            self.next_sort()
