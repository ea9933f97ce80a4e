"""The tour: every chapter can be read, carried out, tried, left and resumed."""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from stepscope.tui.session.chapters import CHAPTERS, Chapter
from stepscope.tui.session.tour import Tour
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.views.panels import footer

KEYS = {action.id: action.key for action in ACTIONS}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.title)
def test_each_tour_text_fits_the_smallest_screen_and_names_existing_keys(chapter: Chapter) -> None:
    for text in (chapter.before, chapter.question, chapter.answer):
        lines = textwrap.wrap(text.format_map(KEYS), 80 - 2)
        assert len(lines) < footer.TOUR_HEIGHT, text
    assert "Next: " in chapter.before
    assert "Question: " in chapter.question
    assert "Try: " in chapter.answer


def test_a_tour_chapter_acts_when_it_asks_and_can_be_read_again() -> None:
    done: list[Any] = []
    tour = Tour(done.append, lambda: None, first=2)
    assert (tour.page.number, tour.page.part, done) == (3, "before", [])
    tour.go_on()
    assert (tour.page.part, done) == ("question", [CHAPTERS[2].acts])
    tour.go_on()
    tour.go_on()
    assert (tour.page.number, tour.page.part) == (4, "before")
    tour.again()
    assert tour.page.number == 3
    tour.go_on()
    tour.again()
    assert (tour.page.number, tour.page.part) == (3, "before")


def test_the_tour_begins_with_any_chapter_and_without_torch(terminal: Any, tmp_path: Path) -> None:
    state = {"STEPSCOPE_CONFIG": "none"}
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    command = (sys.executable, "-m", "stepscope.tui.cli", "tour")
    screen = terminal(*command, columns=80, rows=24, **state)
    for number, chapter in enumerate(CHAPTERS, 1):
        title = re.escape(f"tour {number}/10  {chapter.title}")
        screen.wait_for(f"{title}  what comes", 90.0)
        screen.send("\t")
        held = r".*picture held" if chapter.is_held else ""
        screen.wait_for(f"{title}  look{held}", 60.0)
        screen.send("\t")
        screen.wait_for(f"{title}  try")
        if number == 1:
            screen.wait_for(r"RUN 2/16")
        screen.send("\t")
        if number == 3:
            screen.wait_for("tour 4/10")
            screen.send("q")
            assert screen.wait_for_exit() == 0
            state["PYTHONPATH"] = str(tmp_path)
            screen = terminal(*command, "4", columns=120, rows=40, **state)
            screen.wait_for("simulated")
    screen.wait_for("That was the tour")
    screen.send("q")
    assert screen.wait_for_exit() == 0
