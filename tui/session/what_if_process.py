"""`WhatIfProcess`: runs `stepscope what-if` in a process of its own, not to slow the screen."""

import subprocess
import sys
from pathlib import Path

from stepscope.recordings.errors import RecordingError


class WhatIfProcess:
    """Starts `stepscope what-if` of a recording at once; `options` follow its path."""

    def __init__(self, path: Path, *options: str) -> None:
        self._path = path
        command = [sys.executable, "-m", "stepscope.tui.cli", "what-if", str(path), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self, seconds: float) -> str | None:
        """Return what it printed; None if it still runs. RecordingError if it failed."""
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
