"""`KnobForecast`: simulates the steps in memory with another value of a knob, for one line."""

import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import typed_text
from stepscope.tui.settings.terminal import OURSELVES

_SHOWN = (("TTFT p99", "ttft_p99_ms"), ("ITL p99", "itl_p99_ms"))
_MAX_STEPS = 10_000  # the newest steps to simulate: more would take minutes


class _Dropped(Exception):  # noqa: N818 - no error
    """Raised in the thread of a simulation whose result is no longer needed."""


class KnobForecast(threading.Thread):
    """Runs `stepscope what-if` as a process, not to slow the screen; `text` is its result."""

    def __init__(self, history: History, name: str, value: KnobValue) -> None:
        super().__init__(name="what-if", daemon=True)
        self._history = history
        self._change = f"{name}={typed_text(value)}"
        self._is_dropped = False
        self._process: subprocess.Popen[str] | None = None
        self.text = f"what if {self._change}: simulating the steps in memory ..."
        self.start()

    def drop(self) -> None:
        """Let the simulation end, as its result is no longer needed."""
        self._is_dropped = True
        if self._process is not None:
            self._process.kill()

    def run(self) -> None:
        from stepscope.recordings.history.memory_file import write_memory  # loads mcap

        try:
            with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
                path, first = Path(folder) / "memory.mcap", self._history.state.step - _MAX_STEPS
                write_memory(self._history, path, self._look, first=first)
                answer = _in_words(msgspec.json.decode(self._simulated(path)))
            self.text = f"what if {self._change}: {answer}"
        except _Dropped:
            return
        except (OSError, RecordingError, msgspec.DecodeError) as error:
            self.text = f"no forecast: {error}"

    def _look(self, _: float = 0.0) -> None:
        if self._is_dropped:
            raise _Dropped

    def _simulated(self, path: Path) -> str:
        """Return the JSON that the process printed; RecordingError if it failed."""
        command = [*OURSELVES, "what-if", str(path), self._change]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "--json"], stdout=pipe, stderr=pipe, text=True) as process:
            self._process = process
            if self._is_dropped:
                process.kill()
            out, wrong = process.communicate()
        self._look()
        if process.returncode:
            said = wrong.strip().rpartition("\n")[2].removeprefix("stepscope: error: ")
            for known in (f"{path}: ", f"{self._change}, with the other knobs as recorded: "):
                said = said.removeprefix(known)
            raise RecordingError(said)
        return out


def _in_words(answer: dict[str, Any]) -> str:
    """Return the output of `stepscope what-if --json` of one variant in a line."""
    parts = []
    for label, name in _SHOWN:
        before, after = answer["recorded"].get(name), answer["variants"][0]["figures"].get(name)
        if before is not None and after is not None:
            interval = f"({after['low']:,.0f} to {after['high']:,.0f})"
            parts.append(f"{label} {before:,.0f} → {after['value']:,.0f} ms {interval}")
    return "   ".join(parts) or "no request finished"
