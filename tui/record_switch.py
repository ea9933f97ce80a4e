"""`FileSwitch`: what `R` in the dashboard switches; a recording in the working folder."""

import threading
from pathlib import Path

from stepscope.recordings.mcap_index import RecordingError
from stepscope.recordings.recorder import Recorder, default_name
from stepscope.recordings.source import Source


class FileSwitch:
    """Implements `ports.RecordSwitch`: each start is a new file.

    Args:
        source: what is recorded.
        recorder: one that runs already.
    """

    def __init__(self, source: Source, recorder: Recorder | None = None) -> None:
        self._source = source
        self._recorder = recorder

    @property
    def path(self) -> Path | None:
        return None if self._recorder is None else self._recorder.path

    @property
    def active(self) -> bool:
        return self._recorder is not None and self._recorder.state == "recording"

    @property
    def num_bytes(self) -> int:
        return 0 if self._recorder is None else self._recorder.num_bytes

    @property
    def seconds(self) -> float:
        return 0.0 if self._recorder is None else self._recorder.elapsed_s

    @property
    def error(self) -> str | None:
        return None if self._recorder is None else self._recorder.error

    def start(self) -> None:
        """Raises OSError when no file can be written here."""
        self.stop()
        try:
            self._recorder = Recorder(self._source, Path.cwd() / default_name(self._source.name))
        except RecordingError as error:
            raise OSError(str(error)) from error

    def stop(self) -> None:
        """Does not wait; the process does not end before the file is whole."""
        if self.active and self._recorder is not None:
            threading.Thread(target=self._recorder.stop, name="finish recording").start()
