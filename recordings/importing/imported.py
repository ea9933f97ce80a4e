"""`imported`: a temporary recording of what a file of another tool tells."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.sink import MAGIC
from stepscope.recordings.importing import (
    aiperf,
    bench_result,
    guidellm,
    sglang_log,
    trtllm_log,
    vllm_log,
)
from stepscope.recordings.importing.source import FOLDER_PREFIX, ForeignFile, ForeignSession
from stepscope.recordings.simulation.writing import RecordingSink

FORMATS: tuple[Callable[[ForeignFile], ForeignSession | None], ...] = (
    vllm_log.read,
    sglang_log.read,
    trtllm_log.read,
    bench_result.read,
    guidellm.read,
    aiperf.read,
)


class ImportedFile(NamedTuple):
    """A recording of a foreign file, and what a reader must know about it."""

    path: Path
    note: str | None


def imported(path: Path) -> ImportedFile | None:
    """Write what a foreign file tells into a recording, which the end of the process removes.

    Returns None if it is no file of a known format. A file that did not change is read once.

    Raises:
        RecordingError: the file is of a known format, and cannot be used.
    """
    try:
        if not path.is_file():
            return None
        state = path.stat()
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) == MAGIC:
                return None
    except OSError:
        return None  # who opens it says why
    return _imported(path.resolve(), state.st_mtime_ns, state.st_size)


@cache
def _imported(path: Path, mtime_ns: int, size: int) -> ImportedFile | None:
    file = ForeignFile(path)
    if "\0" in file.head:
        return None
    session = next((found for read in FORMATS if (found := read(file)) is not None), None)
    if session is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info, target = session.info, folder / path.name
    first = Snapshot(
        sequence=0,
        step=-1,
        time_ns=info.monotonic_ns,
        info=info,
        knobs={},
        knobs_version=0,
        state="running",
        requests=[],
        blocks=None,
        kv=None,
    )
    with RecordingSink(target, {}) as sink:
        sink.begin(first)
        sink.next_sequence = 1
        for message in session.messages:
            sink.publish(message)
    if sink.num_steps == 0:
        raise RecordingError(f"{path} holds nothing that has a time")
    return ImportedFile(target, session.note)
