"""`LogPipe`: the log of a server as another program passes it on, such as `tail -F`."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, Numbered, SourceStatus
from stepscope.recordings.importing.log_session import LOGS, LogClock, LogEntry, LogFormat
from stepscope.recordings.importing.source import COLOURS, ForeignFile

_SILENT_S = 1.1  # stamps are whole seconds: after this time, a second has ended
_BEGIN_S = 1.5  # lines of this time tell how often there is one
_MAX_WAITING = 10_000  # lines


class LogSource:
    """Fills `history` with what one rank prints; implements `Source`."""

    is_live = True

    def __init__(
        self, log_format: LogFormat, begun: list[LogEntry], pipe: "LogPipe", history: History
    ) -> None:
        self.name = f"{log_format.engine} {begun[0].rank}"
        self.history = history
        self.tap = FrameTap()
        self.status: SourceStatus = "live"
        # Lines after those with which it began; None: there will be no more.
        self.later: queue.Queue[LogEntry | None] = queue.Queue(_MAX_WAITING)
        self._pipe = pipe
        self._is_stopping = False
        file = ForeignFile(Path(self.name), "")
        self._session = log_format.session(file, begun, self._read_later())
        self._thread = Thread(target=self._run, name="log", daemon=True)

    @property
    def error(self) -> str | None:
        return "the log has ended" if self.status == "ended" else self._pipe.error

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        with contextlib.suppress(queue.Full):
            self.later.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        messages = Numbered(self.history, self.tap)
        messages.begin(self._session.info)
        for each in self._session.messages:
            messages.publish(each)
        self.status = "ended"

    def _read_later(self) -> Iterator[LogEntry | None]:
        while not self._is_stopping:
            try:
                if (entry := self.later.get(timeout=_SILENT_S)) is None:
                    return
                yield entry
            except queue.Empty:
                yield None


class LogPipe:
    """Reads a log, and gives the lines of each rank to its `LogSource`."""

    def __init__(self, stream: IO[str], new_history: Callable[[], History]) -> None:
        self.error: str | None = None  # on the last line that could not be read
        self._new_history = new_history
        self._clock = LogClock(ForeignFile(Path("standard input"), ""))
        self._format: LogFormat | None = None
        self._begun: dict[str, list[LogEntry]] = {}  # lines of ranks without a source
        self._sources: dict[str, LogSource] = {}
        self._lock = Lock()
        self._has_begun, self._has_ended = Event(), Event()
        Thread(target=self._read, args=(stream,), name="pipe", daemon=True).start()

    def begin(self) -> list[LogSource]:
        """Wait for the first lines with figures; return a source, not yet started, of each rank.

        Raises RecordingError: the log ends without such a line.
        """
        self._has_begun.wait()
        self._has_ended.wait(_BEGIN_S)
        if not (found := self.newcomers()):
            expected = "standard input: expected the log of vLLM, SGLang or TensorRT-LLM"
            raise RecordingError(self.error or expected)
        return found

    def newcomers(self) -> list[LogSource]:
        """The sources of ranks that have appeared since it was called last, not yet started."""
        with self._lock:
            begun, self._begun = self._begun, {}
            fresh = {
                rank: LogSource(self._format, lines, self, self._new_history())
                for rank, lines in begun.items()
                if self._format is not None
            }
            self._sources |= fresh
            for each in fresh.values() if self._has_ended.is_set() else ():
                each.later.put(None)
        return list(fresh.values())

    def _read(self, stream: IO[str]) -> None:
        for number, line in enumerate(stream, 1):
            if (entry := self._entry(number, COLOURS.sub("", line))) is None:
                continue
            with self._lock:
                if (source := self._sources.get(entry.rank)) is None:
                    self._begun.setdefault(entry.rank, []).append(entry)
            if source is not None:
                source.later.put(entry)
            self._has_begun.set()
        with self._lock:
            self._has_ended.set()
        for each in self._sources.values():
            each.later.put(None)
        self._has_begun.set()

    def _entry(self, number: int, line: str) -> LogEntry | None:
        if self._format is None:
            self._format = next((each for each in LOGS if each.parse(line)), None)
        try:
            return self._format and self._format.entry(self._clock, number, line)
        except RecordingError as error:
            self.error = str(error)
            return None
