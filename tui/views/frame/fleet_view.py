"""`FleetView`: how the operator views several engines: order, selected engine, and their table.

The table has a line per engine, its columns a width for narrow screens and one for wide screens.
All screens of a dashboard share one `FleetView`, so the order stays when the operator opens an
engine and comes back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.fleets.fleet import NUM_LOADS, EngineLine, Fleet, FleetPicture
from stepscope.recordings.fleets.imbalance import FleetFigure
from stepscope.recordings.history.source import Source
from stepscope.recordings.state.ranks import MATTERS, rank_sizes
from stepscope.recordings.state.session import model_text
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views import format as fmt
from stepscope.tui.views.framed_panels import Column, Rows, sparkline, table
from stepscope.tui.views.lines import Line, Run, bounded

ColumnKey: TypeAlias = Literal[
    "engine", "state", "run", "wait", "kv", "ttft", "itl", "budget", "preempt", "gap",
    "steps", "out", "hit", "ranks", "model", "load",
]  # fmt: skip

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
SORTS: dict[ColumnKey, Callable[[EngineLine], float | str | None]] = {
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
        at = None if self.selected is None else names.index(self.selected)
        outliers = {each.name: frozenset(each.figures) for each in picture.imbalances}
        order = self.sort, self.is_reversed
        return FleetPage(picture, lines, *order, at, outliers, recorded)

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


UNKNOWN = "-"
_Value = TypeVar("_Value")


class FleetColumn(NamedTuple):
    """One column of the fleet table, with its widths on a narrow and a wide screen."""

    key: ColumnKey
    short: str
    name: str
    narrow: int  # widths in cells; 0 leaves it out
    wide: int
    draw: Callable[[EngineFigures], Run] | None  # None: state, or the load that is drawn apart
    figure: FleetFigure | None = None  # the figure that may stand out from the other engines
    is_right: bool = True

    def width(self, is_wide: bool) -> int:
        return self.wide if is_wide else self.narrow


def state_text(line: EngineLine) -> Run:
    """Return what an engine is doing, in a word, and for how long if that matters."""
    figures = line.figures
    if figures.status == "connecting":
        return "CONNECTING", "badge_paused"
    if figures.status == "starting":
        return "STARTING", "caution"
    if figures.status == "down":
        return f"DOWN {fmt.short_span(line.status_s)}", "badge_down"
    if figures.status == "stale":
        return f"STALE {fmt.short_span(line.silent_s or line.status_s)}", "badge_paused"
    if figures.status in ("playing", "paused", "ended"):
        return "RECORDING", "mark"
    if figures.state in ("paused", "draining", "stopped"):
        return figures.state.upper(), "caution"
    if line.new_s is not None:
        return f"LIVE new {fmt.short_span(line.new_s)}", "mark"
    role = None if figures.info is None else figures.info.role
    if role is not None:
        return f"LIVE {role}", "muted" if figures.state == "idle" else "good"
    return ("LIVE idle", "muted") if figures.state == "idle" else ("LIVE", "good")


def _known(value: _Value | None, text: Callable[[_Value], str], style: str = "text") -> Run:
    """Return a value in words, with its style; a dash if it is unknown, never a zero."""
    return (UNKNOWN, "muted") if value is None else (text(value), style)


def _running(figures: EngineFigures) -> Run:
    seats = "" if figures.num_seats is None else f"/{fmt.short(figures.num_seats)}"
    return _known(figures.num_running, lambda number: f"{fmt.short(number)}{seats}")


def _latency(figures: EngineFigures, ms: float | None, bound_ms: float) -> Run:
    is_estimate = figures.info is not None and figures.info.totals_every_s is not None
    text, style = bounded(("≈" if is_estimate else "") + fmt.milliseconds(ms), ms, bound_ms)
    return _known(ms, lambda _: text, style)


def _counted(number: int | None) -> Run:
    return _known(number, fmt.short, "caution" if number else "text")


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else fmt.short(value)


def _ranks(figures: EngineFigures) -> Run:
    style = "caution" if (figures.rank_wait or 0) >= MATTERS else "text"
    return _known(figures.rank_wait, lambda w: f"{figures.slow_rank} {fmt.percent(w)}", style)


COLUMNS: tuple[FleetColumn, ...] = (
    FleetColumn("engine", "engine", "engine", 10, 20,
                lambda f: (f.name, "strong" if f.is_up else "caution"), is_right=False),
    FleetColumn("state", "state", "state", 11, 14, None, is_right=False),
    FleetColumn("run", "run", "running", 7, 9, _running),
    FleetColumn("wait", "wait", "waiting", 5, 8,
                lambda f: _known(f.num_waiting, fmt.short), "waiting"),
    FleetColumn("kv", "KV", "KV", 5, 5, lambda f: _known(f.kv_used, fmt.percent), "kv"),
    FleetColumn("ttft", "TTFT", "TTFT p95", 6, 9,
                lambda f: _latency(f, f.ttft_p95_ms, f.slo.ttft_ms), "ttft"),
    FleetColumn("itl", "ITL", "ITL p95", 6, 8,
                lambda f: _latency(f, f.itl_p95_ms, f.slo.itl_ms), "itl"),
    FleetColumn("budget", "bud", "budget", 4, 7, lambda f: _known(f.budget_used, fmt.percent)),
    FleetColumn("preempt", "pre", "preempt/m", 4, 10,
                lambda f: _counted(f.num_preempted), "preemptions"),
    FleetColumn("gap", "gap", "gap", 4, 4, lambda f: _counted(f.num_lost)),
    FleetColumn("steps", "", "steps/s", 0, 8, lambda f: _known(f.steps_per_s, _rate)),
    FleetColumn("out", "", "tok/s", 0, 7, lambda f: _known(f.output_tokens_per_s, _rate)),
    FleetColumn("hit", "", "hit", 0, 5, lambda f: _known(f.prefix_hit_rate, fmt.percent), "hits"),
    FleetColumn("ranks", "", "ranks wait", 0, 12, _ranks),
    FleetColumn("model", "", "model", 0, 18,
                lambda f: _known(f.info, model_text, "muted"),
                is_right=False),
    FleetColumn("load", "load", "load", 0, 0, None, is_right=False),
)  # fmt: skip
FIGURES = {column.key: column.draw for column in COLUMNS if column.draw is not None}
# Left out in this order.
_WIDE_ONLY: tuple[ColumnKey, ...] = ("model", "ranks", "hit", "out", "steps")
_ROOMY_SPARK = 24


def placed(page: FleetPage, width: int) -> list[FleetColumn]:
    """Return the columns to show in `width` cells, from left to right; the load fills the rest.

    That of ranks is left out if no engine has several.
    """
    is_wide = width >= 100
    left_out = "" if any(rank_sizes(each.info) != (1, 1) for each in page.engines) else "ranks"
    kept = [each for each in COLUMNS[:-1] if each.key != left_out and each.width(is_wide)]

    def total() -> int:
        return 1 + sum(column.width(is_wide) + 1 for column in kept)

    for key in _WIDE_ONLY:
        if total() + _ROOMY_SPARK <= width:
            break
        kept = [column for column in kept if column.key != key]
    return [*kept, COLUMNS[-1]]


def draw(page: FleetPage, width: int, height: int) -> list[Line]:
    """Return the table: a heading, and the lines of as many engines as fit."""
    shown, is_wide = placed(page, width), width >= 100
    widths = [column.width(is_wide) for column in shown]
    widths[-1] = max(0, width - 1 - sum(widths) - len(widths))
    columns: list[Column] = []
    for column, room in zip(shown, widths, strict=True):
        name = column.name if is_wide else column.short
        if column.key == page.sort:
            name = name[: room - 1] + ("▲" if page.is_ascending else "▼")
        columns.append(Column(name, column.width(is_wide), column.is_right))
    top = max((each for line in page.lines for each in line.load if each is not None), default=0)

    def row(at: int) -> list[Run]:
        found = zip(shown, widths, strict=True)
        return [_cell(page, page.lines[at], column, room, top) for column, room in found]

    return table(columns, Rows(len(page.lines), row), width, height, page.selected)


def _cell(page: FleetPage, line: EngineLine, column: FleetColumn, width: int, top: int) -> Run:
    """Return one figure of an engine; ▲ or ▼ before a value that differs much from others."""
    name = line.figures.name
    if column.key == "load":
        load = (*[None] * (NUM_LOADS - len(line.load)), *line.load)
        return sparkline(load, width, top), "decode"
    text, style = column.draw(line.figures) if column.draw else state_text(line)
    if line.figures.status == "stale" and style in ("text", "good"):
        style = "muted"  # the figure is from before the engine fell silent
    if column.key == "engine":
        mark = " ●" if name in page.recorded else ""
        room = width - len(mark)  # similar engines differ at the end
        text = (text if len(text) <= room else f"…{text[len(text) - room + 1 :]}") + mark
    elif column.figure in page.standing_out.get(name, ()):
        style = style if style == "breach" else "caution"
        sign = "▲" if column.figure != "hits" else "▼"
        text = f"{sign}{text}" if len(text) < width else text
    return text, style
