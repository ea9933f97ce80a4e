"""Finds out whether the terminal can be drawn on, with which characters, and how we are called.

Errors cannot go to a terminal that is drawn on, so there is a log file for them.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

import platformdirs

from stepscope.tui.settings.cli_errors import WrongUsage

# Begins the command of another `stepscope`. -P: no module of the current folder hides one of ours.
OURSELVES = (sys.executable, "-P", "-m", "stepscope.tui.cli")
_UNDRAWABLE = frozenset({"", "dumb", "unknown"})


def in_browser() -> bool:
    """Whether this process draws for a browser, over the pipes of a web server (`--web`)."""
    return os.environ.get("TEXTUAL_DRIVER", "").endswith(":WebDriver")


def no_terminal() -> str | None:
    """Return which of standard input and output is no terminal; a browser is one, for both."""
    if in_browser():
        return None
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None or not stream.isatty():
            return f"standard {name}"
    return None


def piped_input() -> IO[str]:
    """Return standard input, a pipe, and read keys from the terminal in its place."""
    if sys.stdin is None or sys.stdin.isatty():
        raise WrongUsage("-: expected a log on standard input, as from 'tail -F server.log |'")
    stream = open(os.dup(0), encoding="utf-8-sig", errors="replace")  # noqa: SIM115 - for good
    with contextlib.suppress(OSError):  # without a terminal, `no_terminal` says so
        terminal = os.open("/dev/tty", os.O_RDWR)
        os.dup2(terminal, 0)
        os.close(terminal)
    return stream


def can_be_drawn_on() -> bool:
    """Whether this process has a terminal that can show the dashboard."""
    return no_terminal() is None and cannot_be_drawn_on(os.environ) is None


def cannot_be_drawn_on(environment: Mapping[str, str]) -> str | None:
    """Say why this terminal cannot show the dashboard, and what to do; None if it can."""
    name = environment.get("TERM", "")
    if name.lower() not in _UNDRAWABLE:
        return None
    said = f"TERM is {name!r}" if name else "TERM is not set"
    return f"the dashboard cannot move the cursor of this terminal ({said}): set TERM to its name"


def only_ascii(environment: Mapping[str, str]) -> str | None:
    """Say why this terminal cannot show block characters; None if it can."""
    if environment.get("TERM", "").startswith("linux"):
        return "the font of the Linux console has few others"
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name, "")
        if not value or (name, value) == ("LC_CTYPE", "C.UTF-8"):  # Python's, if none was set
            continue
        if value.lower().partition("@")[0].replace("-", "").endswith("utf8"):
            return None
        return f"{name}={value} is not a UTF-8 locale"
    return "no locale is set (LANG)"


def forget_empty_no_color() -> None:
    """Remove NO_COLOR from the environment if it is empty: only then Textual would heed it."""
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]


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
