"""`EngineProcess`: an engine as a child process that never outlives its parent.

The child's standard input is a pipe whose other end only the parent holds. However the parent ends,
the pipe closes, and the child sees that and stops.
"""

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import Shutdown
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.options import as_options
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.cli.shared.process import StopSignals, awaited
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.settings.terminal import OURSELVES

_ERROR = "stepscope: error: "
_POLL_S = 0.1
_STOP_S = 5
_JOIN_S = 10.0


class EngineProcess:
    """A context manager: the engine answers when its block begins, and is gone after it.

    Args:
        progress: shows what the engine prints while it loads, not afterwards: a dashboard may then
            use the terminal.
        name: start of the engine's name; our process id follows it.

    Raises CommandFailed: the engine ended instead; the message has the last line that it printed.
    """

    info: EngineInfo

    def __init__(
        self,
        options: Mapping[str, KnobValue],
        progress: Progress,
        command: str = "serve",
        name: str = "demo",
    ) -> None:
        self.endpoint = Endpoint.parse(f"{name}-{os.getpid()}")
        self._progress = progress
        self._is_loading = True
        self._last_lines: deque[str] = deque(maxlen=20)
        self._command = [*OURSELVES, command, "--exit-with-stdin"]
        self._command += ["--endpoint", self.endpoint.control]
        self._command += as_options(options)

    def __enter__(self) -> "EngineProcess":
        self._progress("starting the engine", None)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to us, not to the engine
        )
        assert self._process.stderr is not None
        threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True).start()
        try:
            while self._is_loading:
                self.check()
                try:
                    with ControlClient(self.endpoint, timeout_s=_POLL_S) as client:
                        self.info = client.info()
                    self._is_loading = False
                except (EngineUnreachable, CommandRefused):
                    time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def check(self) -> None:
        if self.exit_code is None:
            return
        time.sleep(_POLL_S)  # its last lines may not have been read yet
        said = [line for line in self._last_lines if line.startswith(_ERROR)] or [
            line for line in self._last_lines if line
        ]
        last = said[-1].removeprefix(_ERROR) if said else "it said nothing"
        raise CommandFailed(f"the engine ended with exit code {self.exit_code}: {last}")

    def wait_until_live(self, source: Subscriber, stop: StopSignals) -> None:
        """Wait for telemetry, so that the first request will be seen; a signal ends the wait."""

        def is_live() -> bool:
            self.check()
            return source.status == "live" or bool(stop)

        if not awaited(is_live, _JOIN_S):
            raise CommandFailed(f"no telemetry from the engine: {source.error}")

    def news(self, more: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return what every frame calls: it tells, once, that the engine has ended; and more."""
        notice = iter(["the engine has ended for good"])

        def news() -> str | None:
            return (None if self.exit_code is None else next(notice, None)) or more()

        return news

    def stop(self) -> None:
        """End the engine by a command, else by SIGTERM; kill it if it does not end in time."""
        process = self._process
        if process.poll() is not None:
            return
        try:
            with ControlClient(self.endpoint, timeout_s=1.0) as client:
                client.ask(Shutdown(who="stepscope"))
        except (EngineUnreachable, CommandRefused):
            process.terminate()  # it is still loading, or hangs
        for _ in range(_STOP_S):
            try:
                process.wait(1.0)
                return
            except subprocess.TimeoutExpired:
                if self._is_loading:  # an import may have swallowed the exception of the first one
                    process.terminate()
        process.kill()
        process.wait()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_lines.append(line.strip())
            if self._is_loading and not line.startswith(_ERROR):  # `check` raises errors
                self._progress(line.strip(), None)
