"""`Terminal`: a program in a pseudo-terminal, and the screen it has drawn."""

import re
import threading
import time

import pyte

from tests.support.screens.pty_process import PtyProcess


class Terminal:
    """A program in a pseudo-terminal, and the screen it has drawn.

    Args:
        arguments: the program and its arguments.
        columns, rows: size of the terminal.
        environment, cwd: of the program.
    """

    def __init__(
        self,
        arguments: list[str],
        columns: int,
        rows: int,
        environment: dict[str, str],
        cwd: str | None,
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.process = PtyProcess(arguments, rows=rows, columns=columns, env=environment, cwd=cwd)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Feed the screen complete frames: it claims to support synchronized output, mode 2026.

        Otherwise a test could find what it waits for in a screen that is drawn in part.
        """
        pending = b""
        while True:
            try:
                received = self.process.read()
            except EOFError:  # ended, or closed by the test
                with self._lock:
                    self._stream.feed(pending)
                return
            if b"\x1b[?2026$p" in received:
                self.process.write(b"\x1b[?2026;2$y")
            pending += received
            begun, ended = pending.rfind(b"\x1b[?2026h"), pending.rfind(b"\x1b[?2026l")
            whole = begun if begun > ended else len(pending)
            with self._lock:
                self._stream.feed(pending[:whole])
            pending = pending[whole:]

    def text(self) -> str:
        with self._lock:
            return "\n".join(self.screen.display)

    def cells(self) -> list[list[pyte.screens.Char]]:
        """Every character of the screen, row by row, with its colours."""
        with self._lock:
            screen = self.screen
            return [
                [screen.buffer[y][x] for x in range(screen.columns)] for y in range(screen.lines)
            ]

    def send(self, keys: str) -> None:
        self.process.write(keys.encode())

    def click(self, column: int, row: int, button: int = 0) -> None:
        """Press and release a mouse button at a cell, counted from 0; 64 and 65 are the wheel."""
        at = f"{button};{column + 1};{row + 1}"
        self.send(f"\x1b[<{at}M" if button >= 64 else f"\x1b[<{at}M\x1b[<{at}m")

    def row_of(self, pattern: str) -> int:
        """The first matching row of the screen, once there is one."""
        match = self.wait_for(pattern)
        return match.string.count("\n", 0, match.start())

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self.screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def scribble(self) -> None:
        """Overwrite the whole screen as if another program had, unknown to this one."""
        with self._lock:
            self.screen.reset()
            self.screen.draw("noise " * 100)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """The first match of a regular expression on the screen."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            if match := re.search(pattern, text):
                return match
            assert time.monotonic() < deadline, f"{pattern!r} never appeared:\n{text}"
            time.sleep(0.05)

    def wait_for_exit(self, timeout_s: float = 30.0) -> int:
        """Exit status, or minus the number of the signal that ended it."""
        deadline = time.monotonic() + timeout_s
        while (exit_code := self.process.exit_code) is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text()}"
            time.sleep(0.05)
        return exit_code

    def close(self) -> None:
        self.process.close()
        self._reader.join(5)
