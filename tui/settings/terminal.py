"""What the terminal says of itself: whether it can be drawn on, and with which characters."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_UNDRAWABLE = frozenset({"", "dumb", "unknown"})
_COERCED = frozenset({"c.utf-8", "c.utf8"})  # what Python itself puts into LC_CTYPE for LANG=C
_NO_LOCALE = frozenset({"", "c", "posix"})


def no_terminal() -> str | None:
    """The stream (input or output) that is not a terminal but must be one; None if both are.

    Standard error may go to a file.
    """
    for name, stream in (("input", sys.stdin), ("output", sys.stdout)):
        if stream is None or not stream.isatty():
            return f"standard {name}"
    return None


def cannot_be_drawn_on(environment: Mapping[str, str]) -> str | None:
    """Why there can be no dashboard, in one line with what to do; None when there can."""
    name = environment.get("TERM", "")
    if name.lower() not in _UNDRAWABLE:
        return None
    said = f"TERM is {name!r}" if name else "TERM is not set"
    return f"the dashboard cannot move the cursor of this terminal ({said}): set TERM to its name"


def only_ascii(environment: Mapping[str, str]) -> str | None:
    """Why block characters would come out wrong; None when they would not."""
    if environment.get("TERM", "").startswith("linux"):
        return "the font of the Linux console has few others"
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name, "")
        if not value:
            continue
        if value.lower().replace("-", "").endswith("utf8"):
            return None
        return f"{name}={value} is not a UTF-8 locale"
    return "no locale is set (LANG)"


def said_environment() -> Mapping[str, str]:
    """The environment as this process was started with.

    Python changes LC_CTYPE if the locale is C (PEP 538), which hides the original value.
    """
    environment = dict(os.environ)
    is_coerced = (
        environment.get("LC_CTYPE", "").lower() in _COERCED
        and not environment.get("LC_ALL")
        and environment.get("LANG", "").lower() in _NO_LOCALE
    )
    if not is_coerced:
        return environment
    try:
        started = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux: then LC_CTYPE is what Python made of it
        del environment["LC_CTYPE"]
        return environment
    if not any(each.startswith(b"LC_CTYPE=") for each in started):
        del environment["LC_CTYPE"]
    return environment
