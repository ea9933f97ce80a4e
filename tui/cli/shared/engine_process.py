"""`EngineProcess`: an engine as a child process that never outlives its parent.

The child's standard input is a pipe whose other end only the parent holds. However the parent ends,
the pipe closes, and the child sees that and stops.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.commands import Shutdown
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.settings.cli_errors import CommandFailed

_ERROR = "stepscope: error: "
_POLL_S = 0.1
_STOP_S = 5.0


class EngineProcess:
    """A context manager that starts an engine at the beginning of its block and ends it after it.

    Args:
        options: options of the command, by field name.
        on_progress: called with each line that the engine prints while it loads.
        command: the stepscope command that runs the engine.
        name: start of the engine's name; our process id follows it.
    """

    def __init__(
        self,
        options: Mapping[str, KnobValue],
        on_progress: Callable[[str], None],
        command: str = "serve",
        name: str = "demo",
    ) -> None:
        self.endpoint = Endpoint.parse(f"{name}-{os.getpid()}")
        self._options = options
        self._command = command
        self._on_progress = on_progress
        self._last_lines: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[str] | None = None
        self._is_loading = True

    def __enter__(self) -> "EngineProcess":
        command = [sys.executable, "-m", "stepscope.tui.cli", self._command, "--exit-with-stdin"]
        fixed: dict[str, KnobValue] = {"endpoint": self.endpoint.control}
        for name, value in {**fixed, **self._options}.items():
            command += _as_flags(name, value)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to us, not to the engine
        )
        assert self._process.stderr is not None
        threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> EngineInfo:
        """Wait until the engine answers. What the engine prints afterwards is ignored."""
        while True:
            self.check()
            try:
                with ControlClient(self.endpoint, timeout_s=_POLL_S) as client:
                    info = client.info()
            except (EngineUnreachable, CommandRefused):
                time.sleep(_POLL_S)
            else:
                self._is_loading = False  # from now on a dashboard may use the terminal
                return info

    @property
    def exit_code(self) -> int | None:
        """The engine's exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def check(self) -> None:
        """Raise CommandFailed if the engine has ended."""
        assert self._process is not None
        exit_code = self._process.poll()
        if exit_code is None:
            return
        time.sleep(_POLL_S)  # its last lines may not have been read yet
        said = [line for line in self._last_lines if line.startswith(_ERROR)] or [
            line for line in self._last_lines if line
        ]
        last = said[-1].removeprefix(_ERROR) if said else "it said nothing"
        raise CommandFailed(f"the engine ended with exit code {exit_code}: {last}")

    def stop(self) -> None:
        """End the engine by a command, else by SIGTERM; kill it if it does not end in time."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            with ControlClient(self.endpoint, timeout_s=1.0) as client:
                client.ask(Shutdown(who="stepscope"))
        except (EngineUnreachable, CommandRefused):
            process.terminate()  # it is still loading, or hangs
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_lines.append(line.strip())
            if self._is_loading and not line.startswith(_ERROR):  # `check` raises errors
                self._on_progress(line.strip())


def _as_flags(name: str, value: KnobValue) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
