"""What a list of recordings says of a file, read from its ends."""

from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording


class Overview(NamedTuple):
    """One recording; `error` says in one line why nothing else is known."""

    duration_s: float | None = None
    num_steps: int | None = None
    engine: str = ""
    model: str = ""
    is_cut: bool = False  # it was never finished, or is damaged
    error: str | None = None


def overview(path: Path) -> Overview:
    """Open the file and look; whatever is wrong with it becomes `error`."""
    try:
        with Recording(path) as recording:
            first, last = recording.first_step, recording.last_step
            return Overview(
                recording.duration_s,
                0 if first is None or last is None else last - first + 1,
                recording.metadata.get("engine_name", recording.info.name),
                recording.metadata.get("model", recording.info.model),
                recording.truncated,
            )
    except (RecordingError, OSError) as error:
        return Overview(error=str(error).removeprefix(f"{path} "))


def recordings_in(folder: Path) -> list[Path]:
    """Files of a folder that are called like recordings, those being written among them."""
    try:
        found = [*folder.glob("*.mcap"), *folder.glob(f"*.mcap{PART_SUFFIX}")]
        return sorted(path for path in found if path.is_file())
    except OSError:
        return []
