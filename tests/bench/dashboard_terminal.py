"""A dashboard in a pseudo-terminal of its own process, measured from outside and inside.

Not a test. `Terminal` is the terminal: it reads what the dashboard writes and types keys. Run as a
script it is the dashboard: the `stepscope` command with a meter that tells what each frame took;
what it has measured it writes to a file when the operator leaves.

    dashboard_terminal.py REPORT top ENDPOINT
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import psutil
import ptyprocess

QUIET_S = 0.08  # after a picture, before the next key
SAME_S = 0.01  # between two pieces of a picture


class Report(msgspec.Struct):
    """The measurements that the dashboard writes when it ends."""

    frames: list[tuple[str, float]]  # page, and seconds of processor time that a frame took
    num_dropped: int
    num_steps: int  # in memory
    last_step: int
    num_lost: int
    num_recovered: int
    peak_bytes: int


class Piece(NamedTuple):
    at_s: float
    num_bytes: int


class Terminal:
    """Starts `stepscope ARGUMENTS` and plays the operator.

    Args:
        size: columns and rows.
        report: where the dashboard is to write its `Report`; None runs the command as it is.
    """

    def __init__(
        self, arguments: list[str], size: tuple[int, int] = (200, 60), report: Path | None = None
    ) -> None:
        here = Path(__file__).resolve()
        if report is None:
            command = [str(Path(sys.executable).with_name("stepscope")), *arguments]
        else:
            command = [sys.executable, str(here), str(report), *arguments]
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "STEPSCOPE_CONFIG": "none",
        }
        for name in ("NO_COLOR", "SSH_CONNECTION"):
            environment.pop(name, None)
        self._report = report
        self.started_s = time.monotonic()
        self._child = ptyprocess.PtyProcess.spawn(
            command, dimensions=(size[1], size[0]), env=environment
        )
        self.process = psutil.Process(self._child.pid)
        self.pieces: list[Piece] = []
        self.answered_cpu_s = 0.0  # when the last answer had come
        self._has_ended = False
        self._text = b""  # the last of what was written
        self._seen = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.terminate(force=True)

    def _read(self) -> None:
        while True:
            try:
                piece = self._child.read(65536)
            except EOFError:
                with self._seen:
                    self._has_ended = True
                    self._seen.notify_all()
                return
            with self._seen:
                self.pieces.append(Piece(time.monotonic(), len(piece)))
                self._text = (self._text + piece)[-200_000:]
                self._seen.notify_all()

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> float:
        """Wait until a match was written; return the seconds since the start."""
        wanted = re.compile(pattern.encode())
        with self._seen:
            found = self._seen.wait_for(
                lambda: wanted.search(self._text) or self._has_ended, timeout_s
            )
            if not found or self._has_ended:
                end = self._text[-1000:].decode(errors="replace")
                raise TimeoutError(f"{pattern!r} never came: {end}")
            return time.monotonic() - self.started_s

    @property
    def cpu_s(self) -> float:
        """Processor time of the dashboard so far, to about ten milliseconds."""
        times = self.process.cpu_times()
        return times.user + times.system

    def type(self, keys: str) -> None:
        self._child.write(keys.encode())

    def answer_ms(
        self, keys: str, at_least: int = 0, shows: str = "", timeout_s: float = 5.0
    ) -> float:
        """From the last of some keys to the end of the resulting picture, in milliseconds.

        Args:
            at_least: bytes that such a picture has.
            shows: text that is new in it.
        """
        with self._seen:
            self._text = b""
            number = len(self.pieces)
        wanted = shows.encode()
        start_s = time.monotonic()
        self.type(keys)
        with self._seen:
            came = self._seen.wait_for(
                lambda: (
                    sum(piece.num_bytes for piece in self.pieces[number:]) >= at_least
                    and wanted in self._text
                ),
                timeout_s,
            )
        if not came:
            raise TimeoutError(f"{keys!r} brought no new picture")
        self.answered_cpu_s = self.cpu_s
        done_s = self.pieces[-1].at_s
        time.sleep(QUIET_S)
        for piece in self.pieces[number:]:
            if done_s < piece.at_s <= done_s + SAME_S:  # the same picture still
                done_s = piece.at_s
        return (done_s - start_s) * 1e3

    def measure(self, seconds: float) -> tuple[float, float]:
        """Processor time in per cent of a core, and kilobytes written a second."""
        before_s, bytes_before, start_s = self.cpu_s, self.num_bytes, time.monotonic()
        time.sleep(seconds)
        cpu_s, elapsed_s = self.cpu_s - before_s, time.monotonic() - start_s
        return 100 * cpu_s / elapsed_s, (self.num_bytes - bytes_before) / 1000 / elapsed_s

    def leave(self) -> Report:
        """Quit; return what the dashboard has measured."""
        assert self._report is not None
        self.type("q")
        deadline_s = time.monotonic() + 20
        while self._child.isalive() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return msgspec.json.decode(self._report.read_bytes(), type=Report)


class FrameMeter:
    """Notes the page and the cost of each frame, and frames that were due and never drawn.

    The cost is processor time, since the machine may be shared.
    """

    def __init__(self) -> None:
        self.frames: list[tuple[str, float]] = []
        self.num_dropped = 0
        self._screen: Any = None
        self._drawn_s = 0.0  # the cost so far of the frame that is not written yet
        self._due_s: float | None = None

    def watch(self, screen: Any) -> None:
        self._screen, draw, look = screen, screen._draw, screen._look

        def drawn(everything: bool) -> None:
            start_s = time.thread_time()
            draw(everything)
            self._drawn_s += time.thread_time() - start_s

        def looked() -> None:
            now_s = time.monotonic()
            if self._due_s is not None:
                self.num_dropped += max(0, round((now_s - self._due_s) * screen.fps) - 1)
            self._due_s = now_s if screen.is_shown else None
            look()

        screen._draw, screen._look = drawn, looked
        screen._compositor_refresh = self.written(screen._compositor_refresh)

    def written(self, write: Callable[..., None]) -> Callable[..., None]:
        """Return `write`, measured; it ends the frame that was drawn before."""

        def measured(*args: Any) -> None:
            start_s = time.thread_time()
            write(*args)
            if self._drawn_s:
                took_s = self._drawn_s + time.thread_time() - start_s
                self.frames.append((self._screen.view.page, took_s))
                self._drawn_s = 0.0

        return measured


def show(report: Path, arguments: list[str]) -> None:
    """The dashboard."""
    from stepscope.tui.app import app as dashboards
    from stepscope.tui.cli.__main__ import main

    made: list[Any] = []
    meter = FrameMeter()

    begin = dashboards.Dashboard.__init__

    def begin_measured(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        meter.watch(self.main)
        made.append(self)

    dashboards.Dashboard.__init__ = begin_measured  # type: ignore[method-assign]
    sys.argv = ["stepscope", *arguments]
    with contextlib.suppress(SystemExit):
        main()
    if made:
        app = made[0]
        history, source = app.session.history, app.session.source
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        told = Report(
            meter.frames,
            meter.num_dropped,
            history.num_steps,
            history.last_step or 0,
            history.num_lost,
            getattr(source, "num_recovered", 0),
            int(peak) * 1024,
        )
        report.write_bytes(msgspec.json.encode(told))


class Engine:
    """A `fed_engine.py` process.

    Args:
        folder: for its sockets.
    """

    def __init__(self, folder: Path, num_requests: int, rate: float, burst: int = 1_000) -> None:
        self.endpoint = f"ipc://{folder}/{time.monotonic_ns()}"
        arguments = ["--requests", num_requests, "--rate", rate, "--burst", burst]
        script = Path(__file__).with_name("fed_engine.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), self.endpoint, *map(str, arguments)]
        )
        path = Path(self.endpoint.removeprefix("ipc://"))
        while not path.exists():
            if self._process.poll() is not None:
                raise RuntimeError("the engine of the bench ended")
            time.sleep(0.05)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    show(Path(sys.argv[1]), sys.argv[2:])
