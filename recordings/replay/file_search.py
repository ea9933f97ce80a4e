"""`FileSearch`: a thread that looks through a whole file while others have more urgent work."""

import threading
from collections.abc import Callable
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording


class FileSearch:
    """Looks through a file once it is started, with a file handle of its own.

    Args:
        path: of the recording.
        name: of the thread.
        look: does the work, on the thread; to ask `rest` often, and to end where that says so.
        first_pause_s: what is shown first comes before.
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
        """End it. Waits for that."""
        self._is_stopping = True
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        """Nothing more will be found."""
        return self._done.is_set()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Until it is done, without any rest; False if it takes longer."""
        self._hurry.set()
        return self._done.wait(timeout_s)

    # The thread

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def rest(self, seconds: float) -> bool:
        """Let others work; true at once where somebody waits for the end, or wants it."""
        return self._hurry.wait(seconds)

    def _run(self) -> None:
        try:
            self.rest(self._first_pause_s)
            if not self._is_stopping:
                with Recording(self._path) as recording:
                    self._look(recording)
        except (RecordingError, OSError):
            pass  # who plays it says what is wrong with it
        finally:
            self._done.set()
