"""What can be read in a file that a recorder still writes."""

import contextlib
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording


def has_steps(path: Path) -> bool:
    with contextlib.suppress(RecordingError), Recording(path) as recording:
        return recording.last_step is not None
    return False
