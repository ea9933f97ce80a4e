"""`Finder`: looks for engines and recordings in the background, for the start screen.

It receives the engines' telemetry as the fleet page does, but keeps only a short history. A thread
opens the recordings.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepscope.engine.adapters.metrics.local_servers import LocalServers
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.recordings.file.overview import Overview, overview, recordings_in
from stepscope.recordings.fleets.fleet import EngineLine, Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.tui.session.live_source import Address, local_addresses, receive
from stepscope.tui.views.pages.start_page import MAX_RECORDINGS, File

_MAX_STEPS = 512  # per engine, enough for rates over ten seconds
_MAX_BYTES = 1024 * 1024
_FIND_S = 1.0  # between two searches for engines
_FILES_S = 3.0  # between two searches for recordings
_GROWING_S = 30.0  # a file that still grows is opened again at most this often


class _Opened(NamedTuple):
    state: tuple[int, float]  # its size, and when it was written
    opened_s: float
    overview: Overview


class Finder:
    """Finds engines and recordings for the screen's thread; a thread of its own opens files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = LocalServers()
        self._sources: dict[Address, Source] = {}
        self._fleet = Fleet([])
        self._find_due_s = 0.0
        self.files: tuple[File, ...] = ()  # the recordings found, the last written first
        self._opened: dict[Path, _Opened] = {}  # for the thread that opens files
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="recordings", daemon=True).start()

    def look(self) -> None:
        """Update the figures of the known engines, and once a second search for new engines."""
        now_s = time.monotonic()
        if now_s >= self._find_due_s:
            self._find_due_s = now_s + _FIND_S
            try:
                found = local_addresses(self._servers.found)
            except (ConfigError, OSError):
                found = []  # the runtime folder belongs to someone else: it holds no engine of ours
            self._follow(found)
        self._fleet.look()

    def engines(self) -> list[tuple[str, EngineLine]]:
        lines = self._fleet.picture.lines
        addresses = [endpoint.control for endpoint in self._sources]
        return list(zip(addresses, lines, strict=False))

    def stop(self) -> None:
        self._stopping.set()
        self._servers.stop()
        self._fleet.stop()

    def _follow(self, endpoints: Sequence[Address]) -> None:
        for endpoint in endpoints:
            if endpoint not in self._sources:
                history = History(max_steps=_MAX_STEPS, max_bytes=_MAX_BYTES)
                source = self._sources[endpoint] = receive(endpoint, history)
                self._fleet.add(source)
                source.start()
        for endpoint in [each for each in self._sources if each not in endpoints]:
            gone = self._sources.pop(endpoint)
            self._fleet.remove(gone)
            # In a thread: `stop` may wait for an answer that never comes.
            threading.Thread(target=gone.stop, name="end of a source", daemon=True).start()

    # The thread that opens files

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.files = tuple(self._listed())
            for file in self.files:
                if self._stopping.is_set():
                    return
                self._open(file)
                self.files = tuple(self._listed())
            self._stopping.wait(_FILES_S)

    def _listed(self) -> list[File]:
        files = []
        for path in recordings_in(self._folder):
            with contextlib.suppress(OSError):  # the file is gone
                status, path = path.stat(), path.absolute()
                about = self._opened.get(path)
                known = None if about is None else about.overview
                files.append(File(path, status.st_size, status.st_mtime, known))
        return sorted(files, key=lambda each: -each.written_s)[:MAX_RECORDINGS]

    def _open(self, file: File) -> None:
        state, now_s = (file.num_bytes, file.written_s), time.monotonic()
        seen = self._opened.get(file.path)
        if seen is None or (seen.state != state and now_s - seen.opened_s >= _GROWING_S):
            self._opened[file.path] = _Opened(state, now_s, overview(file.path))
