"""`FileSearch`: a background thread that searches a whole file and gives way to other work."""

import threading
from collections.abc import Callable
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording


class FileSearch:
    """Searches a file on a thread, with its own file handle.

    Args:
        path: the recording.
        name: name of the thread.
        look: the search itself, called on the thread. It must call `rest` often, and return if
            `is_stopping`.
        first_pause_s: seconds to wait at the start, so that the screen is drawn first.
    """

    def __init__(
        self, path: Path, name: str, look: Callable[[Recording], None], first_pause_s: float
    ) -> None:
        self._path = path
        self._look = look
        self._first_pause_s = first_pause_s
        self._is_stopping = False
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._is_stopping = True
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether the search has ended."""
        return self._done.is_set()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Let the search run without rests, and wait for its end. Returns False on timeout."""
        self._hurry.set()
        return self._done.wait(timeout_s)

    # The thread

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def rest(self, seconds: float) -> bool:
        """Sleep to give way to other work. Returns True at once after `wait` or `stop`."""
        return self._hurry.wait(seconds)

    def _run(self) -> None:
        try:
            self.rest(self._first_pause_s)
            if not self._is_stopping:
                with Recording(self._path) as recording:
                    self._look(recording)
        except (RecordingError, OSError):
            pass  # playing it reports the error
        finally:
            self._done.set()
