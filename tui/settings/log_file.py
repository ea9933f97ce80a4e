"""The log file of the dashboard, as errors cannot go to the terminal on which it draws."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

import platformdirs

_MAX_BYTES = 1_000_000


def log_path() -> Path:
    """Return the path of the log file, which exists once something was logged."""
    return platformdirs.user_log_path("stepscope") / "dashboard.log"


def see_log(error: object) -> str:
    """Return a line about an error that was logged: what it was, and where the log is."""
    for handler in logging.getLogger("stepscope").handlers:
        if isinstance(handler, RotatingFileHandler):
            path, home = Path(handler.baseFilename), Path.home()
            shown = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else path
            return f"see {shown}: {error!r}"
    return f"see the log: {error!r}"


@contextmanager
def logged_to_file(path: Path) -> Iterator[None]:
    """A context in which all that stepscope logs goes to this file only, if it opens."""
    handler: logging.Handler
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=1, delay=True)
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    )
    logger = logging.getLogger("stepscope")
    handlers_before, propagate_before = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [handler], False
    raise_before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = raise_before
        logger.handlers, logger.propagate = handlers_before, propagate_before
        handler.close()
