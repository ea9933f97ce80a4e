"""`WhatIfProcess`: runs `stepscope what-if` in a process of its own, not to slow the screen."""

import subprocess
import sys
from pathlib import Path

from stepscope.recordings.errors import RecordingError


class WhatIfProcess:
    """Starts `stepscope what-if` at once.

    Args:
        path: the recording.
        options: what follows the path on the command line.
    """

    def __init__(self, path: Path, *options: str) -> None:
        self._path = path
        command = [sys.executable, "-m", "stepscope.tui.cli", "what-if", str(path), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self, seconds: float) -> str | None:
        """Wait for the process, and return what it printed; None if it still runs after this time.

        Raises:
            RecordingError: the process failed; the message is its error line.
        """
        try:
            out, wrong = self._process.communicate(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        if self._process.returncode:
            last = wrong.strip().rpartition("\n")[2]
            said = last.removeprefix("stepscope: error: ").removeprefix(f"{self._path}: ")
            raise RecordingError(said)
        return out

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
