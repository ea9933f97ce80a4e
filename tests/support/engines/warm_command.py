"""`WarmCommand`: runs a stepscope command in a process that has imported torch already.

It is forked from a process without threads that has imported everything. So an engine starts in a
quarter of the processor time. For tests that need a real process, but not its start.
"""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from stepscope.tui.cli.__main__ import main

_IMPORTED = [
    "stepscope.engine.execution.loading",
    "stepscope.engine.http.server",
    "stepscope.engine.process.serve",
    "stepscope.tui.cli.command_line",
    "stepscope.tui.cli.engines.serve",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class WarmCommand:
    """Starts at once. Has the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: of `stepscope`.
        environment: variables besides those of the test.
        stdout, stderr: files to write to.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        stdout: str | Path = os.devnull,
        stderr: str | Path = os.devnull,
    ) -> None:
        variables = {**os.environ, **(environment or {})}
        self._process = _context.Process(
            target=_run, args=(arguments, variables, str(stdout), str(stderr)), daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("stepscope", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: tuple[str, ...], variables: dict[str, str], stdout: str, stderr: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["stepscope", *arguments]
    main()


class HttpServer:
    """A process with folders of its own; it listens once it is made.

    Args:
        folder: for its sockets, its config file and what it says.
        arguments: of the command, without the address.
        address: to listen on; by default any free port.
        environment: variables besides those of the test.
    """

    def __init__(
        self, folder: Path, *arguments: str, address: str = "0", **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "stdout"
        self._stderr = folder / "stderr"
        self.process = WarmCommand(
            *(*arguments, "--http", address),
            environment={"XDG_CONFIG_HOME": str(folder), **environment},
            stdout=self._said,
            stderr=self._stderr,
        )
        self.url = self._said_url()

    def _said_url(self) -> str:
        while True:
            has_ended = self.process.poll() is not None
            said = self._said.read_text() if self._said.exists() else ""
            if match := re.search(r"OpenAI API on (http://[^/]+)/v1", said):
                return match[1]
            assert not has_ended, f"it never served: {self.stderr()}"
            time.sleep(0.02)

    def stderr(self) -> str:
        """All that it has written to stderr so far."""
        return self._stderr.read_text()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
