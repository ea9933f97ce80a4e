"""`stepscope tour`: a lesson in the dashboard, on an engine of its own."""

import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.dashboards.demo import EngineNews, wait_until_live
from stepscope.tui.cli.dashboards.demo_engine import KV_MEMORY
from stepscope.tui.cli.engines.engine import has_torch
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.levels import own_levels
from stepscope.tui.cli.shared.options import TOUR_DEFAULTS
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals, ending_on_signals
from stepscope.tui.session.tour.bookmark import bookmark, keep_bookmark
from stepscope.tui.session.tour.chapters import CHAPTERS, SMALL
from stepscope.tui.session.tour.director import Director
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings

_KNOBS: Mapping[str, KnobValue] = {"max_num_batched_tokens": SMALL, "max_num_seqs": 16}
_ENGINE: Mapping[str, KnobValue] = {"model": "demo", "http": "", "kv_memory": KV_MEMORY, **_KNOBS}
# The same engine simulated: the step times of a sample that ran the demo model, and as many blocks
# as `KV_MEMORY` holds of that model.
_SIMULATED: Mapping[str, KnobValue] = {"step_time": "chunked", "num_blocks": 682, **_KNOBS}


def tour(chapter: int | None, is_simulated: bool | None, flags: Mapping[str, Any]) -> None:
    """Run the tour until the person leaves it.

    Args:
        chapter: the chapter to begin with, from 1; None: the one where the person left it.
        is_simulated: whether the engine is simulated; None: only where torch is missing.

    Raises:
        CommandFailed: the engine failed.
    """
    if chapter is not None and not 1 <= chapter <= len(CHAPTERS):
        raise WrongUsage(f"CHAPTER: expected 1 to {len(CHAPTERS)}, got {chapter}")
    settings = resolve(DashboardSettings, "dashboard", flags, TOUR_DEFAULTS)
    need_terminal("the tour runs only in a terminal")
    first = bookmark(len(CHAPTERS)) if chapter is None else chapter - 1
    if is_simulated is None:
        is_simulated = not has_torch()
    options, command = (_SIMULATED, "simulated-engine") if is_simulated else (_ENGINE, "serve")
    with ending_on_signals(), Progress() as progress:
        progress("starting the engine", None)
        told = partial(progress, share=None)
        options = {**options, **own_levels(settings)}
        with EngineProcess(options, told, command, name="tour") as engine:
            engine.wait_until_ready()
            source = Subscriber(engine.endpoint, new_history(settings))
            source.start()
            try:
                wait_until_live(engine, source, StopSignals(signal.SIGINT))
                progress.close()
                with Director(engine.endpoint) as director:
                    lesson = Tour(director.do, lambda: director.ended, keep_bookmark, first)
                    ended = EngineNews(engine)
                    run_live(
                        source,
                        settings,
                        keeps_levels=False,
                        news=lambda: ended() or director.news(),
                        tour=lesson,
                    )
            finally:
                source.stop()
