"""Simulates the session with other knobs: for one line (`KnobForecast`), or for a comparison.

A simulation runs in a process of its own, not to slow the screen.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.compare.side.feed import Feed
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import typed_text
from stepscope.tui.views.frame.compare_choices import Origin


class WhatIfProcess:
    """Starts `stepscope what-if` of a recording at once; `options` follow its path."""

    def __init__(self, path: Path, *options: str) -> None:
        self._path = path
        command = [sys.executable, "-m", "stepscope.tui.cli", "what-if", str(path), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self, seconds: float) -> str | None:
        """Return what it printed; None if it still runs. RecordingError if it failed."""
        try:
            out, wrong = self._process.communicate(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        if self._process.returncode:
            last = wrong.strip().rpartition("\n")[2]
            said = last.removeprefix("stepscope: error: ").removeprefix(f"{self._path}: ")
            raise RecordingError(said)
        return out

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


_SHOWN = (("TTFT p99", "ttft_p99_ms"), ("ITL p99", "itl_p99_ms"))
_MAX_STEPS = 10_000  # the newest steps to simulate: more would take minutes
_WAIT_S = 0.1  # between two checks whether the answer is still wanted


class _Dropped(Exception):  # noqa: N818 - no error
    """Raised in the thread of a simulation whose result is no longer needed."""


class KnobForecast(threading.Thread):
    """Simulates one value of a knob, in a process of its own; `text` is the result in one line."""

    def __init__(self, history: History, name: str, value: KnobValue) -> None:
        super().__init__(name="what-if", daemon=True)
        self._history = history
        self._change = f"{name}={typed_text(value)}"
        self._is_dropped = False
        self.text = f"what if {self._change}: simulating the steps in memory ..."
        self.start()

    def drop(self) -> None:
        """Let the simulation end, as its result is no longer needed."""
        self._is_dropped = True

    def run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
                path = _newest_steps(self._history, Path(folder), self._look)
                answer = self._simulated(path)
            self.text = f"what if {self._change}: {answer}"
        except _Dropped:
            return
        except (OSError, RecordingError, msgspec.DecodeError) as error:
            self.text = f"what if {self._change}: {error}"

    def _look(self, _: float = 0.0) -> None:
        if self._is_dropped:
            raise _Dropped

    def _simulated(self, path: Path) -> str:
        process = WhatIfProcess(path, self._change, "--json")
        try:
            while (out := process.wait(_WAIT_S)) is None:
                self._look()
        finally:
            process.end()
        return _in_words(msgspec.json.decode(out))


def _newest_steps(
    history: History, folder: Path, on_share: Callable[[float], None] = lambda share: None
) -> Path:
    """Return the path of a recording of the newest steps in memory, in this folder."""
    from stepscope.recordings.history.memory_file import write_memory  # loads mcap

    path = folder / "memory.mcap"
    if not path.exists():
        write_memory(history, path, on_share, first=history.state.step - _MAX_STEPS)
    return path


def _in_words(answer: dict[str, Any]) -> str:
    """Return the output of `stepscope what-if --json` of one variant in a line."""
    parts = []
    for label, name in _SHOWN:
        before, after = answer["recorded"].get(name), answer["variants"][0]["figures"].get(name)
        if before is not None and after is not None:
            interval = f"({after['low']:,.0f} to {after['high']:,.0f})"
            parts.append(f"{label} {before:,.0f} → {after['value']:,.0f} ms {interval}")
    return "   ".join(parts) or "no request finished"


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
        assert self.session.history is not None
        return _newest_steps(self.session.history, Path(self._folder.name))

    def _feed(self) -> Feed:
        return WhatIfFeed(self)


class WhatIfFeed:
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
