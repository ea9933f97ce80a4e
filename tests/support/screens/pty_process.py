"""`PtyProcess`: a program in a pseudo-terminal of its own, started without a fork of this process.

A fork of a process with several threads can leave a lock of theirs locked for ever in the child;
Python 3.12 and later warn of it, and `ptyprocess` forks. Here `subprocess` starts a shell as the
leader of a new session. The first terminal that such a leader opens becomes its own; then the
program takes the shell's place.
"""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

_IN_TERMINAL = ("/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1')


class PtyProcess:
    """A running program.

    Args:
        arguments: the program and its arguments.
        rows, columns: size of its terminal.
        env, cwd: those of this process if not given.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        rows: int = 24,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        self.fd, terminal = pty.openpty()
        try:
            self.setwinsize(rows, columns)
            self._process = subprocess.Popen(
                [*_IN_TERMINAL, os.ttyname(terminal), *arguments],
                stdin=terminal,  # kept open, so that it does not end before the shell opens it
                stdout=terminal,
                stderr=terminal,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            os.close(terminal)
        self.pid = self._process.pid

    def read(self, size: int = 65536) -> bytes:
        """Wait for output and return it. Raises EOFError when there will be no more."""
        try:
            received = os.read(self.fd, size)
        except OSError:  # Linux's way to say that the other side is closed
            received = b""
        if not received:
            raise EOFError
        return received

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    def setwinsize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        """Kill its remaining processes and close its terminal."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(self.fd)
