"""`stepscope tour`: a lesson in the dashboard, on an engine of its own."""

import signal
from collections.abc import Mapping
from typing import Any

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.dashboards.demo import news_of, wait_until_live
from stepscope.tui.cli.engines.engine import has_torch
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.errors import StopSignals, ending_on_signals
from stepscope.tui.cli.shared.levels import own_levels
from stepscope.tui.cli.shared.options import argument, command, flag
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.session.tour.chapters import CHAPTERS, SMALL
from stepscope.tui.session.tour.tour import Director, Tour
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings

# Decodes beside chunks of 64 keep these levels; decodes beside a whole prompt of 900 do not.
_LEVELS = {"slo_ttft_ms": 1000.0, "slo_itl_ms": 50.0}
_KNOBS: Mapping[str, KnobValue] = {"max_num_batched_tokens": SMALL, "max_num_seqs": 16}
_ENGINE: Mapping[str, KnobValue] = {"model": "demo", "http": "", "kv_memory": "64MB", **_KNOBS}
# The same engine simulated: the step times of a sample that ran the demo model, and as many blocks
# as 64 MB hold of that model.
_SIMULATED: Mapping[str, KnobValue] = {"step_time": "chunked", "num_blocks": 682, **_KNOBS}


@command(
    "stepscope tour",
    "stepscope tour 4",
    "stepscope tour --simulate",
    sections=("dashboard",),
    defaults=_LEVELS,
)
def tour(
    chapter: int = argument(
        "CHAPTER",
        "a step, the batch, the budget, a freeze, chunks, the knee, KV blocks, prefix "
        "hits, preemption, a late token: 1 to 10",
        default=1,
        min=1,
        max=len(CHAPTERS),
    ),
    *,
    simulate: bool | None = flag(
        "simulate the engine instead of running one (default: only where torch is missing)",
        "--simulate/--no-simulate",
        default=None,
    ),
    flags: dict[str, Any],
) -> None:
    """Learn how serving works, on a live engine."""
    settings = resolve(DashboardSettings, "dashboard", flags, _LEVELS)
    need_terminal("the tour runs only in a terminal")
    if simulate is None:
        simulate = not has_torch()
    options, command = (_SIMULATED, "simulated-engine") if simulate else (_ENGINE, "serve")
    with ending_on_signals(), Progress() as progress:
        options = {**options, **own_levels(settings)}
        with EngineProcess(options, progress, command, name="tour") as engine:
            source = Subscriber(engine.endpoint, new_history(settings))
            source.start()
            try:
                wait_until_live(engine, source, StopSignals(signal.SIGINT))
                progress.close()
                with Director(engine.endpoint) as director:
                    news = news_of(engine, director.news)
                    lesson = Tour(director.do, director.ended, chapter - 1)
                    run_live(source, settings, keeps_levels=False, news=news, tour=lesson)
            finally:
                source.stop()
