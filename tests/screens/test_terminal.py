"""The dashboard in a real (pseudo-)terminal: raw key and mouse input, and what is drawn."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.file.reader import Recording
from tests.support.engines.engine_process import EngineProcess
from tests.support.waiting import wait_for

STEPSCOPE = (sys.executable, "-m", "stepscope.tui.cli")
LEFT, PAGE_UP, ESCAPE, F1 = "\x1b[D", "\x1b[5~", "\x1b", "\x1bOP"
CTRL_L, CTRL_C = "\x0c", "\x03"
NAMED = {"default", "black", "red", "green", "brown", "blue", "magenta", "cyan", "white"}
NAMED |= {f"bright{name}" for name in NAMED}


@pytest.fixture
def busy_engine(runtime_folder: Path) -> Iterator[str]:
    """The address of an overloaded simulated engine in a process of its own."""
    with EngineProcess(f"{runtime_folder}/engine") as engine:
        engine.work()
        yield f"{runtime_folder}/engine"


def shown_step(screen: Any) -> int:
    """The step that the header names."""
    return int(screen.wait_for(r"step ([\d,]+)")[1].replace(",", ""))


def test_an_operators_session_with_a_live_engine_works_in_a_terminal(
    busy_engine: str, terminal: Any, tmp_path: Path
) -> None:
    folders = {"cwd": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    screen = terminal(*STEPSCOPE, "top", busy_engine, **folders)
    screen.wait_for(r"LIVE.*step [\d,]{2,}")
    screen.wait_for(r"RUN [1-9]")

    # Pause, and go back in time.
    screen.send(" ")
    screen.wait_for("PAUSED")
    step = shown_step(screen)
    screen.send(LEFT + "h" + LEFT)
    screen.wait_for(rf"step {step - 3:,} ")
    screen.send(PAGE_UP)
    wait_for(lambda: shown_step(screen) < step - 50, "not a screen back")
    screen.wait_for(r"PAUSED▌ .*\d\d:\d\d:\d\d\.\d, [\d.]+ m?s back \([\d,]+ steps\)")

    # A step, a request of it, and why its tokens took so long; Esc leads back.
    screen.send("2")
    screen.wait_for(r"rows \(\d+\)")
    screen.send("j\r")
    screen.wait_for(r"request r\d+")
    screen.wait_for("gaps between tokens")
    screen.send(ESCAPE)
    screen.wait_for(r"rows \(\d+\)")
    screen.send(ESCAPE)
    screen.wait_for("requests × steps")

    # A knob is changed, and the engine names the effective step.
    screen.send("L")
    screen.wait_for("LIVE")
    screen.send("B256\r")
    screen.wait_for(r"2048→256 applied at step [\d,]+")
    screen.wait_for(r"BUDGET +\d+/256")
    # Recording.
    screen.send("R")
    screen.wait_for(r"● REC")
    screen.wait_for(r"REC .*[1-9]\d* ?kB|REC .*MB")
    screen.send("R")
    screen.wait_for(r"recording ended: ")
    assert "● REC" not in screen.text()

    # The mouse.
    row = screen.row_of(r"r\d+ DEC")
    screen.click(60, row)
    screen.wait_for("PAUSED")
    name = re.search(r"r\d+", screen.text().splitlines()[row])[0]
    screen.click(60, row)
    screen.click(60, row)
    screen.wait_for(rf"request {name} ")
    screen.send(ESCAPE)
    screen.wait_for("requests × steps")
    # Take a picture and quit.
    screen.send("S")
    screen.wait_for(r"screenshot: ")
    (picture,) = tmp_path.glob("stepscope-*.svg")
    assert "BUDGET" in picture.read_text("utf-8")
    screen.send("q")
    assert screen.wait_for_exit() == 0
    (recorded,) = tmp_path.glob("*.mcap")
    with Recording(recorded) as recording:
        assert recording.message is None
        assert recording.last_step > recording.first_step


def test_a_screen_is_redrawn_when_resized_or_overwritten(terminal: Any, tmp_path: Path) -> None:
    arguments = (*STEPSCOPE, "replay", "chunked", "--at", "300")
    screen = terminal(*arguments, columns=120, rows=40, XDG_CONFIG_HOME=str(tmp_path))
    screen.wait_for("REPLAY PAUSED")
    screen.wait_for(r"step 300\b")
    screen.wait_for("steps: token budget")
    for columns, rows, words in (
        (80, 24, r"TTFT [\d.]+"),
        (60, 15, r"stepscope needs 80x20, has 60x15"),
        (200, 60, r"knobs"),
        (120, 40, r"steps: token budget"),
    ):
        screen.resize(columns, rows)
        screen.wait_for(words)
    colours = {cell.fg for row in screen.cells() for cell in row}
    assert "4fb3ff" in colours, "decode has its own colour on a terminal of true colours"
    before = ""
    while before != (before := screen.text()):  # the first full frame overwrites other text
        time.sleep(0.5)
    screen.scribble()
    screen.wait_for("noise noise")
    screen.send(CTRL_L)
    screen.wait_for("REPLAY PAUSED")
    screen.wait_for("requests × steps")
    assert "noise" not in screen.text()
    screen.send(F1)
    screen.wait_for("This is the main screen")
    screen.send(ESCAPE)
    screen.wait_for("requests × steps")
    screen.send(CTRL_C)
    assert screen.wait_for_exit() == 0


@pytest.mark.parametrize(
    ("environment", "colours", "is_ascii"),
    [
        ({"TERM": "xterm", "COLORTERM": ""}, NAMED, False),
        ({"TERM": "linux", "COLORTERM": ""}, NAMED, True),
        ({"NO_COLOR": "1"}, {"default"}, False),
    ],
    ids=["16 colours", "console", "NO_COLOR"],
)
def test_each_terminal_gets_the_colours_and_characters_it_supports(
    terminal: Any, tmp_path: Path, environment: dict[str, str], colours: set[str], is_ascii: bool
) -> None:
    screen = terminal(
        *(*STEPSCOPE, "replay", "chunked", "--at", "360"),
        XDG_CONFIG_HOME=str(tmp_path),
        **{"LC_ALL": "C.UTF-8", **environment},
    )
    screen.wait_for("REPLAY PAUSED")
    screen.wait_for(r"r17")
    time.sleep(0.3)  # the rest of the first frame
    found = {colour for row in screen.cells() for cell in row for colour in (cell.fg, cell.bg)}
    assert found <= colours
    assert screen.text().isascii() == is_ascii
    # Prefill and decode differ in their characters alone.
    prefill, decode = ("#", "=") if is_ascii else ("▓", "━")
    assert prefill in screen.text()
    assert decode in screen.text()
    screen.send("q")
    assert screen.wait_for_exit() == 0
