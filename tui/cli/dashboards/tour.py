"""`stepscope tour`: a lesson in the dashboard, on an engine of its own."""

import signal
from collections.abc import Mapping
from typing import Any

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards.dashboard import need_terminal, new_history, run_live
from stepscope.tui.cli.dashboards.demo import EngineNews, wait_until_live
from stepscope.tui.cli.dashboards.demo_engine import KV_MEMORY
from stepscope.tui.cli.shared.engine_process import EngineProcess
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals, ending_on_signals
from stepscope.tui.session.tour.bookmark import bookmark, keep_bookmark
from stepscope.tui.session.tour.chapters import CHAPTERS, SMALL
from stepscope.tui.session.tour.director import Director
from stepscope.tui.session.tour.tour import Tour
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings

_ENGINE: Mapping[str, KnobValue] = {
    "model": "demo",
    "http": "",
    "kv_memory": KV_MEMORY,
    "max_num_batched_tokens": SMALL,
    "max_num_seqs": 16,
}

# Decodes beside chunks of 64 keep these levels; decodes beside a whole prompt of 900 do not.
_LEVELS = {"slo_ttft_ms": 1000.0, "slo_itl_ms": 50.0}


def tour(chapter: int | None, flags: Mapping[str, Any]) -> None:
    """Run the tour until the person leaves it.

    Args:
        chapter: the chapter to begin with, from 1; None: the one where the person left it.

    Raises:
        CommandFailed: the engine failed.
    """
    if chapter is not None and not 1 <= chapter <= len(CHAPTERS):
        raise WrongUsage(f"CHAPTER: expected 1 to {len(CHAPTERS)}, got {chapter}")
    settings = resolve(DashboardSettings, "dashboard", flags, _LEVELS)
    need_terminal("the tour runs only in a terminal")
    first = bookmark(len(CHAPTERS)) if chapter is None else chapter - 1
    with ending_on_signals(), Progress() as progress:
        progress("starting the engine", None)
        with EngineProcess(_ENGINE, lambda line: progress(line, None), "serve") as engine:
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
