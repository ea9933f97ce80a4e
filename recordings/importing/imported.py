"""`imported`: a temporary recording of what a file of another tool tells."""

import atexit
import shutil
import tempfile
from pathlib import Path

from stepscope.recordings.importing import (
    aiperf,
    bench_result,
    guidellm,
    sglang_log,
    trtllm_log,
    vllm_log,
)
from stepscope.recordings.importing.source import FOLDER_PREFIX, ForeignFile
from stepscope.recordings.live.numbered import first_snapshot
from stepscope.recordings.simulation.writing import RecordingSink

FORMATS = (
    vllm_log.read,
    sglang_log.read,
    trtllm_log.read,
    bench_result.read,
    guidellm.read,
    aiperf.read,
)


def imported(path: Path) -> tuple[Path, str | None] | None:
    """Write what a foreign file tells into a recording, which the end of the process removes.

    Returns its path and a note for who reads it; None if the file is of no known format.

    Raises:
        RecordingError: the file is of a known format, and cannot be used.
    """
    try:
        file = ForeignFile(path)
    except OSError:
        return None  # who opens it says why
    session = next((found for read in FORMATS if (found := read(file)) is not None), None)
    if session is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with RecordingSink(folder / path.name, {}) as sink:
        sink.begin(first_snapshot(session.info, sink.next_sequence))
        for sink.next_sequence, message in enumerate(session.messages, 1):
            sink.publish(message)
    return folder / path.name, session.note
