"""What the commands share that run an engine in their own process (such as `serve`)."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.tui.cli.shared.errors import leave
from stepscope.tui.settings.cli_errors import CommandFailed

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


def model_on_text(info: EngineInfo, *more: str) -> str:
    """Return the model, its dtype, the device, who computes attention, and more."""
    by = f"attention by {info.attention_backend}" if info.attention_backend else None
    parts = (info.dtype, info.device, info.implementation, by, *more)
    return f"{info.model} ({', '.join(filter(None, parts))})"


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
