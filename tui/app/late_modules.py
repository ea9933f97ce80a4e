"""Imports, in the background, the modules that the first picture does not need.

They are imported soon after the start because a dashboard may run for days, and stepscope may be
updated meanwhile. A module imported after that would be of another version than the rest.
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
    "stepscope.tui.screens.overlays.export_chooser",
    "stepscope.tui.screens.handlers.svg_picture",
)
_AFTER_S = 2.0  # the first pictures are drawn long before


@contextmanager
def loaded_soon() -> Iterator[None]:
    """Import the modules in `LATE` in the background, soon after the dashboard has started."""
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
