"""`RecentFiles`: remembers which recordings were opened or written lately, for the start screen.

The list, of paths and times only, is a short file in the platform's state folder. Everything else
about a recording is read from the recording itself. If the list cannot be read or written, a
warning is logged and nothing else happens.
"""

import contextlib
import json
import logging
import os
import time
from pathlib import Path

import platformdirs

from stepscope.recordings.importing.source import FOLDER_PREFIX

log = logging.getLogger("stepscope.tui")

MAX_FILES = 20


class RecentFiles:
    """The list of recent recordings, the newest first; by default in the file of this user."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or platformdirs.user_state_path("stepscope") / "recent.json"

    def files(self) -> list[tuple[Path, float]]:
        """Return (path, last use in Unix time) of each file, even if it is gone by now."""
        try:
            entries = json.loads(self.path.read_text("utf-8"))
            found = [(Path(str(each["path"])), float(each["time"])) for each in entries]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the list of recent files is not readable: %s: %s", self.path, error)
            return []
        return found[:MAX_FILES]

    def remember(self, file: Path) -> None:
        """Put a file at the front of the list."""
        file = Path(os.path.abspath(file))  # not resolved: links stay as the user knows them
        kept = [(path, used_s) for path, used_s in self.files() if path != file]
        entries = [(file, time.time()), *kept][:MAX_FILES]
        document = [{"path": str(path), "time": used_s} for path, used_s in entries]
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(document, indent=1), "utf-8")
            unfinished.replace(self.path)
        except OSError as error:
            log.warning("the list of recent files is not written: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink()


def remember(file: Path) -> None:
    """Put a recording just opened or written at the front of the list, if not temporary."""
    if not file.parent.name.startswith(FOLDER_PREFIX):
        RecentFiles().remember(file)
