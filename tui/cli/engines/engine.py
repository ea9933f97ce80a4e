"""What the commands share that run an engine in their own process (such as `serve`)."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType

from stepscope.tui.settings.cli_errors import CommandFailed

_EXTRAS = {"torch", "transformers", "tokenizers", "safetensors", "numpy"}


def prepare_process() -> None:
    """Log warnings to standard error; let signals end the process while the engine loads.

    Once the engine is ready it installs its own signal handlers.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


@contextmanager
def engine_packages() -> Iterator[None]:
    """A context in which a missing package that an engine needs raises CommandFailed.

    Torch is looked for at once, before anything is downloaded or made.
    """
    if not has_torch():
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
    return f"{package} is not installed, and an engine needs it: pip install 'stepscope[engine]'"


def _leave(number: int, frame: FrameType | None) -> None:
    """Signal handler while the model loads: exits by an exception, so that no lock file is left."""
    raise SystemExit(128 + number)
