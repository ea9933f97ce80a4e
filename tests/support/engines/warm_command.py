"""`WarmCommand`: runs a stepscope command in a process that has imported torch already.

It is forked from a process without threads that has imported everything. So an engine starts in a
quarter of the processor time. For tests that need a real process, but not its start.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from stepscope.tui.cli.__main__ import main

_IMPORTED = [
    "stepscope.engine.execution.loading",
    "stepscope.engine.http.server.server",
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
        assert self._process.pid is not None
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
