"""`IncidentFolder`: the folder with incident files.

It deletes the oldest when they grow too large.
"""

import logging
from pathlib import Path

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.incident import Incident, incidents_in

log = logging.getLogger("stepscope.recordings")

KEEP_LAST = 5  # so many newest incidents are never deleted, whatever their size


class IncidentFolder:
    """The folder of one recorder. Creates it if needed.

    `keep_bytes`: most bytes of all incidents, beyond which the oldest are deleted. None: keep all.

    Raises RecordingError: the folder cannot be created.
    """

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        self.path = path
        self._keep_bytes = keep_bytes
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror or error}") from error

    def new_path(self, incident: Incident) -> Path:
        """A path in the folder that does not exist yet."""
        path = self.path / incident.file_name
        number = 1
        while path.exists():
            number += 1
            path = self.path / f"{Path(incident.file_name).stem}-{number}.mcap"
        return path

    def delete_old(self) -> int:
        """Delete the oldest files beyond the limit, but never the last `KEEP_LAST`.

        Returns how many.
        """
        if self._keep_bytes is None:
            return 0
        found = [(path, path.stat().st_size) for path, _ in incidents_in(self.path)]
        total = sum(num_bytes for _, num_bytes in found)
        num_deleted = 0
        for path, num_bytes in reversed(found[KEEP_LAST:]):
            if total <= self._keep_bytes:
                break
            try:
                path.unlink()
            except OSError as error:
                log.warning("cannot delete %s: %s", path, error)
                continue
            total -= num_bytes
            num_deleted += 1
        return num_deleted
