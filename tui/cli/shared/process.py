"""The process of a command: errors in one line, signals, its parent, the packages of an engine."""

import errno
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any, Protocol

import typer

from stepscope.engine.protocol.knobs import ConfigError, WrongValue
from stepscope.recordings.errors import NotInRecording, RecordingError, TooLittleData
from stepscope.tui.settings.cli_errors import FAILED, TOO_LITTLE_DATA, WRONG_USAGE, CommandFailed


def report(error: BaseException) -> int:
    """Print an error in one line (STEPSCOPE_DEBUG=1: with traceback); return the exit code."""
    if os.environ.get("STEPSCOPE_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    exit_code, message = expected(error) or (
        FAILED,
        f"{type(error).__name__}: {error} (this is a bug in stepscope: "
        "run it again with STEPSCOPE_DEBUG=1 and report what it shows)",
    )
    line = " ".join(message.split())
    if sys.stderr is not None:  # with file=None, `print` would write to standard output
        print(f"stepscope: error: {line}", file=sys.stderr)
    return exit_code


def expected(error: BaseException) -> tuple[int, str] | None:
    """Return (exit code, message) of an error that is known to occur; None for a bug of ours."""
    # Look for the module instead of importing it, which takes time: an exception of a module that
    # is not imported cannot have been raised.
    client = sys.modules.get("stepscope.engine.client.client")
    output = sys.modules.get("stepscope.recordings.export.output")
    if isinstance(error, CommandFailed):
        return error.exit_code, str(error)
    if isinstance(error, ConfigError | RecordingError):
        if isinstance(error, TooLittleData):
            return TOO_LITTLE_DATA, str(error)
        is_asked_wrong = isinstance(error, WrongValue | NotInRecording)
        return (WRONG_USAGE if is_asked_wrong else FAILED), str(error)
    if client and isinstance(error, client.CommandRefused):
        return FAILED, f"the engine refused: {error}"
    if (client and isinstance(error, client.EngineUnreachable)) or (
        output and isinstance(error, output.MissingPackage)
    ):
        return FAILED, str(error)
    if isinstance(error, typer.TyperException):
        # Like ours: no capital letter, no full stop.
        said = error.format_message().removesuffix(".").replace(": Value error, ", ": ")
        context = getattr(error, "ctx", None)
        named = [word for word in sys.argv[1:2] if not word.startswith("-")]  # of its parser
        command = context.command_path if context is not None else " ".join(["stepscope", *named])
        return error.exit_code, f"{said[:1].lower()}{said[1:]} (see '{command} --help')"
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return FAILED, f"cannot write: {error.strerror}"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return FAILED, "the name of a file is not valid UTF-8: rename the file"
    return None


class _Source(Protocol):
    def start(self) -> object: ...
    def stop(self) -> object: ...


@contextmanager
def running(source: _Source) -> Iterator[None]:
    """A context in which what has a thread of its own runs: a source, or several."""
    source.start()
    try:
        yield
    finally:
        source.stop()


def awaited(is_there: Callable[[], bool], seconds: float) -> bool:
    """Wait until `is_there` says so, at most so long; return whether it did."""
    deadline_s = time.monotonic() + seconds
    while not (found := is_there()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


class StopSignals:
    """A context in which the first signal is only noted; a second signal has its default effect."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before: list[Any] = []
        self.received: int | None = None  # the first signal

    def __bool__(self) -> bool:
        return self.received is not None

    def wait(self, seconds: float) -> bool:
        # No lock and no event: a handler that interrupts the holder of a lock would deadlock.
        if self.received is None:
            time.sleep(seconds)
        return self.received is not None

    def ticks(self, every_s: float, seconds: float | None) -> Iterator[float]:
        """Yield the elapsed time again and again, until a signal or until `seconds` are over."""
        start_s, elapsed_s = time.monotonic(), 0.0
        while elapsed_s < (seconds or math.inf) and not self.wait(every_s):
            elapsed_s = time.monotonic() - start_s
            yield elapsed_s

    def __enter__(self) -> "StopSignals":
        self._before = [signal.signal(number, self._note) for number in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._numbers, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._numbers:
            default = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, default)


def leave(number: int, frame: FrameType | None) -> None:
    """Signal handler: exits by an exception, so that what was begun is ended."""
    raise SystemExit(128 + number)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end the command like Ctrl-C, even where that was ignored."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handlers = (leave, leave, signal.default_int_handler)
    before = [signal.signal(*pair) for pair in zip(numbers, handlers, strict=True)]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# Engines in this process

_GRACE_S = 5.0
# What each package that an engine needs, but a dashboard does not, is installed with.
_EXTRAS = dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"), "engine")
_EXTRAS |= dict.fromkeys(("starlette", "uvicorn"), "http")


def prepare_process() -> None:
    """Log warnings to stderr; let signals end the process until the engine handles them."""
    log_warnings()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def log_warnings() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


@contextmanager
def engine_packages(*, needs_torch: bool = True) -> Iterator[None]:
    """A context in which a missing package of an extra (torch at once) is CommandFailed."""
    if needs_torch and not has_torch():
        raise CommandFailed(missing_text("torch"))
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise CommandFailed(missing_text(missing)) from error


def has_torch() -> bool:
    """Whether torch is installed. It is not imported, which would take seconds."""
    return find_spec("torch") is not None


def missing_text(package: str) -> str:
    extra = _EXTRAS[package]
    return f"{package} is not installed, and an engine needs it: pip install 'stepscope[{extra}]'"


def when_parent_ends(work: Callable[[], object]) -> None:
    """Call `work` on a thread when standard input ends, that is when the parent process is gone."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            continue
        work()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_process() -> None:
    """Stop this process as SIGTERM does, at the latest after some seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)  # lets the current step finish
    os._exit(1)
