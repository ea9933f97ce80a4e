"""Shared by the commands that run an engine in their own process."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stepscope.tui.settings.cli_errors import CommandFailed

_EXTRAS = {"torch", "transformers", "tokenizers", "safetensors", "numpy"}


def prepare_process() -> None:
    """Warnings to standard error; a signal ends it until the engine is ready and has its own."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


@contextmanager
def engine_packages() -> Iterator[None]:
    """Raises CommandFailed when a package that an engine needs is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise CommandFailed(
            f"{missing} is not installed, and an engine needs it: pip install 'stepscope[engine]'"
        ) from error


def _leave(number: int, frame: FrameType | None) -> None:
    """End while the model loads, without leaving a lock file behind."""
    raise SystemExit(128 + number)
