"""Loads in the background what the first picture does not need.

A dashboard may run for days while stepscope is updated: a module imported later would come from
another version than the rest.
"""

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("stepscope.tui")

LATE = (
    "stepscope.recordings.autopilot.live_pilot",
    "stepscope.recordings.export.export",
    "stepscope.recordings.export.mooncake",
    "stepscope.recordings.export.output",
    "stepscope.recordings.history.memory_file",
    "stepscope.recordings.file.reader",
    "stepscope.recordings.live.recorder",
    "stepscope.recordings.live.scraper",
    "stepscope.engine.adapters.metrics.local_servers",
    "stepscope.recordings.compare.side.recording_feed",
    "stepscope.recordings.replay.replay",
    "stepscope.tui.settings.config_file",
    "stepscope.tui.settings.keymap",
    "stepscope.tui.app.picture",
    "stepscope.tui.views.picture_png",
    "stepscope.tui.screens.overlays.export_chooser",
    "stepscope.tui.screens.handlers.svg_picture",
)
_AFTER_S = 2.0  # when the first pictures are long drawn


@contextmanager
def loaded_soon() -> Iterator[None]:
    """While the dashboard runs: load `LATE` in the background, once it has begun."""
    timer = threading.Timer(_AFTER_S, load)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def load() -> None:
    for name in LATE:
        try:
            importlib.import_module(name)
        except ImportError:  # the command that needs it will report it
            log.exception("%s cannot be loaded", name)
