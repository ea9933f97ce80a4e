"""Saves the chapter at which a person left the tour, so that the next session begins there."""

import json
import logging
from pathlib import Path

import platformdirs

log = logging.getLogger("stepscope.tui")


def bookmark_path() -> Path:
    return platformdirs.user_state_path("stepscope") / "tour.json"


def bookmark(num_chapters: int) -> int:
    """Return the saved chapter, counted from 0; 0 if none is saved."""
    try:
        chapter = int(json.loads(bookmark_path().read_text("utf-8"))["chapter"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return chapter if 0 <= chapter < num_chapters else 0


def keep_bookmark(chapter: int) -> None:
    """Save the chapter to begin with next time; an error is only logged."""
    path = bookmark_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"chapter": chapter}), "utf-8")
    except OSError as error:
        log.warning("the place in the tour is not kept: %s", error)
