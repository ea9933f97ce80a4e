"""The screens beyond the main one: what draws each, and what its rows lead to."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepscope.tui.settings.page_names import Page
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Target
from stepscope.tui.views.lines import Line
from stepscope.tui.views.pages import (
    compare_page,
    fleet_page,
    knobs_page,
    kv_page,
    latency_page,
    request_page,
    step_page,
)


class PageView(NamedTuple):
    """A screen that is a single view: a pure function of a frame, and the rows one can choose."""

    name: str
    draw: Callable[[Frame, int, int], list[Line]]
    targets: Callable[[Frame], list[Target]]
    reading: str  # how to read it, for the help page


PAGE_VIEWS: Mapping[Page, PageView] = {
    "step": PageView(
        "step inspector",
        step_page.draw,
        step_page.targets,
        "One forward step. The bar on top is its time: s scheduling, l preparing the launch, ━ the "
        "model; what is too short for a cell has none. "
        "Below stands what it spent, against budget, seats and KV blocks; beside it what is "
        "different from the step before, and what happened to requests. Each row is a request: "
        "positions are those computed in this step, blocks what it holds (+ taken in this step).",
    ),
    "request": PageView(
        "request inspector",
        request_page.draw,
        request_page.targets,
        "The life of one request on a line of time; a cell shows the worst of what is in it. "
        "Below it a bar for each token: how long it took since the one before. Those above the "
        "dotted line broke the service level; a wait that the operator's pause made (‖) did not. "
        "Each late token is split into what its wait was made of; the parts sum to the wait.",
    ),
    "kv": PageView(
        "KV map",
        kv_page.draw,
        kv_page.targets,
        "Every block of the KV cache in the order of its id, by state or holder ({sort}). A "
        "is the request that holds most. Shared blocks hold equal prompt beginnings: one with 3 "
        "references saves 2. Fragmentation is the share of slots in held blocks without a token.",
    ),
    "latency": PageView(
        "latency screen",
        latency_page.draw,
        latency_page.targets,
        "Exact percentiles over three windows (all; mem: of a replay, what is in memory of it up "
        "to the cursor), and the share of samples within the service level. The heat map has time "
        "to the right and latency upwards, in bands of equal factors; those beyond the service "
        "level are marked !. Each breach is listed with what the wait was made of, the newest or "
        "the longest ({reverse}) first. Time in which the operator had paused the engine counts "
        "nowhere.",
    ),
    "knobs": PageView(
        "knobs screen",
        knobs_page.draw,
        knobs_page.targets,
        "What may be changed while the engine runs; ◆ is not the default. Each change is listed "
        "with who made it, the first step it held for, and the latencies in the ten seconds (or "
        "up to the next change) before it and after it. Between them stands whatever else somebody "
        "did to the engine, or was refused: pauses, single steps, resets, workloads, floods. Of a "
        "replayed file the changes that lie ahead are listed too, and {inspect} goes to them.",
    ),
    "compare": PageView(
        "compare screen",
        compare_page.draw,
        compare_page.targets,
        "Two runs, A and B. A figure stands as A→B, then who is better and how many times; = is "
        "alike, ? a difference that is not sure. 'At least' is the end of an interval that "
        "holds the true factor 99 times of 100, as far as the run varies in itself. Under ITL "
        "stand waits without and beside a prefill, in steps that decode as many: these have a "
        "winner where both were not given the same to do; others only where who had more to do "
        "was better. Else ▼ is lower in B, ▲ higher. "
        "Below, A grows up and B down from one axis: prefill tokens against each side's own "
        "budget, what happened next to the axis, and the longest wait for a token in a column.",
    ),
    "fleet": PageView(
        "fleet screen",
        fleet_page.draw,
        fleet_page.targets,
        "A line per engine; a dash is what an engine does not tell. Latencies and preemptions are "
        "over a minute, budget and rates over ten seconds; ! is later than the service level. ▲ "
        "marks a figure that stands out: far above the median of the other engines, for seconds. "
        "The load of all engines is drawn on one scale; ● is recorded. An engine that is not open "
        "keeps two minutes in memory, the one opened last as much as ever.",
    ),
}


def targets(frame: Frame) -> list[Target]:
    """The rows of the screen that is shown; none on the main screen."""
    page = PAGE_VIEWS.get(frame.view.page)
    return [] if page is None else page.targets(frame)
