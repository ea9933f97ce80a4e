"""`Tour`: where the person is in the guided tour, and what the tour shows there.

The chapter at which a person left the tour is saved: the next session begins there.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import platformdirs

from stepscope.tui.session.tour.chapters import CHAPTERS, Act, Chapter, Try

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


_PARTS = ("before", "question", "answer")
_END = (
    "That was the tour. {quit} leaves, {tour_again} goes back. Next: 'stepscope demo' runs freely, "
    "'stepscope top' shows your own engine, 'stepscope lab' measures what you saw."
)


class TourPage(NamedTuple):
    """What the tour shows now."""

    number: int  # of the chapter, from 1; `total` + 1 after the last
    total: int
    title: str
    part: str
    text: str
    panels: Sequence[str]
    is_tried: bool  # what the chapter invites to try
    is_held: bool  # the tour has stopped the picture


class Tour:
    """The position in the chapters: `do` carries out their acts, `keep` saves the chapter."""

    def __init__(
        self,
        do: Callable[[tuple[Act, ...]], None],
        ended: Callable[[], int | None],
        keep: Callable[[int], None],
        first: int = 0,
    ) -> None:
        self._do = do
        self._keep = keep
        self.ended = ended
        self._number = first
        self._part = 0
        self._tried: set[Try] = set()
        self.held_step: int | None = None  # the step where the tour stopped the picture

    @property
    def chapter(self) -> Chapter | None:
        """The current chapter; None after the last."""
        return CHAPTERS[self._number] if self._number < len(CHAPTERS) else None

    @property
    def page(self) -> TourPage:
        chapter, total = self.chapter, len(CHAPTERS)
        if chapter is None:
            return TourPage(
                total + 1, total, "The end", "", _END, (), is_tried=False, is_held=False
            )
        part = _PARTS[self._part]
        is_tried = part == "answer" and chapter.tries in self._tried
        panels = chapter.panels if part == "question" else ()
        text = getattr(chapter, part)
        is_held = self.held_step is not None
        return TourPage(
            self._number + 1, total, chapter.title, part, text, panels, is_tried, is_held
        )

    @property
    def wants_hold(self) -> bool:
        """Whether to stop the picture as soon as the acts of this chapter are done."""
        chapter = self.chapter
        is_asking = self._part == _PARTS.index("question")
        return chapter is not None and chapter.is_held and is_asking and self.held_step is None

    def go_on(self) -> None:
        """Go to the next part. At the question, start the acts of the chapter."""
        chapter = self.chapter
        if chapter is None:
            return
        self._tried.clear()
        self._part += 1
        if self._part == 1:
            self.held_step = None
            self._do(chapter.acts)
        elif self._part == len(_PARTS):
            self._begin(self._number + 1)

    def again(self) -> None:
        """Go to the beginning of this chapter; if already there, to the chapter before it."""
        is_inside = self._part > 0
        self._begin(self._number if is_inside else max(0, self._number - 1))

    def note(self, tried: Iterable[Try]) -> None:
        """Note what the person has tried; this counts only in the last part of a chapter."""
        if self._part == len(_PARTS) - 1:
            self._tried.update(tried)

    def _begin(self, number: int) -> None:
        self._number, self._part, self.held_step = number, 0, None
        self._tried.clear()
        self._keep(number % len(CHAPTERS))
