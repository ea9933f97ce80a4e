"""`imported`: a temporary recording of what a file of another tool tells."""

import atexit
import shutil
import tempfile
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.source import first_snapshot
from stepscope.recordings.importing import client_results
from stepscope.recordings.importing.log_session import LOGS
from stepscope.recordings.importing.source import FOLDER_PREFIX, ForeignFile, ForeignSession
from stepscope.recordings.simulation.writing import RecordingSink

FORMATS = (*(each.read for each in LOGS), client_results.read)


def foreign_session(path: Path) -> ForeignSession | None:
    """The session that a file tells; None: of no known format. Raises OSError, RecordingError."""
    file = ForeignFile(path)
    try:
        return next((found for read in FORMATS if (found := read(file)) is not None), None)
    except UnicodeEncodeError as error:  # half of a pair of escapes
        got = ascii(error.object[error.start : error.end])
        raise RecordingError(f"{path}: expected text in UTF-8, got {got}") from error


def imported(path: Path) -> tuple[Path, str | None] | None:
    """Write what a foreign file tells into a recording, which the end of the process removes.

    Returns its path and a note for who reads it; None if the file is of no known format.

    Raises RecordingError: the file is of a known format, and cannot be used.
    """
    try:
        session = foreign_session(path)
    except OSError:
        return None  # who opens it says why
    if session is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with RecordingSink(folder / path.name, {}) as sink:
        sink.begin(first_snapshot(session.info, sink.next_sequence))
        for sink.next_sequence, message in enumerate(session.messages, 1):
            sink.publish(message)
    return folder / path.name, session.note


def client_result(path: Path) -> ForeignSession:
    """Read a load generator's result. Raises RecordingError: it cannot be read, or is none."""
    try:
        session = foreign_session(path)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    if session is None or not session.requests:
        got = "another file" if session is None else session.info.imported
        raise RecordingError(f"{path}: expected the result of a load generator, got {got}")
    return session
