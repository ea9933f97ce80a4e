"""`FileEvents`: marks and knob changes of a whole file, also of what a replay has not played yet.

Its thread owns a file handle of its own; it reads a chunk now and then, so that it is in nobody's
way.
"""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from stepscope.engine.wire import KnobsChanged, Mark
from stepscope.recordings.events import SessionEvent, knobs_event, mark_event
from stepscope.recordings.landmarks import messages_in
from stepscope.recordings.mcap_index import RecordingError
from stepscope.recordings.reader import Recording

_PAUSE_S = 0.005  # between two chunks
_FIRST_PAUSE_S = 0.3  # the first picture comes before


class FileEvents:
    """Finds them once it is started.

    Attributes:
        found: so far, by step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_stopping = False
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="marks of the file", daemon=True)
        self.found: Sequence[SessionEvent] = ()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Until the whole file has been looked through; False if it takes longer."""
        self._hurry.set()
        return self._done.wait(timeout_s)

    def next(self, step: int, direction: int, kinds: Collection[str]) -> SessionEvent | None:
        """The nearest one after (direction 1) or before (-1) `step`."""
        found = [each for each in self.found if each.kind in kinds]
        if direction > 0:
            return next((each for each in found if each.step > step), None)
        return next((each for each in reversed(found) if each.step < step), None)

    def _run(self) -> None:
        try:
            self._hurry.wait(_FIRST_PAUSE_S)
            if not self._is_stopping:
                self._look()
        except (RecordingError, OSError):
            pass  # who plays it says what is wrong with it
        finally:
            self._done.set()

    def _look(self) -> None:
        with Recording(self._path) as recording:
            found: set[SessionEvent] = set()
            for number in range(recording.num_chunks):
                told = {_event(message) for message in messages_in(recording, number)}
                if new := {each for each in told if each is not None} - found:
                    found |= new
                    self.found = sorted(found, key=lambda each: (each.step, each.time_ns))
                self._hurry.wait(_PAUSE_S)
                if self._is_stopping:
                    return


def _event(message: object) -> SessionEvent | None:
    if isinstance(message, Mark):
        return mark_event(message)
    return knobs_event(message) if isinstance(message, KnobsChanged) else None
