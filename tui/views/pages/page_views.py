"""The table of all pages but the main one: how to draw each, and the targets of its rows."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepscope.tui.settings.action_table import Page
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
    """A page: pure functions from a frame to its lines and to the targets of its rows."""

    name: str
    draw: Callable[[Frame, int, int], list[Line]]
    targets: Callable[[Frame], list[Target]]
    reading: str  # how to read it, for the help page


PAGE_VIEWS: Mapping[Page, PageView] = {
    "step": PageView(
        "step inspector",
        step_page.draw,
        step_page.targets,
        "One forward step. The bar on top shows its time: s scheduling, l preparing the launch, ━ "
        "the model; a part shorter than a cell is not drawn. Below it: how much of the token "
        "budget, of max_num_seqs and of the KV blocks the step used. Beside it: what changed "
        "since the step before, and what happened to requests. Each row is a request with the "
        "positions computed in this step and the blocks it holds (+ taken in this step).",
    ),
    "request": PageView(
        "request inspector",
        request_page.draw,
        request_page.targets,
        "The life of one request over time; a cell shows the worst state in it. Below it is a bar "
        "for each token: the time since the token before. Bars above the dotted line broke the "
        "service level; a wait caused by the operator's pause (‖) does not count. The wait for "
        "each late token is split into its causes; the parts sum to the wait.",
    ),
    "kv": PageView(
        "KV map",
        kv_page.draw,
        kv_page.targets,
        "Every block of the KV cache in the order of block ids, by state or by owner ({sort}). A "
        "is the request with the most blocks. Shared blocks hold a prompt prefix that requests "
        "have in common: a block with 3 references saves 2 blocks. Fragmentation is the share of "
        "slots in used blocks that hold no token.",
    ),
    "latency": PageView(
        "latency screen",
        latency_page.draw,
        latency_page.targets,
        "Exact percentiles over two windows, and the share of samples within the service level. "
        "In the heat map time runs to the right and latency upwards on a logarithmic scale; bands "
        "beyond the service level are marked !. Each breach is listed with the causes of its "
        "wait, the newest or the longest ({reverse}) first. Time in which the operator paused the "
        "engine never counts.",
    ),
    "knobs": PageView(
        "knobs screen",
        knobs_page.draw,
        knobs_page.targets,
        "The knobs can change while the engine runs; * marks a value that is not the default. "
        "Each change is listed with who made it, the first step it applied to, and the latencies "
        "in the ten seconds before and after it (less if another change is nearer). The list also "
        "shows other commands and refusals: pauses, single steps, resets, workloads, floods. In a "
        "replay it shows changes after the cursor too, and {inspect} goes to them.",
    ),
    "compare": PageView(
        "compare screen",
        compare_page.draw,
        compare_page.targets,
        "Two runs, A and B. A figure reads A→B, then the better run and by what factor; = is "
        "alike, ? is an uncertain difference. 'At least' is the near end of the 99 % interval of "
        "the factor. Under ITL stand the waits without and beside a prefill. If the loads differ, "
        "only the run that did better with more work wins; elsewhere ▼ is lower in B, ▲ higher. "
        "In the charts A grows up and B down from one axis: prefill tokens against each run's own "
        "budget, events next to the axis, and the longest wait for a token in each column.",
    ),
    "fleet": PageView(
        "fleet screen",
        fleet_page.draw,
        fleet_page.targets,
        "A line per engine; a dash is a figure the engine does not report. Latencies and "
        "preemptions cover a minute, budget and rates ten seconds; ! breaks the service level. ▲ "
        "marks a figure that has been far above the median of the other engines for several "
        "seconds. The load of all engines is drawn on one scale; ● means that the engine is being "
        "recorded. Two minutes of each engine stay in memory; of the one opened last, everything "
        "that fits.",
    ),
}


def targets(frame: Frame) -> list[Target]:
    """Return the targets of the rows of the shown page; none on the main screen."""
    page = PAGE_VIEWS.get(frame.view.page)
    return [] if page is None else page.targets(frame)
