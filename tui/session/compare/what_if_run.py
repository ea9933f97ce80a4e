"""`WhatIfRun`: a simulation of the session with other knobs, as one run of a comparison."""

import tempfile
import time
from pathlib import Path

from stepscope.recordings.compare.side.feed import Feed
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.step_range import StepRange
from stepscope.tui.session.knob_forecast import WhatIfProcess
from stepscope.tui.views.frame.compare_choices import Origin

_MAX_STEPS = 10_000  # the newest steps in memory to simulate: more would take minutes


class WhatIfRun:
    """A simulation of the session with this change of knobs, deleted with this object."""

    def __init__(self, session: Origin, change: str) -> None:
        self.session = session
        self.change = change
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-")
        self.path = Path(self._folder.name) / "what-if.mcap"

    @property
    def origin(self) -> Origin:
        name = f"what if {self.change}"
        return Origin(name, self.session.slo, path=self.path, make_feed=self._feed)

    def recorded(self) -> Path:
        """Return the path of the session's recording, written from memory if need be."""
        if self.session.path is not None:
            return self.session.path
        from stepscope.recordings.history.memory_file import write_memory  # loads mcap

        history = self.session.history
        assert history is not None
        path = Path(self._folder.name) / "memory.mcap"
        if not path.exists():
            first = history.state.step - _MAX_STEPS
            write_memory(history, path, lambda share: None, first=first)
        return path

    def _feed(self) -> Feed:
        return WhatIfFeed(self)


class WhatIfFeed:
    """A `Feed` that waits for the simulation, then reads its recording."""

    def __init__(self, wanted: WhatIfRun) -> None:
        self.name = wanted.origin.name
        self._wanted = wanted
        self._process: WhatIfProcess | None = None
        self._feed: Feed | None = None
        self._error: str | None = None

    @property
    def side(self) -> Side | None:
        return None if self._feed is None else self._feed.side

    @property
    def share(self) -> float | None:
        return 0.0 if self._feed is None else self._feed.share

    @property
    def is_done(self) -> bool:
        return self._error is not None or (self._feed is not None and self._feed.is_done)

    @property
    def note(self) -> str | None:
        if self._error is not None:
            return f"{self.name}: {self._error}"
        return f"simulating {self.name}" if self._feed is None else self._feed.note

    def read(self, until_s: float) -> bool:
        if self._error is not None:
            return False
        try:
            if self._feed is None:
                self._feed = self._simulated(until_s)
        except (OSError, RecordingError) as error:
            self._error = str(error)
        return self._feed is not None and self._feed.read(until_s)

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
        if self._feed is not None:
            self._feed.close()

    def _simulated(self, until_s: float) -> Feed | None:
        """Return a feed that reads the simulation's recording; None while the simulation runs."""
        from stepscope.recordings.compare.side.recording_feed import RecordingFeed
        from stepscope.recordings.file.reader import Recording  # with mcap, only when needed

        wanted = self._wanted
        if not wanted.path.exists() or self._process is not None:
            if self._process is None:
                options = (*wanted.change.split(), "-o", str(wanted.path))
                self._process = WhatIfProcess(wanted.recorded(), *options)
            if self._process.wait(until_s - time.monotonic()) is None:
                return None
            self._process = None
        session = wanted.session
        return RecordingFeed(Recording(wanted.path), self.name, session.slo, StepRange())
