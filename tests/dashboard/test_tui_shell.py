"""The dashboard started from a shell: locale, config file, Ctrl-Z, fast changes of size."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.start import StartApp
from stepscope.tui.settings.terminal import cannot_be_drawn_on, only_ascii
from tests.support.waiting import wait_for

REPLAY = (sys.executable, "-m", "stepscope.tui.cli", "replay", "chunked", "--at", "200")
SIZES = [(1, 1), (200, 60), (80, 24), (60, 15), (3, 50), (300, 5), (79, 19)]


@pytest.mark.slow
def test_a_shell_without_utf8_gets_an_ascii_dashboard(
    terminal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "STEPSCOPE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "stepscope" / "config.toml"
    config.parent.mkdir()
    config.write_text("# mine\n[keys]\npause = 'f7'  # as everywhere\n")
    screen = terminal(*REPLAY, LANG="C", XDG_CONFIG_HOME=str(tmp_path))
    screen.wait_for("ASCII characters only: LANG=C is not a UTF-8 locale; v or --no-ascii draws")
    screen.wait_for(r" F7 Go on")
    assert screen.text().isascii()
    assert "step 200" in screen.text()

    screen.send("v")
    screen.wait_for("━")

    # Sizes that change faster than the dashboard can draw.
    for number in range(40):
        columns, rows = SIZES[number % len(SIZES)]
        screen.process.setwinsize(rows, columns)
        time.sleep(0.005)
    screen.resize(120, 40)
    screen.wait_for(r"requests × steps")

    # Suspend to the shell and come back.
    screen.send("\x1a")
    state = Path(f"/proc/{screen.process.pid}/stat")
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    screen.scribble()
    os.kill(screen.process.pid, signal.SIGCONT)
    screen.wait_for(r"(?s)\A(?!.*noise).*requests × steps")
    screen.send("\x1b[D")
    screen.wait_for(r"step 19\d ")  # a column earlier
    screen.send("q")
    assert screen.wait_for_exit() == 0

    # The changed character set is kept in the file, beside its other settings, and used again.
    assert config.read_text() == (
        "# mine\n[keys]\npause = 'f7'  # as everywhere\n\n[dashboard]\nascii = false\n"
    )
    screen = terminal(*REPLAY, LANG="C", XDG_CONFIG_HOME=str(tmp_path))
    screen.wait_for("step 200")
    screen.wait_for("━")
    assert "ASCII characters only" not in screen.text()
    screen.send("q")
    assert screen.wait_for_exit() == 0
    assert tomllib.loads(config.read_text())["keys"] == {"pause": "f7"}


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"LANG": "en_US.UTF-8"}, None),
        ({"LANG": "C", "LC_CTYPE": "en_GB.utf8"}, None),
        ({"LANG": "ca_ES.UTF-8@valencia"}, None),
        ({"LANG": "de_DE.ISO-8859-15@euro"}, "LANG=de_DE.ISO-8859-15@euro is not a UTF-8 locale"),
        ({"LC_ALL": "", "LANG": "ja_JP.EUC-JP"}, "LANG=ja_JP.EUC-JP is not a UTF-8 locale"),
        ({"LANG": "C.UTF-8", "LC_ALL": "C"}, "LC_ALL=C is not a UTF-8 locale"),
        ({}, "no locale is set (LANG)"),
        ({"LANG": "en_US.UTF-8", "TERM": "linux"}, "the font of the Linux console has few others"),
    ],
)
def test_locale_and_console_decide_between_ascii_and_blocks(
    environment: dict[str, str], why: str | None
) -> None:
    assert only_ascii({"TERM": "xterm-256color", **environment}) == why
    assert cannot_be_drawn_on({"TERM": "linux", **environment}) is None
    assert "TERM is 'unknown'" in cannot_be_drawn_on({"TERM": "unknown"})


@pytest.mark.parametrize("locale", [{}, {"LANG": "C"}, {"LANG": "xx_XX.ISO-8859-1"}])
def test_the_locale_that_python_puts_in_place_of_none_counts_not(locale: dict[str, str]) -> None:
    program = (
        "import os\n"
        "from stepscope.tui.settings.terminal import only_ascii\n"
        "assert os.environ['LC_CTYPE'] == 'C.UTF-8'\n"
        "assert only_ascii(os.environ) is not None"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("LANG", "LC_ALL", "LC_CTYPE")}
    subprocess.run([sys.executable, "-c", program], env=environment | locale, check=True)


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "dark"),
        ({"NO_COLOR": ""}, "dark"),
        ({"NO_COLOR": "0"}, "none"),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "none"),
        ({"FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}, "dark"),
        ({"COLORTERM": ""}, "dark"),
        ({"COLORTERM": "", "TERM": "vt100"}, "ansi"),
        ({"COLORTERM": "24bit", "TERM": "vt100"}, "dark"),
    ],
)
def test_the_environment_decides_on_colours(
    still_source: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mode: str
) -> None:
    """NO_COLOR counts if it is not empty (no-color.org); the screen is drawn on a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLORTERM": "truecolor", **variables}.items():
        monkeypatch.setenv(name, value)
    source = still_source(5)
    dashboard, start = Dashboard(source), StartApp(lambda _: None, lambda: None)
    assert (dashboard.main.skin.mode, start.skin.mode) == (mode, mode)
    assert dashboard.no_color == start.no_color == (mode == "none")
