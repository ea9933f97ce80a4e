"""`FleetView`: how the operator views several engines: the sort order and the selected engine.

All screens of a dashboard share one `FleetView`, so the order stays when the operator opens an
engine and comes back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.fleets.fleet import EngineLine, Fleet, FleetPicture
from stepscope.recordings.fleets.imbalance import FleetFigure
from stepscope.recordings.history.source import Source
from stepscope.tui.settings.action_table import Page

ColumnKey: TypeAlias = Literal[
    "engine", "state", "run", "wait", "kv", "ttft", "itl", "budget", "preempt", "gap",
    "steps", "out", "hit", "ranks", "model", "load",
]  # fmt: skip
_Rank: TypeAlias = Callable[[EngineLine], float | str | None]

# Both worst first: a down engine before a silent one, a stopped engine before a running one.
_STATUSES = ("down", "stale", "starting", "connecting", "live", "playing", "paused", "ended")
_STATES = ("stopped", "draining", "paused", "running", "idle", None)


def natural(name: str) -> str:
    """Return a sort key for a name, by which engine-2 comes before engine-10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), name)


def _state_rank(line: EngineLine) -> float:
    figures = line.figures
    return -(_STATUSES.index(figures.status) * 10 + _STATES.index(figures.state))


_FIGURES: dict[ColumnKey, str] = {
    "run": "num_running", "wait": "num_waiting", "kv": "kv_used", "ttft": "ttft_p95_ms",
    "itl": "itl_p95_ms", "budget": "budget_used", "preempt": "num_preempted", "gap": "num_lost",
    "steps": "steps_per_s", "out": "output_tokens_per_s", "hit": "prefix_hit_rate",
    "ranks": "rank_wait",
}  # fmt: skip
# The sort key of each column; engines with an unknown value come last in either direction.
SORTS: dict[ColumnKey, _Rank] = {
    "engine": lambda line: natural(line.figures.name),
    "state": _state_rank,
    **{key: attrgetter(f"figures.{name}") for key, name in _FIGURES.items()},
    "model": lambda line: None if line.figures.info is None else line.figures.info.model,
    "load": lambda line: line.figures.load,
}
_ASCENDING = frozenset({"engine", "model"})  # in all other columns the highest come first


class FleetPage(NamedTuple):
    picture: FleetPicture
    lines: tuple[EngineLine, ...]  # in order
    sort: ColumnKey
    is_reversed: bool  # against the column's default direction
    selected: int | None  # index into `lines`
    standing_out: dict[str, frozenset[FleetFigure]]  # engine -> figures
    recorded: frozenset[str] = frozenset()  # engines that are being recorded

    @property
    def is_ascending(self) -> bool:
        return (self.sort in _ASCENDING) != self.is_reversed

    @property
    def engines(self) -> list[EngineFigures]:
        return [line.figures for line in self.lines]


@dataclass(slots=True)
class FleetView:
    """The operator's view of the fleet. Use it only on the screen's thread."""

    fleet: Fleet
    sort: ColumnKey = "engine"
    is_reversed: bool = False
    selected: str | None = None  # name of an engine
    shown: tuple[ColumnKey, ...] = tuple(SORTS)  # the columns on the screen
    # Shows a page of an engine; set by the dashboard.
    open: Callable[[str, Page], None] = lambda name, page: None

    def name_of(self, source: Source) -> str:
        return self.fleet.names[self.fleet.sources.index(source)]

    def page(self, current: str | None, recorded: frozenset[str] = frozenset()) -> FleetPage:
        picture = self.fleet.look()
        lines = self._ordered(picture)
        names = [line.figures.name for line in lines]
        if self.selected not in names:
            self.selected = current if current in names else (names[0] if names else None)
        return FleetPage(
            picture,
            lines,
            self.sort,
            self.is_reversed,
            None if self.selected is None else names.index(self.selected),
            {each.name: frozenset(each.figures) for each in picture.imbalances},
            recorded,
        )

    @property
    def chosen(self) -> Source | None:
        names = self.fleet.names
        return self.fleet.sources[names.index(self.selected)] if self.selected in names else None

    def move_sort(self, direction: int) -> None:
        """Sort by the column `direction` places right of the current sort column on the screen."""
        columns = [each for each in self.shown if each in SORTS]
        at = columns.index(self.sort) if self.sort in columns else 0
        self.sort, self.is_reversed = columns[(at + direction) % len(columns)], False

    def reverse(self) -> None:
        self.is_reversed = not self.is_reversed

    def _ordered(self, picture: FleetPicture) -> tuple[EngineLine, ...]:
        rank = SORTS[self.sort]
        known = [line for line in picture.lines if rank(line) is not None]
        unknown = [line for line in picture.lines if rank(line) is None]
        descending = (self.sort in _ASCENDING) == self.is_reversed
        known.sort(key=rank, reverse=descending)  # type: ignore[arg-type]
        return (*known, *unknown)
