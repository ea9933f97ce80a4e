"""`View`: what the operator looks at. Keys change it, and the panels and pages read it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.recordings.state.latency import LatencyKind
from stepscope.tui.settings.action_table import PAGES, Page

Axis: TypeAlias = Literal["step", "time"]
Sort: TypeAlias = Literal["arrival", "state", "blocks", "latest"]
KVMapKind: TypeAlias = Literal["state", "owner", "group"]

LATENCIES: tuple[LatencyKind, ...] = ("itl", "ttft", "tpot", "step")
ZOOMS = (1, 2, 5, 10, 20, 50)
SORTS: tuple[Sort, ...] = ("arrival", "state", "blocks", "latest")


def next_kv_map(kind: KVMapKind, *, has_groups: bool) -> KVMapKind:
    """Return what the KV map shows after key `o`. It shows groups only if there are several."""
    if kind == "state":
        return "owner"
    return "group" if kind == "owner" and has_groups else "state"


@dataclass(slots=True)
class View:
    """What the operator looks at: the page, the position in time, and the selection in lists."""

    cursor: int | None = None  # the step to show; None follows the newest step
    right: int | None = None  # step at the right edge, while the cursor moves on the screen
    axis: Axis = "step"
    zoom_idx: int = 0
    other_zoom_idx: int = 0  # zoom of the axis that is not shown
    is_time_fitted: bool = False  # the zoom of the time axis was chosen for this recording
    sort: Sort = "arrival"
    filter: str = ""
    selected: int | None = None  # request id
    first_lane: int | None = None  # None while the most interesting lanes are chosen
    followed: int | None = None  # request id; this request always keeps a lane
    page: Page = "live"
    trail: tuple[Page, ...] = ()  # the pages that Escape goes back to
    row: int = 0  # the selected one
    entry: object = None  # the selected entry of a list that grows; `row` follows it
    kv_map: KVMapKind = "state"
    latency: LatencyKind = "itl"
    longest_first: bool = False  # order of the list of breaches; else newest first

    @property
    def live(self) -> bool:
        return self.cursor is None

    @property
    def zoom(self) -> int:
        return ZOOMS[self.zoom_idx]

    def pause(self, last_step: int | None) -> None:
        """Stop following: keep the cursor at the step that is now the newest."""
        if self.cursor is None:
            self.cursor = self.right = last_step

    def follow(self) -> None:
        self.cursor = self.right = None

    def go(self, step: int, first_step: int, last_step: int) -> None:
        """Move the cursor to `step`, or to the nearest step in memory."""
        self.cursor = max(first_step, min(last_step, step))
        if self.right is None:
            self.right = last_step

    def keep_visible(self, first_visible: int, last_visible: int, last_step: int) -> None:
        """Move the right edge of the screen so that the cursor is visible again."""
        if self.cursor is None or self.right is None:
            return
        if self.cursor < first_visible:
            # Keep a third of the screen left of the cursor, for the steps before it.
            width = last_visible - first_visible
            self.right = min(last_step, self.cursor + width - width // 3)
        elif self.cursor > self.right:
            self.right = self.cursor

    def change_zoom(self, direction: int) -> None:
        self.zoom_idx = max(0, min(len(ZOOMS) - 1, self.zoom_idx + direction))

    def next_axis(self) -> None:
        """Switch between the axes of steps and of time, which have a zoom each."""
        self.axis = "time" if self.axis == "step" else "step"
        self.zoom_idx, self.other_zoom_idx = self.other_zoom_idx, self.zoom_idx

    def fit_time(self, num_cells: float, cells_a_step: float, num_columns: int) -> None:
        """Choose once the zoom of the time axis: all of a recording, or a step per column."""
        if self.is_time_fitted:
            return
        self.is_time_fitted = True
        fitting = [n for n, zoom in enumerate(ZOOMS) if num_cells <= zoom * num_columns]
        a_step = [n for n, zoom in enumerate(ZOOMS) if cells_a_step <= zoom]
        self.zoom_idx = next(iter(fitting or a_step), len(ZOOMS) - 1)

    def scroll_lanes(self, rows: int, num_lanes: int) -> None:
        """Scroll the lanes; the first call goes to the first or last of them all."""
        if self.first_lane is None:
            self.first_lane = 0 if rows < 0 else num_lanes
        else:
            self.first_lane = max(0, self.first_lane + rows)

    def show(self, page: Page) -> None:
        if page != self.page:
            self.trail = (*self.trail[-len(PAGES) :], self.page) if page != "live" else ()
            self.page, self.row, self.entry = page, 0, None

    def leave(self) -> None:
        self.page = self.trail[-1] if self.trail else "live"
        self.trail, self.row, self.entry = self.trail[:-1], 0, None

    def next_order(self, *, has_groups: bool) -> None:
        """Handle key `o`: change the order of the shown page, or what it shows."""
        if self.page == "kv":
            self.kv_map = next_kv_map(self.kv_map, has_groups=has_groups)
        elif self.page == "latency":
            self.latency = LATENCIES[(LATENCIES.index(self.latency) + 1) % len(LATENCIES)]
        else:
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.first_lane = None
