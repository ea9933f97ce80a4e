"""`AutopilotSwitch`: starts and stops an autopilot, which runs in a thread of its own.

An autopilot moves knobs so that ITL keeps a level.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.state.audit_text import changes_text, value_text
from stepscope.tui.settings.terminal import see_log
from stepscope.tui.views.notices import Tone

if TYPE_CHECKING:
    from stepscope.recordings.autopilot.live_pilot import LivePilot, Moved

log = logging.getLogger("stepscope.tui")

_TICK_S = 0.2
_CLOSE_S = 2.0  # wait for the knobs to be restored; after that the engine restores them itself


class AutopilotSwitch:
    """Starts and stops the autopilot of this dashboard. Use it only on the UI thread."""

    def __init__(self, endpoint: str, who: Callable[[], str]) -> None:
        self._endpoint = endpoint
        self._who = who
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._news: deque[tuple[str, Tone]] = deque()

    @property
    def is_on(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopping.is_set()

    def start(self, itl_ms: float) -> None:
        """Start an autopilot that holds this ITL level, until `stop` or until it ends by itself."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(itl_ms, self._stopping), name="autopilot", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Tell the autopilot to restore the knobs and end; do not wait for it."""
        self._stopping.set()

    def close(self) -> None:
        """Stop the autopilot and wait until it has ended, at most `_CLOSE_S`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def news(self) -> tuple[str, Tone] | None:
        """Return the oldest line about the autopilot not returned yet, with its style."""
        return self._news.popleft() if self._news else None

    def _run(self, itl_ms: float, stopping: threading.Event) -> None:
        # Imported here: few sessions need it, and the code that fits models loads slowly.
        from stepscope.recordings.autopilot.live_pilot import LivePilot

        try:
            pilot = LivePilot(Endpoint.parse(self._endpoint), itl_ms, self._who())
        except (ConfigError, CommandRefused, EngineUnreachable) as error:
            self._news.append((f"no autopilot: {error}", "caution"))
            return
        try:
            while pilot.ended is None and not stopping.wait(_TICK_S):
                if (moved := pilot.tick(time.monotonic())) is not None:
                    self._news.append((_moved_text(moved), "text"))
        except Exception as failure:
            log.exception("the autopilot failed")
            pilot.ended = f"internal error, {see_log(failure)}"
        self._end(pilot)

    def _end(self, pilot: "LivePilot") -> None:
        given_back = pilot.close()
        values = ", ".join(f"{name} {value_text(value)}" for name, value in given_back.items())
        back = f"; given back: {values}" if values else ""
        if pilot.ended is None:
            self._news.append((f"autopilot ended{back}", "good"))
        else:
            self._news.append((f"autopilot ended: {pilot.ended}{back}", "caution"))


def _moved_text(moved: "Moved") -> str:
    changes = changes_text(moved.before, moved.move.changes)
    return f"autopilot: {changes} ({moved.move.reason})"
