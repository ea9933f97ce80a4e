"""`Overview`: what a list of recordings shows of a file, read from its beginning and end."""

from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.incident import incident_in
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording


class Overview(NamedTuple):
    """Facts about one recording. If `error` is set, it tells why the other fields are empty."""

    duration_s: float | None = None
    num_steps: int | None = None
    engine: str = ""
    model: str = ""
    is_cut: bool = False  # never finished, or damaged
    error: str | None = None
    incident: str | None = None  # the incident that it was kept for, in one line


def overview(path: Path) -> Overview:
    """Read the overview of a file. Any problem becomes its `error`."""
    try:
        with Recording(path) as recording:
            incident = incident_in(recording.metadata)
            first, last = recording.first_step, recording.last_step
            return Overview(
                (recording.end_ns - recording.start_ns) / 1e9,
                0 if first is None or last is None else last - first + 1,
                recording.metadata.get("engine_name", recording.info.name),
                recording.metadata.get("model", recording.info.model),
                recording.truncated,
                incident=None if incident is None else incident.text,
            )
    except (RecordingError, OSError) as error:
        return Overview(error=str(error).removeprefix(f"{path} "))


def recordings_in(folder: Path) -> list[Path]:
    """Files in a folder with the name of a recording, including those being written."""
    try:
        found = [*folder.glob("*.mcap"), *folder.glob(f"*.mcap{PART_SUFFIX}")]
        return sorted(path for path in found if path.is_file())
    except OSError:
        return []
